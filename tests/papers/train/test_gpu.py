"""`make gpu` at size tiny: runs that are cut anywhere end with the same bits; bad input is refused before any work."""

import json
import os
import re
import signal
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from forks import forked
from limitformer.base.errors import InputError
from limitformer_papers import gpu
from limitformer_papers.gpu import PICTURES, SIZES, GpuSize, TrainingJob, continue_runs, hours, status
from limitformer_papers.training.data import idx
from limitformer_papers.training.interrupts import Budget, TrainingInterrupted
from limitformer_papers.training.runs import RUN
from limitformer_papers.training.tasks import mlm, vit
from train_states import assert_same_run

pytestmark = [
    pytest.mark.xdist_group("training"),  # they share a process to fork
    pytest.mark.usefixtures("one_thread"),  # bits are compared, which depend on the number of threads
]

ROOT = Path(__file__).resolve().parents[3]
RUNS = 8  # of size tiny: two seeds × two variants, two rates × two variants
NEVER = Budget(1e6, clock=float)  # a clock that stands still


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of uninterrupted runs."""
    folder, threads = tmp_path_factory.mktemp("whole"), torch.get_num_threads()
    torch.set_num_threads(1)
    assert continue_runs("tiny", NEVER, folder)
    torch.set_num_threads(threads)
    return folder / "gpu-tiny"


@dataclass
class Ticks:
    """A clock that advances by a second at every reading; at `last` it sends a signal to its process."""

    last: float = float("inf")
    signal: int = signal.SIGKILL
    now: float = 0.0

    def __call__(self) -> float:
        self.now += 1
        if self.now == self.last:
            os.kill(os.getpid(), self.signal)
        return self.now


def names_of(root: Path) -> set[str]:
    return {path.parent.relative_to(root).as_posix() for path in root.rglob(RUN)}


def assert_same_runs(root: Path, other: Path) -> None:
    assert names_of(root) == names_of(other)
    assert len(names_of(root)) == RUNS
    for name in names_of(root):
        assert_same_run(root / name, other / name)


def rows_of(root: Path) -> list[dict]:
    return [json.loads(line) for line in (root / "gpu.jsonl").read_text().splitlines()]


@pytest.mark.slow(keep=1)
def test_runs_cut_by_budgets_have_the_same_bits(whole, tmp_path, capsys):
    commands = 1
    while not continue_runs("tiny", Budget(23 / 60, clock=Ticks()), tmp_path):
        assert "The minutes are over; the same command resumes." in capsys.readouterr().out
        commands += 1
    assert commands >= 4  # 128 steps in all
    assert "All is done." in capsys.readouterr().out
    assert_same_runs(tmp_path / "gpu-tiny", whole)
    rows = rows_of(tmp_path / "gpu-tiny")
    cut = [row for row in rows if row["result"] is None]
    assert len(cut) >= 3
    assert all(0 < row["step"] < row["steps"] for row in cut)
    assert [row["run"] for row in rows if row["result"]] == [row["run"] for row in rows_of(whole)]


def killed(out: Path, last: int) -> int:
    process = forked(continue_runs, "tiny", Budget(1e6, clock=Ticks(last)), out)
    process.join(300)
    return process.exitcode


@pytest.mark.slow
def test_killed_command_resumes_to_the_last_bit(whole, tmp_path):
    # In a vision run between checkpoints, in another one, and in a language run.
    assert [killed(tmp_path, last) for last in (8, 40, 75)] == [-signal.SIGKILL] * 3
    assert (tmp_path / "gpu-tiny" / "figures" / "ct-fig2.json").exists()
    assert not (tmp_path / "gpu-tiny" / "figures" / "st-lr.json").exists()
    assert continue_runs("tiny", NEVER, tmp_path)
    assert_same_runs(tmp_path / "gpu-tiny", whole)


def test_ctrl_c_saves_records_and_resumes(whole, tmp_path):
    with pytest.raises(TrainingInterrupted) as ended:
        continue_runs("tiny", Budget(1e6, clock=Ticks(8, signal.SIGINT)), tmp_path)
    assert ended.value.minutes is None
    (row,) = rows_of(tmp_path / "gpu-tiny")
    assert (row["run"], row["result"]) == ("vit-tiny/constant-0", None)
    assert row["step"] == ended.value.pickled_arguments[1]
    assert continue_runs("tiny", NEVER, tmp_path)
    assert_same_runs(tmp_path / "gpu-tiny", whole)


def test_finished_runs_leave_pictures_a_record_and_no_checkpoints(whole):
    for name in (one for names in PICTURES.values() for one in names):
        assert {path.suffix for path in (whole / "figures").glob(f"{name}.*")} == {".png", ".nc", ".json"}
    assert list(whole.rglob("checkpoints")) == []
    assert list(whole.rglob("tensorboard")) == []
    rows = rows_of(whole)
    assert {row["run"] for row in rows} == names_of(whole)
    assert (whole / "gpu.jsonl").stat().st_size < 1500 * RUNS
    for row in rows:
        summary = json.loads((whole / row["run"] / "summary.json").read_text())
        assert row["result"] == summary
        assert row["seconds"] == pytest.approx(summary["seconds"], abs=1e-3)
        assert row["versions"]["torch"] == torch.__version__
        assert row["device"] == row["begun_on"] == gpu_or_cpu()
    assert {(row["variant"], row["seed"]) for row in rows if row["experiment"] == "vit"} == {
        (variant, seed) for variant in ("constant", "random") for seed in (0, 1)
    }
    assert {(row["variant"], row["learning_rate"]) for row in rows if row["experiment"] == "mlm"} == {
        (variant, rate) for variant in ("shaped-recover", "pre-ln") for rate in (1e-3, 3e-3)
    }


def gpu_or_cpu() -> str:
    from limitformer_papers.training.device import device_name

    return device_name()


def test_finished_list_trains_nothing(whole, capsys, monkeypatch):
    monkeypatch.setattr("limitformer_papers.training.harness.ResumableTrainer", lambda *_, **__: pytest.fail("trained"))
    before = (whole / "gpu.jsonl").read_bytes()
    assert continue_runs("tiny", NEVER, whole.parent)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "ct-fig2: 4 of 4 runs are finished, 100 % of the steps.",
        "st-lr, st-fig6: 4 of 4 runs are finished, 100 % of the steps.",
    ]
    assert not any("Drawn" in line for line in lines)
    assert (whole / "gpu.jsonl").read_bytes() == before


def write_run(folder: Path, steps: int, summary: dict | None) -> TrainingJob:
    folder.mkdir(parents=True)
    (folder / RUN).write_text(json.dumps({"plan": {"steps": steps}}))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return TrainingJob(folder, lambda: None)


def test_status_estimates_the_time_from_the_runs_so_far(tmp_path):
    finished = write_run(tmp_path / "a", 1000, {"steps": 1000, "seconds": 500.0})
    waiting = write_run(tmp_path / "b", 1000, None)
    size = GpuSize(vit="tiny", mlm="tiny", guesses={"vit": 90.0, "mlm": 1.0})
    jobs = [finished, waiting, TrainingJob(tmp_path / "c", lambda: None)]
    (line,) = status(size, {"vit": jobs})
    assert line == "ct-fig2: 1 of 3 runs are finished, 33 % of the steps; about 17 min left, as measured so far."
    (line,) = status(size, {"vit": jobs[1:]})
    assert line.endswith(
        "0 of 2 runs are finished, 0 % of the steps; about 3.0 h on one GPU, a guess without a measurement."
    )
    assert hours(7200) == "about 120 min"


def test_picture_that_cannot_be_drawn_is_named(tmp_path, capsys):
    gpu.draw("vit", tmp_path)
    assert "ct-fig2 is not drawn: No finished runs in" in capsys.readouterr().out


def invoke(*options):
    application = typer.Typer()
    application.command()(gpu.main)
    return CliRunner().invoke(application, [str(one) for one in options])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--minutes", "0"], "minutes must be positive; got 0."),
        (["--size", "papers"], "size must be one of tiny, small, paper; got 'papers'. Nearest: paper."),
        (["--size", "tiny", "--data", "/nowhere"], "The digits come with scikit-learn"),
    ],
)
def test_bad_input_is_refused_before_any_work(options, message, tmp_path):
    refused = invoke(*options, "--out", tmp_path / "runs")
    assert refused.exit_code == 2
    assert message in re.sub(r"\s+", " ", refused.stderr)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("size", ["small", "paper"])
def test_missing_images_are_refused_before_any_work(size, tmp_path):
    refused = invoke("--size", size, "--data", tmp_path / "nowhere", "--out", tmp_path / "runs")
    assert refused.exit_code == 2
    assert "dataset-fashion-mnist" in refused.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("size", SIZES)
def test_settings_of_every_size_are_fields_of_the_presets(size):
    settings = SIZES[size]
    config, _ = vit.with_changes(vit.PRESETS[settings.vit], settings.vit_changes)
    words = mlm.preset(settings.mlm, learning_rates=settings.rates, **settings.mlm_changes)
    if size == "paper":
        assert (config.layers, config.dim, config.batch, config.epochs, config.warmup_epochs) == (128, 96, 128, 300, 8)
        assert (words.width, words.depth, words.steps, words.bf16) == (512, 18, 20_000, True)
    assert settings.guesses.keys() == PICTURES.keys()


def test_gpu_gets_tf32_and_compiled_steps(tmp_path, monkeypatch):
    def options(has_gpu: bool, has_tf32: bool):
        monkeypatch.setattr("limitformer_papers.training.device.has_gpu", lambda: has_gpu)
        monkeypatch.setattr("limitformer_papers.training.device.has_tf32", lambda: has_tf32)
        jobs = [job for jobs in gpu.jobs_of(SIZES["tiny"], tmp_path, None).values() for job in jobs]
        return {(job.train.keywords["tf32"], job.train.keywords["compile"]) for job in jobs}

    assert options(True, True) == {(True, True)}
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert gpu.jobs_of(SIZES["tiny"], tmp_path, None)["vit"][0].train.keywords["loaders"] == 5
    assert options(True, False) == {(False, True)}
    assert options(False, False) == {(False, False)}


def test_make_gpu_passes_size_minutes_and_folders():
    def command(*variables: str) -> str:
        done = subprocess.run(["make", "-n", "gpu", *variables], cwd=ROOT, capture_output=True, text=True, check=True)
        return " ".join(done.stdout.replace("\\\n", " ").splitlines()[-1].partition("-m ")[2].split())

    assert command() == "limitformer_papers.gpu --size paper --minutes 8 --out runs"
    assert command("SIZE=tiny", "MINUTES=25", "RUNS=a", "DATA=b") == (
        "limitformer_papers.gpu --size tiny --minutes 25 --out a --data b"
    )


def test_run_that_fails_ends_the_command_with_its_error(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise InputError("no memory")

    monkeypatch.setattr(vit, "run_vit", fail)
    with pytest.raises(InputError, match="no memory"):
        continue_runs("tiny", NEVER, tmp_path)
    assert not (tmp_path / "gpu-tiny" / "gpu.jsonl").exists()


def write_images(folder: Path) -> None:
    """Write 40 training and 20 test images in the format of Fashion-MNIST."""
    generator = np.random.default_rng(0)
    for name in idx.NAMES:
        shape = (40 if name.startswith("train") else 20, *((28, 28) if "images" in name else ()))
        head = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">i4").tobytes()
        (folder / name).write_bytes(head + generator.integers(10, size=shape, dtype=np.uint8).tobytes())


@pytest.mark.slow
def test_papers_list_runs_on_a_small_set_of_its_images(tmp_path, monkeypatch):
    """The list of size paper, with its augmented images, its rates and its seeds, on networks of two layers."""
    write_images(tmp_path)
    small = {"layers": 2, "dim": 8, "epochs": 4, "warmup_epochs": 1, "batch": 20}
    paper = replace(SIZES["paper"], mlm="tiny", mlm_changes=gpu.TINY_WORDS, mlm_seeds=1, documents=40)
    monkeypatch.setitem(SIZES, "paper", replace(paper, vit_changes=SIZES["paper"].vit_changes | small))
    roots = [tmp_path / name / "gpu-paper" for name in ("whole", "parts")]
    assert continue_runs("paper", NEVER, roots[0].parent, tmp_path)
    while not continue_runs("paper", Budget(21 / 60, clock=Ticks()), roots[1].parent, tmp_path):
        pass
    assert names_of(roots[0]) == names_of(roots[1])
    for name in names_of(roots[0]):
        assert_same_run(roots[1] / name, roots[0] / name)
    rows = [row for row in rows_of(roots[0]) if row["experiment"] == "vit"]
    assert {(row["variant"], row["seed"], row["learning_rate"]) for row in rows} == {
        (variant, seed, vit.PRESETS["fashion"].rate(variant)) for variant in vit.VARIANTS for seed in range(3)
    }
    assert (roots[1] / "figures" / "ct-fig2.png").exists()


def test_damaged_lines_of_the_record_are_left_out(tmp_path):
    path = tmp_path / "gpu.jsonl"
    good = json.dumps({"run": "a", "step": 3, "result": None})
    path.write_bytes(b"\n".join([good.encode(), good.encode()[:-9], b"\xff\xfe\x00", b"1", b"[]", b"{}"]))
    assert list(gpu.rows_of(path)) == [good]
