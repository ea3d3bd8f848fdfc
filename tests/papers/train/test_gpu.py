"""`make gpu` at size tiny: runs that are cut end with the same bits; bad input is refused before any work."""

import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
import typer
import xarray as xr
from typer.testing import CliRunner

from limitformer_papers import gpu
from limitformer_papers.gpu import PICTURES, SIZES, continue_runs
from limitformer_papers.training.interrupts import Budget, TrainingInterrupted
from limitformer_papers.training.log import FILE, read_log
from limitformer_papers.training.plan import RUN, SUMMARY
from limitformer_papers.training.tasks import mlm, vit
from train_states import assert_same_run

pytestmark = [
    pytest.mark.xdist_group("training"),  # they share a process to fork
    pytest.mark.usefixtures("one_thread"),  # bits are compared, which depend on the number of threads
]

ROOT = Path(__file__).resolve().parents[3]
RUNS = 4  # of size tiny: two variants each
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
    """A clock that advances by a second at every reading; at `last` it sends Ctrl-C to its process."""

    last: float = float("inf")
    now: float = 0.0

    def __call__(self) -> float:
        self.now += 1
        if self.now == self.last:
            os.kill(os.getpid(), signal.SIGINT)
        return self.now


def assert_same_runs(root: Path, other: Path, number: int) -> None:
    names = {path.parent.relative_to(root) for path in root.rglob(RUN)}
    assert names == {path.parent.relative_to(other) for path in other.rglob(RUN)}
    assert len(names) == number
    for name in names:
        assert_same_run(root / name, other / name)


@pytest.mark.slow
def test_runs_cut_by_ctrl_c_and_budgets_have_the_same_bits(whole, tmp_path, capsys):
    with pytest.raises(TrainingInterrupted) as ended:
        continue_runs("tiny", Budget(1e6, clock=Ticks(8)), tmp_path)
    assert ended.value.minutes is None
    commands = 1
    while not continue_runs("tiny", Budget(23 / 60, clock=Ticks()), tmp_path):
        assert "The minutes are over; the same command resumes." in capsys.readouterr().out
        commands += 1
    assert commands >= 3  # 64 steps in all
    assert "All is done." in capsys.readouterr().out
    assert_same_runs(tmp_path / "gpu-tiny", whole, RUNS)


def test_finished_runs_leave_pictures_and_no_checkpoints(whole, capsys, monkeypatch):
    for name in (one for names in PICTURES.values() for one in names):
        assert {path.suffix for path in (whole / "figures").glob(f"{name}.*")} == {".png", ".nc", ".json"}
    assert list(whole.rglob("checkpoints")) == list(whole.rglob("tensorboard")) == []
    monkeypatch.setattr("limitformer_papers.training.harness.ResumableTrainer", lambda *_, **__: pytest.fail("trained"))
    assert continue_runs("tiny", NEVER, whole.parent)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["ct-fig2: 2 of 2 runs are finished.", "st-lr, st-fig6: 2 of 2 runs are finished."]


def test_command_ends_when_the_minutes_are_over(tmp_path, capsys):
    assert not continue_runs("tiny", Budget(2 / 60, clock=Ticks()), tmp_path)
    assert "The minutes are over; the same command resumes." in capsys.readouterr().out


def test_unfinished_runs_are_drawn_as_far_as_they_all_are(whole, tmp_path):
    """One of two runs is cut after eight of twelve steps: both curves end there, with the losses of the whole runs."""
    root = tmp_path / "gpu-tiny"
    shutil.copytree(whole, root)
    folder = next(root.glob("pre-ln-*"))
    rows = read_log(folder)
    pq.write_table(rows.filter(pc.less_equal(rows["step"], 8)), folder / FILE)
    (folder / SUMMARY).unlink()
    gpu.draw_so_far(root)
    steps = {}
    for place in ("so-far", "figures"):
        with xr.open_dataset(root / place / "st-lr.nc") as data:
            steps[place] = data.load()
    assert int(steps["so-far"].step[-1]) == 8
    assert int(steps["figures"].step[-1]) == 12
    assert "8 steps" in steps["so-far"].attrs["runs"]
    early = steps["figures"].loss.sel(step=slice(0, 8))
    assert np.allclose(steps["so-far"].loss, early, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--minutes", "0"], "minutes must be positive; got 0."),
        (["--size", "papers"], "size must be one of tiny, small, medium, paper; got 'papers'. Nearest: paper."),
        (["--size", "paper", "--data", "/nowhere"], "dataset-fashion-mnist"),
    ],
)
def test_bad_input_is_refused_before_any_work(options, message, tmp_path):
    application = typer.Typer()
    application.command()(gpu.main)
    refused = CliRunner().invoke(application, [*options, "--out", str(tmp_path / "runs")])
    assert refused.exit_code == 2
    assert message in re.sub(r"\s+", " ", refused.stderr)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("size", SIZES)
def test_settings_of_every_size_are_fields_of_the_presets(size):
    settings = SIZES[size]
    config, _ = vit.with_changes(vit.PRESETS[settings.vit], settings.vit_changes)
    words = mlm.preset(settings.mlm, learning_rates=settings.rates, **settings.mlm_changes)
    if size in ("medium", "paper"):
        assert (config.layers, config.dim, config.batch, config.epochs, config.warmup_epochs) == (128, 96, 128, 300, 8)
        sizes = (512, 20_000, True) if size == "medium" else (768, 100_000, False)
        assert (words.width, words.steps, words.bf16) == sizes


def test_size_paper_begins_with_the_rate_of_the_entropy_collapse(tmp_path, monkeypatch):
    """[ST, App. D.1]: the grid of rates without 1e-4, both depths, batch 32, Adam's warm-up of 4,000 steps."""
    read = []
    monkeypatch.setattr("limitformer_papers.training.data.images.read_images", lambda source, data: read.append(source))
    (tmp_path / gpu.CIFAR).mkdir()
    jobs = gpu.jobs_of(SIZES["paper"], tmp_path, tmp_path)
    assert list(jobs) == ["mlm", "vit"]
    names = [folder.name for folder in jobs["mlm"]]
    assert names[:3] == ["shaped-recover-d18-gamma0.2-lr0.001-seed0", "pre-ln-d18-lr0.001-seed0",
                         "shaped-recover-d24-gamma0.2-lr0.001-seed0"]  # fmt: skip
    assert len(names) == 2 * 2 * 3 * 2
    assert {folder.parent.name for folder in jobs["vit"]} == {"vit-paper"}
    gpu.jobs_of(SIZES["medium"], tmp_path, tmp_path)
    assert read == ["cifar10", "fashion"]


def test_gpu_gets_tf32_and_compiled_steps(tmp_path, monkeypatch):
    def options(has_gpu: bool, has_tf32: bool):
        monkeypatch.setattr("limitformer_papers.training.plan.has_gpu", lambda: has_gpu)
        monkeypatch.setattr("limitformer_papers.training.plan.has_tf32", lambda: has_tf32)
        trains = [train for jobs in gpu.jobs_of(SIZES["tiny"], tmp_path, None).values() for train in jobs.values()]
        return {(train.keywords["tf32"], train.keywords["compile"], train.keywords.get("loaders")) for train in trains}

    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert options(True, True) == {(True, True, 5), (True, True, None)}
    assert options(True, False) == {(False, True, 5), (False, True, None)}
    assert options(False, False) == {(False, False, 0), (False, False, None)}


def test_make_gpu_passes_size_minutes_and_folders():
    def command(*variables: str) -> str:
        done = subprocess.run(["make", "-n", "gpu", *variables], cwd=ROOT, capture_output=True, text=True, check=True)
        return " ".join(done.stdout.replace("\\\n", " ").splitlines()[-1].partition("-m ")[2].split())

    assert command() == "limitformer_papers.gpu --size paper --minutes 8 --out runs"
    assert command("SIZE=tiny", "MINUTES=25", "RUNS=a", "DATA=b") == (
        "limitformer_papers.gpu --size tiny --minutes 25 --out a --data b"
    )
