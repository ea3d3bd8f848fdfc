"""`limitformer.check`: its curves against direct computations, its bands against drawn networks, and its verdicts."""

import json

import numpy as np
import pytest
import torch
import transformers
import xarray as xr
from torch import nn
from typer.testing import CliRunner

import limitformer as lf
from limitformer.checking import THRESHOLDS
from limitformer.checking.curves import band, by_kind, curves, inside, kind_and_block, surprises
from limitformer.checking.module import measure_module
from limitformer.checking.thresholds import VERDICTS, WAITS, failing, thresholds_with
from limitformer.checking.verdicts import CERTAIN, RULES, WORDS, failed, verdicts
from limitformer.cli.app import app
from limitformer.subjects.inputs import inputs_of
from limitformer.subjects.losses import chosen_loss, same_token
from limitformer.subjects.subject import resolve
from weightless_families import CONFIGS

SMALL = {"vocab_size": 60, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 24, "bos_token_id": 1}
SMALL |= {"eos_token_id": 2, "initializer_range": 0.15}
IDS = [[5, 6, 7, 5, 8, 9, 10, 11], [12, 13, 14, 15, 16, 0, 0, 0], [0, 0, 3, 4, 3, 4, 3, 4]]
SEEN = [[1] * 8, [1] * 5 + [0] * 3, [0] * 2 + [1] * 6]


def small_gpt2(seed=0, **changes):
    """Return a small GPT-2 with the weights that its own initialisation draws."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(**(SMALL | changes))
    return transformers.GPT2LMHeadModel._from_config(
        config, attn_implementation=changes.pop("attention", "sdpa")
    ).eval()


def sequences():
    """Return three sequences, padded on either side."""
    return {"input_ids": torch.tensor(IDS), "attention_mask": torch.tensor(SEEN)}


@pytest.fixture(scope="module")
def module():
    return small_gpt2().double()


@pytest.fixture(scope="module")
def report(module):
    return lf.check(module, sequences(), samples=2, progress=False)


def tokens_of(x, k):
    """Return the tokens of sequence k without padding, in NumPy."""
    return x[k][torch.tensor(SEEN[k], dtype=torch.bool)].detach().numpy()


def by_definition(x):
    """Return statistics of the tokens X (m, n) of one sequence, from X itself."""
    m, _n = x.shape
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    pairs = np.array([unit[i] @ unit[j] for i in range(m) for j in range(i)])
    squares = np.linalg.svd(x, compute_uv=False) ** 2
    part = squares / squares.sum()
    part = part[part > 1e-14]
    return {
        "correlation": pairs.mean(),
        "correlation_abs": np.abs(pairs).mean(),
        "correlation_95": np.quantile(pairs, 0.95),
        "size": np.sqrt((x**2).mean()),
        "stable_rank": squares.sum() / squares.max(),
        "effective_rank": np.exp(-(part * np.log(part)).sum()),
    }


def eager(module):
    """Return a model with the same weights whose attentions are outputs."""
    other = transformers.GPT2LMHeadModel._from_config(module.config, attn_implementation="eager").double().eval()
    other.load_state_dict(module.state_dict())
    return other


def test_curves_match_hidden_states_without_padding(module, report):
    out = eager(module)(**sequences(), output_hidden_states=True)
    hidden = [*out.hidden_states[:-1]]
    for layer, x in enumerate(hidden):
        each = [by_definition(tokens_of(x, k)) for k in range(3)]
        for name in each[0]:
            direct = np.mean([one[name] for one in each])
            assert float(report.curves[name][0, layer]) == pytest.approx(direct, rel=1e-5, abs=1e-9), (name, layer)
        every = np.concatenate([tokens_of(x, k).ravel() for k in range(3)])
        assert float(report.curves["largest"][0, layer]) == pytest.approx(np.abs(every).max(), rel=1e-6)
    padded = by_definition(hidden[1].detach().reshape(-1, 32).numpy())["correlation"]
    assert abs(padded - float(report.curves["correlation"][0, 1])) > 1e-3  # padding would change it


def test_head_curves_match_attentions(module, report):
    attentions = eager(module)(**sequences(), output_attentions=True).attentions
    for block, a in enumerate(attentions):
        entropies = np.zeros((3, 4))
        for k in range(3):
            tokens = np.flatnonzero(SEEN[k])
            rows = a[k][:, tokens][:, :, tokens].detach().numpy()
            several = range(1, len(tokens))
            entropies[k] = [
                np.mean([-sum(w * np.log(w) for w in rows[head, i] if w > 0) for i in several]) for head in range(4)
            ]
        np.testing.assert_allclose(report.curves["entropy"][0, block], entropies.mean(0), rtol=1e-5)


def test_json_has_the_medians_of_the_curves(report):
    curves, record = report.curves, json.loads(json.dumps(report.record(), allow_nan=False))["curves"]
    assert record.keys() == {name for name, each in curves.items() if "sample" in each.dims}
    law = lf.check(transformers.GPT2Config(**SMALL), tokens=8, samples=5, progress=False)
    curves, record = law.curves, law.record()["curves"]

    def largest_difference(value, expected):
        return np.max(np.abs(np.array(value) / expected - 1))

    def both(middle):
        """Return the largest differences from statistics over samples, with digits beyond the fifth left out."""
        heads = curves["logit_std"].values.mean(2)
        yield largest_difference(record["logit_std"], middle(heads, axis=0))
        yield largest_difference(record["size"], middle(curves["size"].values, axis=0))
        for k, each in enumerate(record["relative_branch"]):
            yield largest_difference(each, middle(curves["relative_branch"].values[:, :, k], axis=0))
        kind = "transformer.h.*.mlp.c_proj.weight"
        own = middle(curves["gradient"].sel(kind=kind).values, axis=0)
        yield largest_difference(record["gradient"][kind], own)
        yield largest_difference(record["loss"], middle(curves["loss"].values))

    assert max(both(np.median)) < 6e-5
    assert min(both(np.mean)) > 6e-5


def test_json_has_the_curves_of_other_stacks():
    t5 = {"model_type": "t5", "d_model": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 32, "vocab_size": 40}
    report = lf.check(t5, tokens=6, samples=2, gradients=False, progress=False, witness=False)
    record = report.record()
    (stack,) = report.stacks
    assert record["curves_of_stacks"][stack.name]["size"] == pytest.approx(
        stack.curves["size"].median("sample").values, rel=6e-5
    )
    assert record["curves_of_stacks"][stack.name]["size"] != record["curves"]["size"]


def test_gradients_match_autograd(module, report):
    other = eager(module)
    out = other(**sequences())
    ids = torch.tensor(IDS)
    seen = torch.tensor(SEEN, dtype=torch.bool)
    loss = torch.zeros((), dtype=torch.float64)
    for k in range(3):
        at = seen[k].nonzero().flatten()
        loss = loss + nn.functional.cross_entropy(out.logits[k, at[:-1]], ids[k, at[1:]]) / 3
    loss.backward()
    assert float(report.curves["loss"][0]) == pytest.approx(float(loss.detach()), rel=1e-6)
    for block in range(3):
        name = "transformer.h.*.attn.c_attn.weight"
        direct = float(other.transformer.h[block].attn.c_attn.weight.grad.norm())
        assert float(report.curves["gradient"].sel(kind=name, block=block + 1)[0]) == pytest.approx(direct, rel=1e-5)


def test_check_leaves_the_module_unchanged():
    model = small_gpt2()
    model.transformer.h[1].train()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    chance = torch.get_rng_state()
    lf.check(model, tokens=6, samples=2, progress=False)
    assert torch.equal(chance, torch.get_rng_state())
    assert model.transformer.h[1].training
    assert not model.training
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_band_covers_90_percent_of_new_networks():
    rng = np.random.default_rng(5)
    hits = {}
    for count in (2, 4, 30):
        law = xr.Dataset({"size": (("sample", "layer"), np.exp(rng.normal(1, 0.3, (count, 4000))))})
        new = xr.Dataset({"size": (("sample", "layer"), np.exp(rng.normal(1, 0.3, (1, 4000))))})
        hits[count] = float(inside(new, band(law))["size"].mean())
    assert all(abs(part - 0.9) < 4 * np.sqrt(0.09 / 4000) for part in hits.values()), hits


def shares(models, law):
    """Return the mean share of each curve of drawn models that lies in the band."""
    inputs = inputs_of(12, resolve(models[0]))
    result = [curves(measure_module(model, inputs, chosen_loss(None, "causal"))) for model in models]
    parts = [inside(each, law) for each in result]
    names = ("size", "correlation", "effective_rank", "logit_std", "effective_tokens", "stream_gradient", "gradient")
    return {name: float(np.mean([part[name].mean() for part in parts])) for name in names}


@pytest.mark.slow
def test_drawn_networks_lie_in_their_band_and_wrong_twins_do_not():
    config = transformers.GPT2Config(**SMALL)
    law = lf.check(config, tokens=12, samples=40, progress=False).band
    own = shares([small_gpt2(seed) for seed in range(24)], law)
    other = shares([small_gpt2(seed, initializer_range=0.15 * 1.3) for seed in range(6)], law)
    assert 0.86 < np.mean(list(own.values())) < 0.94, own
    assert min(own.values()) > 0.8, own
    assert other["size"] < 0.3, other
    assert other["logit_std"] < 0.6, other


def test_surprises_have_their_level_and_power():
    rng = np.random.default_rng(6)

    def curve(count, shift=0.0):
        x = np.cumsum(rng.normal(0, 0.1, (count, 20)), 1) + 1.0  # neighbouring layers are correlated
        x[:, 12:] += shift
        return xr.Dataset({"size": (("sample", "layer"), np.exp(x)), "step": (("sample", "block"), np.exp(x))})

    def alarms(shift, number):
        return sum(min(surprises(curve(1, shift), band(curve(8))).values()) < 0.01 for _ in range(number))

    assert alarms(0.0, 200) <= 8  # at most 2 expected: once in 4,000 seeds
    assert alarms(4.0, 40) > 37


@pytest.fixture(scope="module")
def unshaped():
    """[ST, Fig. 1]: unshaped attention without a norm."""
    part = {"attention": lf.SoftmaxAttention(), "feedforward": lf.ShapedReLU(c_plus=0.0, c_minus=-1.0)}
    return lf.Transformer(width=100, depth=50, gamma=8**-0.5, **part)


def test_rank_collapse_begins_at_the_layer_of_the_chain(unshaped):
    start = lf.equicorrelated(4, 0.2)
    report = lf.check(unshaped, start, samples=24, gradients=False, progress=False)
    chain = lf.simulate(unshaped, start, samples=400, seed=3, progress=False)
    rho = lf.correlation(chain).values
    mean = rho[..., *np.triu_indices(4, 1)].mean(-1)
    below = mean < THRESHOLDS["collapse"].broken
    since = np.median(50 + 1 - below[:, ::-1].argmax(1))
    verdict = report.verdicts[0]
    assert (verdict.name, verdict.share) == ("collapsed", 1.0)
    assert abs(verdict.layer - since) <= 0.1 * since


def test_shaped_transformer_is_fine(unshaped):
    shaped = lf.Transformer(
        width=100, depth=50, gamma=8**-0.5, attention=lf.ShapedAttention(tau0=1.0), feedforward=unshaped.feedforward
    )
    report = lf.check(shaped, lf.equicorrelated(4, 0.2), samples=2, progress=False)
    assert report.grade == "fine", str(report)
    assert "✓ fine" in str(report)


def test_gradients_vanish_in_post_norm_only():
    stock = {
        "gamma": 1.0,
        "lam": 1.0,
        "attention": lf.SoftmaxAttention(),
        "feedforward": lf.ShapedReLU(c_plus=0.0, c_minus=-1.0),
    }
    post = lf.Transformer(width=64, depth=40, norm="post", mask="causal", **stock)
    report = lf.check(post, lf.equicorrelated(6, 0.2), samples=2, progress=False)
    assert "vanishing" in [verdict.name for verdict in report.verdicts], str(report)
    pre = lf.Transformer(width=64, depth=40, norm="pre", mask="causal", **stock)
    report = lf.check(pre, lf.equicorrelated(6, 0.2), samples=2, progress=False)
    assert "vanishing" not in [verdict.name for verdict in report.verdicts], str(report)


def names_of(what, **options):
    return [one.name for one in lf.check(what, samples=2, gradients=False, progress=False, **options).verdicts]


def test_attention_is_frozen_by_width_or_by_scale():
    wide = transformers.LlamaConfig(
        hidden_size=16384, num_attention_heads=128, num_key_value_heads=8, intermediate_size=64, num_hidden_layers=1
    )
    assert "frozen" in names_of(wide, tokens=64)
    assert "frozen" not in names_of(wide, tokens=64, settings={"initializer_range": 0.005})


def sound(layers=6, heads=2, samples=4):
    """Return curves without a verdict."""

    def flat(value, *sizes):
        return np.full((samples, *sizes), value)

    return xr.Dataset(
        {
            "size": (("sample", "layer"), flat(1.0, layers + 1)),
            "correlation": (("sample", "layer"), flat(0.2, layers + 1)),
            "largest": (("sample", "layer"), flat(4.0, layers + 1)),
            "typical": (("sample", "layer"), flat(0.7, layers + 1)),
            "stream_gradient": (("sample", "layer"), flat(1.0, layers + 1)),
            "relative_branch": (("sample", "block", "sublayer"), flat(0.3, layers, 2)),
            "logit_std": (("sample", "block", "head"), flat(1.0, layers, heads)),
            "effective_tokens": (("sample", "block", "head"), flat(10.0, layers, heads)),
            "tokens_seen": (("sample", "block", "head"), flat(16.0, layers, heads)),
            "largest_logit": (("sample", "block", "head"), flat(3.0, layers, heads)),
            "gradient": (("sample", "kind", "block"), flat(1.0, 3, layers)),
            "outside_gradient": (("sample", "outside"), flat(1.0, 2)),
            "loss": (("sample",), flat(np.log(50.0))),
            "effective_experts": (("sample", "block"), flat(7.0, layers)),
            "unrelated_experts": (("sample", "block"), flat(7.8, layers)),
            "chosen_experts": (("sample", "block"), flat(2.0, layers)),
            "busiest_expert": (("sample", "block"), flat(0.3, layers)),
            "longest_memory": (("sample", "block"), flat(80.0, layers)),
            "group_size": (("sample", "layer", "group"), flat(1.0, layers + 1, 2)),
            "agreement": (("condition",), np.array([0.7, 0.9, 0.4])),
        },
        {
            "kind": ["h.*.a.weight", "h.*.b.weight", "h.*.b.bias"],
            "outside": ["e.weight", "head.weight"],
            "group": ["words", "pixel_values"],
            "condition": ["input_ids", "pixel_values", "every input"],
        },
        attrs={"tokens": 16, "chance": np.log(50.0)},
    )  # fmt: skip


def changed(name, at, value, **attributes):
    """Return sound curves with other values in one place."""
    data = sound()
    data[name].values[at] = value
    return data.assign_attrs(attributes)


SICK = {  # by name and grade: curves, and the layer of the verdict
    ("loss", "broken"): (changed("loss", np.s_[:], 30.0), None),
    ("loss", "watch"): (changed("loss", np.s_[:], np.log(50.0) - 1.5), None),
    ("dead", "broken"): (changed("gradient", np.s_[:, 0], 1e-9), None),
    (WAITS, "watch"): (changed("gradient", np.s_[:, 0], 0.0, behind_zero="h.*.a.weight", zero_weights="z"), None),
    ("collapsed", "broken"): (changed("correlation", np.s_[:, 4:], 0.95), 4),
    ("collapsed", "watch"): (changed("correlation", np.s_[:, 3:], 0.7), 3),
    ("grows", "broken"): (changed("size", np.s_[:, 5:], 200.0), None),
    ("grows", "watch"): (changed("size", np.s_[:, 5:], 40.0), None),
    ("dies", "broken"): (changed("size", np.s_[:, 5:], 0.002), None),
    ("dies", "watch"): (changed("size", np.s_[:, 5:], 0.3), None),
    ("frozen", "broken"): (changed("logit_std", np.s_[:, 2], 5.0), 3),
    ("frozen", "watch"): (changed("effective_tokens", np.s_[:, 2], 4.0), 3),
    ("uniform", "watch"): (changed("effective_tokens", np.s_[:, 3:], 15.99), 4),
    ("router", "broken"): (changed("effective_experts", np.s_[:, 3:], 2.1), 4),
    ("router", "watch"): (changed("effective_experts", np.s_[:, 3:], 4.0), 4),
    ("memory", "broken"): (changed("longest_memory", np.s_[:], 0.53), None),
    ("deaf", "watch"): (changed("agreement", np.s_[1:2], 0.9995), None),
    ("constant", "watch"): (changed("agreement", np.s_[2:], 0.9995), None),
    ("equal", "watch"): (sound().assign_attrs(equal="6 of h.*.a.weight"), None),
    ("faint", "watch"): (changed("relative_branch", np.s_[:], 0.01), None),
    ("uneven", "watch"): (changed("group_size", np.s_[:, 0, 0], 51.0), None),
    ("swamped", "watch"): (changed("relative_branch", np.s_[:, 0, 1], 30.0), 1),
    ("vanishing", "broken"): (changed("gradient", np.s_[:, 1, 4], 1e-4), 5),
    ("vanishing", "watch"): (changed("gradient", np.s_[:, 1, 4], 5e-3), 5),
    ("exploding", "broken"): (changed("stream_gradient", np.s_[:, :2], 1e4), 1),
    ("exploding", "watch"): (changed("stream_gradient", np.s_[:, :2], 300.0), 1),
    ("range", "watch"): (changed("largest", np.s_[:, 3], 5000.0), 3),
    ("not finite", "broken"): (changed("size", np.s_[:, 2:], np.nan), 2),
}


def test_every_rule_has_a_case():
    assert set(SICK) == {(rule.name, rule.grade) for rule in RULES}
    assert {name for name, _ in SICK} == set(VERDICTS) == set(WORDS)


@pytest.mark.parametrize("case", SICK)
def test_each_verdict_appears_only_on_its_curves(case):
    data, layer = SICK[case]
    assert [one.name for one in verdicts(sound(), THRESHOLDS)] == ["fine"]
    result = {(one.name, "broken" if one.severe else one.grade): one for one in verdicts(data, THRESHOLDS)}
    assert set(result) == {case}
    assert (result[case].grade == "broken") is (case in {(name, "broken") for name in CERTAIN})
    assert result[case].layer == layer
    assert result[case].source or case[0] in ("not finite", "equal")
    assert result[case].why
    assert result[case].mends


def test_verdict_shows_value_and_threshold():
    """The value is past the threshold: above it, or below it for what falls."""
    for (name, grade), (data, _) in SICK.items():
        (one,) = verdicts(data, THRESHOLDS)
        if name not in ("not finite", "dead", "equal", WAITS):
            below = name in ("dies", "router", "memory", "faint") or (name, grade) == ("frozen", "watch")
            assert (one.value < one.threshold) is below, name
    (dies,) = verdicts(SICK["dies", "broken"][0], THRESHOLDS)
    assert (dies.value, dies.threshold) == (0.002, 0.01)


def test_verdict_needs_the_median_sample_and_reports_its_share():
    data = changed("correlation", np.s_[:3, 4:], 0.95)
    assert [(one.name, one.share) for one in verdicts(data, THRESHOLDS)] == [("collapsed", 0.75)]
    data = changed("correlation", np.s_[:1, 4:], 0.95)
    assert [one.name for one in verdicts(data, THRESHOLDS)] == ["fine"]


def test_verdict_value_equals_the_number_of_the_table():
    """The median over all samples, also of those in which the threshold is not reached."""
    data = sound(samples=5)
    data["correlation"].values[:, -1] = [0.3, 0.55, 0.6, 0.7, 0.8]
    (one,) = verdicts(data, THRESHOLDS)
    assert (one.name, one.grade, one.share) == ("collapsed", "watch", 0.8)
    assert one.value == np.median(data["correlation"].values[:, -1]) == 0.6


def test_missing_stream_gradient_does_not_explode():
    """0/0 behind a zero head, and no gradient at a last block that the loss misses: neither is a finding."""
    for at, value in ((np.s_[:], 0.0), (np.s_[:, -1:], np.nan), (np.s_[:, -1:], 0.0)):
        result = verdicts(changed("stream_gradient", at, value), THRESHOLDS)
        assert [one.name for one in result] == ["fine"], (at, value)
    data = changed("stream_gradient", np.s_[:, :2], 1e4)
    data["stream_gradient"].values[:, -1] = np.nan
    assert [one.name for one in verdicts(data, THRESHOLDS)] == ["exploding"]


def test_redundant_bias_or_weight_outside_the_loss_is_not_dead():
    for value in (0.0, np.nan):  # without a gradient, or outside of the loss
        assert [one.name for one in verdicts(changed("gradient", np.s_[:, 2], value), THRESHOLDS)] == ["fine"]
    both = changed("gradient", np.s_[:, 1:], 0.0)
    both["outside_gradient"].values[:] = 1.0
    (one,) = verdicts(both, THRESHOLDS)
    assert (one.name, one.value) == ("dead", 2.0)
    assert "2 of 5 kinds of weight have no gradient: h.*.b.weight, h.*.b.bias" in str(one)


def test_failed_selects_the_worst_grade_of_a_name():
    """`collapsed` fails past its threshold for broken, `swamped` at watch; a grade fails at itself or worse."""
    watch, broken = (verdicts(SICK["collapsed", grade][0], THRESHOLDS) for grade in ("watch", "broken"))
    swamped = verdicts(SICK["swamped", "watch"][0], THRESHOLDS)
    table = {"collapsed": (0, 1, 0), "swamped": (0, 0, 1), "broken": (0, 0, 0), "watch": (1, 1, 1), "any": (1, 1, 1)}
    for names, counts in table.items():
        assert tuple(len(failed(each, failing(names))) for each in (watch, broken, swamped)) == counts, names


def test_broken_needs_certainty_or_a_second_measure():
    """Logits and attention, or two measures past thresholds, agree; equal tokens are certain; BERT's 0.95 is not."""
    data, _ = SICK["frozen", "broken"]
    narrow = data.assign(effective_tokens=SICK["frozen", "watch"][0]["effective_tokens"])
    both = data.assign(correlation=SICK["collapsed", "broken"][0]["correlation"])
    equal = changed("correlation", np.s_[:, 4:], 1.0)
    for seen, grades in ((data, ["watch"]), (narrow, ["broken"]), (both, ["broken"] * 2), (equal, ["broken"])):
        assert [one.grade for one in verdicts(seen, THRESHOLDS)] == grades
    waits = verdicts(SICK[WAITS, "watch"][0], THRESHOLDS)
    assert ([one.sign for one in waits], failed(waits, ("any",)), failed(waits, (WAITS,))) == (["·"], [], waits)


def test_thresholds_accept_changes():
    data, _ = SICK["collapsed", "broken"]
    assert [one.grade for one in verdicts(data, thresholds_with({"collapse": 0.99}))] == ["watch"]
    assert [one.name for one in verdicts(data, thresholds_with({"collapse": (0.97, 0.99)}))] == ["fine"]
    assert [one.name for one in verdicts(data, thresholds_with({"collapse": "0.97,0.99"}))] == ["fine"]
    assert thresholds_with({"collapse": 0.3})["collapse"].watch == 0.3  # watch never begins after broken
    assert thresholds_with({"swamped": 20})["swamped"].watch == 20
    with pytest.raises(lf.InputError, match=r"no .colapse..*Nearest: collapse"):
        thresholds_with({"colapse": 0.99})
    with pytest.raises(lf.InputError, match=r"watch, then broken; got 0.9, 0.5"):
        thresholds_with({"collapse": (0.9, 0.5)})
    with pytest.raises(lf.InputError, match=r"takes one number"):
        thresholds_with({"swamped": (1, 2)})


def test_kinds_join_weights_of_like_blocks():
    names = ["h.0.a.w", "h.1.a.w", "h.0.experts.0.w", "h.0.experts.1.w", "wte.w"]
    values = xr.DataArray([[1.0, 2.0, 3.0, 4.0, 5.0]], {"weight": names}, ("sample", "weight"))
    result, rest = by_kind(values)
    assert float(result.sel(kind="h.*.experts.*.w", block=1)[0]) == 5.0
    assert float(result.sel(kind="h.*.a.w", block=2)[0]) == 2.0
    assert np.isnan(result.sel(kind="h.*.experts.*.w", block=2)).all()
    assert rest["outside"].values.tolist() == ["wte.w"]
    assert kind_and_block("model.layers.11.mlp.w") == ("model.layers.*.mlp.w", 11)


class Poisoned(nn.Module):
    """A module whose third block divides by zero."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(200, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, ids):
        x = self.embed(ids)
        for k, block in enumerate(self.blocks):
            x = block(x) / (0.0 if k == 2 else 1.0)
        return x


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        (nn.Linear(3, 3), {}, "Linear cannot run with these inputs"),
        (nn.Linear(3, 3), {"text": np.ones((1, 2, 3))}, "Linear has no blocks: no module of a list receives tokens"),
        ("gpt3", {}, "Nearest: gpt2"),
        ("gpt2", {"tokens": 1}, "tokens must"),
        ("gpt2", {"text": "one"}, "two tokens or more; got 1"),
        ("roberta-base", {"tokens": 600}, r"Nearest: --tokens 512 .*; its max_position_embeddings is 514\."),
        ("gpt2", {"settings": {"n_layers": 2}}, "no field 'n_layers'. Nearest: n_layer"),
        ("gpt2", {"thresholds": {"collapse": "a"}}, "must be a number"),
        ("gpt2", {"thresholds": {"collapse": 1.5}}, "must be above 0 and at most 1; got 1.5"),
        ("gpt2", {"thresholds": {"stream": 0.5}}, "must be above 1; got 0.5"),
        ("gpt2", {"thresholds": {"logit": np.inf}}, "must be finite"),
        ({"kind": "ShapedAttention", "tau0": 1.0}, {"settings": {"tau0": 1}}, "settings are for configurations"),
        (Poisoned(), {"settings": {"a": 1}}, "has its weights already"),
        (small_gpt2().requires_grad_(False), {"tokens": 6}, "no weight of GPT2LMHeadModel has a gradient"),
        (small_gpt2(), {"text": {"input_ids": torch.full((1, 4), 99)}}, "cannot run with these inputs"),
        (
            small_gpt2(),
            {"text": {"input_ids": torch.ones(2, 4).long(), "attention_mask": torch.ones(2, 3)}},
            r"\(2, 4\)",
        ),
        (
            small_gpt2(),
            {"text": {"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.zeros(1, 4)}},
            "every token",
        ),
    ],
)
def test_check_refuses_bad_input(what, options, message):
    with pytest.raises(lf.InputError, match=message) as caught:
        lf.check(what, progress=False, samples=2, **options)
    assert "\n" not in str(caught.value)


def test_infinite_stream_has_a_verdict():
    report = lf.check(Poisoned(), progress=False)
    assert (report.grade, report.verdicts[0].name, report.verdicts[0].layer) == ("broken", "not finite", 3)
    assert "NaN or infinite from layer 3" in str(report)
    model = small_gpt2()
    with lf.checking.Looks(model, tokens=6, samples=2, every=1) as looks:
        with torch.no_grad():
            model.transformer.h[1].mlp.c_fc.weight.fill_(torch.nan)
        looks.step()
    assert looks.last.verdicts[0].name == "not finite"


@pytest.fixture
def command(tmp_path):
    """Return a function that runs the command on the file of a small configuration."""
    path = tmp_path / "config.json"
    path.write_text(transformers.GPT2Config(**SMALL).to_json_string(), encoding="utf-8")

    def run(*options, what=None):
        return CliRunner().invoke(app, ["check", what or str(path), "--tokens", "8", "--samples", "2", *options])

    return run


def test_command_prints_the_verdict_and_writes_its_files(command, tmp_path):
    result = command("--out", str(tmp_path / "out"), "--set", "n_layer=2")
    assert result.exit_code == 0, result.output
    assert "2 blocks, 8 tokens, law at initialisation" in result.output
    assert len(result.output.splitlines()) < 24
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"check.{e}" for e in ("html", "png", "nc", "json")}


def test_fail_on_sets_the_exit_code(command):
    options = ("--no-gradients", "--threshold", "collapse=0.001")
    assert command(*options).exit_code == 0
    assert command(*options, "--fail-on", "frozen").exit_code == 0
    assert command(*options, "--fail-on", "frozen,collapsed").exit_code == 1
    assert command(*options, "--fail-on", "any").exit_code == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--fail-on", ""), "no verdict ''"),
        (("--set", "n_embd=abc"), "n_embd"),
        (("--fail-on", "colapsed"), "no verdict 'colapsed'"),
        (("--set", "n_layer"), "--set takes KEY=VALUE"),
        (("--shaped", "gama=1"), "there are gamma, tau0"),
        (("--text", "/nowhere/a.txt"), "Cannot read the text"),
    ],
)
def test_command_refuses_bad_options(command, options, message):
    result = command(*options)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_check_accepts_compiled_modules_and_json():
    """A compiled module, and the JSON of a Transformer with and without a text, are accepted."""
    compiled = torch.compile(small_gpt2(), backend="eager")
    assert lf.check(compiled, tokens=6, law=False, progress=False).name == "GPT2LMHeadModel"
    text = lf.to_json(lf.Transformer(width=20, depth=3, gamma=0.3, attention=lf.ShapedAttention(tau0=1.0)))
    report = lf.check(text, "to be or not to be", samples=2, progress=False)
    assert (report.name, report.about["tokens"], report.grade) == ("Transformer", 6, "fine")
    assert lf.check(text, samples=2, progress=False).about["tokens"] == 20


def test_untrained_decoder_loss_is_that_of_a_uniform_guess():
    """T5, whose head is its embedding, beats a uniform guess only if its input holds the token."""
    ids = torch.arange(3, 23)[None]
    report = lf.check(CONFIGS["t5"](), ids, samples=6, progress=False)
    assert float(report.curves["loss"].mean()) > 0.95 * np.log(40)
    leaked = lf.check(
        CONFIGS["t5"](), {"input_ids": ids, "decoder_input_ids": ids}, samples=6, loss=same_token, progress=False
    )
    assert float(leaked.curves["loss"].mean()) < 0.9 * np.log(40)


class Stock(nn.Module):
    """torch's attention of several heads, with logits that are far too large."""

    def __init__(self, weights):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(24, 3, batch_first=True, bias=False), nn.LayerNorm(24)
        self.weights = weights
        with torch.no_grad():
            self.attention.in_proj_weight.mul_(8.0)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=self.weights)[0]


@pytest.mark.parametrize(("weights", "gradients"), [(True, False), (False, True)])
def test_torch_attention_is_measured(weights, gradients):
    torch.manual_seed(0)
    blocks = nn.Sequential(Stock(weights), Stock(weights))
    x = torch.randn(2, 7, 24)
    report = lf.check(blocks, x, law=False, gradients=gradients, progress=False)
    first = blocks[0]
    q, k, _ = (first.norm(x) @ first.attention.in_proj_weight.T).chunk(3, -1)
    q, k = (each.view(2, 7, 3, 8).transpose(1, 2) for each in (q, k))
    logits = (q @ k.mT / 8**0.5).detach().double()
    direct = logits.var(-1, correction=0).mean((0, 2)).sqrt()
    np.testing.assert_allclose(report.curves["logit_std"][0, 0], direct, rtol=1e-3)
    np.testing.assert_allclose(report.curves["largest_logit"][0, 0], logits.amax((0, 2, 3)), rtol=1e-4)
    assert [one.name for one in report.failed("frozen")] == ["frozen"]
    assert torch.nn.functional.softmax.__module__ == "torch.nn.functional"


def test_report_of_a_module_with_fewer_blocks_than_its_configuration_is_saved_whole(tmp_path):
    module = small_gpt2()
    module.transformer.h = module.transformer.h[:1]
    report = lf.check(module, samples=2, tokens=6, progress=False)
    assert {path.name for path in report.save(tmp_path)} == {"check.html", "check.png", "check.nc", "check.json"}
    assert "correlation" in lf.load(tmp_path / "check.nc")


TINY_GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 51, "n_positions": 64}


NARROW = lf.Transformer(width=8, depth=2, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lf.check(TINY_GPT2, thresholds=[1]), r"thresholds must be a dict, .*; got \[1\]\.$"),
        (lambda: lf.check(3), r"The model must be a configuration .*; got 3\. Nearest: a name of limitformer\.shapes"),
        (lambda: lf.design(None), r"The model must be .*; got None\. Nearest: a name of"),
        (lambda: lf.design("x"), r"there is no public shape, file or folder 'x'\. All: limitformer check list\.$"),
        (lambda: lf.check(TINY_GPT2, []), r"text must hold at least one text or token; got \[\]\. Nearest: None, for"),
        (lambda: lf.design(NARROW, ()), r"text must hold at least one text or token; got \(\)\. Nearest: None, for"),
        (lambda: lf.check(TINY_GPT2, shaping={}), r"must be a limitformer\.hf\.Shaping; got \{\}\. Nearest: Shaping\("),
        (lambda: lf.design(TINY_GPT2, knobs=3), r"knobs must be one or two names; got 3\.$"),
        (lambda: lf.design(TINY_GPT2, grid={"output": 0.1}), r"grid must map names of knobs to lists, "),
        (lambda: lf.checking.Looks(torch.nn.Linear(2, 2), law=False), r"Looks has no option law"),
        (lambda: lf.checking.Looks(torch.nn.Linear(2, 2)).last, r"There is no look yet\. Nearest: look\(0\)\.$"),
    ],
)
def test_wrong_arguments_of_check_and_design_give_one_line(call, message):
    with pytest.raises(lf.InputError, match=message):
        call()
