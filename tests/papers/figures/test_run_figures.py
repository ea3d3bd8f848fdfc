"""Figures of finished runs: numbers against those of the runs, claims with each verdict, and bad folders.

The runs are invented and written with the package's own writers; nothing is trained.
"""

import importlib
import json
import math
import shutil
import sys

import numpy as np
import pytest
from PIL import Image
from scipy.stats import t

import limitformer as lf
from limitformer.base.errors import InputError, MissingExtraError
from limitformer.plot import style
from limitformer_papers import RUN_FIGURES, make
from limitformer_papers.catalogue import STORED
from limitformer_papers.common.claims import FigureRun
from limitformer_papers.making import module_of
from limitformer_papers.shaped_transformer import language_runs
from limitformer_papers.training.log import FILE, Log
from limitformer_papers.training.plan import RUN, SUMMARY, write_json

STEPS, LOOK, HEADS, LENGTH = 20, 5, 2, 16
SHAPED, LEARN, FIXED, PRE, POST = "shaped-recover", "shaped-learn", "shaped-fixed", "pre-ln", "post-ln"
LANGUAGE = ["st-lr", "st-fig6", "st-table1"]  # of `train mlm` alone
TASKS = {"CoLA": ("matthews",), "MRPC": ("accuracy", "f1"), "RTE": ("accuracy",)}


def written(folder, about, plan, summary, log):
    folder.mkdir(parents=True)
    write_json(folder / RUN, {"about": about, "plan": plan | {"folder": str(folder)}})
    log.write(folder / FILE)
    write_json(folder / SUMMARY, summary)
    return folder


def losses_of(train, seed, until=STEPS):
    """Return losses that fall from 5 to `train` by step 16, bent so that all means differ; the last tenth is
    `train`.
    """
    fall = np.minimum(np.arange(until) / 15, 1) ** (0.5 + 0.1 * seed)
    return 5 + (train - 5) * fall


def entropy_of(base, seed, layer, head, step):
    """Return an entropy that is asymmetric in all arguments, least at the last step of the last layer."""
    return base * (1 + 0.03 * seed + 0.05 * head) * (1 - 0.01 * step) * (1 - 0.02 * layer)


def mlm(out, variant, rate=1e-3, seed=0, *, train=2.0, held_out=2.5, died=None, lost=False, entropy=1.0, **changes):
    """Write a run of `train mlm`; `died` is the step of a loss that is not finite, `lost` means a final loss far
    above.
    """
    gamma = changes.pop("gamma", 0.2 if variant.startswith("shaped") else 0.0)
    depth, name = changes.pop("depth", 2), changes.pop("name", "")
    losses = losses_of(1e5 if lost else train, seed, died or STEPS)
    log, diverged = Log(), bool(died) or lost
    for step, loss in enumerate(losses, 1):
        log.record(step, "loss", math.inf if step == died else loss)
    for step in range(0, len(losses) + 1, LOOK):
        for layer in range(1, depth + 1):
            for head in range(HEADS):
                log.record(step, "entropy", entropy_of(entropy, seed, layer, head, step), layer, head)
    about = {"experiment": "mlm", "variant": variant, "gamma": gamma, "depth": depth, "width": 32, "heads": HEADS}
    about |= {"length": LENGTH, "evaluated": 512, "looked_at": 8, "data": {"source": "stdlib", "digest": "0"}}
    plan = {"steps": STEPS, "batch": 8, "learning_rate": rate, "seed": seed, "threads": seed + 1, "bf16": False}
    ended = {name: math.nan if diverged else value for name, value in (("train_loss", train), ("eval_loss", held_out))}
    folder = out / (name or f"{variant}-d{depth}-gamma{gamma:g}-lr{rate:g}-seed{seed}")
    summary = ended | {"steps": len(losses), "diverged": diverged}
    parts = (about, plan)
    changed = [part | {key: value for key, value in changes.items() if key in part} for part in parts]
    return written(folder, *changed, summary, log)


def vit(out, variant, seed=0, *, accuracy=0.9, diverged=False, epochs=3, name="", **changes):
    """Write a run of `train vit`."""
    log = Log()
    for epoch in range(1, epochs + 1):
        log.record(10 * epoch, "eval_accuracy", accuracy * (epoch / epochs) ** 0.3)
        log.record(10 * epoch, "eval_loss", 1 - accuracy / 2 + 0.1 * seed)
    config = {"data": "digits", "layers": 3, "dim": 8, "patch": 2, "beta": 1.0, "sigma": 1.0, "batch": 32}
    config |= {"learning_rate": 1e-3, "epochs": epochs} | changes
    about = {"experiment": "vit", "preset": "tiny", "variant": variant, "seed": seed, "config": config}
    about |= {"examples": {"training": 1438, "held_out": 359}, "data": ["a", "b"]}
    plan = {"steps": 10 * epochs, "batch": 32, "learning_rate": 1e-3, "seed": seed, "threads": seed}
    summary = {"eval_accuracy": math.nan if diverged else accuracy, "steps": 10 * epochs, "diverged": diverged}
    return written(out / (name or f"{variant}-{seed}"), about, plan, summary, log)


def glue(out, pretrained, task="CoLA", seed=0, *, score=0.5, diverged=False, name="", **changes):
    """Write a run of `train glue` from the run in `pretrained`; each metric of a task is 0.1 below the one before."""
    examples = {"train": {"examples": 100 * len(task), "digest": task}, "dev": {"examples": 10, "digest": task}}
    began = {"pretrained": pretrained.name, "variant": "-".join(pretrained.name.split("-")[:2]), "weights": name}
    about = {"experiment": "glue", "task": task, "epochs": 5, **began, "data": examples}
    plan = {"steps": 7 * len(task), "batch": 16, "learning_rate": 5e-4, "seed": seed, "threads": seed}
    scores = {f"eval_{metric}": score - 0.1 * k for k, metric in enumerate(TASKS[task])}
    ended = {"train_loss": 0.5, "eval_loss": 0.6, **scores}
    summary = dict.fromkeys(ended, math.nan) if diverged else ended
    parts = [part | {key: value for key, value in changes.items() if key in part} for part in (about, plan)]
    folder = out / "glue" / pretrained.name / (name or f"{task}-seed{seed}")
    return written(folder, *parts, summary | {"diverged": diverged}, Log())


def tuned(out, levels, *, tasks=("CoLA",), tunings=1, **common):
    """Write pretrained runs of {(variant, γ): scores by pretraining seed}, each fine-tuned on every task and seed."""
    for (variant, gamma), values in levels.items():
        for seed, value in enumerate(values):
            before = mlm(out, variant, seed=seed, gamma=gamma, **common)
            for task in tasks:
                for tuning in range(tunings):
                    glue(out, before, task, tuning, score=value + 0.02 * tuning)
    return out


def data_of(name, out):
    module = module_of(name)
    return module.compute(module.paper(), FigureRun(seed=0, threads=1, runs=out))


def claims_of(name, out):
    """Return all claims; their names are unique, and their values can go to JSON."""
    claims = module_of(name).claims(data_of(name, out))
    assert len({claim.name for claim in claims}) == len(claims)
    assert all(type(claim.value) is float and type(claim.holds) in (bool, type(None)) for claim in claims)
    return claims


def claim_of(name, out, part):
    (claim,) = [claim for claim in claims_of(name, out) if part in claim.name]
    return claim


def drawn(name, out):
    with style():
        return module_of(name).draw(data_of(name, out))


def labels(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def grid(out, losses, **common):
    """Write runs of {(variant, rate): training losses by seed, None if diverged}; held-out losses are 0.3 above."""
    for (variant, rate), values in losses.items():
        for seed, value in enumerate(values):
            ended = {"died": 12} if value is None else {"train": value, "held_out": value + 0.3}
            mlm(out, variant, rate, seed, **ended, **common)
    return out


# Every figure: its files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("figures")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of four language variants, three rates and seeds, one of them diverged, and four pairs of vision runs."""
    out = tmp_path_factory.mktemp("runs")
    for k, variant in enumerate((SHAPED, LEARN, PRE, POST)):
        level = {
            rate: [2 + 0.1 * k + 0.2 * j + 0.01 * s for s in range(3)] for j, rate in enumerate((1e-3, 3e-3, 1e-2))
        }
        if variant == SHAPED:
            level[1e-2][1] = None
        grid(out / "mlm", {(variant, rate): values for rate, values in level.items()})
        for seed in range(3):
            before = next((out / "mlm").glob(f"{variant}-*-lr0.001-seed{seed}"))
            for task in TASKS:
                glue(out, before, task, score=0.5 - 0.1 * k + 0.01 * seed)
    for seed in range(4):
        vit(out / "vit", "constant", seed, accuracy=0.9 + 0.01 * seed)
        vit(out / "vit", "random", seed, accuracy=0.8 + 0.02 * seed, diverged=seed == 3)
    return out


@pytest.fixture(scope="module")
def made(runs, folder, tmp_path_factory):
    own = {"st-gains": (gains_runs, ENDS), "st-sizes": (sizes_runs, SIZES)}
    folders = dict.fromkeys(RUN_FIGURES, runs) | dict.fromkeys(STORED)
    folders |= {name: write(tmp_path_factory.mktemp(name), losses) for name, (write, losses) in own.items()}
    return {name: make(name, out=folder, runs=folders[name]) for name in RUN_FIGURES}


@pytest.mark.parametrize("name", RUN_FIGURES)
def test_picture_data_and_record(made, folder, name):
    assert {path.name for path in folder.glob(f"{name}.*")} == {f"{name}.{end}" for end in ("png", "nc", "json")}
    with Image.open(folder / f"{name}.png") as picture:
        assert len(picture.convert("RGB").getcolors(maxcolors=2**24)) > 20
    loaded, data = lf.load(folder / f"{name}.nc"), made[name].data
    assert set(loaded.variables) == set(data.variables)
    for variable in data.variables:
        np.testing.assert_array_equal(loaded[variable].values, data[variable].values)
    assert str(module_of(name).claims(loaded)) == str(made[name].claims)  # NaN is not NaN
    record = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert record["shows"] == RUN_FIGURES[name]
    assert record["scale"] == "as the runs were"
    assert [one["name"] for one in record["claims"]] == [claim.name for claim in made[name].claims]
    assert len({claim.name for claim in made[name].claims}) == len(made[name].claims)


# st-lr


def test_lr_numbers_are_those_of_the_runs(tmp_path):
    losses = {(SHAPED, 1e-3): [2.0, 2.2], (SHAPED, 1e-2): [1.5, 1.9], (PRE, 1e-3): [2.1, 2.5], (PRE, 1e-2): [3.0, 3.3]}
    data = data_of("st-lr", grid(tmp_path, losses))
    for (variant, rate), values in losses.items():
        for seed, value in enumerate(values):
            place = {"depth": 2, "variant": variant, "rate": rate, "seed": seed}
            assert float(data["final"].sel(place)) == value
            np.testing.assert_allclose(data["loss"].sel(place), losses_of(value, seed), rtol=1e-12)
    claims = {claim.name: claim for claim in claims_of("st-lr", tmp_path)}
    assert claims["d = 2, Pre-LN, rate 0.01: final training loss"].value == pytest.approx(3.15)
    ratio, gap = claim_of("st-lr", tmp_path, "spread"), claim_of("st-lr", tmp_path, "above the least")
    assert ratio.value == pytest.approx((2.1 - 1.7) / (3.15 - 2.3))
    assert gap.value == pytest.approx((1.7 - 1.7) - (3.15 - 2.3))
    assert (ratio.holds, gap.holds) == (True, True)
    assert data.attrs["runs"] == "n = 32, d = 2, 2 heads, length 16, batch 8, 20 steps, stdlib, 2 seeds"


def test_lr_curves_are_means_over_the_last_steps(tmp_path):
    mlm(tmp_path, PRE, train=2.3, seed=1)
    mlm(tmp_path, PRE, 1e-2, seed=1, died=12)
    module = module_of("st-lr")
    data = module.compute(module.Config(smoothing=5), FigureRun(seed=0, threads=1, runs=tmp_path))
    losses = losses_of(2.3, 1)
    naive = [np.mean(losses[max(0, k - 3) : k + 1]) for k in range(STEPS)]
    np.testing.assert_allclose(data["loss"].sel(rate=1e-3).squeeze(), naive, rtol=1e-12)
    np.testing.assert_array_equal(data["loss"].sel(rate=1e-2).squeeze().isnull(), [False] * 11 + [True] * 9)


INF = math.inf
COMPARED = {
    "Pre-LN degrades": ({SHAPED: [2.0, 2.1], PRE: [2.0, 3.0]}, 0.1, True, -0.9, True),
    "shaped diverges at the largest rate": ({SHAPED: [2.0, None], PRE: [2.0, 2.1]}, INF, False, INF, False),
    "Pre-LN diverges at the largest rate": ({SHAPED: [2.0, 2.1], PRE: [2.0, None]}, 0, True, -INF, True),
    "both diverge": ({SHAPED: [2.0, None], PRE: [2.0, None]}, None, None, None, None),
    "nothing depends on the rate": ({SHAPED: [2.0, 2.0], PRE: [2.0, 2.0]}, None, None, 0, None),
    "shaped alone is worse at the largest rate": ({SHAPED: [2.0, 2.1], PRE: [2.3, 2.0]}, 1 / 3, True, 0.1, False),
    "slow at the smallest rate": ({SHAPED: [3.0, 2.0], PRE: [2.0, 2.1]}, 10, False, -0.1, True),
    "rates that only one has": ({SHAPED: [2.0, 2.1, 9.0], PRE: [2.0, 3.0]}, 0.1, True, -0.9, True),
    "shaped alone": ({SHAPED: [2.0, 2.1]}, None, None, None, None),
}


@pytest.mark.parametrize("case", COMPARED)
def test_lr_claims_reach_each_verdict(case, tmp_path):
    losses, *expected_values = COMPARED[case]
    rates = (1e-3, 1e-2, 1e-1)
    grid(tmp_path, {(name, rate): [v, v] for name, row in losses.items() for rate, v in zip(rates, row, strict=False)})
    ratio, gap = claim_of("st-lr", tmp_path, "spread"), claim_of("st-lr", tmp_path, "above the least")
    for found, expected_value in zip((ratio.value, ratio.holds, gap.value, gap.holds), expected_values, strict=True):
        if expected_value is None:
            assert found is None or math.isnan(found)
        else:
            assert found == pytest.approx(expected_value)
    both = SHAPED in losses and PRE in losses
    for name, row in losses.items():
        diverged = [f"{rate:g}" for rate, value in zip(rates, row, strict=False) if value is None]
        expected = f"{language_runs.VARIANTS[name]} diverged at {', '.join(diverged)}"
        assert (expected in ratio.name) == (bool(diverged) and both)
    drawn("st-lr", tmp_path)


def test_lr_divergence_of_one_seed_makes_the_mean_infinite(tmp_path):
    losses = {(SHAPED, 1e-3): [2.0, 2.0], (SHAPED, 1e-2): [1.8, None], (PRE, 1e-3): [2.0, 2.0], (PRE, 1e-2): [2.1, 2.1]}
    grid(tmp_path, losses)
    claim = claim_of("st-lr", tmp_path, "shaped, Recover (1 of 2 diverged), rate 0.01")
    assert claim.value == INF
    assert claim_of("st-lr", tmp_path, "spread").holds is False
    figure = drawn("st-lr", tmp_path)
    assert labels(figure) == ["rate 0.001", "rate 0.01", "shaped, Recover", "Pre-LN", "a seed diverged"]
    lines = [line for line in figure.axes[0].get_lines() if line.get_marker() != "x"]
    assert [int(line.get_xdata()[-1]) for line in lines] == [20, 11, 20, 20]
    (cross,) = [line for line in figure.axes[0].get_lines() if line.get_marker() == "x"]
    assert list(cross.get_xdata()) == [11]


def test_incomplete_seeds_are_left_out_and_counted(tmp_path):
    """In an unfinished grid, a mean over other seeds would compare seeds."""
    grid(tmp_path, {(SHAPED, 1e-3): [2.0, 9.0], (SHAPED, 1e-2): [2.1], (PRE, 1e-3): [2.0, 9.0], (PRE, 1e-2): [2.2]})
    data = data_of("st-lr", tmp_path)
    assert list(data["seed"].values) == [0]
    assert data.attrs["runs"].endswith("1 of 2 seeds")
    assert claim_of("st-lr", tmp_path, "spread").value == pytest.approx(0.5)
    for name in ("st-fig6", "st-table1"):
        assert data_of(name, tmp_path).attrs["runs"].endswith("1 of 2 seeds")


def test_lr_draws_a_panel_for_each_depth(tmp_path):
    for depth in (2, 4):
        for rate in (1e-3, 1e-2):
            mlm(tmp_path, SHAPED, rate, depth=depth, gamma=0.1, held_out=2 + depth)
            mlm(tmp_path, SHAPED, rate, depth=depth, gamma=0.2, held_out=5)
            mlm(tmp_path, PRE, rate, depth=depth, train=2 + depth)
    data = data_of("st-lr", tmp_path)
    assert dict(zip(data["depth"].values, data["gamma"].values, strict=True)) == {2: 0.1, 4: 0.2}
    assert [axes.get_title() for axes in drawn("st-lr", tmp_path).axes] == ["d = 2, γ = 0.1", "d = 4, γ = 0.2"]
    assert float(data["final"].sel(depth=4, variant=PRE, rate=1e-2, seed=0)) == 6
    assert len([claim for claim in claims_of("st-lr", tmp_path) if "spread" in claim.name]) == 2
    entropy = data_of("st-fig6", tmp_path)
    assert (entropy.attrs["depth"], entropy.attrs["gamma"]) == (4, 0.2)
    assert list(entropy["layer"].values) == [1, 4]


# γ


def finished(out):
    return language_runs.language_runs(FigureRun(seed=0, threads=1, runs=out))


GAMMAS = {
    "the least held-out loss": ({0.1: [2.0, 2.5], 0.2: [2.2, 2.1]}, 0.2),
    "a divergence is worse than any loss": ({0.1: [1.0, None], 0.2: [5.0, 5.0]}, 0.2),
    "all diverged somewhere: fewer times": ({0.1: [1.0, None, None], 0.2: [5.0, 5.0, None]}, 0.2),
    "diverged everywhere": ({0.2: [None, None], 0.1: [None, None]}, 0.1),
    "rates that both have": ({0.1: [2.0], 0.2: [1.9, 9.0]}, 0.2),
}


@pytest.mark.parametrize("case", GAMMAS)
def test_best_gamma_has_least_held_out_loss(case, tmp_path):
    losses, wanted = GAMMAS[case]
    for gamma, values in losses.items():
        for k, value in enumerate(values):
            ended = {"died": 12} if value is None else {"held_out": value}
            mlm(tmp_path, SHAPED, 10.0 ** (k - 3), gamma=gamma, **ended)
    for k in range(3):
        mlm(tmp_path, PRE, 10.0 ** (k - 3))
    assert language_runs.best_gamma(finished(tmp_path)) == wanted
    data = data_of("st-lr", tmp_path)
    assert list(data["variant"].values) == [SHAPED, PRE]  # it never vanishes
    assert f"γ = {wanted:g}" in drawn("st-lr", tmp_path).axes[0].get_title()
    assert data_of("st-fig6", tmp_path).attrs["gamma"] == wanted


def test_best_gamma_is_nan_without_shaped_runs(tmp_path):
    grid(tmp_path, {(PRE, 1e-3): [2.0], (PRE, 1e-2): [2.5]})
    assert math.isnan(language_runs.best_gamma(finished(tmp_path)))
    assert drawn("st-lr", tmp_path).axes[0].get_title() == "d = 2"
    assert "γ" not in drawn("st-fig6", tmp_path).axes[0].get_title()
    assert all(claim.holds is None for name in LANGUAGE for claim in claims_of(name, tmp_path))


# st-fig6


def entropies(out, changes, rates=(1e-3, 1e-2), seeds=2):
    """Write a run of each variant, rate and seed, with `changes` by (variant, rate)."""
    for variant in (SHAPED, PRE):
        for rate in rates:
            for seed in range(seeds):
                mlm(out, variant, rate, seed, **changes.get((variant, rate), {}))
    return out


def test_entropy_is_the_mean_over_heads_and_seeds(tmp_path):
    data = data_of("st-fig6", entropies(tmp_path, {(PRE, 1e-2): {"entropy": 0.7}, (SHAPED, 1e-2): {"entropy": 1.9}}))
    for variant, rate, base in ((PRE, 1e-2, 0.7), (SHAPED, 1e-2, 1.9), (PRE, 1e-3, 1.0)):
        for layer in (1, 2):
            expected = [
                np.mean([entropy_of(base, seed, layer, head, step) for seed in range(2) for head in range(HEADS)])
                for step in range(0, STEPS + 1, LOOK)
            ]
            mean = data["entropy"].sel(variant=variant, rate=rate, layer=layer).mean("seed")
            np.testing.assert_allclose(mean, expected, rtol=1e-12)
    assert data.attrs["largest"] == pytest.approx(math.log(LENGTH))
    (claim,) = [one for one in claims_of("st-fig6", tmp_path) if one.name.startswith("Pre-LN, rate 0.01")]
    least = np.mean([entropy_of(0.7, seed, 2, head, STEPS) for seed in range(2) for head in range(HEADS)])
    assert claim.value == pytest.approx(least / math.log(LENGTH))
    assert claim_of("st-fig6", tmp_path, "over that of").value == pytest.approx(0.7 / 1.9)


@pytest.mark.parametrize(("entropy", "holds"), [(0.3, True), (0.6, False)])
def test_entropy_claim_reaches_each_verdict(entropy, holds, tmp_path):
    entropies(tmp_path, {(PRE, 1e-2): {"entropy": entropy}, (PRE, 1e-3): {"entropy": 0.1}})
    claim = claim_of("st-fig6", tmp_path, "over that of")
    assert claim.value == pytest.approx(entropy)
    assert claim.holds is holds
    assert claim.name.startswith("rate 0.01: ")


@pytest.mark.parametrize(("variant", "ended"), [(SHAPED, {"died": 12}), (PRE, {"lost": True})])
def test_entropy_claim_is_not_judged_for_diverged_runs(variant, ended, tmp_path):
    entropies(tmp_path, {(variant, 1e-2): {"entropy": 0.01, **ended}, (PRE, 1e-3): {"entropy": 0.3}})
    judged, largest = [claim for claim in claims_of("st-fig6", tmp_path) if "over that of" in claim.name]
    assert judged.name.startswith("rate 0.001: ")
    assert judged.holds is True
    assert judged.value == pytest.approx(0.3)
    assert largest.name.startswith("rate 0.01: ")
    assert f"{language_runs.VARIANTS[variant]} (2 of 2 diverged)" in largest.name
    assert largest.holds is None
    figure = drawn("st-fig6", tmp_path)
    assert "a seed diverged" in labels(figure)


# st-table1


def pairs(out, gaps, base=2.0, **shaped):
    """Write Pre-LN runs with a large common spread over seeds, and shaped runs above them by `gaps`."""
    for seed, gap in enumerate(gaps):
        level = base + seed**2
        mlm(out, PRE, seed=seed, held_out=level)
        mlm(out, SHAPED, seed=seed, held_out=level + gap, **shaped)
    return out


@pytest.mark.parametrize(
    ("gaps", "holds"),
    [
        ([0.0, 0.01, -0.01], True),
        ([0.5, 0.4, 0.6], False),
        ([0.5, -0.4, 0.1], None),  # noise does not make it comparable
        ([0.0, 0.0], None),
        ([-0.1], None),
    ],
)
def test_table_claim_compares_seeds_in_pairs(gaps, holds, tmp_path):
    claim = claim_of("st-table1", pairs(tmp_path, gaps), "minus Pre-LN")
    assert claim.value == pytest.approx(np.mean(gaps), abs=1e-12)
    assert claim.holds is holds
    assert "chosen by this loss" in claim.name
    if len(gaps) > 1:
        half = t.ppf(0.975, len(gaps) - 1) * np.std(gaps, ddof=1) / len(gaps) ** 0.5
        assert f"95 %: ± {half:.3f};" in claim.name
    else:
        assert "no 95 % interval;" in claim.name


def test_table_rows_have_the_best_rates(tmp_path):
    losses = {
        (PRE, 1e-3): [2.0, 2.4],
        (PRE, 1e-2): [1.9, 2.6],
        (POST, 1e-3): [3.0, 3.1],
        (POST, 1e-2): [1.0, None],
        (LEARN, 1e-3): [2.2, 2.1],
        (SHAPED, 1e-3): [None, None],
    }
    data = data_of("st-table1", grid(tmp_path, losses))
    assert list(data["variant"].values) == [SHAPED, LEARN, PRE, POST]
    assert list(data["rate"].values) == [1e-3] * 4
    assert list(data["diverged"].values) == [2, 0, 0, 1]
    np.testing.assert_allclose(data["train_loss"], [[INF, INF], [2.2, 2.1], [2.0, 2.4], [3.0, 3.1]])
    np.testing.assert_allclose(data["eval_loss"], data["train_loss"] + 0.3)
    claims = {claim.name: claim.value for claim in claims_of("st-table1", tmp_path)}
    assert claims["d = 2, Pre-LN, rate 0.001: eval loss"] == pytest.approx(2.5)
    assert claims["d = 2, shaped, Recover, γ = 0.2, each rate: eval loss"] == INF
    assert claims["d = 2, Post-LN: runs that diverged, at all rates"] == 1
    assert any(name.startswith("d = 2, shaped, Learn, γ = 0.2 minus Pre-LN") for name in claims)
    labels_ = texts(drawn("st-table1", tmp_path))
    assert labels_[:4] == ["diverged", "2.150 ± 0.071", "2.200 ± 0.283", "3.050 ± 0.071"]


@pytest.mark.parametrize(("who", "holds"), [((SHAPED,), False), ((PRE,), True), ((SHAPED, PRE), None)])
def test_table_claim_where_a_side_diverged_everywhere(who, holds, tmp_path):
    for variant in (SHAPED, PRE):
        for seed in range(3):
            mlm(tmp_path, variant, seed=seed, died=8 if variant in who and seed == 1 else None)
    assert claim_of("st-table1", tmp_path, "minus Pre-LN").holds is holds


# st-table2


def test_scores_are_those_of_the_runs(tmp_path):
    """Scores are by row, metric, pretraining seed and fine-tuning seed, rows in the order of the paper."""
    levels = {(PRE, 0.0): [0.2, 0.4], (LEARN, 0.1): [0.5, 0.1], (SHAPED, 0.1): [0.9, 0.7], (SHAPED, 0.05): [0.3, 0.35]}
    data = data_of("st-table2", tuned(tmp_path, levels, tasks=TASKS, tunings=2))
    rows = list(zip(data["variant"].values, data["gamma"].values, strict=True))
    assert rows == [(SHAPED, 0.05), (SHAPED, 0.1), (LEARN, 0.1), (PRE, 0.0)]
    assert list(data["metric"].values) == ["CoLA matthews", "MRPC accuracy", "MRPC f1", "RTE accuracy"]
    for row, key in enumerate(rows):
        for place, lower in enumerate((0.0, 0.0, 0.1, 0.0)):
            expected = np.array(levels[key])[:, None] + [0.0, 0.02] - lower
            np.testing.assert_allclose(data["score"][row, place], expected, rtol=1e-12)
    claims = {claim.name: claim for claim in claims_of("st-table2", tmp_path)}
    assert claims["d = 2, shaped, Learn, γ = 0.1, pretrained at 0.001: MRPC f1"].value == pytest.approx(0.21)
    gap = claim_of("st-table2", tmp_path, "Learn, γ = 0.1 minus Pre-LN, RTE accuracy")
    assert (gap.value, gap.holds) == (pytest.approx(0.0), None)
    assert "0.310 ± 0.231" in texts(drawn("st-table2", tmp_path))
    assert data.attrs["runs"].startswith("pretraining: n = 32, d = 2")


@pytest.mark.parametrize(("gaps", "holds"), [([0.1, 0.11, 0.09], True), ([-0.1, -0.11, -0.09], False), ([0.1], None)])
def test_scores_are_compared_by_pretraining_seed(gaps, holds, tmp_path):
    """Five fine-tunings of one network are one value of the comparison, not five."""
    levels = {(PRE, 0.0): [0.2, 0.6, 0.1][: len(gaps)]}
    levels[SHAPED, 0.2] = [base + gap for base, gap in zip(levels[PRE, 0.0], gaps, strict=True)]
    claim = claim_of("st-table2", tuned(tmp_path, levels, tunings=5), "minus Pre-LN")
    assert (claim.value, claim.holds) == (pytest.approx(np.mean(gaps)), holds)


def test_diverged_fine_tuning_has_no_score(tmp_path):
    tuned(tmp_path, {(PRE, 0.0): [0.2, 0.3, 0.25]})
    for seed in range(3):
        glue(tmp_path, mlm(tmp_path, SHAPED, seed=seed), score=0.9, diverged=seed == 1)
    claim = claim_of("st-table2", tmp_path, "minus Pre-LN")
    assert math.isnan(claim.value)
    assert claim.holds is None
    assert texts(drawn("st-table2", tmp_path))[0] == "diverged"
    make("st-table2", out=tmp_path / "out", runs=tmp_path)


def test_pretraining_rate_is_chosen_by_pretraining_loss(tmp_path):
    """The other rate's networks score better after fine-tuning; choosing by score would use the result."""
    for rate, held_out, score in ((1e-3, 2.0, 0.3), (1e-2, 2.5, 0.8)):
        glue(tmp_path, mlm(tmp_path, PRE, rate, held_out=held_out), score=score)
    data = data_of("st-table2", tmp_path)
    assert (float(data["rate"][0]), float(data["score"].squeeze())) == (1e-3, 0.3)


def test_scores_use_seeds_that_all_rows_and_tasks_have(tmp_path):
    tuned(tmp_path, {(PRE, 0.0): [0.2, 0.3], (SHAPED, 0.2): [0.4]}, tasks=("CoLA", "RTE"))
    assert data_of("st-table2", tmp_path)["score"].shape == (2, 2, 1, 1)


# ct-fig2


def seeds_of(out, differences, level=0.5):
    for seed, difference in enumerate(differences):
        vit(out, "constant", seed, accuracy=level + 0.05 * seed)
        vit(out, "random", seed, accuracy=level + 0.05 * seed + difference)
    return out


@pytest.mark.parametrize(
    ("differences", "holds"),
    [
        ([0.1, 0.12, 0.11], True),
        ([-0.1, -0.12, -0.11], False),
        ([0.1, 0.16, 0.05], False),  # three standard errors, but the quantile of two degrees of freedom is 4.3
        ([0.1], None),
    ],
)
def test_vision_claim_uses_students_interval(differences, holds, tmp_path):
    claim = claims_of("ct-fig2", seeds_of(tmp_path, differences))[0]
    assert claim.value == pytest.approx(np.mean(differences))
    assert claim.holds is holds
    if len(differences) > 1:
        error = np.std(differences, ddof=1) / len(differences) ** 0.5
        assert f"standard error {error:.4f}" in claim.name
        assert f"± {t.ppf(0.975, len(differences) - 1) * error:.4f}" in claim.name
    else:
        assert "one seed" in claim.name


def test_vision_curves_are_those_of_the_pairs(runs):
    data = data_of("ct-fig2", runs)
    assert list(data["seed"].values) == [0, 1, 2]
    expected = [[(0.8 + 0.02 * seed) * (epoch / 3) ** 0.3 for epoch in (1, 2, 3)] for seed in range(3)]
    np.testing.assert_allclose(data["accuracy"].sel(variant="random"), expected)
    assert claim_of("ct-fig2", runs, "random runs that diverged").value == 1
    assert claim_of("ct-fig2", runs, "constant runs that diverged").value == 0


def test_vision_claim_is_against_each_variant(tmp_path):
    out = seeds_of(tmp_path, [0.1, 0.12, 0.11])
    for seed in range(3):
        vit(out, "untied", seed, accuracy=0.7 + 0.05 * seed)
    tied, untied = claims_of("ct-fig2", out)[:2]
    assert (tied.holds, untied.holds) == (True, False)
    assert untied.value == pytest.approx(0.11 - 0.2)
    assert "random minus untied" in untied.name
    for tied_run in out.glob("constant-*"):
        shutil.rmtree(tied_run)
    assert claims_of("ct-fig2", out)[0] == untied


# st-gains

ENDS = {FIXED: [2.6, 2.7, 2.9], LEARN: [2.0, 2.2, 2.1], SHAPED: [1.9, 2.1, 2.2]}


def gains_runs(out, ends):
    """Write three variants with γ = 0.2 at two rates, and two of them with γ = 0.5 at one, where a seed diverges."""
    grid(out, {(variant, rate): values for variant, values in ends.items() for rate in (1e-3, 3e-3)})
    return grid(out, {(LEARN, 3e-3): [2.2, 2.3, 2.7], (SHAPED, 3e-3): [2.5, None, 2.2]}, gamma=0.5)


def test_gains_numbers_are_those_of_the_runs(tmp_path):
    claims = {claim.name: claim for claim in claims_of("st-gains", gains_runs(tmp_path, ENDS))}
    assert claims["rate 0.001, γ = 0.2: held-out loss, shaped, fixed"].value == pytest.approx(0.3 + 8.2 / 3)
    gaps = [claim for name, claim in claims.items() if "fixed minus shaped, Learn" in name]
    assert [(round(gap.value, 12), gap.holds) for gap in gaps] == [(round(1.9 / 3, 12), True)] * 2
    (share,) = [
        claim.value for name, claim in claims.items() if name.startswith("rate 0.003: share") and "Learn" in name
    ]
    fixed, learn = (np.mean([losses_of(v, s) for s, v in enumerate(ENDS[name])], 0) for name in (FIXED, LEARN))
    assert share == next(k + 1 for k in range(STEPS) if learn[k] <= fixed[-1]) / STEPS
    assert claims["γ = 0.5, shaped, Recover, rate 0.003: seeds that diverged, of 3"].value == 1
    assert claims["γ = 0.5, shaped, Recover, rate 0.003: held-out loss"].value == INF
    assert claims["γ = 0.5, shaped, Learn, rate 0.003: held-out loss"].value == pytest.approx(0.3 + 7.2 / 3)
    assert claims["γ = 0.2, shaped, Learn, rate 0.003: held-out loss"].value == pytest.approx(0.3 + 6.3 / 3)
    figure = drawn("st-gains", tmp_path)
    assert "1" in texts(figure)  # the number of seeds at its cross
    ends = [line.get_ydata()[-1] for line in figure.axes[0].lines]
    assert np.isclose(ends, learn[-1] - fixed[-1]).sum() == 2  # one for each rate
    assert not np.isclose(ends, fixed[-1] - learn[-1]).any()


def test_gains_that_the_paper_does_not_expect(tmp_path):
    """A fixed variant that is better fails the claim; one that differs by less than its interval is not judged."""
    gains_runs(tmp_path / "better", ENDS | {FIXED: [1.5, 1.6, 1.8]})
    gains_runs(tmp_path / "equal", ENDS | {FIXED: [1.9, 2.3, 2.1]})
    found = [
        claim_of("st-gains", tmp_path / name, "rate 0.001: shaped, fixed minus shaped, L")
        for name in ("better", "equal")
    ]
    assert [claim.holds for claim in found] == [False, None]


# st-sizes

RATES = (1e-3, 2e-3, 4e-3, 8e-3)


def sizes_runs(out, losses):
    """Write runs of {variant: held-out losses by (width, depth) and rate, None if a seed diverged}."""
    for variant, rows in losses.items():
        for (width, depth), row in rows.items():
            for rate, value in zip(RATES, row, strict=True):
                for seed in range(2):
                    ended = {"died": 12} if value is None and seed else {"held_out": (value or 2.0) + 0.1 * seed}
                    name = f"{variant}-{width}-{rate}-{seed}"
                    mlm(out, variant, rate, seed, width=width, heads=width // 16, depth=depth, name=name, **ended)
    return out


def sizes_with_other_gamma(out):
    mlm(out, SHAPED, RATES[0], width=32, heads=2, depth=2, gamma=0.0, name="other")
    return out


SIZES = {
    SHAPED: {(32, 2): [2.4, 2.0, 2.1, 2.6], (64, 4): [2.3, 1.8, 1.9, 2.2]},
    PRE: {(32, 2): [2.4, 2.2, 2.0, 2.1], (64, 4): [2.3, 1.9, 2.2, None]},
}


def test_sizes_say_which_best_rate_moves(tmp_path):
    claims = {claim.name: claim for claim in claims_of("st-sizes", sizes_runs(tmp_path, SIZES))}
    assert claims["shaped, Recover, n = 64, d = 4: best rate"].value == 2e-3
    change = "change of the best rate over the sizes, in powers of two (the paper: 0)"
    regret = "regret at the last size of the first one's best rate, in nats"
    assert (claims[f"shaped, Recover: {change}"].value, claims[f"shaped, Recover: {change}"].holds) == (0, True)
    assert (claims[f"Pre-LN: {change}"].value, claims[f"Pre-LN: {change}"].holds) == (-1, False)
    assert claims[f"shaped, Recover: {regret}"].value == pytest.approx(0)
    assert claims[f"Pre-LN: {regret}"].value == pytest.approx(0.3)
    figure = drawn("st-sizes", tmp_path)
    assert [axes.get_title() for axes in figure.axes] == ["shaped, Recover", "Pre-LN"]
    assert "n = 32/64, d = 2/4, 2/4 heads" in figure.get_suptitle()


def test_sizes_best_at_the_end_of_the_grid_is_not_judged(tmp_path):
    """Also where a diverging rate is next to it."""
    sizes_runs(tmp_path, {SHAPED: {(32, 2): [2.0, 2.1, 2.2, 2.6], (64, 4): [2.3, 1.8, None, None]}})
    change = claim_of("st-sizes", tmp_path, "change of the best rate")
    assert (change.value, change.holds) == (1, None)


def test_sizes_at_which_every_rate_diverges_have_no_best_one(tmp_path):
    sizes_runs(tmp_path, {SHAPED: {(32, 2): [2.0, 1.9, 2.2, 2.6], (64, 4): [None] * 4}})
    claims = {claim.name: claim.value for claim in claims_of("st-sizes", tmp_path)}
    assert np.isnan(claims["shaped, Recover, n = 64, d = 4: best rate"])
    assert claim_of("st-sizes", tmp_path, "change of the best rate").holds is None
    drawn("st-sizes", tmp_path)


def test_gains_are_drawn_where_every_seed_diverges(tmp_path):
    drawn("st-gains", grid(tmp_path, {(name, 1e-2): [None, None] for name in ENDS}))
    assert not [claim for claim in claims_of("st-gains", tmp_path) if "share" in claim.name]


# Bad folders


def same_twice(run):
    shutil.copytree(run, run.parent / "two")


def without_its_pretraining(out):
    glue(out, mlm(out, PRE))
    lost = glue(out, mlm(out, SHAPED))
    shutil.rmtree(out / lost.parent.name)


UNLIKE = "2 different settings or data and cannot be compared: "
# Each case writes runs; the figure of its name refuses them with the message.
REFUSED = {
    "no runs": ("ct-fig2", lambda out: None, "No finished runs in"),
    "other experiments": ("ct-fig2", lambda out: mlm(out, PRE), "are of other experiments"),
    "one fine-tuning twice": (
        "st-table2",
        lambda out: same_twice(glue(out, mlm(out, PRE), name="one")),
        r"one and .*two are the same run twice",
    ),
    "no fixed variant": (
        "st-gains",
        lambda out: [mlm(out, LEARN), mlm(out, SHAPED, depth=4)],
        r"depths \[2, 4\], γ \[\] and 2 others. Nearest",
    ),
    "several γ": (
        "st-sizes",
        lambda out: sizes_runs(sizes_with_other_gamma(out), SIZES),
        "4 rate × 2 seed = 32; there are 33",
    ),
    "a rate that one size lacks": (
        "st-sizes",
        lambda out: shutil.rmtree(next(sizes_runs(out, SIZES).glob("*-64-0.002-0"))),
        "= 32; there are 31",
    ),
    "more rates than lines": (
        "st-gains",
        lambda out: grid(out, {(name, rate): [2.0] for name in (FIXED, LEARN) for rate in (*RATES, 1.6e-2)}),
        "shows 4 rates at most",
    ),
    "two depths at one width": (
        "st-sizes",
        lambda out: [mlm(out, PRE), mlm(out, PRE, depth=4)],
        r"\(width, depth\) = \[\(32, 2\), \(32, 4\)\]",
    ),
    "other variants": (
        "st-lr",
        lambda out: [mlm(out, LEARN), mlm(out, POST)],
        r"of shaped-recover and pre-ln; the finished runs in .* are of post-ln, shaped-l",
    ),
    "other width": ("st-fig6", lambda out: [mlm(out, PRE), mlm(out, SHAPED, width=64)], UNLIKE + "width is "),
    "other course of fine-tuning": (
        "st-table2",
        lambda out: [glue(out, mlm(out, PRE)), glue(out, mlm(out, PRE, seed=1), epochs=3)],
        UNLIKE + "epochs is",
    ),
    "lost pretraining": (
        "st-table2",
        without_its_pretraining,
        r"began from shaped-recover-.*, whose finished run is not in .*Nearest: copy",
    ),
    "no common seed": (
        "st-lr",
        lambda out: [mlm(out, SHAPED), mlm(out, PRE, seed=1)],
        r"No seed is finished for all settings .*has \[\d\]\. Nearest: finish the grid",
    ),
    "no common pair of seeds": (
        "st-table2",
        lambda out: [glue(out, mlm(out, PRE)), glue(out, mlm(out, LEARN, seed=1))],
        r"No pair of .* has \[.*\]\. Nearest: finish the grid",
    ),
    "diverged side of a pair": (
        "ct-fig2",
        lambda out: [vit(out, "random", diverged=True), vit(out, "constant")],
        r"seeds \[0\] of constant and \[\] of random \(1 diverged\)",
    ),
    "other β": (
        "ct-fig2",
        lambda out: [vit(out, "constant"), vit(out, "random", beta=3.0)],
        UNLIKE + r"config\.beta is 1\.0 in",
    ),
    "damaged log": (
        "st-lr",
        lambda out: (mlm(out, PRE) / FILE).write_bytes(b"PAR1 half of it"),
        "is not a log that limitformer wrote",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_runs_that_cannot_be_compared_are_refused(case, tmp_path):
    name, write, message = REFUSED[case]
    write(tmp_path)
    with pytest.raises(InputError, match=message):
        data_of(name, tmp_path)


# Without torch


def test_st_fig2_without_torch_names_the_extra(monkeypatch):
    for module in ("limitformer_papers.shaped_transformer.st_fig2", "limitformer.nn"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'limitformer\[torch\]'"):
        importlib.import_module("limitformer_papers.shaped_transformer.st_fig2")
