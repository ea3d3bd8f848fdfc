"""Pairs of builds of small models: sound ones, and ones with an error in the second build.

`python two_builds.py` (`make alarms`) compares sound pairs of twenty families: a build on the meta device, modules,
state dicts, loaded builds, and builds whose code is not read.
"""

import contextlib
import math
import sys
from fnmatch import fnmatchcase

import torch
import transformers
from torch import nn

from limitformer.initialisation.builds import Build, build_of
from limitformer.initialisation.comparison import TwoBuilds, compare
from limitformer.subjects.subject import resolve
from weightless_families import CONFIGS

SEEDS, LEVEL = 5, 1e-4
SIZE = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Block(nn.Module):
    """A block with a buffer that scales its norm by depth, as in OLMo-core."""

    def __init__(self, layer):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(48), nn.Linear(48, 96), nn.Linear(96, 48)
        self.layer = layer
        self.register_buffer("ln_scale", torch.tensor([1 / math.sqrt(layer + 1)]), persistent=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x) * self.ln_scale).relu())


class Plain(nn.Module):
    """A user's own language model with a tied head, a table of angles and an initialisation of its own."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(96, 48), nn.ModuleList(Block(layer) for layer in range(2))
        self.score, self.head = nn.Linear(48, 7, bias=False), nn.Linear(48, 96, bias=False)
        self.register_buffer("angles", self.table(), persistent=False)
        self.initialize_weights()
        self.tie_weights()

    def table(self):
        return torch.outer(torch.arange(16.0), 10000 ** (-torch.arange(8) / 8))

    def tie_weights(self):
        self.head.weight = self.embed.weight

    @torch.no_grad()
    def initialize_weights(self):
        for part in self.modules():
            if getattr(part, "_is_hf_initialized", False):
                continue
            if isinstance(part, nn.Linear | nn.Embedding):
                part.weight.normal_(0, 0.02)
                if getattr(part, "bias", None) is not None:
                    part.bias.zero_()
            elif isinstance(part, nn.LayerNorm):
                part.reset_parameters()
            elif isinstance(part, Block):
                part.ln_scale.fill_(1 / math.sqrt(part.layer + 1))
            elif part is self:
                part.angles.copy_(self.table())


LLAMA = {**SIZE, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 96, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 24, **IDS}
T5 = {"d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 1, "num_heads": 4, "vocab_size": 96, "pad_token_id": 0}
T5 |= {"decoder_start_token_id": 0, "eos_token_id": 2}
MODELS = {  # the model with a tied head
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZE, max_position_embeddings=24)),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
    "plain": Plain,
}
HEADED = {  # a model with a new head, and the head's name
    "llama": (lambda: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**LLAMA, **IDS)), "score"),
    "plain": (Plain, "score"),
}
OUTPUTS = {  # weights that write to the stream
    "llama": ("o_proj", "down_proj"),
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "plain": ("down",),
}


def materialised(factory, skipped=(), tie=True):
    """Build on the meta device, give memory, and initialise all modules but those of these names."""

    def meta():
        with torch.device("meta"):
            model = factory()
        model.to_empty(device="cpu")
        for name, part in model.named_modules():
            part._is_hf_initialized = any(fnmatchcase(name, each) for each in skipped)
        model.initialize_weights()
        if tie:
            model.tie_weights()
        return model

    return meta


def untouched(factory, head):
    """Build on the CPU by an initialisation that passes one module by, so that torch's default stays."""

    def built():
        with passing_by(head):
            return factory()

    return built


@contextlib.contextmanager
def passing_by(head):
    """Mark a module of this name as initialised when its parent gets it."""
    before = nn.Module.__setattr__

    def mark(self, name, value):
        if name == head.rpartition(".")[2] and isinstance(value, nn.Module):
            value._is_hf_initialized = True
        before(self, name, value)

    nn.Module.__setattr__ = mark
    try:
        yield
    finally:
        nn.Module.__setattr__ = before


def weights_of(model, endings):
    return [p for name, p in model.named_parameters() if any(name.endswith(f"{each}.weight") for each in endings)]


def scaled_by_depth(name, again):
    """Scale the weights that write to the stream by depth; `again`: the general initialisation runs once more."""

    @torch.no_grad()
    def built():
        model = MODELS[name]()
        for weight in weights_of(model, OUTPUTS[name]):
            weight.normal_(0, 0.02 / math.sqrt(2 * 2))
        for weight in weights_of(model, OUTPUTS[name]) if again else ():
            weight.normal_(0, 0.02)
        return model

    return built


def with_fans(name, shards, initialise=nn.init.xavier_uniform_, same_seed=False):
    """Initialise every matrix of the blocks with fans, as a whole or shard by shard along the input's dimension."""

    @torch.no_grad()
    def built():
        model = MODELS[name]()
        for parameter_name, weight in model.named_parameters():
            if weight.dim() != 2 or not any(word.isdecimal() for word in parameter_name.split(".")):
                continue
            if shards == 1:
                initialise(weight)
                continue
            parts, seed = [], int(torch.randint(2**31, ()))
            for part in weight.chunk(shards, 1):
                if same_seed:
                    torch.manual_seed(seed)
                parts.append(initialise(torch.empty_like(part)))
            weight.copy_(torch.cat(parts, 1))
        return model

    return built


def kinds(report):
    """Return the names of the findings by kind."""
    result = {}
    for each in report.findings:
        result.setdefault(each.kind, set()).update(each.names)
    return result


def names_ending(name, *endings):
    return {key for key, _ in MODELS[name]().named_parameters() if key.endswith(endings)}


ERRORS = {  # kind: the two builds of a model, and the pattern of the names that must be found
    "erased buffer": lambda name: (
        (MODELS[name], materialised(MODELS[name], ("*rotary_emb",)), "*inv_freq")
        if name == "llama"
        else (MODELS[name], materialised(MODELS[name], ("blocks.?",)), "*ln_scale")
    ),
    "lost tie": lambda name: (MODELS[name], materialised(MODELS[name], tie=False), "*"),
    "untouched": lambda name: (HEADED[name][0], untouched(*HEADED[name]), f"{HEADED[name][1]}.*"),
    "second initialisation": lambda name: (
        scaled_by_depth(name, again=False),
        scaled_by_depth(name, again=True),
        "*.weight",
    ),
    "after sharding": lambda name: (with_fans(name, 1), with_fans(name, 4), "*.weight"),
    "uninitialised": lambda name: (
        HEADED[name][0],
        materialised(HEADED[name][0], (HEADED[name][1], f"{HEADED[name][1]}.*")),
        f"{HEADED[name][1]}.*",
    ),
}


# Sound pairs


def drawn(name, seed):
    """Return a model of a family, drawn from a seed."""
    torch.manual_seed(1000 * list(CONFIGS).index(name) + seed)
    return resolve(CONFIGS[name]()).factory()


def loading(name, seed, meta):
    """Return a function that builds a model and loads the weights of another one."""
    state = drawn(name, seed).state_dict()
    factory = resolve(CONFIGS[name]()).factory

    def loaded():
        model = materialised(factory)() if meta else factory()
        model.load_state_dict(state)
        return model

    return loaded


def unread(what):
    """Return a build whose laws are not known, so that they must be tested."""
    build = build_of(what, "build")
    if isinstance(build, Build):
        build.laws = {}
    return build


SOUND = {
    "meta": lambda name, seed: compare(*pair(name), level=LEVEL),
    "module": lambda name, seed: compare(pair(name)[seed % 2], drawn(name, seed), level=LEVEL),
    "state dict": lambda name, seed: compare(drawn(name, seed), drawn(name, seed + 100).state_dict(), level=LEVEL),
    "loaded": lambda name, seed: compare(loading(name, seed, False), loading(name, seed, True), level=LEVEL, same=True),
    "unread": lambda name, seed: TwoBuilds(*map(unread, seeded(name, seed)), False, None).report(LEVEL),
}


def pair(name):
    factory = resolve(CONFIGS[name]()).factory
    return factory, materialised(factory)


def seeded(name, seed):
    """Return the two builds, with random numbers that depend on this seed."""

    def shifted(factory):
        def built():
            torch.manual_seed(torch.initial_seed() + 10_000 * (seed + 1))
            return factory()

        return built

    return [shifted(each) for each in pair(name)]


def main(families):
    """Compare sound pairs, print the findings, and return 1 if there are any."""
    number, alarms = 0, []
    for name in families:
        for kind, compared in SOUND.items():
            for seed in range(SEEDS):
                report = compared(name, seed)
                number += 1
                if report.findings:
                    alarms.append(f"{name}, {kind}, {seed}: {report}")
        print(f"{name:16s} {len(alarms)} alarms so far in {number} pairs", flush=True)
    print("\n".join([*alarms, f"alarms: {len(alarms)} of {number} sound pairs at level {LEVEL:g}"]))
    return int(bool(alarms))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(CONFIGS)))
