"""Knobs of `limitformer.design`: their weights in each family, and their effect."""

import pytest
import torch
import transformers

import limitformer as lf
from drawn_networks import blocks, first, first_tokens
from limitformer.designing import Objective
from limitformer.designing.design import trials_of
from limitformer.designing.knobs import factor_knob
from limitformer.designing.report import PYTHON, block
from limitformer.designing.trials import first_pass, uses_of
from limitformer.subjects.inputs import inputs_for
from limitformer.subjects.subject import resolve
from limitformer.weightless.network import Weightless
from weightless_families import CONFIGS


def knobs(config, *names):
    trials, _ = trials_of(config, None, names, Objective(gradient=None, effective=None), None, 5, None)
    return trials.knobs


def weights_of(name, family):
    subject = resolve(CONFIGS[family]())
    network = Weightless(subject, torch.float32, torch.device("cpu"))
    uses = uses_of(network, lambda: first_pass(network, inputs_for(subject, None, 5)))
    return factor_knob(name, network, uses).weights


FAMILIES = {  # matrices whose product is added to the stream, one kind each
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "bert": ("attention.output.dense", "output.dense"),
    "modernbert": ("attn.Wo", "mlp.Wo"),
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
    "gemma2": ("self_attn.o_proj", "mlp.down_proj"),
    "gpt_neox": ("attention.dense", "mlp.dense_4h_to_h"),
    "vit": ("attention.o_proj", "mlp.fc2"),
    "mixtral": ("self_attn.o_proj", "mlp.experts.down_proj"),
    "deepseek_v3": ("self_attn.o_proj", "mlp.experts.down_proj", "mlp.down_proj", "mlp.shared_experts.down_proj"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_output_knob_has_the_last_matrices_of_branches(family):
    """The names of each family are listed by hand."""
    weights = weights_of("output", family)
    kinds = {".".join(name.removesuffix(".weight").split(".")[-3:]) for name in weights}
    ends = {end for end in FAMILIES[family] if any(f".{kind}".endswith(f".{end}") for kind in kinds)}
    assert ends == set(FAMILIES[family])
    assert all(any(f".{kind}".endswith(f".{end}") for end in FAMILIES[family]) for kind in kinds)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "mixtral", "qwen3"])
def test_zero_outputs_make_a_pre_norm_network_the_identity(family):
    """Second route: a drawn network with these weights at zero returns its input."""
    config = CONFIGS[family]()
    weights = weights_of("output", family)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(0.0 if name in weights else 1.0)
        hidden = []
        for part in (blocks(model)[0], blocks(model)[-1]):
            part.register_forward_pre_hook(lambda m, a, kw: hidden.append(first_tokens(a, kw)), with_kwargs=True)
            part.register_forward_hook(lambda m, a, out: hidden.append(first(out)))
        model(input_ids=torch.tensor([[3, 7, 9, 5]]))
    assert torch.equal(hidden[0], hidden[-1])


class Block(torch.nn.Module):
    """A block whose matrices have names that say nothing."""

    def __init__(self):
        super().__init__()
        for name in ("ask", "tell", "wv", "back", "up", "close"):
            setattr(self, name, torch.nn.Linear(8, 8, bias=False))

    def forward(self, x):
        y = torch.nn.functional.layer_norm(x, (8,))
        x = x + self.back(torch.softmax(self.ask(y) @ self.tell(y).mT, -1) @ self.wv(y))
        return x + self.close(torch.relu(self.up(torch.nn.functional.layer_norm(x, (8,)))))


def test_matrices_of_own_models_are_knobs_by_their_use():
    """Second route: with outputs at zero a drawn block is the identity, with logits at zero all tokens weigh alike."""

    def build():
        return torch.nn.Sequential(torch.nn.Embedding(20, 8), *[Block() for _ in range(2)], torch.nn.Linear(8, 20))

    trials, _ = trials_of(build, None, ["output", "logits"], Objective(gradient=None, effective=None), None, 5, None)
    for knob, wrong in zip(trials.knobs, reversed(trials.knobs), strict=True):
        for chosen in (knob, wrong):
            torch.manual_seed(0)
            model, x = build(), torch.randn(1, 5, 8)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.mul_(0.0 if name in chosen.weights else 1.0)
                block, y = model[1], torch.nn.functional.layer_norm(x, (8,))
                still = torch.equal(block(x), x)
                alike = torch.equal(block.ask(y) @ block.tell(y).mT, torch.zeros(1, 5, 5))
            assert (still if chosen.name == "output" else alike) is True
            assert (alike if chosen.name == "output" else still) is False


def test_output_knob_has_one_of_the_matrices_that_a_function_takes_together():
    """torch's own attention draws its two weights in one call; pasted patterns keep the number of a Sequential."""

    class Layer(torch.nn.TransformerEncoderLayer):
        def __init__(self):
            super().__init__(8, 2, 8, batch_first=True)
            self.linear2 = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))

    def build():
        return torch.nn.Sequential(torch.nn.Embedding(20, 8), *[Layer() for _ in range(2)])

    trials, _ = trials_of(build, None, ["output"], Objective(gradient=None), None, 5, None)
    assert trials.knobs[0].weights[::2] == tuple(f"{k}.self_attn.out_proj.weight" for k in (1, 2))
    assert list(trials.patch({"output": 0.5})["weights"]) == ["*.self_attn.out_proj.weight", "*.linear2.1.weight"]


class MultiQuery(torch.nn.Module):
    """A block whose keys and values share a matrix."""

    def __init__(self):
        super().__init__()
        self.query, self.shared, self.back = (torch.nn.Linear(8, n, bias=False) for n in (8, 16, 8))

    def forward(self, x):
        y = torch.nn.functional.layer_norm(x, (8,))
        keys, values = self.shared(y).chunk(2, -1)
        return x + self.back(torch.softmax(self.query(y) @ keys.mT, -1) @ values)


class ValuesOnly(MultiQuery):
    """A block without a matrix behind its attention: the values write to the stream, queries and keys do not."""

    def forward(self, x):
        y = torch.nn.functional.layer_norm(x, (8,))
        keys, values = self.shared(y).chunk(2, -1)
        if self.fused:
            mixed = torch.nn.functional.scaled_dot_product_attention(self.query(y), keys, self.back(values))
        else:
            mixed = torch.softmax(self.query(y) @ keys.mT, -1) @ self.back(values)
        return x + mixed


@pytest.mark.parametrize("fused", [False, True])
def test_queries_and_keys_do_not_write_to_the_stream(fused):
    """Second route: a drawn block with these weights at zero returns its input; the twin is the query matrix."""

    def build():
        blocks = [ValuesOnly(), ValuesOnly()]
        for each in blocks:
            each.fused = fused
        return torch.nn.Sequential(torch.nn.Embedding(20, 8), *blocks, torch.nn.Linear(8, 20))

    trials, _ = trials_of(build, None, ["output"], Objective(gradient=None, effective=None), None, 5, None)
    assert trials.knobs[0].weights == ("1.back.weight", "2.back.weight")
    for name, still in (("back", True), ("query", False)):
        block, x = build()[1], torch.randn(1, 5, 8)
        torch.nn.init.zeros_(getattr(block, name).weight)
        assert torch.equal(block(x), x) is still


def multi_query():
    return torch.nn.Sequential(torch.nn.Embedding(20, 8), *[MultiQuery() for _ in range(2)], torch.nn.Linear(8, 20))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (CONFIGS["llama"], {"q_proj", "k_proj"}),
        (lambda: multi_query, {"query"}),
        (CONFIGS["deepseek_v3"], {"q_b_proj"}),
    ],
    ids=["keys apart", "keys with values", "latent keys"],
)
def test_logits_knob_multiplies_the_deviation_of_logits(model, names):
    """The first block's logits, which nothing else changes, scale with the factor, not its square; values stay."""
    trials, _ = trials_of(model(), None, ["logits"], Objective(gradient=None), None, 6, None)
    assert {each.split(".")[-2] for each in trials.knobs[0].weights} == names
    deviations = [float(trials.report({"logits": value}, 3).curves["logit_std"][:, 0].mean()) for value in (1.0, 0.5)]
    assert abs(deviations[1] / deviations[0] - 0.5) < 1e-4


@pytest.mark.parametrize(
    ("stds", "names"),
    [
        ({"keys": 3.0}, ["keys"]),
        ({"queries": 3.0}, ["queries"]),
        ({"keys": 0.1}, ["keys"]),
        ({"keys": 0.45}, ["queries", "keys"]),  # of uniform entries, whose size is 1/√3 = 0.58
        ({"queries": 3.0, "keys": 3.0}, ["queries", "keys"]),
    ],
)
def test_logits_knob_is_the_matrix_that_departs_from_the_values(stds, names):
    """The logits' deviation has the factor itself; with the even split each matrix has its root."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.queries, self.keys, self.values, self.back = (torch.nn.Linear(8, 8, bias=False) for _ in range(4))
            for name, std in stds.items():
                torch.nn.init.normal_(getattr(self, name).weight, std=std / 8**0.5)

        def forward(self, x):
            y = torch.nn.functional.layer_norm(x, (8,))
            return x + self.back(torch.softmax(self.queries(y) @ self.keys(y).mT, -1) @ self.values(y))

    def build():
        return torch.nn.Sequential(torch.nn.Embedding(20, 8), Block(), Block(), torch.nn.Linear(8, 20))

    trials, _ = trials_of(build, None, ["logits"], Objective(gradient=None, effective=None), None, 5, None)
    assert trials.knobs[0].weights == tuple(f"{k}.{name}.weight" for k in (1, 2) for name in names)
    deviations = [float(trials.report({"logits": value}, 3).curves["logit_std"][:, 0].mean()) for value in (1.0, 0.5)]
    assert abs(deviations[1] / deviations[0] - 0.5) < 1e-4


def test_missing_knob_is_refused():
    with pytest.raises(lf.InputError, match=r"gpt2 has no knob logits: its queries are not a separate matrix\."):
        knobs(CONFIGS["gpt2"](), "logits")
    with pytest.raises(lf.InputError, match="has no knob embedding"):
        knobs(CONFIGS["vit"](), "embedding")


@pytest.mark.parametrize(("family", "name"), [("qwen3", "logits"), ("gemma2", "output"), ("bert", "embedding")])
def test_normalised_product_is_not_a_knob(family, name):
    assert weights_of(name, family)  # the weights exist
    with pytest.raises(lf.InputError, match=f"has no knob {name}: what it multiplies is normalised at once"):
        knobs(CONFIGS[family](), name)


def test_padding_rows_stay_zero_when_embeddings_are_scaled():
    """The pasted lines and the law keep these rows; an override by a standard deviation would draw them."""
    namespace = {}
    exec(
        PYTHON.format(setter="", fields=block("FIELDS", []), factors='FACTORS = {"bert.embeddings.*.weight": 4.0}'),
        namespace,
    )
    model = transformers.BertForMaskedLM(CONFIGS["bert"]())
    namespace["scale_weights"](model)
    table = model.bert.embeddings.word_embeddings.weight.detach()
    assert float(table[0].abs().max()) == 0
    assert 0.7 < float(table[1:].std()) < 0.9
    trials, _ = trials_of(CONFIGS["gemma"](), None, ["embedding"], Objective(gradient=None), None, 5, None)
    laws = [weight.law for weight in trials.network({"embedding": 4.0}).weights if "embed_tokens" in weight.name]
    assert [law.rows for law in laws] == [{0: 0.0}]
    assert abs(laws[0].std - 0.8) < 1e-12
