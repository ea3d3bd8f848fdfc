"""Grids on several processes: Ctrl-C saves every run, a failed run ends no other, and each process has its GPU."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forks import forking
from grid_program import dies_as_it_starts, mixed, of_all_kinds, slow
from limitformer.base.errors import InputError
from limitformer_papers.training import grid, interrupts, pool
from limitformer_papers.training.grid import GridInterrupted, gpus, run_all
from limitformer_papers.training.interrupts import Interrupt, TrainingInterrupted
from limitformer_papers.training.log import read_log
from sweep_grids import alive
from train_program import STEPS, At, small_run

pytestmark = pytest.mark.xdist_group("training")  # they share a process to fork

PROGRAM = """
import sys
from functools import partial
from limitformer_papers.training import pool
from grid_program import patient
from limitformer_papers.training.grid import run_all

def hand_out(self, worker, hand_out=pool.Pool.hand_out):
    hand_out(self, worker)
    print("handed out", flush=True)

if __name__ == "__main__":
    pool.Pool.hand_out = hand_out
    for run, outcome in run_all(range(3), partial(patient, out=sys.argv[1]), workers=2):
        print(run, outcome, flush=True)
"""


def begun(folder: Path) -> subprocess.Popen[str]:
    """Start a grid of three runs on two workers, in its own process group, as a terminal does."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, str(program), str(folder)]
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def until(happened, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def checkpoint(folder: Path) -> int:
    """Return the step of the newest checkpoint, or 0."""
    return max((int(path.name.partition("-")[2]) for path in folder.glob("checkpoints/checkpoint-*")), default=0)


@pytest.mark.slow
def test_ctrl_c_while_workers_start_saves_their_runs(tmp_path):
    process = begun(tmp_path)
    assert [process.stdout.readline() for _ in range(2)] == ["handed out\n"] * 2  # to workers that still import
    os.killpg(process.pid, signal.SIGINT)
    _, output = process.communicate(timeout=300)
    assert output.count("Finishing the steps in work; Ctrl-C again to stop at once.") == 1
    assert "GridInterrupted: Interrupted; runs: 2 stopped and saved, 1 not begun." in output
    assert output.count("Traceback") == 1  # of the program, which does not catch it
    assert [checkpoint(tmp_path / str(seed)) for seed in (0, 1)] == [1, 1]
    assert not (tmp_path / "2").exists()


def interrupt_all() -> None:
    """Send Ctrl-C to all processes, as a terminal does."""
    for process in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        os.kill(process, signal.SIGINT)


def test_ctrl_c_saves_runs_and_a_second_ends_stuck_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "spawning", forking)

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
    assert_resumes_to_the_last_bit(tmp_path, 0)


def assert_resumes_to_the_last_bit(folder: Path, seed: int) -> None:
    slow(seed, folder, 0.0)
    slow(seed, folder / "whole", 0.0)
    assert read_log(folder / str(seed)).equals(read_log(folder / "whole" / str(seed)))
    ours, theirs = (load_file(one / str(seed) / "model" / "model.safetensors") for one in (folder, folder / "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_worker_without_its_parent_saves_its_run(tmp_path):
    ours, theirs = forking.Pipe()
    begin = pickle.dumps(partial(grid.begin, partial(slow, out=tmp_path), []))
    worker = forking.Process(target=pool.serve, args=(theirs, begin, 0), daemon=True)
    worker.start()
    theirs.close()
    ours.send([0])
    until(lambda: (tmp_path / "0" / "run.json").exists())
    ours.close()
    worker.join(60)
    assert worker.exitcode == 0
    assert 0 < checkpoint(tmp_path / "0") < STEPS


@pytest.mark.parametrize("dying", [1, 99])
def test_workers_that_die_as_they_start_are_replaced_and_then_one_error(tmp_path, monkeypatch, dying):
    monkeypatch.setattr(pool, "spawning", forking)
    group = pool.Pool(partial(dies_as_it_starts, tmp_path, dying), 1, caller="run_all")
    if dying == 1:
        assert dict(group.outcomes(["a", "b"])) == {"a": 1, "b": 1}
        return
    says = r"^Every worker process exits during start-up \(exit code 3\)\. In a script, call run_all below "
    with pytest.raises(InputError, match=says):
        list(group.outcomes(["a", "b"]))
    assert len(list(tmp_path.iterdir())) == pool.MOST_FAILED_STARTS


def as_words(outcomes) -> dict[str, str]:
    return {run: str(outcome) if isinstance(outcome, InputError) else "fine" for run, outcome in outcomes}


def test_failed_run_does_not_end_others_on_workers(capfd, monkeypatch):
    monkeypatch.setenv(grid.DEVICES, "4,6")
    runs = ["good", "better", "killed", "bad", "bug"]
    outcomes = dict(run_all(runs, of_all_kinds, workers=2))
    assert outcomes["good"] == {"value": 4.0, "patience": float("inf"), "device": 4.0}  # no bars
    assert outcomes["better"] == {"value": 6.0, "patience": float("inf"), "device": 6.0}
    words = as_words(outcomes.items())
    assert words["bad"] == "got 0, at least 1"
    assert words["bug"] == "ZeroDivisionError: by nothing"
    assert words["killed"].startswith("The worker died in this run (killed by SIGKILL; out of memory? ")
    output = capfd.readouterr().err
    assert "this is good" in output
    assert 'raise ZeroDivisionError("by nothing")' in output
    assert multiprocessing.active_children() == []


def test_failed_run_does_not_end_others_in_one_process(capfd, monkeypatch):
    monkeypatch.setenv(grid.DEVICES, "0")
    words = as_words(run_all(["bad", "bug", "good"], of_all_kinds))
    assert words == {"bad": "got 0, at least 1", "bug": "ZeroDivisionError: by nothing", "good": "fine"}
    assert 'raise ZeroDivisionError("by nothing")' in capfd.readouterr().err


def test_processes_of_one_run_end_together(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ZeroDivisionError):
        list(run_all(["bug", "good"], of_all_kinds))
    with pytest.raises(InputError, match="workers must be 1"):
        list(run_all(["bug", "good"], of_all_kinds, workers=2))


def test_ctrl_c_between_runs_names_checkpoints():
    def interrupted(run):
        raise KeyboardInterrupt

    with pytest.raises(GridInterrupted, match="earlier checkpoints stay"):
        list(run_all([1, 2], interrupted))


def test_interruption_pickles():
    import pickle

    error = TrainingInterrupted(Path("runs/a"), 3, 7)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "Interrupted at step 3 of 7, which is saved; start it again to resume: runs/a"


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
