"""`limitformer.steps`: verdicts on datasets with known answers and on real networks, the report's files, and its page.

`LIMITFORMER_SCREENSHOTS=folder` stores pictures of the page. Without a Chromium the tests of the browser are skipped.
"""

import csv
import json
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from scipy import stats

import limitformer as lf
from chromium import launched
from limitformer.checking import STEP_THRESHOLDS, StepsInterrupted, StepsReport
from limitformer.checking.step_verdicts import (
    by_rate,
    compared_loss,
    enough_for,
    exploded,
    middle,
    moved,
    quantile,
    sound_rate,
    step_verdicts,
)
from limitformer.checking.thresholds import STEP_VERDICTS, failing
from limitformer.reports import page as frame
from pages_read import CONTRAST, PageParser, intruders, opened
from zero_projections import BLOCKS, ZeroNetwork, sgd

NAMES = [
    "embed.weight",
    "h.0.up.weight",
    "h.0.proj.weight",
    "h.1.up.weight",
    "h.1.proj.weight",
    "head.weight",
    "norm.bias",
]
RATES = [1e-4, 1e-3, 1e-2, 1e-1]


def dataset(falls=(20, 20, 6, 0), samples=20, steps=3, start=4.0, rates=RATES, batches="same", **changes):
    """Return a dataset in which the loss falls in `falls[k]` networks at rate k, and rises a little in the others."""
    shape = len(rates), samples, steps + 1
    chance = np.random.default_rng(0)
    slope = np.where(np.arange(samples) < np.array(falls)[:, None], -0.1, 0.1)[..., None]
    loss = start + slope * np.arange(steps + 1)
    by_weight = np.broadcast_to(np.arange(steps + 1.0)[:, None], (*shape, len(NAMES))).copy()
    clipping = np.ones(shape)
    clipping[..., -1] = np.nan
    dims = "rate", "sample", "step"
    values = {
        "loss": (dims, loss),
        "loss_unseen": (dims, np.full(shape, start)),
        "gradient_norm": (dims, np.where(np.arange(steps + 1) < steps, 1.0, np.nan) * np.ones(shape)),
        "clipping": (dims, clipping),
        "output": (dims, np.ones(shape)),
        "output_change": (dims, 0.1 * np.arange(steps + 1) * np.ones(shape)),
        "stream": ((*dims, "layer"), np.ones((*shape, 3))),
        "stream_change": ((*dims, "layer"), 0.1 * np.arange(steps + 1.0)[:, None] * np.ones((*shape, 3))),
        "largest": ((*dims, "layer"), chance.uniform(2, 3, (*shape[:2], 1, 1)) * np.ones((*shape, 3))),
        "branch": ((*dims, "block", "sublayer"), np.ones((*shape, 2, 2))),
        "branch_change": ((*dims, "block", "sublayer"), 0.2 * np.ones((*shape, 2, 2))),
        "entropy": ((*dims, "block", "head"), np.ones((*shape, 2, 4))),
        "logit_std": ((*dims, "block", "head"), np.ones((*shape, 2, 4))),
        "largest_logit": ((*dims, "block", "head"), 5 * np.ones((*shape, 2, 4))),
        "weight_gradient": ((*dims, "weight"), np.ones((*shape, len(NAMES)))),
        "weight_change": ((*dims, "weight"), 0.01 * by_weight),
        "weight_spectral": ((*dims, "weight"), 0.01 * by_weight),
        "update_effect": ((*dims, "weight"), 0.02 * by_weight),
        "weight_size": ("weight", np.ones(len(NAMES))),
    }
    coordinates = {
        "rate": list(rates),
        "sample": np.arange(samples),
        "step": np.arange(steps + 1),
        "layer": np.arange(3),
        "block": [1, 2],
        "weight": NAMES,
        "matrix": ("weight", [not name.endswith("bias") for name in NAMES]),
    }
    data = xr.Dataset(values, coordinates, {"batches": batches, "optimizer": "sgd", "seed": 0})
    return data.assign(
        {name: data[name].copy(data=np.broadcast_to(each, data[name].shape)) for name, each in changes.items()}
    )


def report_of(data, **about):
    return StepsReport(
        "small", data, step_verdicts(data), {**data.attrs, "batch": "16 tokens", "asked": data.sizes["sample"], **about}
    )


def verdict(data, name):
    """Return the only verdict of a name, or None."""
    named = [one for one in step_verdicts(data) if one.name == name]
    assert len(named) <= 1
    return named[0] if named else None


def changed(data, name, where, value):
    """Return the dataset with another value at some places."""
    values = data[name].values.copy()
    values[where] = value
    return data.assign({name: data[name].copy(data=values)})


# Rates at which the loss falls


def test_rate_verdict_is_the_largest_rate_of_nine_of_ten_networks():
    one = verdict(dataset(falls=(40, 38, 12, 0), samples=40), "rate")
    assert (one.grade, one.value, one.share) == ("note", 1e-3, 0.95)  # 38 of 40 leave it open
    assert "up to a rate of 0.001, in 38 of 40 networks" in one.said
    assert "at 0.01 in 12 of 40; at 0.0001 in 40 of 40" in one.said
    assert verdict(dataset(falls=(40, 36, 12, 0), samples=40), "rate").value == 1e-3  # nine of ten are enough
    assert verdict(dataset(falls=(40, 35, 12, 0), samples=40), "rate").value == 1e-4


def test_intervals_are_those_of_scipy():
    table = by_rate(dataset(falls=(20, 19, 6, 0)))
    for k, count in enumerate((20, 19, 6, 0)):
        interval = stats.binomtest(count, 20).proportion_ci(0.95, "wilson")
        assert (float(table["low"][k]), float(table["high"][k])) == pytest.approx(
            (interval.low, interval.high), abs=1e-9
        )
    ends = [stats.binomtest(count, count).proportion_ci(0.95, "wilson").low for count in (34, 35)]
    assert ends[0] < 0.9 <= ends[1]
    assert enough_for(0.9) == 35


@pytest.mark.parametrize(
    ("samples", "falls", "said"),
    [
        (8, (8, 8, 3, 0), "8 networks are too few to tell nine of ten: take 35 or more"),
        (1, (1, 1, 0, 0), "1 network is too few to tell nine of ten"),
        (40, (40, 37, 3, 0), "40 networks leave open whether that is nine of ten"),
        (40, (40, 40, 35, 0), "40 networks leave open whether that is nine of ten"),  # the rate above may do as well
        (40, (40, 40, 3, 0), None),
    ],
)
def test_rate_verdict_says_whether_the_networks_are_enough(samples, falls, said):
    one = verdict(dataset(falls=falls, samples=samples), "rate")
    sentence = one.said
    assert (one.grade, sentence.startswith("not decided: ")) == (("note", True) if said else ("fine", False))
    assert (said in sentence) if said else ("too few" not in sentence and "leave open" not in sentence)


def test_rate_at_which_no_loss_falls_is_broken():
    one = verdict(dataset(falls=(3, 9, 6, 0)), "rate")
    assert (one.grade, one.rate, one.share) == ("broken", 1e-3, 0.45)
    assert "at no rate in nine of ten networks; the best rate is 0.001, in 9 of 20 networks" in one.said
    one = verdict(dataset(falls=(2,), rates=[0.1]), "rate")
    assert (one.grade, one.rate) == ("broken", 0.1)
    assert "does not fall within 3 steps at a rate of 0.1 in nine of ten networks, but in 2 of 20" in one.said


def test_rates_above_a_gap_are_not_sound():
    data = dataset(falls=(20, 20, 3, 20))
    assert verdict(data, "rate").value == 1e-3
    assert "it falls again at 0.1" in verdict(data, "rate").said
    assert sound_rate(by_rate(dataset(falls=(0, 20, 20, 0)))) == 2  # the smallest is too small: no gap
    shuffled = data.isel(rate=[2, 0, 3, 1])
    assert verdict(shuffled, "rate").said == verdict(data, "rate").said


def test_equal_or_unknown_losses_do_not_fall():
    data = dataset(falls=(20,), rates=[0.1])
    assert int(by_rate(changed(data, "loss", np.s_[:, :5, -1], 4.0))["falls"][0]) == 15
    assert int(by_rate(changed(data, "loss", np.s_[:, :5, -1], np.nan))["falls"][0]) == 15
    assert int(by_rate(changed(data, "loss", np.s_[:, :5, -1], np.inf))["falls"][0]) == 15


def test_other_batches_are_compared_by_the_unseen_batch():
    data = dataset(falls=(20, 20, 20, 20), batches="fresh")
    assert (compared_loss(data), compared_loss(dataset())) == ("loss_unseen", "loss")
    one = verdict(data, "rate")  # the unseen loss is constant: losses of different batches say nothing
    assert one.grade == "note"
    assert "the loss of an unseen batch falls within 3 steps at no rate" in one.said
    assert verdict(data.assign_attrs(unseen="given"), "rate").grade == "broken"
    assert verdict(data.assign(loss_unseen=data["loss"], loss=data["loss_unseen"]), "rate").value == 0.1


# Explosions


def test_losses_of_any_sign_explode_if_they_are_not_finite():
    loss = np.array([[-1.0, 5.0], [-1.0, np.nan], [0.0, 3.0], [1.0, 2.1], [1.0, 1.9]])
    assert exploded(loss).tolist() == [False, True, False, True, False]


def test_start_that_is_not_finite_is_the_only_verdict():
    data = changed(dataset(), "loss", np.s_[:, :3], np.nan)
    assert [(one.name, one.grade, one.share) for one in step_verdicts(data)] == [("rate", "broken", 0.15)]
    assert "the loss is not finite before the first step, in 3 of 20 networks" in step_verdicts(data)[0].said
    assert "before the first" not in verdict(changed(dataset(), "loss", np.s_[:, :2], np.nan), "rate").said


def test_rate_that_ruins_an_unseen_batch_is_not_sound():
    data = changed(dataset(falls=(20, 20, 20, 0)), "loss_unseen", np.s_[2, :3, -1], 9.0)
    one = verdict(data, "unseen")
    assert (one.grade, one.rate, one.share) == ("note", 1e-2, 0.15)
    data = changed(data, "loss_unseen", np.s_[2, :, -1], 9.0)
    assert "at a rate of 0.01 the loss falls only on the batch of the steps" in verdict(data, "unseen").said
    assert "goes from 4 to 9" in verdict(data, "unseen").said
    assert verdict(data, "rate").value == 1e-3
    assert verdict(data, "fastest").rate == 1e-3
    assert (
        verdict(changed(data, "loss_unseen", np.s_[2, :, -1], 7.9), "rate").value == 1e-2
    )  # it rises, but not twofold
    every = changed(data, "loss_unseen", np.s_[:, :, -1], 9.0)
    assert verdict(every, "unseen").grade == "watch"
    assert verdict(every, "rate").grade == "broken"
    assert verdict(dataset(), "unseen") is None


# What moves


def test_fastest_matrix_is_compared_with_the_median_matrix():
    place = np.s_[:, :, 1, NAMES.index("embed.weight")]
    data = changed(dataset(), "weight_change", place, 0.05)
    data = changed(data, "update_effect", np.s_[:, :, 1, NAMES.index("head.weight")], 0.7)
    one = verdict(data, "fastest")
    assert (one.grade, one.value, one.rate, one.layer) == ("note", pytest.approx(5), 1e-3, None)
    assert "embed.weight moves most in the first step at a rate of 0.001: by 5 % of its size" in one.said
    assert "the largest effect on an output is that of head.weight, 0.7" in one.said
    assert verdict(changed(data, "weight_change", place, 0.11), "fastest").grade == "watch"
    other = changed(dataset(), "weight_change", np.s_[:, :, 1, NAMES.index("h.1.up.weight")], 0.05)
    assert verdict(other, "fastest").layer == 2


def still_data():
    """Return a dataset in which the head moves first, then the projections, then one of the other kinds; one never."""
    change = np.zeros((4, 20, 4, len(NAMES)))
    for k, name in enumerate(NAMES):
        begins = 1 if "head" in name or "bias" in name else 2 if "proj" in name or "embed" in name else 3
        change[:, :, begins:, k] = np.inf if "proj" in name or "head" in name else 0.1
        if "proj" in name or "head" in name:
            change[:, :, :begins, k] = np.nan  # zero over zero
    change[..., NAMES.index("h.1.up.weight")] = 0.0
    gradient = np.where(change > 0, 1.0, 0.0)
    return dataset(weight_change=change, weight_gradient=gradient)


def test_still_verdict_lists_the_order_in_which_matrices_begin_to_move():
    one = verdict(still_data(), "still")
    assert (one.grade, one.value) == ("watch", 5)
    assert "5 of 6 matrices do not move in the first step" in one.said
    groups = (
        "first step: head.weight",
        "second step: embed.weight, h.*.proj.weight (2)",
        "third step: h.*.up.weight",
        "in none of the 3: h.*.up.weight",
    )
    order = [one.said.index(part) for part in groups]
    assert order == sorted(order)
    moves = changed(still_data(), "weight_change", np.s_[..., 3, NAMES.index("h.1.up.weight")], 0.1)
    assert verdict(moves, "still").grade == "note"
    assert "in none" not in verdict(moves, "still").said
    assert verdict(dataset(), "still") is None


def test_logits_verdict_needs_a_logit_that_passes_the_threshold():
    data = changed(dataset(), "largest_logit", np.s_[:, :, 2:, 1, 3], 150.0)
    one = verdict(data, "logits")
    assert (one.grade, one.value, one.layer) == ("watch", 150, 2)
    assert "grows from 5 to 150 in block 2 at a rate of 0.001, after 2 steps" in one.said
    assert verdict(changed(data, "largest_logit", np.s_[:, :, :, 1, 3], 150.0), "logits") is None  # it was that large
    assert verdict(changed(dataset(), "largest_logit", np.s_[:, :, 2:, 1, 3], 99.0), "logits") is None
    assert verdict(dataset().drop_vars("largest_logit"), "logits") is None


def test_tokens_that_become_alike_are_a_note_beside_the_rate():
    at_end = np.broadcast_to([0.3, 0.9, 0.995, 0.999], (4, 20, 4))[..., None]
    by_layer = at_end * [0, 0, 1]
    data = dataset().assign(correlation=(("rate", "sample", "step", "layer"), by_layer))
    one = verdict(data, "alike")
    assert (one.grade, one.value) == ("note", 0.995)
    assert "goes from 0.3 to 0.995 in 2 steps" in one.said
    assert "Tokens become alike at a rate of 0.001" in verdict(data, "rate").mends
    for other in (0.98 * data["correlation"], 0 * data["correlation"] + 0.995):  # never alike, or from the start
        assert verdict(data.assign(correlation=other), "alike") is None
    assert "alike" not in verdict(dataset(), "rate").mends


def test_medians_count_networks_that_diverged_as_infinite():
    values = np.array([[1.0, 2.0, np.nan], [np.nan, np.nan, 1.0], [np.nan] * 3, [1.0, 2.0, 3.0]])
    assert middle(values).tolist()[:2] == [2.0, np.inf]
    assert np.isnan(middle(values)[2])
    assert quantile(values, 0.95)[0] == np.inf  # survivors alone would give 2
    assert quantile(values, 0.05).tolist()[3] == 1.0


# Reports


@pytest.fixture(scope="module")
def zero():
    """Return the report of a network whose head and projections start at zero."""
    return lf.steps(ZeroNetwork, 10, optimizer=sgd, rates=[1e-2, 1.0], steps=4, samples=3, seed=0, progress=False)


def test_zero_network_moves_its_head_then_its_projections_then_the_rest(zero):
    one = next(each for each in zero.verdicts if each.name == "still")
    first = {
        str(name): int((moved(zero.data.isel(rate=1))[:, k]).argmax())
        for k, name in enumerate(zero.data["weight"].values)
    }
    matrices = {name: step for name, step in first.items() if "norm" not in name}
    assert {name for name, step in matrices.items() if step == 1} == {"head.weight"}
    second = {name for name, step in matrices.items() if step == 2}
    assert second == {
        "embed.weight",
        *(f"blocks.{k}.{part}.weight" for k in range(BLOCKS) for part in ("proj", "down")),
    }
    assert {name for name, step in matrices.items() if step == 3} == {
        f"blocks.{k}.{part}.weight" for k in range(BLOCKS) for part in ("qkv", "up")
    }
    assert (
        "first step: head.weight; in the second step: embed.weight, blocks.*.proj.weight (2), blocks.*.down" in one.said
    )


def test_wrong_twin_with_a_drawn_head_moves_its_projections_first():
    class DrawnHead(ZeroNetwork):
        def __init__(self):
            super().__init__()
            self.head.reset_parameters()

    report = lf.steps(DrawnHead, 10, optimizer=sgd, steps=2, samples=2, seed=0, progress=False)
    said = next(each for each in report.verdicts if each.name == "still").said
    assert "first step: embed.weight, blocks.*.proj.weight (2), blocks.*.down.weight (2), head.weight" in said
    assert "second step: blocks.*.qkv.weight (2), blocks.*.up.weight (2)" in said


def test_text_begins_with_verdicts_and_ends_with_the_caveat(zero):
    text = str(zero)
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(text.split()).endswith(
        "Gradients come from these 10 tokens; a larger batch has other gradients (Adam's signs, Muon's directions), "
        "and nothing is said about later steps."
    )
    words = " ".join(text.split())
    for one in zero.verdicts:
        assert f"{one.sign} {one.grade}: {one.said}" in words
    assert re.search(r"^ +rate +falls +explodes", text, flags=re.MULTILINE)


def test_expected_interval_is_that_of_a_further_network():
    data = dataset(falls=(20, 20, 6, 0), steps=12)
    chance = np.random.default_rng(1)
    losses = data["loss"].values * np.exp(chance.normal(0.0, 0.1, (4, 20, 1)))
    heads = chance.normal(5.0, 1.0, data["largest_logit"].shape)
    data = data.assign(loss=(data["loss"].dims, losses), largest_logit=(data["largest_logit"].dims, heads))
    report = StepsReport("net", data, step_verdicts(data), dict(data.attrs))
    rate, rows = report.expected()
    assert rate == 1e-3
    assert [row["step"] for row in rows] == [0, 1, 3, 10, 12]

    def interval(values, quantile):
        half = quantile * values.std(ddof=1) * (1 + 1 / len(values)) ** 0.5
        return [values.mean() - half, values.mean(), values.mean() + half]

    student, normal, place = stats.t.ppf(0.95, 19), stats.norm.ppf(0.95), RATES.index(rate)
    for row in rows:
        own = [row[f"loss{end}"] for end in ("_low", "", "_high")]
        logs = np.log(data["loss"].values[:, :, row["step"]])
        assert own == pytest.approx(np.exp(interval(logs[place], student)).tolist())
        assert own != pytest.approx(np.exp(interval(logs[place], normal)).tolist(), rel=1e-3)
        assert own != pytest.approx(np.exp(interval(logs[place - 1], student)).tolist(), rel=1e-3)
        largest = heads[place, :, row["step"]].max((-1, -2))
        assert [row[f"largest_logit{end}"] for end in ("_low", "", "_high")] == pytest.approx(
            interval(largest, student)
        )
    assert np.isnan(rows[-1]["gradient_norm"])  # none is taken after the last step
    words = "What to watch at a rate of 0.001; nine of ten networks lie within"
    assert f"{words}:" in str(report)
    assert f"{words}." in report.page()
    assert " to " in report.watched().rows[0][1]
    one = data.isel(sample=[0])
    assert "(" not in "".join(StepsReport("net", one, step_verdicts(one), dict(one.attrs)).watched().rows[0])


def test_files_hold_the_same_numbers(zero, tmp_path):
    paths = zero.save(tmp_path / "new")
    assert [path.name for path in paths] == ["steps.html", "steps.csv", "steps.json", "steps.nc"]
    record = json.loads((tmp_path / "new" / "steps.json").read_text(encoding="utf-8"))
    assert record == zero.record()
    assert [one["name"] for one in record["verdicts"]] == [one.name for one in zero.verdicts]
    rows = list(csv.DictReader((tmp_path / "new" / "steps.csv").read_text(encoding="utf-8").splitlines()))
    last = zero.data["loss"].isel(step=-1).median("sample").values
    assert [float(row["loss_last"]) for row in rows] == pytest.approx(last)
    assert [float(row["rate"]) for row in rows] == [1e-2, 1.0]
    assert set(rows[0]) <= set(zero.columns())
    loaded = lf.load(tmp_path / "new" / "steps.nc")
    for name, each in zero.data.data_vars.items():
        np.testing.assert_array_equal(loaded[name].values, each.values)
    assert loaded["matrix"].values.astype(bool).tolist() == zero.data["matrix"].values.tolist()
    assert pickle.loads(pickle.dumps(zero)).record() == record


def test_failed_verdicts_are_watch_or_broken():
    data = changed(dataset(falls=(0,) * 4), "largest_logit", np.s_[:, :, 1], 200.0)
    report = report_of(data)
    assert [one.name for one in report.failed("any")] == ["rate", "logits"]
    assert [one.name for one in report.failed("broken")] == ["rate"]
    assert [one.name for one in report.failed("logits,still,fastest")] == ["logits"]
    assert report.failed(None) == []
    assert report_of(dataset()).failed("rate") == []
    with pytest.raises(lf.InputError, match=r"no verdict 'ratee'.*Nearest: rate"):
        report.failed("ratee")


def test_verdict_names_and_thresholds_are_complete():
    assert failing("rate, watch", STEP_VERDICTS) == ("rate", "watch")
    assert failing(None, STEP_VERDICTS) == ()
    data = changed(still_data(), "largest_logit", np.s_[:, :, 1], 200.0)
    data = changed(data, "loss_unseen", np.s_[1, :, -1], 9.0).assign_attrs(muon_outside="wte.weight")
    data["correlation"] = 0.998 * data["stream"] * (data["step"] > 0)
    assert [one.name for one in step_verdicts(data)] == [name for name in STEP_VERDICTS if name != "fastest"]
    assert all(each.source for each in STEP_THRESHOLDS.values())
    assert all((each.watch is None) != (each.broken is None) for each in STEP_THRESHOLDS.values())


def test_interruption_gives_the_report_of_finished_networks(monkeypatch):
    from limitformer.stepping.trajectory import Trajectory

    def arrays(self, real=Trajectory.arrays):
        if self.sample == 2:
            raise KeyboardInterrupt
        return real(self)

    options = {"optimizer": sgd, "rates": [0.1, 1.0], "steps": 1, "seed": 0, "progress": False}
    whole = lf.steps(ZeroNetwork, 8, samples=2, **options)
    monkeypatch.setattr(Trajectory, "arrays", arrays)
    with pytest.raises(StepsInterrupted, match="interrupted after 2 samples") as caught:
        lf.steps(ZeroNetwork, 8, samples=5, **options)
    report = caught.value.report
    assert isinstance(caught.value, lf.Interrupted)
    np.testing.assert_array_equal(report.data["loss"].values, whole.data["loss"].values)
    assert report.partial
    assert not whole.partial
    assert "2 of 5 networks" in report.heading
    assert "PARTIAL" in str(report)
    assert "PARTIAL" in PageParser(report.page()).words
    assert report.record()["partial"]
    monkeypatch.setattr(Trajectory, "arrays", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt) as caught:
        lf.steps(ZeroNetwork, 8, samples=5, **options)
    assert not isinstance(caught.value, lf.Interrupted)


@pytest.mark.parametrize("rates", [[0.0], [1e-3, np.nan], ["fast"]])
def test_bad_rates_are_refused(rates):
    with pytest.raises(lf.InputError, match=r"^rates\[\d\] must be (above 0 and at most 100|a number)"):
        lf.steps(ZeroNetwork, 8, optimizer=sgd, rates=rates, steps=1, samples=1, seed=0)


# The page


@pytest.fixture(scope="module")
def zero_page(zero):
    return zero.page()


def hostile():
    name = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\"'&<!--"
    data = dataset().assign_coords(weight=[f"{each}{name}" for each in NAMES])
    return replace(report_of(data), name=name, about={name: name, "batch": name, "laws": name, "optimizer": name})


def test_hostile_names_stay_text_on_the_page(monkeypatch):
    assert intruders(hostile().page()) == []
    monkeypatch.setattr(frame, "escape", str)  # the wrong twin
    assert intruders(hostile().page())


def test_page_shows_verdicts_caveat_table_and_provenance(zero, zero_page):
    words = PageParser(zero_page).words
    for one in zero.verdicts:
        assert " ".join(f"{one.sign} {one.grade} {one.said}".split()) in words
    assert zero.caveat in words
    assert f"sequences {zero.about['sequences']}" in words
    for name, each in STEP_THRESHOLDS.items():
        number = each.watch if each.watch is not None else each.broken
        assert f"{name} {number:g} {each.source}" in words
    titles = (
        *("Share of networks whose loss falls", "Loss at rate 0.01", "Gradient norm", "Change of the stream"),
        *("Size of branch 1 of a block", "Largest logit", "Change of the matrices, after the first step"),
    )
    for title in titles:
        assert f"<strong>{title}</strong>" in zero_page


def test_page_survives_numbers_that_are_not_finite():
    data = changed(dataset(), "loss", np.s_[2:, :, 1:], np.nan)
    measures = ("stream", "stream_change", "largest", "branch", "branch_change", "weight_change", "update_effect")
    for name in (*measures, "entropy"):
        data = changed(data, name, np.s_[2, :, 2:], np.nan)
        data = changed(data, name, np.s_[3, :, 1:], np.inf)
    text = report_of(data).page()
    assert not re.search(r"\bnan\b", text)
    drawings = re.findall(r'(?:d|x|y|cx|cy|width|height|x1|y1)="([^"]*)"', "".join(re.findall(r"<svg.*?</svg>", text)))
    assert drawings
    assert not any("inf" in each or "nan" in each for each in drawings)
    assert "20 of 20 networks diverged" in text
    gone = dataset(rates=[0.1], falls=(0,), samples=1)
    for name in gone.data_vars:
        gone = gone if name == "weight_size" else changed(gone, name, ..., np.nan)
    assert "loss is not finite" in report_of(gone).page()


@pytest.fixture(scope="module")
def browser():
    with launched() as result:
        yield result


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_page_of_steps_fits_the_screen_with_enough_contrast(browser, zero_page, width, scheme, tmp_path):
    with opened(browser, zero_page, tmp_path, width, scheme) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert tab.troubles == []
        ratio = tab.evaluate(CONTRAST)
        assert min(ratio.values()) >= 4.5, ratio
        folder = os.environ.get("LIMITFORMER_SCREENSHOTS")
        if folder:
            tab.screenshot(path=Path(folder) / f"steps-{width}-{scheme}.png", full_page=True)
