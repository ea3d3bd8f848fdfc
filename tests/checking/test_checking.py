"""`limitformer.check`: what it measures against direct computations, its bands against drawn networks, its verdicts."""

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
from limitformer.checking.band import band, inside, surprises
from limitformer.checking.curves import by_kind, curves, place_of
from limitformer.checking.module import measure_module
from limitformer.checking.thresholds import VERDICTS, failing, thresholds_with
from limitformer.checking.verdicts import RULES, WORDS, failed, number_text, verdicts
from limitformer.cli.app import app
from limitformer.weightless.inputs import default_loss, inputs_of
from limitformer.weightless.models import blueprint_of
from weightless_families import CONFIGS

SMALL = {"vocab_size": 60, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 24, "bos_token_id": 1}
SMALL |= {"eos_token_id": 2, "initializer_range": 0.15}
IDS = [[5, 6, 7, 5, 8, 9, 10, 11], [12, 13, 14, 15, 16, 0, 0, 0], [0, 0, 3, 4, 3, 4, 3, 4]]
SEEN = [[1] * 8, [1] * 5 + [0] * 3, [0] * 2 + [1] * 6]


def small_gpt2(seed=0, **changes):
    """With the weights that its own initialisation draws."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(**(SMALL | changes))
    return transformers.GPT2LMHeadModel._from_config(
        config, attn_implementation=changes.pop("attention", "sdpa")
    ).eval()


def sequences():
    """Three of them, padded on either side."""
    return {"input_ids": torch.tensor(IDS), "attention_mask": torch.tensor(SEEN)}


@pytest.fixture(scope="module")
def module():
    return small_gpt2().double()


@pytest.fixture(scope="module")
def report(module):
    return lf.check(module, sequences(), samples=2, progress=False)


def tokens_of(x, k):
    """Of sequence k without padding, in NumPy."""
    return x[k][torch.tensor(SEEN[k], dtype=torch.bool)].detach().numpy()


def by_definition(x):
    """Statistics of the tokens X (m, n) of one sequence, from X itself."""
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
    """The same weights, with attentions that can be looked at."""
    other = transformers.GPT2LMHeadModel._from_config(module.config, attn_implementation="eager").double().eval()
    other.load_state_dict(module.state_dict())
    return other


def test_states_are_those_of_hidden_states_without_padding(module, report):
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
    assert abs(padded - float(report.curves["correlation"][0, 1])) > 1e-3  # padding would be seen


def test_heads_are_those_of_the_attentions(module, report):
    attentions = eager(module)(**sequences(), output_attentions=True).attentions
    for block, a in enumerate(attentions):
        entropies = np.zeros((3, 4))
        for k in range(3):
            keep = np.flatnonzero(SEEN[k])
            rows = a[k][:, keep][:, :, keep].detach().numpy()
            several = [i for i in range(len(keep)) if i > 0]
            entropies[k] = [
                np.mean([-sum(w * np.log(w) for w in rows[head, i] if w > 0) for i in several]) for head in range(4)
            ]
        np.testing.assert_allclose(report.curves["entropy"][0, block], entropies.mean(0), rtol=1e-5)


def test_gradients_are_autograds(module, report):
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


def test_nothing_of_the_module_changes():
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


def test_a_band_holds_one_more_network_nine_times_of_ten():
    rng = np.random.default_rng(5)
    hits = {}
    for count in (2, 4, 30):
        law = xr.Dataset({"size": (("sample", "layer"), np.exp(rng.normal(1, 0.3, (count, 4000))))})
        new = xr.Dataset({"size": (("sample", "layer"), np.exp(rng.normal(1, 0.3, (1, 4000))))})
        hits[count] = float(inside(new, band(law))["size"].mean())
    assert all(abs(part - 0.9) < 4 * np.sqrt(0.09 / 4000) for part in hits.values()), hits


def shares(models, law):
    """Of drawn models: the mean part of each curve that lies in the band, over all curves."""
    inputs = inputs_of(12, blueprint_of(models[0]))
    found = [curves(measure_module(model, inputs, default_loss("causal"))) for model in models]
    parts = [inside(each, law) for each in found]
    names = ("size", "correlation", "effective_rank", "logit_std", "effective_tokens", "stream_gradient", "gradient")
    return {name: float(np.mean([part[name].mean() for part in parts])) for name in names}


def test_drawn_networks_lie_in_their_own_band_and_others_do_not():
    config = transformers.GPT2Config(**SMALL)
    law = lf.check(config, tokens=12, samples=40, progress=False).band
    own = shares([small_gpt2(seed) for seed in range(24)], law)
    other = shares([small_gpt2(seed, initializer_range=0.15 * 1.3) for seed in range(6)], law)
    assert 0.86 < np.mean(list(own.values())) < 0.94, own
    assert min(own.values()) > 0.8, own
    assert other["size"] < 0.3, other
    assert other["logit_std"] < 0.6, other


def test_a_sound_network_is_seldom_unlike_its_law_and_a_broken_one_is():
    rng = np.random.default_rng(6)

    def curve(count, shift=0.0):
        x = np.cumsum(rng.normal(0, 0.1, (count, 20)), 1) + 1.0  # neighbours are alike, as layers are
        x[:, 12:] += shift
        return xr.Dataset({"size": (("sample", "layer"), np.exp(x)), "step": (("sample", "block"), np.exp(x))})

    def alarms(shift, number):
        return sum(min(surprises(curve(1, shift), band(curve(8))).values()) < 0.01 for _ in range(number))

    assert alarms(0.0, 200) <= 8  # 2 expected at the most: once in 4,000 seeds
    assert alarms(4.0, 40) > 37


@pytest.fixture(scope="module")
def unshaped():
    """[ST, Fig. 1]: unshaped attention without a norm."""
    part = {"attention": lf.SoftmaxAttention(), "feedforward": lf.ShapedReLU(c_plus=0.0, c_minus=-1.0)}
    return lf.Transformer(width=100, depth=50, gamma=8**-0.5, **part)


def test_rank_collapse_begins_where_the_chain_has_it(unshaped):
    start = lf.equicorrelated(4, 0.2)
    found = lf.check(unshaped, start, samples=24, gradients=False, progress=False)
    chain = lf.simulate(unshaped, start, samples=400, seed=3, progress=False)
    rho = lf.correlation(chain).values
    mean = rho[..., *np.triu_indices(4, 1)].mean(-1)
    below = mean < THRESHOLDS["collapse"].broken
    since = np.median(50 + 1 - below[:, ::-1].argmax(1))
    verdict = found.verdicts[0]
    assert (verdict.name, verdict.share) == ("collapsed", 1.0)
    assert abs(verdict.layer - since) <= 0.1 * since


def test_a_shaped_transformer_is_fine(unshaped):
    shaped = lf.Transformer(
        width=100, depth=50, gamma=8**-0.5, attention=lf.ShapedAttention(tau0=1.0), feedforward=unshaped.feedforward
    )
    found = lf.check(shaped, lf.equicorrelated(4, 0.2), samples=2, progress=False)
    assert found.grade == "fine", str(found)
    assert "✓ fine" in str(found)


def test_queries_vanish_in_post_norm():
    stock = {
        "gamma": 1.0,
        "lam": 1.0,
        "attention": lf.SoftmaxAttention(),
        "feedforward": lf.ShapedReLU(c_plus=0.0, c_minus=-1.0),
    }
    post = lf.Transformer(width=64, depth=40, norm="post", mask="causal", **stock)
    found = lf.check(post, lf.equicorrelated(6, 0.2), samples=2, progress=False)
    assert "vanishing" in [verdict.name for verdict in found.verdicts], str(found)
    pre = lf.Transformer(width=64, depth=40, norm="pre", mask="causal", **stock)
    found = lf.check(pre, lf.equicorrelated(6, 0.2), samples=2, progress=False)
    assert "vanishing" not in [verdict.name for verdict in found.verdicts], str(found)


def names_of(what, **options):
    return [one.name for one in lf.check(what, samples=2, gradients=False, progress=False, **options).verdicts]


def test_attention_is_frozen_by_width_or_by_scale():
    wide = transformers.LlamaConfig(
        hidden_size=16384, num_attention_heads=128, num_key_value_heads=8, intermediate_size=64, num_hidden_layers=1
    )
    assert "frozen" in names_of(wide, tokens=64)
    assert "frozen" not in names_of(wide, tokens=64, settings={"initializer_range": 0.005})
    normed = {
        "head_dim": 256,
        "hidden_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    gemma4 = transformers.Gemma4TextConfig(
        **normed, global_head_dim=256, intermediate_size=64, hidden_size_per_layer_input=8
    )
    gemma3 = transformers.Gemma3TextConfig(**normed, intermediate_size=64)
    qwen3 = transformers.Qwen3Config(**normed, intermediate_size=64)
    assert ["frozen" in names_of(config, tokens=64) for config in (gemma4, gemma3, qwen3)] == [True, False, False]


def sound(layers=6, heads=2, samples=4):
    """Curves that no rule objects to."""

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
        },
        {"kind": ["h.*.a.weight", "h.*.b.weight", "h.*.b.bias"], "outside": ["e.weight", "head.weight"]},
        attrs={"tokens": 16, "chance": np.log(50.0)},
    )  # fmt: skip


def changed(name, at, value, **attributes):
    """Sound curves but for one place."""
    data = sound()
    data[name].values[at] = value
    return data.assign_attrs(attributes)


SICK = {  # by name and grade: curves, and the layer of the verdict
    ("loss", "broken"): (changed("loss", np.s_[:], 30.0), None),
    ("loss", "watch"): (changed("loss", np.s_[:], np.log(50.0) - 1.5), None),
    ("dead", "broken"): (changed("gradient", np.s_[:, 0], 1e-9), None),
    ("dead", "watch"): (changed("gradient", np.s_[:, 0], 0.0, behind_zero="h.*.a.weight", zero_weights="z"), None),
    ("collapsed", "broken"): (changed("correlation", np.s_[:, 4:], 0.95), 4),
    ("collapsed", "watch"): (changed("correlation", np.s_[:, 3:], 0.7), 3),
    ("grows", "broken"): (changed("size", np.s_[:, 5:], 200.0), None),
    ("grows", "watch"): (changed("size", np.s_[:, 5:], 40.0), None),
    ("dies", "broken"): (changed("size", np.s_[:, 5:], 0.002), None),
    ("dies", "watch"): (changed("size", np.s_[:, 5:], 0.3), None),
    ("frozen", "broken"): (changed("logit_std", np.s_[:, 2], 5.0), 3),
    ("frozen", "watch"): (changed("effective_tokens", np.s_[:, 2], 4.0), 3),
    ("uniform", "watch"): (changed("effective_tokens", np.s_[:, 3:], 15.99), 4),
    ("swamped", "watch"): (changed("relative_branch", np.s_[:, 0, 1], 30.0), 1),
    ("vanishing", "broken"): (changed("gradient", np.s_[:, 1, 4], 1e-4), 5),
    ("vanishing", "watch"): (changed("gradient", np.s_[:, 1, 4], 5e-3), 5),
    ("exploding", "broken"): (changed("stream_gradient", np.s_[:, :2], 1e4), 1),
    ("exploding", "watch"): (changed("stream_gradient", np.s_[:, :2], 300.0), 1),
    ("range", "watch"): (changed("largest", np.s_[:, 3], 5000.0), 3),
    ("not finite", "broken"): (changed("size", np.s_[:, 2:], np.nan), 2),
}


@pytest.mark.parametrize("case", SICK)
def test_each_verdict_is_given_where_it_should_and_nowhere_else(case):
    data, layer = SICK[case]
    assert [one.name for one in verdicts(sound(), THRESHOLDS)] == ["fine"]
    found = {(one.name, one.grade): one for one in verdicts(data, THRESHOLDS)}
    assert set(found) == {case}
    assert found[case].layer == layer
    assert found[case].source or case == ("not finite", "broken")
    assert found[case].why
    assert found[case].mends


def test_a_verdict_shows_the_two_numbers_that_are_compared():
    """The value is past the threshold: above it, or below it for what falls."""
    for (name, grade), (data, _) in SICK.items():
        (one,) = verdicts(data, THRESHOLDS)
        if name not in ("not finite", "dead"):
            below = name == "dies" or (name, grade) == ("frozen", "watch")
            assert (one.value < one.threshold) is below, name
    (dies,) = verdicts(SICK["dies", "broken"][0], THRESHOLDS)
    assert (dies.value, dies.threshold) == (0.002, 0.01)


def test_every_rule_has_a_case():
    assert set(SICK) == {(rule.name, rule.grade) for rule in RULES}
    assert {name for name, _ in SICK} == set(VERDICTS) == set(WORDS)


def test_a_verdict_needs_the_median_sample_and_says_how_many_samples_have_it():
    data = changed("correlation", np.s_[:3, 4:], 0.95)
    assert [(one.name, one.share) for one in verdicts(data, THRESHOLDS)] == [("collapsed", 0.75)]
    data = changed("correlation", np.s_[:1, 4:], 0.95)
    assert [one.name for one in verdicts(data, THRESHOLDS)] == ["fine"]


def test_a_verdict_and_the_table_show_the_same_number():
    """The median over all samples, also of those in which the threshold is not reached."""
    data = sound(samples=5)
    data["correlation"].values[:, -1] = [0.3, 0.55, 0.6, 0.7, 0.8]
    (one,) = verdicts(data, THRESHOLDS)
    assert (one.name, one.grade, one.share) == ("collapsed", "watch", 0.8)
    assert one.value == np.median(data["correlation"].values[:, -1]) == 0.6


def test_a_gradient_that_does_not_come_back_does_not_explode():
    """0/0 behind a zero head, and no gradient at a last block that the loss misses: neither is a finding."""
    for at, value in ((np.s_[:], 0.0), (np.s_[:, -1:], np.nan), (np.s_[:, -1:], 0.0)):
        found = verdicts(changed("stream_gradient", at, value), THRESHOLDS)
        assert [one.name for one in found] == ["fine"], (at, value)
    data = changed("stream_gradient", np.s_[:, :2], 1e4)
    data["stream_gradient"].values[:, -1] = np.nan
    assert [one.name for one in verdicts(data, THRESHOLDS)] == ["exploding"]


def test_a_bias_without_a_gradient_beside_a_weight_that_has_one_is_not_dead():
    assert [one.name for one in verdicts(changed("gradient", np.s_[:, 2], 0.0), THRESHOLDS)] == ["fine"]
    both = changed("gradient", np.s_[:, 1:], 0.0)
    both["outside_gradient"].values[:] = 1.0
    (one,) = verdicts(both, THRESHOLDS)
    assert (one.name, one.value) == ("dead", 2.0)
    assert "2 of 5 kinds of weight have no gradient: h.*.b.weight, h.*.b.bias" in str(one)


def test_a_kind_that_takes_no_part_in_the_loss_is_not_dead():
    assert [one.name for one in verdicts(changed("gradient", np.s_[:, 0], np.nan), THRESHOLDS)] == ["fine"]


def test_a_loss_or_a_gradient_that_is_not_finite_is_named():
    (one,) = verdicts(changed("loss", np.s_[:], np.nan), THRESHOLDS)
    assert (one.name, str(one)) == ("not finite", "the loss is NaN or infinite")
    found = verdicts(changed("stream_gradient", np.s_[:, 1], np.inf), THRESHOLDS)
    assert str(found[0]) == "a gradient is NaN or infinite"


def test_check_fails_at_the_worst_grade_of_a_name():
    """`collapsed` at broken alone, `swamped` at watch, which is its worst; a grade is that or worse."""
    watch, broken = (verdicts(SICK["collapsed", grade][0], THRESHOLDS) for grade in ("watch", "broken"))
    swamped = verdicts(SICK["swamped", "watch"][0], THRESHOLDS)
    table = {"collapsed": (0, 1, 0), "swamped": (0, 0, 1), "broken": (0, 1, 0), "watch": (1, 1, 1), "any": (1, 1, 1)}
    for names, counts in table.items():
        assert tuple(len(failed(each, failing(names))) for each in (watch, broken, swamped)) == counts, names


def test_the_range_that_design_calls_safe_is_where_check_says_fine():
    from limitformer.designing import Objective

    bands = Objective().bands
    assert bands["correlation"][1] == THRESHOLDS["collapse"].watch
    assert bands["stream"] == (THRESHOLDS["decay"].watch, THRESHOLDS["growth"].watch)
    assert bands["effective"] == (THRESHOLDS["narrow"].watch, THRESHOLDS["uniform"].watch)
    assert bands["gradient"][1] == THRESHOLDS["gradient"].watch


def test_thresholds_are_the_users_to_change():
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


def test_kinds_are_weights_of_like_blocks():
    names = ["h.0.a.w", "h.1.a.w", "h.0.experts.0.w", "h.0.experts.1.w", "wte.w"]
    values = xr.DataArray([[1.0, 2.0, 3.0, 4.0, 5.0]], {"weight": names}, ("sample", "weight"))
    found, rest = by_kind(values)
    assert float(found.sel(kind="h.*.experts.*.w", block=1)[0]) == 5.0
    assert float(found.sel(kind="h.*.a.w", block=2)[0]) == 2.0
    assert np.isnan(found.sel(kind="h.*.experts.*.w", block=2)).all()
    assert rest["outside"].values.tolist() == ["wte.w"]
    assert place_of("model.layers.11.mlp.w") == ("model.layers.*.mlp.w", 11)


def test_texts_have_their_own_tokens_and_are_cut(tmp_path):
    text = "to be or not to be that is the question whether tis nobler"
    found = lf.check(CONFIGS["bert"](), text, tokens=6, samples=2, progress=False)
    assert found.data["word"].values.tolist() == ["to", "be", "or", "not", "to", "be"]
    assert found.about["tokens"] == 6


def test_two_networks_side_by_side():
    found = lf.check(CONFIGS["llama"](), tokens=8, samples=2, progress=False, against=CONFIGS["bert"]())
    assert found.against.name == "bert"
    assert found.against.curves.sizes["layer"] == 4
    assert found.record()["against"]["name"] == "bert"


def test_a_checkpoint_is_measured_and_its_law_shown(tmp_path):
    small_gpt2().save_pretrained(tmp_path / "trained")
    found = lf.check(str(tmp_path / "trained"), tokens=6, samples=3, progress=False)
    assert (found.exists, found.name) == (True, "trained")
    assert np.mean(list(found.within_law.values())) > 0.6
    paths = found.save(tmp_path / "out")
    assert [path.name for path in paths] == ["check.html", "check.png", "check.nc", "check.json"]
    record = json.loads((tmp_path / "out" / "check.json").read_text())
    assert record["verdicts"][0]["name"] == found.verdicts[0].name
    again = lf.load(tmp_path / "out" / "check.nc")
    np.testing.assert_array_equal(again["correlation"], found.curves["correlation"])


class Poisoned(nn.Module):
    """Divides by zero in its third block."""

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
        (nn.Linear(3, 3), {}, "no list of blocks"),
        ("gpt3", {}, "Nearest: gpt2"),
        (3, {}, "got int"),
        ("gpt2", {"tokens": 1}, "tokens must"),
        ("gpt2", {"text": "one"}, "two tokens or more; got 1"),
        ("gpt2", {"settings": {"n_layers": 2}}, "no field 'n_layers'. Nearest: n_layer"),
        ("gpt2", {"thresholds": {"collapse": "a"}}, "must be a number"),
        ("gpt2", {"thresholds": {"collapse": 1.5}}, "must be above 0 and at most 1; got 1.5"),
        ("gpt2", {"thresholds": {"uniform": -1}}, "must be above 0 and at most 1; got -1"),
        ("gpt2", {"thresholds": {"stream": 0.5}}, "must be above 1; got 0.5"),
        ("gpt2", {"thresholds": {"logit": np.inf}}, "must be finite"),
        ({"kind": "ShapedAttention", "tau0": 1.0}, {}, "got ShapedAttention"),
        ({"kind": "ShapedAttention", "tau0": 1.0}, {"settings": {"tau0": 1}}, "settings are for configurations"),
        (Poisoned(), {"settings": {"a": 1}}, "has its weights already"),
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
def test_bad_input_is_one_line(what, options, message):
    with pytest.raises(lf.InputError, match=message) as caught:
        lf.check(what, progress=False, samples=2, **options)
    assert "\n" not in str(caught.value)


def test_a_network_that_is_not_finite_has_a_verdict():
    found = lf.check(Poisoned(), progress=False)
    assert (found.grade, found.verdicts[0].name, found.verdicts[0].layer) == ("broken", "not finite", 3)
    assert "NaN or infinite from layer 3" in str(found)
    model = small_gpt2()
    with lf.checking.Looks(model, tokens=6, samples=2, every=1) as looks:
        with torch.no_grad():
            model.transformer.h[1].mlp.c_fc.weight.fill_(torch.nan)
        looks.step()
    assert looks.last.verdicts[0].name == "not finite"


@pytest.fixture
def command(tmp_path):
    """The command on a small configuration in a file."""
    path = tmp_path / "config.json"
    path.write_text(transformers.GPT2Config(**SMALL).to_json_string(), encoding="utf-8")

    def run(*options, what=None):
        return CliRunner().invoke(app, ["check", what or str(path), "--tokens", "8", "--samples", "2", *options])

    return run


def test_the_command_says_the_verdict_and_writes_its_files(command, tmp_path):
    done = command("--out", str(tmp_path / "out"), "--set", "n_layer=2")
    assert done.exit_code == 0, done.output
    assert "2 blocks, 8 tokens, law at initialisation" in done.output
    assert len(done.output.splitlines()) < 24
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"check.{e}" for e in ("html", "png", "nc", "json")}


def test_the_command_fails_a_build_where_it_is_told_to(command):
    options = ("--no-gradients", "--threshold", "collapse=0.001")
    assert command(*options).exit_code == 0
    assert command(*options, "--fail-on", "frozen").exit_code == 0
    assert command(*options, "--fail-on", "frozen,collapsed").exit_code == 1
    assert command(*options, "--fail-on", "any").exit_code == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--fail-on", ""), "no verdict ''"),
        (("--seed", "1", "--no-gradients", "--seed", "2"), "--seed is given twice"),
        (("--set", "n_embd=abc"), "n_embd"),
        (("--fail-on", "colapsed"), "no verdict 'colapsed'"),
        (("--set", "n_layer"), "--set takes KEY=VALUE"),
        (("--shaped", "gama=1"), "there are gamma, tau0"),
        (("--text", "/nowhere/a.txt"), "Cannot read the text"),
    ],
)
def test_bad_options_are_one_line(command, options, message):
    done = command(*options)
    assert done.exit_code == 2
    assert message in done.output
    assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("config", "tokens", "says"),
    [
        ("gpt2", 5000, r"at most 1024 tokens, .* got 5000\. Nearest: 1024 tokens\."),
        ("bert-base", 600, r"Nearest: fewer tokens; its max_position_embeddings is 512\."),
        ("roberta-base", 600, r"Nearest: fewer tokens; its max_position_embeddings is 514\."),
    ],
)
def test_too_many_tokens_are_refused_in_the_terms_of_the_user(config, tokens, says):
    with pytest.raises(lf.InputError, match=says):
        lf.check(config, tokens=tokens, samples=1, gradients=False, progress=False)


def test_shapes_are_listed(command):
    done = command(what="list")
    assert "llama-3-405b" in done.output


def test_stock_models_can_be_shaped_first(command):
    done = command("--shaped", "gamma=0.3,tau0=1.0")
    assert done.exit_code == 0, done.output
    assert "shaped" in done.output
    assert "attention is uniform" not in done.output


def test_other_kinds_of_networks_are_taken():
    """A compiled module, a Transformer from JSON with a text, and one without a task."""
    compiled = torch.compile(small_gpt2(), backend="eager")
    assert lf.check(compiled, tokens=6, law=False, progress=False).name == "GPT2LMHeadModel"
    text = lf.to_json(lf.Transformer(width=20, depth=3, gamma=0.3, attention=lf.ShapedAttention(tau0=1.0)))
    found = lf.check(text, "to be or not to be", samples=2, progress=False)
    assert (found.name, found.about["tokens"], found.grade) == ("Transformer", 6, "fine")
    assert lf.check(text, samples=2, progress=False).about["tokens"] == 20


def test_a_norm_at_the_end_leaves_a_gradient():
    """½|x|² of normalised tokens is a constant; a readout of them is not."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    found = lf.check(encoder, torch.randn(2, 5, 16), progress=False)
    assert float(found.curves["stream_gradient"].min()) > 1e-2
    square = lf.check(encoder, torch.randn(2, 5, 16), progress=False, loss=lambda out, inputs: (out**2).sum((1, 2)))
    assert float(square.curves["stream_gradient"].min()) < 1e-3
    same = lf.check(encoder, torch.ones(2, 5, 16), progress=False, seed=1).curves["loss"]
    assert float(same[0]) == float(lf.check(encoder, torch.ones(2, 5, 16), progress=False, seed=1).curves["loss"][0])


def test_what_has_no_gradient_is_said():
    model = small_gpt2().requires_grad_(False)
    with pytest.raises(lf.InputError, match="no weight of GPT2LMHeadModel has a gradient"):
        lf.check(model, tokens=6, progress=False)
    assert "gradient" not in lf.check(model, tokens=6, gradients=False, law=False, progress=False).curves


def test_a_decoder_is_not_given_what_it_must_say():
    """An untrained network is no better than chance; T5, whose head is its embedding, is if it is told the token."""
    ids = torch.arange(3, 23)[None]
    found = lf.check(CONFIGS["t5"](), ids, samples=12, progress=False)
    assert float(found.curves["loss"].mean()) > 0.95 * np.log(40)
    told = {"input_ids": ids, "decoder_input_ids": ids}
    assert float(lf.check(CONFIGS["t5"](), told, samples=12, progress=False).curves["loss"].mean()) < 0.9 * np.log(40)


def test_numbers_are_written_as_people_do():
    assert [number_text(value) for value in (0.01234, 12.34, 3456.7, 2.1e7)] == ["0.0123", "12.3", "3,457", "2.1e+07"]
    law = xr.Dataset({"size": (("sample", "layer"), [[1.0, 2.0], [1.1, 2.1]])})
    gone = xr.Dataset({"size": (("sample", "layer"), [[np.nan, np.nan]])})
    assert surprises(gone, band(law)) == {}
    ranks = xr.Dataset({"stable_rank": (("sample", "layer"), [[1.01], [1.5], [1.2]])})
    assert float(band(ranks)["stable_rank"].sel(edge="low")[0]) == 1.0


class Stock(nn.Module):
    """torch's own attention of several heads, with logits that are far too large."""

    def __init__(self, weights):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(24, 3, batch_first=True, bias=False), nn.LayerNorm(24)
        self.weights = weights
        with torch.no_grad():
            self.attention.in_proj_weight.mul_(8.0)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=self.weights)[0]


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_torchs_own_attention_is_seen(weights, gradients):
    torch.manual_seed(0)
    blocks = nn.Sequential(Stock(weights), Stock(weights))
    x = torch.randn(2, 7, 24)
    found = lf.check(blocks, x, law=False, gradients=gradients, progress=False)
    first = blocks[0]
    q, k, _ = (first.norm(x) @ first.attention.in_proj_weight.T).chunk(3, -1)
    q, k = (each.view(2, 7, 3, 8).transpose(1, 2) for each in (q, k))
    logits = (q @ k.mT / 8**0.5).detach().double()
    direct = logits.var(-1, correction=0).mean((0, 2)).sqrt()
    np.testing.assert_allclose(found.curves["logit_std"][0, 0], direct, rtol=1e-3)
    np.testing.assert_allclose(found.curves["largest_logit"][0, 0], logits.amax((0, 2, 3)), rtol=1e-4)
    assert [one.name for one in found.failed("frozen")] == ["frozen"]
    assert torch.nn.functional.softmax.__module__ == "torch.nn.functional"


def test_attention_that_was_not_seen_is_named():
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    found = lf.check(blocks, torch.randn(1, 4, 8), law=False, progress=False)
    assert "no attention was seen" in str(found)
    unseen = sound().drop_vars(["logit_std", "effective_tokens", "tokens_seen", "largest_logit"])
    assert str(verdicts(unseen, THRESHOLDS)[0]) == "fine: no threshold is reached, but no attention was seen"
