"""The masked-language-model experiment: grids, variants, resuming, GLUE, and its command line."""

import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from limitformer.base.errors import InputError
from limitformer.cli.app import app
from limitformer.nn import Residual, gains
from limitformer_papers import make
from limitformer_papers.commands.train import mlm_place, table_over_seeds
from limitformer_papers.training.architecture import ShapedTransformerForMaskedLM
from limitformer_papers.training.data.masking import MaskedCollator
from limitformer_papers.training.data.text_data import text_data
from limitformer_papers.training.interrupts import Budget, TrainingInterrupted, within
from limitformer_papers.training.log import curve, read_log
from limitformer_papers.training.tasks.mlm import COMPARED, PRESETS, MlmRun, grid, preset, run_mlm
from train_states import assert_same_run

pytestmark = [pytest.mark.xdist_group("training"), pytest.mark.usefixtures("one_thread")]

SMALL = {"width": 32, "depth": 2, "heads": 2, "hidden": 64, "length": 16, "batch": 8, "vocabulary": 300, "steps": 12}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of small programs, enough for some hundred sequences."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(60):
        body = "\n".join(f"    total_{k} = value_{(k * number) % 7} + {k}" for k in range(12))
        (folder / f"module_{number}.py").write_text(f"def function_{number}(value):\n{body}\n    return total_0\n")
    return folder


def config(**changes):
    looks = {"look_every": 4, "save_every": 4, "evaluate_every": 6}
    return replace(preset("tiny", **SMALL), **(looks | changes))


def one(corpus, variant="shaped-learn", **changes):
    gamma = 0.2 if variant.startswith("shaped") else 0.0
    return MlmRun(config=config(**changes), variant=variant, learning_rate=3e-3, gamma=gamma, source=str(corpus))


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """Runs of each variant, at a rate at which they learn."""
    out = tmp_path_factory.mktemp("runs")
    runs = list(grid(config(learning_rates=(1e-2,), seeds=1), str(corpus)))
    return out, [(run, run_mlm(run, out, threads=1)) for run in runs]


def test_paper_grid_has_the_papers_settings():
    runs = list(grid(PRESETS["paper"], "x"))
    assert len(runs) == 4 * 4 * (3 + 3 + 1 + 1)  # seeds × rates × (γ of Learn and Recover, Pre-LN, Post-LN)
    assert {run.learning_rate for run in runs} == {1e-4, 5e-4, 1e-3, 5e-3}
    assert PRESETS["deep"].learning_rates == PRESETS["paper"].learning_rates
    assert len({run.name for run in runs}) == len(runs)
    paper = PRESETS["paper"]
    assert (paper.width, paper.depth, paper.heads, paper.hidden, paper.length) == (768, 18, 8, 3072, 128)
    assert (paper.batch, paper.vocabulary, paper.steps, paper.warmup) == (32, 32_000, 100_000, 4_000)


def test_every_variant_learns(finished):
    """Losses fall from about that of guessing by frequency, and the log has all its rows."""
    out, results = finished
    assert [run.variant for run, _ in results] == list(COMPARED)
    for run, summary in results:
        assert not summary["diverged"]
        assert np.isfinite(summary["eval_loss"])
        log = read_log(out / run.name)
        _, losses = curve(log, "loss")
        assert losses[-3:].mean() < losses[:3].mean() - 0.5
        names = set(log["name"].to_pylist())
        wanted = {"loss", "entropy", "correlation", "gradient_norm", "gradient_norm_value", "eval_loss"}
        assert wanted <= names
        assert ("gamma1" in names) == run.is_shaped


def test_recover_ends_without_shaping(finished):
    out, results = finished
    for run, _ in results:
        if run.is_shaped:
            model = ShapedTransformerForMaskedLM.from_pretrained(out / run.name / "model")
            values = torch.cat([gain.value.flatten() for gain in gains(model)])
            assert bool((values == 0).all()) == (run.variant == "shaped-recover")
            steps, gamma1 = curve(read_log(out / run.name), "gamma1", layer=1)
            assert steps[0] == 0
            assert gamma1[0] == 1.0
            if run.variant == "shaped-learn":
                assert 0 < abs(gamma1[-1] - 1) < 0.3


def test_fixed_shaping_stays_and_the_strengths_of_residuals_train(corpus, tmp_path):
    run = one(corpus, "shaped-fixed")
    run_mlm(run, tmp_path, threads=1)
    model = ShapedTransformerForMaskedLM.from_pretrained(tmp_path / run.name / "model")
    assert all(bool((gain.value == gain.start).all()) for gain in gains(model))
    gammas = torch.cat([module.gamma.flatten() for module in model.modules() if isinstance(module, Residual)])
    assert not bool((gammas == torch.tensor(run.gamma)).any())


def held_out_loss(run, out, chosen, seed):
    """Return the mean cross-entropy of the trained model over masked tokens of the chosen held-out sequences."""
    data = text_data(run.source, run.config.vocabulary, run.config.length, out / "data")
    batch = MaskedCollator(data.tokenizer, seed)([data.evaluation[k] for k in chosen(len(data.evaluation))])
    model = ShapedTransformerForMaskedLM.from_pretrained(out / run.name / "model").eval()
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))


def test_held_out_loss_uses_spaced_sequences_and_fixed_masks(finished, monkeypatch, corpus, tmp_path):
    """A small corpus is evaluated as a whole; of a large one, evenly spaced sequences are, not the first ones."""
    out, results = finished
    for run, summary in results[:2]:
        assert held_out_loss(run, out, range, 2**63) == pytest.approx(summary["eval_loss"], abs=1e-5)
        assert abs(held_out_loss(run, out, range, run.seed) - summary["eval_loss"]) > 1e-3
    monkeypatch.setattr("limitformer_papers.training.tasks.mlm.EVALUATED", 5)
    run = one(corpus)
    found = run_mlm(run, tmp_path, threads=1)["eval_loss"]
    every = held_out_loss(run, tmp_path, lambda n: [k * n // 5 for k in range(5)], 2**63)
    assert every == pytest.approx(found, abs=1e-5)
    assert abs(held_out_loss(run, tmp_path, lambda n: range(5), 2**63) - found) > 1e-3


def test_run_stopped_between_checkpoints_resumes_to_the_last_bit(corpus, tmp_path):
    """Masks, gains that fall and rows of all callbacks come back."""
    run = one(corpus, "shaped-recover", save_every=5)
    with within(Budget(7 / 60, clock=count(1).__next__)), pytest.raises(TrainingInterrupted):
        run_mlm(run, tmp_path / "broken", threads=1)
    for out in ("whole", "broken"):
        run_mlm(run, tmp_path / out, threads=1)
    assert_same_run(*(tmp_path / out / run.name for out in ("whole", "broken")))


def test_table_shows_means_and_deviations_over_seeds():
    runs = [MlmRun(config=PRESETS["tiny"], variant="pre-ln", learning_rate=1.0, seed=k) for k in range(3)]
    nan = float("nan")
    values = ({"eval_loss": 2.0}, {"eval_loss": 4.0}, {"eval_loss": nan})
    finished = [(run, value | {"diverged": k == 2}) for k, (run, value) in enumerate(zip(runs, values, strict=True))]
    table = table_over_seeds("x", finished, mlm_place, ("eval_loss",))
    assert [list(column.cells) for column in table.columns] == [
        ["pre-ln"],
        ["–"],
        ["1"],
        ["3"],
        ["1"],
        ["3.000 ± 1.414"],
    ]
    alone = table_over_seeds("x", finished[:1], mlm_place, ("eval_loss",))
    assert list(alone.columns[-1].cells) == ["2.000"]
    lost = table_over_seeds("x", finished[2:], mlm_place, ("eval_loss",))
    assert list(lost.columns[-1].cells) == ["–"]


def test_figures_are_made_from_trained_runs(finished, tmp_path):
    out, results = finished
    for name in ("st-lr", "st-fig6", "st-table1"):
        made = make(name, out=tmp_path, runs=out)
        assert all(path.exists() for path in made.paths)
        assert made.data.attrs["scale"] == "as the runs were"
        assert "n = 32, d = 2" in made.data.attrs["runs"]
    lr = make("st-lr", out=tmp_path, runs=out).data
    for run, summary in results:
        if run.variant in ("shaped-recover", "pre-ln"):
            place = {"depth": 2, "variant": run.variant, "rate": run.learning_rate, "seed": run.seed}
            assert float(lr["final"].sel(place)) == pytest.approx(summary["train_loss"])
            _, losses = curve(read_log(out / run.name), "loss")
            assert float(lr["loss"].sel(place)[-1]) == pytest.approx(losses[-1], rel=1e-6)  # 12 steps: no smoothing


def cola(folder: Path) -> Path:
    """Write sentences that are acceptable if they contain a cat."""
    rng, words = np.random.default_rng(0), ["the", "cat", "dog", "runs", "eats", "big", "house"]
    folder.mkdir(exist_ok=True)
    for name, number in (("in_domain_train", 200), ("in_domain_dev", 50), ("out_of_domain_dev", 50)):
        rows = [" ".join(rng.choice(words, 5)) for _ in range(number)]
        (folder / f"{name}.tsv").write_text("".join(f"x\t{int('cat' in row)}\t\t{row}\n" for row in rows))
    return folder


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("variant", ["shaped-recover", "shaped-learn", "pre-ln"])
def test_glue_fine_tuning_learns_a_word(finished, tmp_path, variant):
    from limitformer_papers.training.tasks.glue import GlueRun, run_glue

    out, results = finished
    run = next(run for run, _ in results if run.variant == variant)
    course = {"epochs": 8, "learning_rate": 5e-3, "batch": 8}
    fine = GlueRun(pretrained=out / run.name, task="CoLA", **course)
    summary = run_glue(fine, cola(tmp_path / "data"), tmp_path / "glue", threads=1)
    assert summary["eval_matthews"] > 0.5
    from limitformer_papers.training.architecture import ShapedTransformerForSequenceClassification

    model = ShapedTransformerForSequenceClassification.from_pretrained(tmp_path / "glue" / fine.name / "model")
    if variant == "shaped-recover":
        assert all(not bool(gain.value.any()) for gain in gains(model))
    if variant == "shaped-learn":
        assert any(bool((gain.value != 1).any()) for gain in gains(model))


def test_glue_refuses_bad_input(finished, tmp_path):
    from limitformer_papers.training.tasks.glue import GlueRun, run_glue

    out, results = finished
    with pytest.raises(InputError, match="holds no finished masked-language run"):
        run_glue(GlueRun(pretrained=out, task="CoLA"), tmp_path, tmp_path / "glue")
    with pytest.raises(InputError, match="task must be one of CoLA, MRPC, RTE; got 'SST'"):
        GlueRun(pretrained=out, task="SST")
    with pytest.raises(InputError, match="CoLA"):
        run_glue(GlueRun(pretrained=out / results[0][0].name, task="CoLA"), tmp_path / "empty", tmp_path / "glue")


def limitformer(*arguments: object) -> Result:
    """Run the command in this process: importing torch again takes seconds."""
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--variant", "shaped"], "--variant must be of shaped-learn, shaped-recover, shaped-fixed, pre-ln, post-ln"),
        (["--variant", "pre-ln,pre-ln"], "--variant lists a name twice; got 'pre-ln,pre-ln'"),
        (["--preset", "huge", "--variant", "pre-ln"], "Unknown preset 'huge'; there are tiny, deep, small, paper"),
        (["--variant", "pre-ln", "--heads", "3"], "heads must divide width; got width=128, heads=3"),
        (["--variant", "pre-ln", "--gamma", "0.1"], "--gamma would change nothing: pre-ln have none"),
        (["--variant", "shaped-learn", "--gamma", "1.5"], "gamma must lie in [0, 1]; got 1.5"),
        (["--variant", "pre-ln", "--data", "/nowhere"], "/nowhere"),
        (["--variant", "pre-ln", "--steps", "0"], "steps must be at least 1; got 0"),
        (["--variant", "pre-ln", "--workers", "0"], "workers must be at least 1; got 0"),
    ],
)
def test_mlm_command_reports_bad_input_in_one_line(options, message, corpus, tmp_path, monkeypatch):
    data = [] if "--data" in options else ["--data", corpus]
    monkeypatch.setenv("COLUMNS", "300")
    done = limitformer("mlm", *options, *data, "--vocabulary", 300, "--out", tmp_path)
    assert done.exit_code == 2
    lines = [line for line in done.stderr.splitlines() if line.strip() and "…" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("Error: ")
    assert message in lines[0]


def test_mlm_command_trains_and_prints_the_loss(corpus, tmp_path):
    options = [part for name, value in SMALL.items() for part in (f"--{name}", value)]
    done = limitformer("mlm", "--variant", "post-ln", "--data", corpus, "--out", tmp_path, "--threads", 1, *options)
    assert done.exit_code == 0, done.stderr
    assert "post-ln" in done.stdout
    (folder,) = tmp_path.glob("post-ln*")
    summary = json.loads((folder / "summary.json").read_text())
    assert f"{summary['eval_loss']:.3f}" in done.stdout
