"""Sweeps on processes and on Dask: the bits of one process after any kill, and no worker that remains."""

import os
import signal
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path

import pytest
from distributed import LocalCluster

import limitformer as lf
from limitformer.base.errors import InputError
from sweep_grids import (
    CELLS,
    alive,
    assert_same_bits,
    cell_path,
    done_cells,
    environment,
    run,
    slow_sweep,
    sweep,
    wait_until,
    workers_of,
)

work = import_module("limitformer.sweep.run")
BETAS = {"beta": [0.0, 0.5, 1.0]}
PROGRAM = str(Path(__file__).parents[1] / "sweep_program.py")


def when(path, cells, action):
    """Start a thread that calls `action` when `cells` cells of the store are done."""
    thread = threading.Thread(target=lambda: (wait_until(lambda: done_cells(path) >= cells), action()))
    thread.start()
    return thread


# Processes.


@pytest.mark.slow
def test_killed_worker_changes_nothing(whole, tmp_path):
    path = tmp_path / "s.sweep"
    thread = when(path, 4, lambda: os.kill(workers_of(os.getpid())[0], signal.SIGKILL))
    report = run(slow_sweep(), path, workers=2)
    thread.join()
    assert (report.done, report.failed, report.skipped) == (CELLS, 0, 0)
    assert_same_bits(path, whole)


def test_killed_parent_ends_its_workers_and_the_store_resumes(whole, tmp_path):
    """While the parent runs, a second run is refused in a line that names it."""
    path = tmp_path / "s.sweep"
    parent = subprocess.Popen([sys.executable, "-W", "error", PROGRAM, path, "3000", "4000"], env=environment())
    try:
        wait_until(lambda: done_cells(path) >= 4)
        with pytest.raises(
            InputError, match=rf"^{path} is in use by process {parent.pid} on .* since .*\. Nearest: wait"
        ):
            run(slow_sweep(3000), path)
        assert parent.poll() is None
        workers = workers_of(parent.pid)
    finally:
        parent.kill()
        parent.wait()
    assert len(workers) == 2
    wait_until(lambda: not any(map(alive, workers)))
    done = [index for index in range(CELLS) if cell_path(path, (index,)).exists()]
    assert 4 <= len(done) <= done_cells(path) < 3000
    (path / "sweep.json").unlink()  # the shorter sweep takes its cells
    assert run(slow_sweep(), path).skipped == len(done)
    assert lf.load_sweep(path)["overlap_mean"].values.tobytes() == lf.load_sweep(whole)["overlap_mean"].values.tobytes()


class DiedError(Exception):
    """Stands for joblib's error."""


def handed_out(batch, begun):
    for index in batch:
        begun.append(index)
        yield index


def test_workers_that_die_as_they_start_are_one_line():
    def parallel(tasks):
        next(tasks)
        raise DiedError

    with pytest.raises(InputError, match=r"6 workers died before a cell ended\. Nearest: fewer workers, or 1\."):
        list(work.outcomes([(k,) for k in range(40)], handed_out, parallel, (DiedError,)))


def test_cells_of_a_dead_worker_run_again_together_and_then_alone():
    """Cell 3 kills its worker; all others end, and those that were in work with it are not blamed."""
    batches = []

    def parallel(tasks):
        batches.append([k for (k,) in tasks])
        for k in batches[-1]:
            if k == 3:
                raise DiedError
            yield (k,), ""

    outcomes = dict(work.outcomes([(k,) for k in range(6)], handed_out, parallel, (DiedError,)))
    assert [k for k in range(6) if outcomes[k,]] == [3]
    assert outcomes[3,].startswith("the worker died 4 times in this cell (out of memory?")
    assert batches == [[0, 1, 2, 3, 4, 5], [3, 4, 5], [3], [4], [5], [3]]


def test_ctrl_c_is_one_line_and_the_store_resumes(tmp_path):
    """A terminal sends Ctrl-C to workers too."""
    file, path = tmp_path / "sweep.toml", tmp_path / "s.sweep"
    file.write_text(
        '[model]\nkind = "StochasticTransformer"\ntokens = 2\ndim = 4\nbeta = 1.0\nlayers_per_unit_time = 20\n'
        "[over]\nseed = { start = 0, stop = 1999, step = 1 }\n"
        "[simulate]\nsamples = 4000\nhorizon = 20.0\n"
    )
    command = [sys.executable, "-m", "limitformer", "sweep", "run", str(file), "--store", str(path), "--workers", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment(), start_new_session=True, **pipes)
    try:
        wait_until(lambda: done_cells(path) >= 4)
        workers = workers_of(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    (line,) = [line for line in err.splitlines() if not line.startswith("Compiling ") and " in all" not in line]
    done = done_cells(path)
    assert line == f"Interrupted with {done} of 2000 cells done; start it again to go on: {path}"
    assert len(workers) == 2
    wait_until(lambda: not any(map(alive, workers)))
    assert 4 <= done < 2000
    assert int((lf.load_sweep(path)["status"] == 1).sum()) == done


# Dask.


@pytest.fixture(scope="module")
def cluster():
    """Two worker processes and their scheduler, on loopback."""
    loopback = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(n_workers=2, threads_per_worker=1, **loopback) as made:
        yield made


@pytest.mark.slow
def test_killed_dask_worker_changes_nothing(cluster, whole, tmp_path):
    """A sweep moves between this process and the cluster, and is extended."""
    path = tmp_path / "s.sweep"
    run(slow_sweep(5), path)
    pids = [worker.pid for worker in cluster.workers.values()]
    thread = when(path, 9, lambda: os.kill(pids[0], signal.SIGKILL))
    report = run(slow_sweep(), path, dask=cluster.scheduler_address, extend=True)
    thread.join()
    assert (report.done, report.failed, report.skipped) == (CELLS, 0, 5)
    assert_same_bits(path, whole)


@pytest.mark.parametrize("address", ["tcp://nowhere", "tcp://127.0.0.1:1"])
def test_dask_address_without_a_scheduler_is_one_line(tmp_path, monkeypatch, address):
    monkeypatch.setattr(work, "CONNECT_SECONDS", 0.2)
    with pytest.raises(InputError, match=f"^No Dask scheduler answers at {address}: .*"):
        run(sweep(BETAS), tmp_path / "s.sweep", dask=address)
    assert list(tmp_path.iterdir()) == []
