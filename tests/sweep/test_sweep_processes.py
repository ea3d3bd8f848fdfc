"""Sweeps on processes: the bits of one process after any kill, and no worker that remains."""

import os
import random
import resource
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

import limitformer as lf
from limitformer.base import pool
from limitformer.base.errors import InputError
from limitformer.base.interrupts import interrupts_wait
from limitformer.sweep import SweepInterrupted, processes
from limitformer.sweep.processes import pool_of
from limitformer.sweep.work import Job
from sweep_grids import (
    CELLS,
    NETWORK,
    alive,
    assert_complete,
    assert_same_bits,
    cell_path,
    cells_written,
    children,
    done_cells,
    environment,
    flip,
    run,
    set_trap,
    slow_sweep,
    sweep,
    wait_until,
    workers_of,
    written,
)

BETAS = {"beta": [0.0, 0.5, 1.0]}


@pytest.fixture(autouse=True)
def no_worker_remains():
    """Fail if a worker of the test is alive at its end."""
    before = workers_of(os.getpid())
    yield
    assert [pid for pid in workers_of(os.getpid()) if pid not in before and alive(pid)] == []


def on_two(description, path, **options):
    return run(description, path, workers=2, **options)


@contextmanager
def killer(path, at):
    """Kill -9 a random worker each time that a number of cells in `at` is done; yield the list of those killed."""
    killed, over, chance = [], threading.Event(), random.Random(0)

    def kill():
        for count in at:
            while done_cells(path) < count:
                if over.wait(0.002):
                    return
            while not (living := [pid for pid in workers_of(os.getpid()) if alive(pid)]):
                if over.wait(0.002):  # one that has died is being replaced
                    return
            victim = chance.choice(living)
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


# Bits.


def test_two_processes_in_random_order_give_the_bits_of_one(tmp_path):
    """A damaged cell is computed again on two processes, and no other."""
    run(sweep(), tmp_path / "one.sweep")
    report = on_two(sweep(), tmp_path / "two.sweep", shuffle=True)
    assert (report.done, report.failed, report.skipped) == (6, 0, 0)
    assert_same_bits(tmp_path / "two.sweep", tmp_path / "one.sweep")
    assert_complete(tmp_path / "two.sweep", 6)
    before = written(tmp_path / "two.sweep")
    flip(cell_path(tmp_path / "two.sweep", (1, 1)))
    assert on_two(sweep(), tmp_path / "two.sweep").skipped == 5
    assert cells_written(before, written(tmp_path / "two.sweep")) == [(1, 1)]
    assert_same_bits(tmp_path / "two.sweep", tmp_path / "one.sweep")


# Kills.


def test_killed_workers_change_nothing(whole, tmp_path):
    path = tmp_path / "s.sweep"
    with killer(path, at=(2, 15)) as killed:
        report = on_two(slow_sweep(CELLS), path)
    assert len(set(killed)) == 2
    assert (report.done, report.failed) == (CELLS, 0)
    assert_complete(path, CELLS)
    assert_same_bits(path, whole)


def test_killed_parent_ends_its_workers_and_the_store_resumes(whole, tmp_path):
    """While the parent runs, a second run is refused in a line that names it."""
    path = tmp_path / "s.sweep"
    program = [
        sys.executable,
        "-W",
        "error",
        str(Path(__file__).parents[1] / "sweep_program.py"),
        str(path),
        str(CELLS),
        "4000",
    ]
    parent = subprocess.Popen(program, env=environment())
    try:
        wait_until(lambda: done_cells(path) >= 4)
        with pytest.raises(
            InputError, match=rf"^{path} is in use by process {parent.pid} on .* since .*\. Nearest: wait"
        ):
            run(slow_sweep(CELLS), path)
        assert parent.poll() is None
        workers = workers_of(parent.pid)
    finally:
        parent.kill()
        parent.wait()
    assert len(workers) == 2
    wait_until(lambda: not any(alive(pid) for pid in workers))
    (path / "cells" / "4242.unfinished").write_bytes(b"half")
    done = done_cells(path)
    assert done < CELLS, "nothing was left to do"
    report = run(slow_sweep(CELLS), path)
    assert (report.done, report.skipped) == (CELLS, done)
    assert_complete(path, CELLS)
    assert_same_bits(path, whole)


def test_cell_that_kills_its_worker_or_fails_is_recorded_and_others_continue(tmp_path, monkeypatch):
    """A worker exits like after a crash in a library; the cell is then an ordinary failed cell."""
    path = tmp_path / "s.sweep"
    with monkeypatch.context() as patch:
        set_trap(tmp_path, patch, exit=0.5, **{"raise": 1.0})
        patch.setattr(processes, "PATIENCE", 0)
        report = on_two(sweep(BETAS), path)
    assert (report.done, report.failed) == (1, 2)
    assert report.errors == {(1,): "the worker died 2 times in this cell (exit code 3)", (2,): "RuntimeError: a trap"}
    assert lf.load_sweep(path)["status"].values.tolist() == [1, 2, 2]
    assert run(sweep(BETAS), path, retry_failed=False).failed == 2
    assert run(sweep(BETAS), path).done == 3
    run(sweep(BETAS), tmp_path / "whole.sweep")
    assert_same_bits(path, tmp_path / "whole.sweep")


def test_patience_outlasts_random_kills_and_ends():
    """A cell gets at least twice the tries of an ordinary failure, and a finite number."""
    job = Job("", "", (), threads=1, tries=2, any_version=False)
    assert 4 <= pool_of(job, 2).patience <= 10


def test_worker_that_cannot_start_is_one_error(tmp_path, monkeypatch):
    """Workers of a script without a guard would run it again."""
    set_trap(tmp_path, monkeypatch, start="each")
    monkeypatch.setattr(pool, "MOST_FAILED_STARTS", 3)
    with pytest.raises(
        InputError, match=r"^Every worker process exits during start-up \(exit code 3\)\. In a script, "
    ) as raised:
        on_two(sweep(BETAS), tmp_path / "s.sweep")
    assert "\n" not in str(raised.value)
    monkeypatch.delenv("SWEEP_TRAP")
    report = run(sweep(BETAS), tmp_path / "s.sweep")
    assert (report.done, report.skipped) == (3, 0)


# Disks.


@contextmanager
def file_size_limit(size):
    """Limit the size of files, here and in processes that start here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_file_that_cannot_be_written_is_one_error_and_the_store_resumes(tmp_path):
    """The covariances of a cell are larger than the system's limit for files."""
    settings = {"samples": 5000, "seed": 1, "start": {"tokens": 3}}
    description = lf.Sweep(NETWORK, over={"gamma": [0.1, 0.2, 0.3, 0.4]}, simulate=settings, reduce={"samples": True})
    path = tmp_path / "s.sweep"
    run(description, tmp_path / "whole.sweep")  # also compiles, and compiled kernels are larger files
    with file_size_limit(200_000), pytest.raises(InputError) as raised:
        on_two(description, path)
    expected = f"Cannot write the store {path}: File too large. What is finished stays; start it again."
    assert str(raised.value) == expected
    assert run(description, path).done == 4
    assert list(path.rglob("*.unfinished")) == []  # a worker that was stopped within a write may have left one
    assert_complete(path, 4)
    assert_same_bits(path, tmp_path / "whole.sweep")


# Ctrl-C.


def test_ctrl_c_ends_the_workers_and_the_store_resumes(whole, tmp_path):
    path = tmp_path / "s.sweep"

    def interrupt():
        wait_until(lambda: done_cells(path) >= 5)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SweepInterrupted, match=r"^Interrupted with \d+ of 30 cells done; start it again to go on: "):
        on_two(slow_sweep(CELLS), path)
    thread.join()
    done = done_cells(path)
    assert 5 <= done < CELLS
    assert run(slow_sweep(CELLS), path).skipped == done
    assert_complete(path, CELLS)
    assert_same_bits(path, whole)


def test_workers_ignore_ctrl_c_from_the_start(tmp_path):
    """A terminal sends Ctrl-C to workers too; they would print tracebacks."""
    run(sweep(BETAS), tmp_path / "s.sweep")
    group = pool_of(Job(str(tmp_path / "s.sweep"), "", (), threads=1, tries=1, any_version=False), 1)
    try:
        pid = group.start(0).process.pid
        facts = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert int(facts["SigBlk"], 16) >> (signal.SIGINT - 1) & 1
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, []), "Ctrl-C is blocked here"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        group.close()
    assert not alive(pid)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["heard here", "heard by another thread"])
def test_ctrl_c_waits_while_a_worker_starts(elsewhere):
    """The signal may reach any thread; a worker that has not started completely would print an error."""
    started, steps = threading.Event(), []

    def interrupt_oneself():
        started.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def block():
        with interrupts_wait():
            started.set()
            thread.join() if elsewhere else os.kill(os.getpid(), signal.SIGINT)
            steps.append("to the end")

    thread = threading.Thread(target=interrupt_oneself if elsewhere else lambda: None)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        block()
    assert steps == ["to the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("cells", [0, 8], ids=["as they start", "as they work"])
def test_ctrl_c_on_the_command_line_is_one_line_and_exit_code_130(tmp_path, cells):
    file = tmp_path / "sweep.toml"
    file.write_text(
        '[model]\nkind = "StochasticTransformer"\ntokens = 2\ndim = 4\nbeta = 1.0\nlayers_per_unit_time = 20\n'
        "[over]\nseed = { start = 0, stop = 399, step = 1 }\n"
        "[simulate]\nsamples = 4000\nhorizon = 20.0\n"
    )
    path = tmp_path / "s.sweep"
    command = [sys.executable, "-m", "limitformer", "sweep", "run", str(file), "--store", str(path), "--workers", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment(), start_new_session=True, **pipes)
    try:
        wait_until(lambda: len(workers_of(process.pid)) == 2 and done_cells(path) >= cells)
        family = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    (line,) = [line for line in err.splitlines() if not line.startswith("Compiling ") and " in all" not in line]
    assert line.startswith("Interrupted with ")
    assert line.endswith(f" of 400 cells done; start it again to go on: {path}")
    wait_until(lambda: not any(alive(pid) for pid in family))
    assert done_cells(path) >= cells
