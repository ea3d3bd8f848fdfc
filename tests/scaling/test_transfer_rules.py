"""Factors of the rules: the numbers of the package mup, and those of the tables."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import limitformer as lf
from limitformer import InputError
from limitformer.scaling import parametrisation
from limitformer.scaling.parametrisation import parametrise
from limitformer.scaling.roles import kind_of, roles_of

# What mup.MuSGD and mup.MuAdam (MuAdamW has the same numbers) give for lr = weight_decay = 1, and set_base_shapes for
# standard deviations over those of the base, of this network from (64, 32) to (256, 64): github.com/microsoft/mup,
# commit 1981497. Its readout is a MuReadout, whose input it multiplies by 0.5.
MUP_NETWORK = {
    "0.weight": ((4.0, 0.25), (1.0, 1.0)),
    "0.bias": ((4.0, 0.25), (1.0, 1.0)),
    "2.weight": ((0.5, 2.0), (0.25, 4.0)),
    "2.bias": ((2.0, 0.5), (1.0, 1.0)),
    "4.weight": ((2.0, 0.5), (1.0, 1.0)),
    "4.bias": ((1.0, 1.0), (1.0, 1.0)),
}
MUP_STD = {"0.weight": 1.0, "0.bias": 1.0, "2.weight": 0.5, "2.bias": 1.0, "4.weight": 1.0, "4.bias": 1.0}
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 50}
LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 96}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 4, "vocab_size": 50}


def perceptron(scale):
    return nn.Sequential(
        nn.Linear(30, 64 * scale**2),
        nn.ReLU(),
        nn.Linear(64 * scale**2, 32 * scale),
        nn.ReLU(),
        nn.Linear(32 * scale, 10),
    )


@pytest.mark.parametrize(("kind", "place"), [("sgd", 0), ("adamw", 1)])
def test_mup_factors_are_those_of_the_package(kind, place):
    result = parametrise(perceptron, "scale", 2, 1, "mup", kind)
    own = {name: (result.lr_factors[name], result.decay_factors[name]) for name in result.lr_factors}
    assert own == {name: pairs[place] for name, pairs in MUP_NETWORK.items()}
    assert result.multipliers == {"4": 0.5}


def test_mup_laws_are_those_of_the_package():
    result = parametrise(perceptron, "scale", 2, 1, "mup", "adam")
    base = {"0.weight": 30, "0.bias": 30, "2.weight": 64, "2.bias": 64, "4.weight": 32, "4.bias": 32}
    own = {"0.weight": 30, "0.bias": 30, "2.weight": 256, "2.bias": 256, "4.weight": 64, "4.bias": 64}
    for name, ratio in MUP_STD.items():
        expected = (3 * base[name]) ** -0.5 * ratio  # torch's linear map draws uniform numbers up to fan_in^-½
        law = result.overrides.get(name)
        std = (3 * own[name]) ** -0.5 if law is None else law.std
        assert std == pytest.approx(expected, rel=1e-6), name
    assert "2.weight" not in result.overrides  # its own law has the right power


def test_readout_multiplier_changes_the_input_of_the_matrix_alone():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = parametrise(perceptron, "scale", 2, 1, "mup", "adam").model.factory()
        x = torch.randn(3, 64)
        assert torch.allclose(module[4](x), (x * 0.5) @ module[4].weight.T + module[4].bias)


def by_kind(values):
    return {kind_of(name): each for name, each in values.items()}


def test_completep_factors_are_those_of_its_table():
    result = parametrise(LLAMA, "depth", 8, 2, "completep", "adamw")
    assert set(result.lr_factors.values()) == {1.0}  # m_L^(α − 1) at α = 1
    assert set(result.decay_factors.values()) == {1.0}
    assert result.multipliers == {"residual branches": 0.25}
    eps = by_kind(result.eps_factors)
    assert eps["model.layers.*.mlp.up_proj.weight"] == eps["model.layers.*.input_layernorm.weight"] == 0.25
    assert eps["model.embed_tokens.weight"] == eps["model.norm.weight"] == eps["lm_head.weight"] == 1.0


def test_depth_mup_factors_are_those_of_its_table():
    result = parametrise(GPT2, "depth", 8, 2, "depth-mup", "adam")
    rate, eps = by_kind(result.lr_factors), by_kind(result.eps_factors)
    inside = ("attn.c_attn.weight", "attn.c_attn.bias", "ln_1.weight", "mlp.c_proj.weight")
    assert {rate[f"transformer.h.*.{name}"] for name in inside} == {0.5}
    assert {eps[f"transformer.h.*.{name}"] for name in inside} == {0.5}
    assert rate["transformer.wte.weight"] == rate["transformer.ln_f.weight"] == eps["transformer.ln_f.weight"] == 1.0
    assert result.multipliers == {"residual branches": 0.5}
    assert set(parametrise(GPT2, "depth", 8, 2, "depth-mup", "sgd").lr_factors.values()) == {1.0}


def test_completep_has_the_width_of_mup():
    own, mup = (parametrise(LLAMA, "width", 256, 64, rule, "adamw") for rule in ("completep", "mup"))
    assert own.lr_factors == mup.lr_factors
    assert own.decay_factors == mup.decay_factors
    assert own.overrides == mup.overrides
    assert own.multipliers == mup.multipliers == {"lm_head": 0.25}
    assert by_kind(own.decay_factors)["model.layers.*.mlp.up_proj.weight"] == 4.0
    assert by_kind(own.eps_factors)["model.layers.*.mlp.up_proj.weight"] == 0.25
    assert by_kind(own.roles)["lm_head.weight"] == "output"


def test_every_epsilon_falls_with_the_width(monkeypatch):
    """The effects of tables do not depend on the width if their ε falls, also where it is as large as gradients."""

    def exponents():
        adam = {"name": "adam", "lr": 1e-3, "eps": 1e-2}
        options = {"optimizer": adam, "rule": "mup", "steps": 1, "samples": 2, "seed": 0}
        return lf.transfer(GPT2, {"width": [64, 256]}, 8, witness=False, progress=False, **options).exponents

    names = [f"effect of transformer.{name}, first step" for name in ("wpe", "wte as a table")]
    right = exponents()
    factors = parametrisation.step_factors

    def of_blocks_alone(table, role, depth):
        rate, decay, eps = factors(table, role, depth)
        return rate, decay, eps if role.inside else 1.0

    monkeypatch.setattr(parametrisation, "step_factors", of_blocks_alone)
    twin = exponents()
    for name in names:
        assert abs(right[name].value) < 0.02
        assert twin[name].value < -0.1


def test_depth_rule_keeps_laws_of_the_base():
    laws = parametrise(GPT2, "depth", 8, 2, "completep", "adamw").overrides
    stds = {name: law.std for name, law in laws.items()}
    # the code draws these by the depth, 0.02/√(2 L); the multiplier takes its place
    assert stds == pytest.approx(dict.fromkeys(stds, 0.02 / 4**0.5))
    assert set(stds) == {"transformer.h.*.attn.c_proj.weight", "transformer.h.*.mlp.c_proj.weight"} or len(stds) == 16


@pytest.mark.parametrize("rule", ["mup", "depth-mup"])
def test_every_factor_is_one_at_the_base(rule):
    result = parametrise(GPT2, "width", 64, 64, rule, "adamw")
    assert (result.overrides, result.multipliers) == ({}, {})
    assert {v for each in (result.lr_factors, result.decay_factors, result.eps_factors) for v in each.values()} == {1.0}


def test_tied_head_has_a_multiplier_and_a_note():
    result = parametrise({**LLAMA, "tie_word_embeddings": True}, "width", 256, 64, "mup", "adamw")
    assert result.multipliers == {"lm_head": 0.25}
    assert result.lr_factors["model.embed_tokens.weight"] == 1.0
    assert any("lm_head.weight is tied to model.embed_tokens.weight" in note for note in result.notes)


def test_router_has_its_multiplier_in_its_law_and_rate():
    config = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}
    adam, sgd = (parametrise(config, "width", 256, 64, "mup", kind) for kind in ("adamw", "sgd"))
    name = "model.layers.0.mlp.gate.weight"
    # Table 3 of the paper, equivalent: variance 1/fan_in², rates of SGD and Adam 1/fan_in
    assert (adam.lr_factors[name], sgd.lr_factors[name]) == (0.25, 0.25)
    assert (adam.decay_factors[name], sgd.decay_factors[name]) == (4.0, 4.0)
    assert adam.overrides["model.layers.*.mlp.gate.weight"].std == pytest.approx(0.02 / 4)
    assert by_kind(adam.roles)["model.layers.*.mlp.experts.down_proj"] == "hidden"


class SharedValues(nn.Module):
    """Two blocks of multi-query attention: all heads, of eight entries, have the same keys and values."""

    def __init__(self, width):
        super().__init__()
        self.table, self.head = nn.Embedding(40, width), nn.Linear(width, 40, bias=False)
        maps = {"queries": width, "shared": 16, "out": width}
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(width, columns, bias=False) for name, columns in maps.items()})
            for _ in range(2)
        )

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            y = nn.functional.rms_norm(x, x.shape[-1:])
            keys, values = block["shared"](y).split(8, -1)
            queries = block["queries"](y).unflatten(-1, (-1, 8)).transpose(1, 2)
            mixed = (queries @ keys[:, None].mT / 8).softmax(-1) @ values[:, None]
            x = x + block["out"](mixed.transpose(1, 2).flatten(2))
        return self.head(nn.functional.rms_norm(x, x.shape[-1:])), values


def size_and_change_of_values(width, seed):
    """Return the root mean square of the last values, and of their change by one step of all matrices but their own."""
    put = parametrise(SharedValues, "width", width, 64, "mup", "adamw")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module, tokens = put.model.factory(), torch.randint(40, (4, 17))
    laws = put.laws_in_effect()
    with torch.no_grad():
        for name, each in module.named_parameters():
            each.mul_(laws[name].std / put.laws[name].std)
    groups = [{"params": [each], "lr": 0.01 * put.lr_factors[name]} for name, each in module.named_parameters()]
    optimizer = torch.optim.Adam(groups, eps=1e-12)
    own = module.blocks[1]["shared"].weight.detach().clone()
    logits, before = module(tokens[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    with torch.no_grad():
        module.blocks[1]["shared"].weight.copy_(own)
    change = module(tokens[:, :-1])[1] - before
    return [float(each.detach().square().mean().sqrt()) for each in (before, change)]


def test_steps_move_shared_values_further_at_larger_width_under_the_rule_of_hidden_matrices_alone(monkeypatch):
    def exponents():
        each = torch.tensor([[size_and_change_of_values(width, seed) for seed in range(3)] for width in (64, 1024)])
        return (each.log().mean(1).diff(dim=0)[0] / math.log(16)).tolist()

    size, change = exponents()
    assert size == pytest.approx(-0.5, abs=0.05)
    assert change < 0.0

    def as_hidden(*arguments):
        roles = roles_of(*arguments)
        return {key: replace(one, role="hidden") if "shared" in key else one for key, one in roles.items()}

    monkeypatch.setattr("limitformer.scaling.parametrisation.roles_of", as_hidden)
    size, change = exponents()
    assert size == pytest.approx(0.0, abs=0.05)
    assert change > 0.25


def test_parametrise_leaves_the_multipliers_of_its_lines_out_of_the_notes():
    result = parametrise(SharedValues, "width", 256, 64, "mup", "adamw")
    assert len(result.lines) == len(result.multipliers) == 3
    assert not [note for note in result.notes if "multiply" in note]
    assert [note for note in result.notes if "blocks.*.shared" in note] == [
        "at width 256: blocks.*.shared has the rule of an output, as it has the same columns at every width"
    ]


@pytest.mark.parametrize(
    ("rule", "kind", "message"),
    [
        ("mpu", "adamw", "rule must be one of standard, mup, completep, depth-mup; got 'mpu'. Nearest: mup"),
        ("mup", "adamm", "optimizer_kind must be one of .*; got 'adamm'. Nearest: adam"),
        ("mup", "muon", "the rule mup has no entry for muon .* Nearest: one of sgd, adam, adamw, lion"),
        ("completep", "sgd", "the rule completep has no entry for sgd"),
        ("mup", {"model.norm.wieght": "adamw"}, "the model has no parameter .* Nearest: model.norm.weight"),
    ],
)
def test_parametrise_refuses_rules_and_optimisers(rule, kind, message):
    with pytest.raises(InputError, match=message):
        parametrise(LLAMA, "width", 128, 64, rule, kind)


def test_transformer_has_its_own_parametrisation():
    model = lf.Transformer(width=16, depth=2, gamma=0.5, feedforward=lf.ReLU())
    assert parametrise(model, "width", 32, 16, "standard").model.transformer.width == 32
    with pytest.raises(InputError, match="divides by √width in its code, which is another parametrisation than mup"):
        parametrise(model, "width", 32, 16, "mup")


def test_lists_that_do_not_grow_with_depth_are_not_blocks():
    config = {"model_type": "wav2vec2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 64, "conv_dim": [32] * 7, "num_conv_pos_embedding_groups": 4, "vocab_size": 20}
    eps = parametrise(config, "depth", 4, 2, "completep").eps_factors
    assert {value for name, value in eps.items() if "encoder.layers." in name} == {0.5}
    assert {value for name, value in eps.items() if "encoder.layers." not in name} == {1.0}


class OwnMap(nn.Module):
    """A head that is a parameter of the module itself, or the weight of a map."""

    def __init__(self, width, mapped):
        super().__init__()
        self.table, self.blocks = nn.Embedding(40, width), nn.ModuleList([nn.Linear(width, width)])
        self.tongue = nn.Linear(width, 40, bias=False) if mapped else nn.Parameter(torch.randn(40, width) * width**-0.5)

    def forward(self, ids):
        x = self.table(ids)
        x = x + self.blocks[0](x)
        return x @ self.tongue.T if isinstance(self.tongue, nn.Parameter) else self.tongue(x)


@pytest.mark.parametrize("mapped", [False, True])
def test_head_that_shapes_show_as_a_table_has_a_note(mapped):
    put = parametrise(lambda width: OwnMap(width, mapped), "width", 64, 16, "mup", "adam")
    assert any("make it the weight of an nn.Linear" in note for note in put.notes) is not mapped
    assert (put.multipliers == {"tongue": 0.25}) is mapped
