"""The studies of docs/studies/protocol.md: halves without a leak, runs that resume, and numbers with a known answer."""

import itertools
import json
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.scaling import page
from limitformer_papers.beyond import foretells
from limitformer_papers.beyond import study_analysis as analysis
from limitformer_papers.beyond import study_networks as nets
from limitformer_papers.beyond import study_runs as runs
from limitformer_papers.beyond import study_transfer as transfer
from limitformer_papers.beyond.study_runs import CHOOSE, GRID, RATES, TEST

UNIGRAMS = 3.0
random = np.random.default_rng(5)


def test_halves_share_no_architecture_knob_or_seed():
    first, second = runs.networks(CHOOSE), runs.networks(TEST)
    for what in (lambda n: n.family, lambda n: n.std, lambda n: (n.std, n.output, n.embedding), lambda n: n.seed):
        assert not {what(n) for n in first} & {what(n) for n in second}
    for half in (first, second):
        assert sorted(n.depth for n in half) == [6] * 8 + [12] * 8 + [24] * 8
        assert len({(n.family, n.depth) for n in half}) == 9
    every = [n.seed for n in (*first, *second, *runs.rate_networks())]
    assert len(set(every)) == len(every) == 68


def fake(one, rate, steps, warmup):
    """Return losses with their lowest at 8e-4, and none from 2e-2 on."""
    loss = None if rate > 2e-2 else 2 + abs(math.log2(rate / 8e-4)) / 10
    return {"first": 5.5, "choose": loss, "loss": loss, "steps": steps, "seconds": 0.0}


@pytest.mark.parametrize("study", [1, 3])
def test_runs_resume_after_a_kill_and_repeat_nothing(study, tmp_path, monkeypatch):
    monkeypatch.setattr(nets, "train", fake)
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    runs.main(["train", str(whole), "--study", str(study)])
    lines = whole.read_text().splitlines()
    assert json.loads(lines[0])["unigrams"] == pytest.approx(3.24, abs=0.2)  # other Pythons have other texts
    part.write_text("\n".join(lines[:7]) + "\n" + lines[7][:20])  # killed while it wrote
    runs.main(["train", str(part), "--study", str(study), "--minutes", "0"])
    assert len(runs.rows_in(part)) == 7
    runs.main(["train", str(part), "--study", str(study)])
    own = [[r | {"seconds": 0} for r in runs.rows_in(path)] for path in (whole, part)]
    assert own[0] == own[1]
    assert len({runs.key_of(row) for row in own[0]}) == len(own[0]) == (96 if study == 1 else 280)


def test_search_of_study_3_brackets_the_best_rate_and_ends_at_the_first_that_diverges():
    own = {}
    while (place := runs.next_place(own)) is not None:
        own[place] = fake(None, GRID[place], 1, 0)
    assert sorted(own) == [2, 3, 4, 5, 6, 7, 8]
    assert runs.best_place(own) == 3
    assert analysis.best_rate(own) == pytest.approx(8e-4)
    assert [k for k in own if runs.diverges(own[k])] == [8]


def test_training_has_the_same_bits_again_and_a_huge_rate_diverges():
    one = nets.StudyNetwork("llama", 1, 0.05, seed=900)
    first, again = (nets.train(one, 1e-3, 3, 1) | {"seconds": 0} for _ in range(2))
    assert first == again
    assert first["choose"] < 5.7
    assert first["steps"] == 3
    assert nets.train(replace(one, family="none"), 1e30, 5, 0)["choose"] is None


@pytest.mark.parametrize("family", nets.FAMILIES)
def test_networks_run_in_law_and_the_law_is_that_of_the_module(family):
    one = nets.StudyNetwork(family, 2, 0.05, logits=4.0, output=0.5, seed=900)
    report = runs.checked(one)
    torch.manual_seed(0)
    block = nets.Decoder(one, one.std).blocks[0]
    spread = [float(getattr(block, name).weight.detach().std()) for name in ("q_proj", "v_proj", "o_proj")]
    assert spread == pytest.approx([0.1, 0.05, 0.025], rel=0.05)
    numbers = runs.numbers_of(one, report)
    assert all(value is not None for value in numbers.values())
    module = nets.Decoder(one, one.std)
    loss = nets.loss_of(module, runs.batch_of(one, -1)[:2])
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in module.parameters()))
    assert numbers["loss at the start"] == pytest.approx(loss.item(), rel=0.05)
    assert numbers["gradient norm"] == pytest.approx(norm, rel=0.25)


def test_whitened_map_has_the_eigenvalues_of_the_map_and_the_bare_covariance_has_not():
    a = random.standard_normal((6, 6))
    x = random.standard_normal((400, 6)) * [1, 2, 1, 2, 3, 1]
    x -= x.mean(0)
    found = np.sort(nets.eigenvalues(x, x @ a))
    true = np.sort(np.abs(np.linalg.eigvals(a)))
    assert found == pytest.approx(true, rel=0.05)
    assert np.sort(np.abs(np.linalg.eigvals(x.T @ x @ a / 400))) != pytest.approx(true, rel=0.3)


def test_auroc_counts_pairs_and_its_interval_is_open_where_walds_is_a_point():
    x, fails = np.array([3.0, 1, 1, 2, 5, 1]), np.array([True, False, True, False, True, False])
    pairs = [(a > b) + (a == b) / 2 for a in x[fails] for b in x[~fails]]
    assert analysis.auroc(x, fails) == pytest.approx(np.mean(pairs))
    assert analysis.auroc_interval(1.0, 5, 5)[0] < 0.85
    assert analysis.auroc_interval(1.0, 5, 5)[1] == 1.0
    low, high = analysis.auroc_interval(0.8, 6, 4)
    for end in (low, high):
        q1, q2 = end / (2 - end), 2 * end**2 / (1 + end)  # Hanley and McNeil, with (m + n)/2 − 1 for both
        variance = (end * (1 - end) + 4 * ((q1 - end**2) + (q2 - end**2))) / 24
        assert abs(0.8 - end) == pytest.approx(1.959964 * math.sqrt(variance), rel=1e-4)


def test_jackknife_of_a_mean_is_students_interval_of_the_clusters():
    x = random.standard_normal((6, 4)) + random.standard_normal((6, 1))
    low, high = analysis.jackknife(lambda k: x.ravel()[k].mean(), np.repeat(range(6), 4))
    means = x.mean(1)
    assert (low, high) == pytest.approx(stats.t.interval(0.95, 5, means.mean(), stats.sem(means)))
    twin = analysis.jackknife(lambda k: x.ravel()[k].mean(), range(24))
    assert twin[1] - twin[0] < 0.8 * (high - low)


def test_sign_flips_are_all_signs():
    d = np.array([0.3, -0.1, 0.5, 0.2])
    every = [abs(np.dot(signs, d)) >= d.sum() - 1e-12 for signs in itertools.product((-1, 1), repeat=4)]
    assert analysis.sign_flips(d) == pytest.approx(np.mean(every)) == 0.25


def synthetic(twin):
    """Return files in which distance orders the losses, fixes gain 0.3 nats and 16 of 20 ranges hold; or none does."""
    foretold, made = [], []
    for half in (CHOOSE, TEST):
        for k, one in enumerate(runs.networks(half)):
            quality = random.random()
            numbers = {name: random.random() for name in ("grade", "verdicts", "gradients' ratio", "RKSP radius")}
            numbers["distance"] = random.random() if twin and half == TEST else quality
            foretold.append(
                {"study": 1, **runs.asdict(one), "numbers": numbers, "verdict": "grows", "placebo": {"inner": 2.0}}
            )
            for kind in ("", "fix", "placebo") if k % 2 else ("",):
                gain = 0.3 * (kind == "fix" and not twin)
                for rate in RATES:
                    loss = 2 + 2 * quality - gain + abs(math.log(rate / 1e-3)) / 10
                    row = {"study": 2 if kind else 1, "kind": kind, "seed": one.seed, "rate": rate, "warmup": 20}
                    made.append(row | {"choose": loss, "loss": loss, "first": 5.5})
    for k, one in enumerate(runs.rate_networks()):
        low = 1e-3 if k % 5 == 0 or twin else 4e-4
        foretold.append({"study": 3, **runs.asdict(one), "low": low, "high": 1.6e-3, "borne": 0.02 + k / 1000})
        places, row = range(2, 9), {"study": 3, "kind": "", "seed": one.seed, "warmup": 0}
        made += [row | {"rate": GRID[p]} | fake(one, GRID[p], 1, 0) for p in places]
    made[0]["unigrams"] = UNIGRAMS
    return *json.loads(json.dumps([foretold, made])), []


def lines_of(data):
    return [f"{claim.name} {claim.value:.3f} {claim.holds}" for claim in analysis.claims(data)]


def test_analysis_finds_built_in_relations_and_wrong_twin_has_none():
    there, twin = (lines_of(analysis.collected(*synthetic(each))) for each in (False, True))
    assert there[0] == "H1a: ρ of distance and the loss is above 0, held out (p = 0.0001) 1.000 True"
    assert twin[0].startswith("H1a: ρ of distance")
    assert twin[0].endswith("False")
    (fix, same), (range_, missed) = (
        [next(x for x in lines if key in x) for lines in (there, twin)] for key in ("H2", "H3")
    )
    assert "(-0.300 to -0.300, p = 0.0" in fix
    foretold, made, _ = synthetic(False)
    fewer = analysis.collected(foretold, [r for r in made if r.get("study") != 2 or r["seed"] < 100], [])
    assert [claim.holds for claim in analysis.fixes_study(fewer)] == [None] * 3  # half of the networks decide nothing
    assert fix.endswith("-0.300 True")
    assert same.endswith(" 0.000 False")
    assert "20 networks whose best rate is in the range (0.56 to 0.94;" in range_
    assert range_.endswith("0.800 True")
    assert missed.endswith("0.000 False")


def test_study_4_finds_a_shift_that_is_foretold_and_no_reversed_one(monkeypatch, tmp_path):
    """The best rate falls by 2^(2 shift) where shift is the exponent; regret is what a parabola costs."""
    powers = {each.name: k % 3 / 2 for k, each in enumerate(transfer.SETTINGS)}

    def train(one, rate, steps, warmup, prepare):
        setting, size = prepare.args
        ratio = math.log2(size / transfer.AXES[setting.over][0])
        away = math.log2(rate / transfer.RATES[setting.optimizer]) - 1 + powers[setting.name] * ratio
        return {"choose": away**2, "loss": away**2, "seconds": 0.0}

    monkeypatch.setattr(nets, "train", train)
    for sign in (1, -1):
        file = tmp_path / f"{sign}.jsonl"
        for name, power in powers.items():
            row = {"setting": name, "transfers": power == 0, "measure": "effect", "exponent": sign * power}
            runs.append(file, row)
        transfer.main("train", str(file))
        rows = runs.rows_in(file)
        assert runs.best_place(transfer.runs_of(rows, transfer.SETTINGS[2], 64)) == 1
        data = analysis.settings(rows)
        shift, regret, distance, refused, others = analysis.transfer_study(data)[:5]
        assert (shift.value, shift.holds, "H4" in shift.name) == (pytest.approx(sign), sign == 1, True)
        assert regret.value == pytest.approx(1)
        assert sum(data["regret"][:, -1].values == 4) == 5  # shifts of two places
        changes = [2 * power for power in powers.values()]
        assert distance.value == pytest.approx(0 if sign == 1 else 2 * np.mean(changes))
        assert f"no change has {np.mean(changes):.2f}" in distance.name
        assert (refused.value, others.value) == (pytest.approx(2.5), 0)  # regrets of 1 and 4, five of each
        assert "10 settings said not to transfer, 0 without change" in refused.name
        assert data["losses"].notnull().sum() == sum("place" in row for row in rows)


def test_rule_of_study_4_changes_nothing_at_the_base_and_each_part_elsewhere():
    every = {}
    for setting in (each for each in transfer.SETTINGS if (each.family, each.over) == ("gpt2", "width")):
        for size in (64, 128) if setting.optimizer == "adamw" else ():
            loss = nets.train(setting.network(size), 4e-3, 3, 0, partial(transfer.prepare, setting, size))["loss"]
            every.setdefault(size, {})[setting.name] = loss
    assert len(set(every[64].values())) == 1
    assert len(set(every[128].values())) == len(every[128]) == 5


def test_published_record_is_that_of_the_packaged_runs():
    record = json.loads((Path(__file__).parents[2] / "docs/figures/foretells.json").read_text(encoding="utf-8"))
    current = analysis.claims(analysis.load(foretells.STORED))
    assert [(one["name"], one["holds"]) for one in record["claims"]] == [(one.name, one.holds) for one in current]
    assert [one["value"] for one in record["claims"]] == pytest.approx([one.value for one in current], nan_ok=True)


def test_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"has no rows in foretold\.jsonl, runs\.jsonl, transfer\.jsonl"):
        analysis.load(tmp_path)
    for name in analysis.FILES:
        shutil.copy(foretells.STORED / f"{name}.jsonl", tmp_path)
    (tmp_path / "runs.jsonl").write_bytes((tmp_path / "runs.jsonl").read_bytes()[:1000])  # the rest is not trained yet
    with pytest.raises(InputError, match="no network of study 1 has its prediction and all its runs"):
        analysis.load(tmp_path)


def test_sentence_of_rate_on_its_range_is_that_of_the_packaged_runs():
    data = analysis.load(foretells.STORED)
    cases = data.isel(case=np.flatnonzero(data["warmup"] == 0))
    inside = ((cases["low"] < cases["best"]) & (cases["best"] < cases["high"])).values
    bare = (cases["case_family"] == "none").values
    above = (cases["best"] / cases["high"]).values[bare]
    found = (
        f"that of {inside.sum()} of {inside.size} other networks, and of none of the five without norms, whose best "
        f"rates were {above.min():.0f} to {above.max():.0f} times above it."
    )
    assert (inside[bare].sum(), bare.sum()) == (0, 5)
    small = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 20}
    report = lf.rate(small, 8, optimizer="adamw", seed=0, networks=4, witness=False, progress=False)
    assert found in report.source


def test_sentence_of_transfer_on_best_rates_is_that_of_the_packaged_runs():
    one = analysis.load(foretells.STORED)
    moved, refused = (one["place"][:, -1] != one["place"][:, 0]).values, (one["transfers"] == 0).values
    assert (len(moved), refused.sum()) == (16, 10)
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    assert f"in {words[(moved & refused).sum()]} of the ten that were said not to transfer" in page.LIMITS[0]
    assert f"in {words[(moved & ~refused).sum()]} of the six that were not decided" in page.LIMITS[0]
