"""Grids on several processes: Ctrl-C saves every run, a failed run ends no other, and each process has its GPU."""

import errno
import multiprocessing
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forks import forking
from grid_program import mixed, of_all_kinds, slow
from limitformer.base.errors import InputError
from limitformer_papers.commands.train import finish_all
from limitformer_papers.training import grid, interrupts
from limitformer_papers.training.grid import GridInterrupted, gpus, run_all
from limitformer_papers.training.interrupts import Interrupt, TrainingInterrupted
from limitformer_papers.training.log import read_log
from sweep_grids import alive
from train_program import STEPS, At, small_run

pytestmark = pytest.mark.xdist_group("training")  # they share a process to fork
LINE = 'raise ZeroDivisionError("by nothing")'


def until(happened, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def checkpoint(folder: Path) -> int:
    """Return the step of the newest checkpoint, or 0."""
    return max((int(path.name.partition("-")[2]) for path in folder.glob("checkpoints/checkpoint-*")), default=0)


def interrupt_all() -> None:
    """Send Ctrl-C to all processes, as a terminal does."""
    for process in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        os.kill(process, signal.SIGINT)


def test_ctrl_c_saves_runs_and_a_second_ends_stuck_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "spawning", forking)

    def twice() -> None:
        until(lambda: all((tmp_path / str(seed) / "run.json").exists() for seed in (0, 1)))
        workers = [child.pid for child in multiprocessing.active_children()]
        interrupt_all()
        until(lambda: [alive(pid) for pid in workers].count(True) == 1)  # one has saved and ended
        interrupt_all()

    handler, thread = signal.getsignal(signal.SIGINT), threading.Thread(target=twice)
    thread.start()
    with pytest.raises(GridInterrupted) as ended:
        list(run_all(range(3), partial(mixed, out=tmp_path), workers=2))
    thread.join()
    counts = "1 stopped and saved, 1 ended at once, which resume from their last checkpoints, 1 not begun"
    assert str(ended.value) == f"Interrupted; runs: {counts}. Start it again to resume."
    assert signal.getsignal(signal.SIGINT) is handler
    assert multiprocessing.active_children() == []
    assert 0 < checkpoint(tmp_path / "0") < STEPS
    slow(0, tmp_path, 0.0)
    slow(0, tmp_path / "whole", 0.0)
    assert read_log(tmp_path / "0").equals(read_log(tmp_path / "whole" / "0"))
    ours, theirs = (load_file(one / "0" / "model" / "model.safetensors") for one in (tmp_path, tmp_path / "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def as_words(outcomes) -> dict[str, str]:
    return {run: str(outcome) if isinstance(outcome, InputError) else "fine" for run, outcome in outcomes}


def test_failed_run_does_not_end_others_on_workers(capfd, monkeypatch):
    monkeypatch.setenv(grid.DEVICES, "4,6")
    monkeypatch.setattr(grid, "spawning", forking)
    runs = ["good", "better", "killed", "bad", "bug", "bug"]
    every = list(run_all(runs, of_all_kinds, workers=2))
    outcomes, words = dict(every), as_words(every)
    values = {(outcomes[name]["value"], outcomes[name]["patience"]) for name in ("good", "better")}
    assert values == {(4.0, float("inf")), (6.0, float("inf"))}  # no bars
    assert {outcomes[name]["device"] for name in ("good", "better")} == {4.0, 6.0}
    assert words["bad"] == "got 0, at least 1"
    assert words["bug"] == "ZeroDivisionError: by nothing"
    assert words["killed"].startswith("The worker died in this run (killed by SIGKILL; out of memory? ")
    assert capfd.readouterr().err.count(LINE) == 1  # once for both runs
    assert multiprocessing.active_children() == []


def test_failed_run_does_not_end_others_in_one_process(capfd, monkeypatch):
    monkeypatch.setenv(grid.DEVICES, "0")
    words = as_words(run_all(["bad", "bug", "good"], of_all_kinds))
    assert words == {"bad": "got 0, at least 1", "bug": "ZeroDivisionError: by nothing", "good": "fine"}
    assert LINE in capfd.readouterr().err


def test_file_that_cannot_be_used_gives_no_traceback(capfd):
    def long_name(run):
        raise OSError(errno.ENAMETOOLONG, "File name too long", "aaa")

    ((_, outcome),) = run_all([1], long_name)
    assert str(outcome) == "Cannot use aaa: File name too long."
    assert "Traceback" not in capfd.readouterr().err


def line_of(run, summary):
    return f"{run} is finished"


def test_reason_that_ends_several_runs_is_printed_once(capsys, monkeypatch):
    monkeypatch.setenv(grid.DEVICES, "0")
    with pytest.raises(InputError, match=r"^3 of 4 runs failed, for the 2 reasons above\.$"):
        finish_all(["bad", "bug", "good", "bad"], of_all_kinds, 1, line_of)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line[1:3] == "/4"] == [
        "1/4 failed: got 0, at least 1",
        "2/4 failed: ZeroDivisionError: by nothing",
        "3/4 good is finished",
        "4/4 failed as 1/4 did",
    ]


def test_reason_of_a_run_alone_is_the_error(capsys):
    with pytest.raises(InputError, match=r"^got 0, at least 1$"):
        finish_all(["bad"], of_all_kinds, 1, line_of)
    assert "got 0" not in capsys.readouterr().err


def test_ctrl_c_between_runs_names_checkpoints():
    def interrupted(run):
        raise KeyboardInterrupt

    with pytest.raises(GridInterrupted, match="earlier checkpoints stay"):
        list(run_all([1, 2], interrupted))


def test_worker_stops_when_its_parent_asks(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(interrupts, "ORDERS", [lambda: bool(asked)])
    with pytest.raises(TrainingInterrupted, match="step 7 of 50"):
        small_run(tmp_path, [At(7, lambda: asked.append(1))])
    assert Interrupt().requested
    assert not asked.clear()
    assert not Interrupt().requested


def test_gpus_are_those_that_cuda_may_use(monkeypatch):
    monkeypatch.setattr(grid.torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv(grid.DEVICES, raising=False)
    assert gpus() == ["0", "1", "2"]
    monkeypatch.setenv(grid.DEVICES, "4,6")
    assert gpus() == ["4", "6"]
    monkeypatch.setenv(grid.DEVICES, "")
    assert gpus() == []
