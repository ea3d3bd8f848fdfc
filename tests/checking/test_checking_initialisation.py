"""Initialisation, weight by weight: levels, power, and known bugs inserted into models of transformers."""

import functools
import math

import pytest
import torch
import transformers
from scipy import stats
from torch import nn

from initialisation_alarms import alarms, law_and_reference
from limitformer.base.errors import InputError
from limitformer.initialisation.bugs import BUGS
from limitformer.initialisation.weight_by_weight import check_initialisation, initialisation
from limitformer.subjects.subject import resolve
from limitformer.weightless.law import build_without_weights, table_of

TITLES = {bug.key: bug.title for bug in BUGS}
SIZE = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 80}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=96, n_embd=48, n_layer=4, n_head=4, n_positions=24, **IDS),
    "bert": lambda: transformers.BertConfig(**SIZE, max_position_embeddings=24),
    "llama": lambda: transformers.LlamaConfig(**SIZE, num_key_value_heads=2),
    "gemma": lambda: transformers.GemmaConfig(**SIZE, num_key_value_heads=2, head_dim=12),
    "modernbert": lambda: transformers.ModernBertConfig(**SIZE, **IDS, cls_token_id=1, sep_token_id=2),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZE, **IDS),
    "t5": lambda: transformers.T5Config(d_model=48, d_kv=12, d_ff=80, num_layers=3, num_heads=4, vocab_size=96),
}


@functools.cache
def law_of(family):
    """Return the law of a family, read before any test changes its initialisation."""
    subject = resolve(FAMILIES[family]())
    reference, result = build_without_weights(subject, torch.float32)
    return table_of(subject, reference, result), reference


def built(family, seed=0):
    """Return a model of the family as transformers draws it."""
    law_of(family)
    torch.manual_seed(seed)
    return resolve(FAMILIES[family]()).factory()


@functools.cache
def outermost_of(family):
    """Return the class whose `_init_weights` runs last, on itself."""
    return type(built(family))


def checked(family, model, **options):
    """Check a model against the law of its family."""
    law, reference = law_of(family)
    return check_initialisation(model, law, reference=reference, **options)


@torch.no_grad()
def change(model, ending, operation):
    """Apply an operation to all parameters whose names have this ending."""
    result = [parameter for name, parameter in model.named_parameters() if name.endswith(ending)]
    assert result
    for parameter in result:
        operation(parameter)


def initialised_otherwise(monkeypatch, family, ending, operation):
    """Return a model whose own `_init_weights` ends with this operation on the parameters of these names."""
    outermost = outermost_of(family)
    kind = next(k for k in outermost.__mro__ if "_init_weights" in vars(k))
    original = kind._init_weights

    def init_weights(self, module):
        original(self, module)
        if module is self and type(self) is outermost:
            change(self, ending, operation)

    monkeypatch.setattr(kind, "_init_weights", init_weights)
    return built(family)


def fan_out_uniform(weight):
    """Draw as `torch.nn.Linear` does by default."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def truncated(weight):
    """Draw a normal of std 0.02 truncated at two standard deviations, without rescaling."""
    nn.init.trunc_normal_(weight, std=0.02, a=-0.04, b=0.04)


def large_query_of_every_head(weight):
    """Enlarge the queries of GPT-NeoX, which has queries, keys and values head by head."""
    weight.view(4, 3, 12, -1)[:, 0] *= 10


SCALE = 1 / math.sqrt(2 * 4)
KNOWN_BUGS = [
    ("gpt2", "attn.c_proj.weight", lambda w: w.mul_(1 / SCALE), "residual-missing"),
    ("llama", "up_proj.weight", lambda w: w.mul_(SCALE), "residual-wrong"),
    ("gpt2", "wte.weight", lambda w: w.normal_(0, 1), "embedding"),
    ("gemma", "embed_tokens.weight", lambda w: w.normal_(0, 1), "embedding"),
    ("llama", "q_proj.weight", lambda w: w.mul_(10), "query"),
    ("gpt_neox", "query_key_value.weight", large_query_of_every_head, "query"),
    ("llama", "layernorm.weight", lambda w: w.zero_(), "norm-zero"),
    ("gemma", "layernorm.weight", lambda w: w.fill_(1), "norm-zero"),
    ("bert", "query.weight", truncated, "truncation"),
    ("modernbert", "Wi.weight", lambda w: w.normal_(0, 0.02), "truncation"),
    ("bert", "intermediate.dense.weight", fan_out_uniform, "fan"),
    ("bert", "attention.output.dense.bias", lambda w: w.uniform_(-(48**-0.5), 48**-0.5), "fan"),
    ("llama", "down_proj.weight", nn.init.xavier_uniform_, "fan"),
    ("t5", "wo.weight", lambda w: w.normal_(0, 48**-0.5), "fan"),
    ("gpt2", "c_fc.weight", lambda w: w.fill_(0.02), "dead"),
    ("llama", "k_proj.weight", lambda w: w.view(-1)[7:9].fill_(math.nan), "uninitialised"),
]


@pytest.mark.parametrize(("family", "ending", "operation", "bug"), KNOWN_BUGS)
def test_known_bug_is_the_only_finding(family, ending, operation, bug, monkeypatch):
    model = initialised_otherwise(monkeypatch, family, ending, operation)
    report = checked(family, model)
    changed = {name for name, _ in model.named_parameters() if name.endswith(ending)}
    assert {finding.bug for finding in report.findings} == {TITLES[bug]}, str(report)
    assert {name for finding in report.findings for name in finding.names} == changed
    assert not report.trained
    assert TITLES[bug] in report.summary


@pytest.mark.parametrize("garbage", [math.nan, 3e30])
def test_unfilled_rotary_buffer_is_found(garbage):
    model = built("llama")
    model.model.rotary_emb.inv_freq = torch.full_like(model.model.rotary_emb.inv_freq, garbage)
    (finding,) = checked("llama", model).findings
    assert (finding.bug, finding.names) == (TITLES["uninitialised"], ("model.rotary_emb.inv_freq",))


@pytest.mark.parametrize("equal", [True, False])
def test_untied_head_is_found(equal):
    model = built("gpt2")
    head = model.lm_head.weight.detach().clone() if equal else torch.randn(96, 48) * 0.02
    model.lm_head.weight = nn.Parameter(head)
    (finding,) = checked("gpt2", model).findings
    assert (finding.kind, finding.bug) == ("broken tie", TITLES["dead"])
    assert set(finding.names) == {"transformer.wte.weight", "lm_head.weight"}
    assert ("equal" in finding.entries) is equal


def test_new_ties_and_copies_are_found():
    model = built("llama")
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    change(layers[3], "mlp.gate_proj.weight", lambda w: w.copy_(layers[2].mlp.gate_proj.weight))
    result = {finding.kind: finding.names for finding in checked("llama", model).findings}
    assert result == {
        "new tie": ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        "copies": ("model.layers.2.mlp.gate_proj.weight", "model.layers.3.mlp.gate_proj.weight"),
    }


def test_dead_rows_and_overwritten_padding_are_found():
    model = built("llama")
    change(model, "layers.1.mlp.up_proj.weight", lambda w: w[5:9].zero_())
    (finding,) = checked("llama", model).findings
    assert (finding.kind, finding.names) == ("dead rows", ("model.layers.1.mlp.up_proj.weight",))

    def padded():
        return nn.Embedding(40, 16, padding_idx=3)

    embedding = padded()
    assert not initialisation(embedding, padded).findings
    with torch.no_grad():
        embedding.weight[3] = 0.1
    assert [finding.kind for finding in initialisation(embedding, padded).findings] == ["fixed rows"]


def equal_heads(weight):
    """Copy the first head's queries to the second's, in rows (out, in)."""
    weight[12:24] = weight[:12]


def half_rank(weight):
    """Write a product of two Gaussian matrices, with the std of the law."""
    out, into = weight.shape
    weight.copy_(torch.randn(out, min(out, into) // 2) @ torch.randn(min(out, into) // 2, into))
    weight.mul_(0.02 / weight.std())


@pytest.mark.parametrize("operation", [equal_heads, half_rank])
def test_equal_heads_and_a_low_rank_are_found(operation):
    """Every single entry follows the law; the wrong twin is the same model before the change."""
    model, name = built("llama"), "model.layers.2.self_attn.q_proj.weight"
    assert not checked("llama", model).findings
    change(model, name, operation)
    (finding,) = checked("llama", model).findings
    assert (finding.kind, finding.names) == ("lines", (name,))


def test_single_odd_layer_is_found_with_and_without_a_law():
    model = built("llama")
    name = "model.layers.2.mlp.up_proj.weight"
    change(model, name, lambda w: w.mul_(1.5))
    for report in (checked("llama", model), check_initialisation(model, None)):
        assert [finding.names for finding in report.findings] == [(name,)]
    assert not check_initialisation(built("llama"), None).findings


def trained(family, steps):
    """Return a model after some steps of Adam on one batch of tokens."""
    model = built(family)
    tokens = torch.randint(96, (4, 20), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(("family", "steps"), [("gpt2", 1), ("llama", 20), ("gemma", 20)])
def test_trained_model_is_recognised(family, steps):
    model = trained(family, steps)
    report = checked(family, model)
    assert report.trained
    assert not report.findings, str(report)
    assert report.summary.endswith("weights differ from the law: a trained model, or another initialisation")
    assert len(str(report).splitlines()) == 1
    name = next(name for name, parameter in model.named_parameters() if ".2.mlp." in name and parameter.dim() == 2)
    change(model, name, lambda w: w.zero_())
    (finding,) = checked(family, model).findings
    assert (finding.names, finding.kind) == ((name,), "dead")


def test_no_bug_is_named_by_its_size_once_norms_and_biases_moved():
    """A std may pass the value of a known bug in training; uninitialised memory is a fault at any time."""
    model = built("gpt2")
    for ending in ("bias", "ln_1.weight", "ln_2.weight", "ln_f.weight"):
        change(model, ending, lambda w: w.add_(1e-3 * torch.linspace(-1, 1, len(w))))
    change(model, "mlp.c_fc.weight", lambda w: w.mul_(1 / 0.8796))
    report = checked("gpt2", model)
    assert report.trained
    assert not report.findings, str(report)
    change(model, "1.mlp.c_fc.weight", lambda w: w[0].fill_(1e30))
    assert TITLES["uninitialised"] in {finding.bug for finding in checked("gpt2", model).findings}


def test_equal_biases_do_not_make_a_model_trained():
    """No training gives all biases one value; another bug keeps its name."""
    model = built("gpt2")
    change(model, "bias", lambda w: w.fill_(0.01))
    for ending in ("ln_1.weight", "ln_2.weight", "ln_f.weight"):
        change(model, ending, lambda w: w.fill_(0.9))
    change(model, "mlp.c_fc.weight", lambda w: w.mul_(1 / 0.8796))
    report = checked("gpt2", model)
    assert not report.trained
    assert TITLES["truncation"] in {finding.bug for finding in report.findings}


@pytest.mark.parametrize(("value", "kind"), [(math.nan, "NaN"), (0.0, "dead rows")])
def test_common_factor_hides_no_fault(value, kind):
    model = built("llama")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            change(model, name, lambda w: w.mul_(1.3))
    change(model, "1.self_attn.q_proj.weight", lambda w: w[3].fill_(value))
    assert {"scale", kind} <= {finding.kind for finding in checked("llama", model).findings}


def test_common_factor_is_one_finding():
    config = FAMILIES["llama"]()
    config.initializer_range = 0.026
    torch.manual_seed(0)
    report = checked("llama", resolve(config).factory())
    (finding,) = report.findings
    assert finding.kind == "scale"
    assert finding.entries.startswith("std 1.3")


# Levels and power


def test_false_alarms_are_within_the_level():
    """Twenty models of three families at 10 %, also in 16 bits; the bound is exceeded once in 400 times."""
    kinds = [("gpt2", torch.float32), ("modernbert", torch.bfloat16), ("torch", torch.float16)]
    number = sum(len(alarms(name, range(20), dtype, level=0.1)) for name, dtype in kinds)
    assert number <= stats.binom.isf(0.0025, 60, 0.1)


# Report and errors


def test_report_has_every_weight():
    model = built("bert")
    report = initialisation(model)
    rows = {each.name: each for each in report.weights}
    assert list(rows) == [name for name, _ in model.named_parameters()]
    name = "bert.encoder.layer.1.output.dense.weight"
    weight = dict(model.named_parameters())[name].detach().double().numpy()
    row = rows[name]
    assert (row.std, row.mean) == pytest.approx((weight.std(), weight.mean()))
    assert row.ks == pytest.approx(stats.kstest(weight.ravel(), "norm", (0, 0.02), method="asymp").statistic, abs=1e-6)
    assert row.law == "normal, std 0.02"
    assert report.summary == f"all {len(report.weights)} weights as the law says"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check_initialisation("gpt2", None), "module must be a torch.nn.Module; got str."),
        (lambda: check_initialisation(nn.Linear(2, 2), None, level=1), "level must be between 0 and 1; got 1."),
        (lambda: check_initialisation(nn.Linear(2, 2, device="meta"), None), "weight is on the meta device"),
        (lambda: check_initialisation(nn.Linear(2, 2), law_and_reference("torch")[0]), "has no weight, but 0.weight"),
        (
            lambda: initialisation(nn.Linear(2, 2), lambda: nn.Linear(3, 2)),
            r"weight is \(2, 2\), and its law of \(2, 3\)",
        ),
    ],
)
def test_initialisation_refuses_bad_input(call, message):
    with pytest.raises(InputError, match=message):
        call()
