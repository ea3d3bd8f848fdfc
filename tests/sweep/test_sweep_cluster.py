"""Sweeps on Dask: a real cluster of processes on loopback gives the bits of one process after any kill."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import dask
import numpy as np
import pytest
from dask.distributed import Client

import limitformer as lf
from limitformer.base.errors import InputError, MissingExtraError
from limitformer.sweep import cluster as cluster_module
from limitformer.sweep.cluster import batches_of, local_cluster, slurm_cluster
from limitformer.sweep.origin import code
from ports import free_port
from sweep_grids import (
    CELLS,
    alive,
    assert_complete,
    assert_same_bits,
    assert_same_numbers,
    cell_path,
    cells_written,
    done_cells,
    environment,
    flip,
    run,
    set_trap,
    slow_sweep,
    slurm_is,
    sweep,
    wait_until,
    written,
)

BETAS = {"beta": [0.0, 0.5, 1.0]}


@pytest.fixture(scope="module")
def cluster():
    """Two worker processes and their scheduler, on loopback."""
    with dask.config.set({"distributed.logging.distributed": "critical"}):
        made = local_cluster(2)
        try:
            assert re.match(r"tcp://127\.0\.0\.1:\d+$", made.scheduler_address)
            yield made
        finally:
            made.close()


@pytest.fixture
def no_work(monkeypatch):
    monkeypatch.setattr(cluster_module, "run_batch", lambda *_: pytest.fail("work was handed out"))


def on(cluster, description, path, **options):
    return run(description, path, cluster=cluster.scheduler_address, **options)


# Bits.


def test_cluster_gives_the_bits_of_one_process(cluster, tmp_path):
    run(sweep(), tmp_path / "one.sweep")
    report = on(cluster, sweep(), tmp_path / "cluster.sweep", shuffle=True)
    assert (report.done, report.failed, report.skipped) == (6, 0, 0)
    assert_same_bits(tmp_path / "cluster.sweep", tmp_path / "one.sweep")
    assert_complete(tmp_path / "cluster.sweep", 6)
    before = written(tmp_path / "cluster.sweep")
    flip(cell_path(tmp_path / "cluster.sweep", (0, 2)))
    assert on(cluster, sweep(), tmp_path / "cluster.sweep").skipped == 5
    assert cells_written(before, written(tmp_path / "cluster.sweep")) == [(0, 2)]
    assert_same_bits(tmp_path / "cluster.sweep", tmp_path / "one.sweep")


def stores_opened():
    """Return how many stores a worker has opened."""
    from limitformer.sweep.work import store_at

    return store_at.cache_info().misses


def test_both_workers_compute_the_cells(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("limitformer.sweep.work.compute", lambda *_, **__: pytest.fail("computed here"))
    with Client(cluster.scheduler_address, set_as_default=False) as client:
        before = client.run(stores_opened)
        assert run(slow_sweep(CELLS), tmp_path / "s.sweep", cluster=client).done == CELLS
        after = client.run(stores_opened)
        assert {worker: after[worker] - before[worker] for worker in after} == dict.fromkeys(before, 1)
        assert client.status == "running", "a client that was given is not closed"
        wait_until(lambda: not client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)))


def test_sweep_moves_between_engines(cluster, whole, tmp_path):
    """The sweep runs here, on a cluster and on processes, and is extended each time."""
    path, seeds = tmp_path / "s.sweep", list(range(CELLS))

    def part(count):
        return sweep({"seed": seeds[:count]}, keep={"moments": True}, samples=4000, horizon=20.0)

    run(part(5), path)
    assert on(cluster, part(15), path, extend=True).skipped == 5
    assert run(part(CELLS), path, extend=True, workers=2).skipped == 15
    assert_same_numbers(path, whole)


def test_killed_workers_change_nothing(cluster, whole, tmp_path):
    """Dask replaces the workers, and their cells are submitted again."""
    path, killed, over, chance = tmp_path / "s.sweep", [], threading.Event(), random.Random(0)

    def kill():
        for count in (3, 14):
            while done_cells(path) < count:
                if over.wait(0.002):
                    return
            victim = chance.choice([worker.pid for worker in nannies(cluster) if worker.pid and alive(worker.pid)])
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        report = on(cluster, slow_sweep(CELLS), path)
    finally:
        over.set()
        thread.join()
    assert len(killed) == 2
    assert (report.done, report.failed) == (CELLS, 0)
    assert_complete(path, CELLS)
    assert_same_bits(path, whole)


def nannies(cluster):
    """Return the processes that restart the workers."""
    return list(cluster.workers.values())


# Failures.


def test_failed_cell_is_recorded_and_others_continue(cluster, tmp_path):
    """A cell that is too large for the memory is refused only when it runs."""
    description = sweep({"tokens": [2, 10**7, 3]}, keep={"moments": True})
    report = on(cluster, description, tmp_path / "s.sweep")
    assert (report.done, report.failed, list(report.errors)) == (2, 1, [(1,)])
    assert "GiB, more than is free" in report.errors[(1,)]


def test_cell_that_kills_its_worker_is_recorded_and_others_continue(tmp_path, monkeypatch):
    path = tmp_path / "s.sweep"
    with monkeypatch.context() as patch, dask.config.set({"distributed.scheduler.allowed-failures": 0}):
        set_trap(tmp_path, patch, exit=0.5)
        made = local_cluster(1)
        try:
            report = on(made, sweep(BETAS), path)
        finally:
            made.close()
    assert (report.done, report.failed) == (2, 1)
    assert report.errors[(1,)].startswith("workers died in this cell: Attempted to run task ")
    assert lf.load_sweep(path)["status"].values.tolist() == [1, 2, 1]
    assert run(sweep(BETAS), path).done == 3
    run(sweep(BETAS), tmp_path / "whole.sweep")
    assert_same_bits(path, tmp_path / "whole.sweep")


def test_killed_scheduler_is_one_error_and_the_store_resumes(whole, tmp_path, capfd):
    """The scheduler and its worker are separate programs."""
    path, contact = tmp_path / "s.sweep", tmp_path / "scheduler.json"
    start, quiet = [sys.executable, "-m"], {"env": environment(), "stderr": subprocess.DEVNULL}
    host = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(contact)]
    scheduler = subprocess.Popen([*start, "distributed.cli.dask_scheduler", *host], **quiet)
    wait_until(lambda: contact.exists() and contact.read_text().endswith("\n}"))
    address = json.loads(contact.read_text())["address"]
    options = ["--nthreads", "2", "--no-nanny", "--no-dashboard", "--death-timeout", "60"]
    worker = subprocess.Popen([*start, "distributed.cli.dask_worker", address, *options], **quiet)

    def kill():
        wait_until(lambda: done_cells(path) >= 8)
        scheduler.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        with pytest.raises(InputError, match=r"^The cluster has cancelled the work .*start it again\.$") as raised:
            run(slow_sweep(CELLS), path, cluster=address)
    finally:
        thread.join()
        for process in (scheduler, worker):
            process.kill()
            process.wait()
    assert "\n" not in str(raised.value)
    assert run(slow_sweep(CELLS), path).skipped >= 8
    assert_same_bits(path, whole)


def test_renamed_folder_is_one_error(cluster, tmp_path):
    path = tmp_path / "s.sweep"

    def remove():
        wait_until(lambda: done_cells(path) >= 3)
        os.rename(path, tmp_path / "elsewhere")

    thread = threading.Thread(target=remove)
    thread.start()
    with pytest.raises(InputError, match=r"^Cannot write the store .*start it again\.$") as raised:
        on(cluster, slow_sweep(CELLS), path)
    thread.join()
    assert "\n" not in str(raised.value)
    os.rename(tmp_path / "elsewhere", path)
    assert on(cluster, slow_sweep(CELLS), path).skipped >= 3
    assert_complete(path, CELLS)


def test_workers_with_other_code_refuse_to_work(cluster, tmp_path, monkeypatch):
    """The store was begun by other code, so that workers must not add to it."""
    monkeypatch.setattr("limitformer.sweep.opening.code", lambda: {**code(), "version": "9.9", "sources": "0" * 16})
    says = r"begun by other code \(version 9\.9 there, .* here; sources 0000000000000000"
    with pytest.raises(InputError, match=says):
        on(cluster, sweep(BETAS), tmp_path / "s.sweep")
    assert done_cells(tmp_path / "s.sweep") == 0


def test_workers_must_see_the_store(cluster, tmp_path, monkeypatch, no_work):
    """Workers on a machine with another disk do not see the store."""
    monkeypatch.setattr(cluster_module, "sees", lambda path, word: Path(path, "other disk", word).exists())
    with pytest.raises(InputError) as raised:
        on(cluster, sweep(BETAS), tmp_path / "s.sweep")
    expected = f"The cluster's workers do not see {tmp_path}/s.sweep; the store must lie on a disk that they share."
    assert str(raised.value) == expected
    assert list((tmp_path / "s.sweep").rglob("*.unfinished")) == []


# Schedulers that cannot be reached.


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:{port}", "127.0.0.1:{port}", "nonsense://a:1", "tcp://a b"])
def test_unreachable_scheduler_is_one_error_before_any_work(tmp_path, monkeypatch, address):
    monkeypatch.setattr(cluster_module, "CONNECT_SECONDS", 0.3)
    address = address.format(port=free_port())
    with pytest.raises(InputError) as raised:
        run(sweep(), tmp_path / "s.sweep", cluster=address)
    assert str(raised.value).startswith(f"No Dask scheduler answers at {address}: ")
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_scheduler_that_accepts_and_never_answers_is_one_error_before_any_work(tmp_path, monkeypatch):
    """A client of Dask would wait forever."""
    monkeypatch.setattr(cluster_module, "CONNECT_SECONDS", 0.5)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(InputError) as raised:
            run(sweep(), tmp_path / "s.sweep", cluster=address)
    assert str(raised.value) == f"No Dask scheduler answers at {address}: no answer in 0.5 s."
    assert list(tmp_path.iterdir()) == []


def test_scheduler_without_workers_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_module, "CONNECT_SECONDS", 0.1)
    with dask.config.set({"distributed.logging.distributed": "critical"}):
        made = local_cluster(0)
    try:
        with pytest.raises(InputError) as raised, Client(made, set_as_default=False) as client:
            run(sweep(), tmp_path / "s.sweep", cluster=client)
        assert str(raised.value) == f"The scheduler at {made.scheduler_address} has no worker that answers."
    finally:
        made.close()


def test_clients_are_closed_after_runs_and_refusals(cluster, tmp_path):
    """The cases are a complete store and a refused one."""

    def clients():
        with Client(cluster.scheduler_address, set_as_default=False) as client:
            return client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.clients))

    run(sweep(BETAS), tmp_path / "s.sweep")
    before = clients()
    assert on(cluster, sweep(BETAS), tmp_path / "s.sweep").skipped == 3
    with pytest.raises(InputError, match="belongs to another sweep"):
        on(cluster, sweep(BETAS, seed=9), tmp_path / "s.sweep")
    assert clients() == before


def test_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'limitformer\[cluster\]'"):
        run(sweep(), tmp_path / "s.sweep", cluster="tcp://127.0.0.1:8786")
    monkeypatch.setitem(sys.modules, "dask_jobqueue.slurm", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'limitformer\[cluster\]'"):
        slurm_cluster(1, 2, "4GB", "00:10:00")
    assert list(tmp_path.iterdir()) == []


# Batches, and SLURM.


@pytest.mark.parametrize(("cells", "workers"), [(1, 1), (5, 2), (100, 2), (20_000, 2), (20_000, 1000), (3, 0)])
def test_batches_have_every_cell_once_and_are_enough_for_all_workers(cells, workers):
    given = list(np.ndindex(cells))
    batches = batches_of(given, workers)
    assert [cell for batch in batches for cell in batch] == given
    assert all(0 < len(batch) <= 64 for batch in batches)
    assert len(batches) >= min(cells, 8 * workers)


def test_slurm_cluster_requests_jobs_of_single_threaded_workers(monkeypatch):
    asked = []

    class Made(SimpleNamespace):
        def scale(self, **options):
            asked.append(options)

        def wait_for_workers(self, count):
            asked.append(count)

    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    slurm_is(monkeypatch, lambda **options: asked.append(options) or Made())
    assert isinstance(slurm_cluster(3, 8, "16GB", "04:00:00"), Made)
    assert isinstance(slurm_cluster(1, 2, "1GB", "00:01:00", "short"), Made)
    job = {"cores": 8, "processes": 8, "memory": "16GB", "walltime": "04:00:00"}
    short = {"cores": 2, "processes": 2, "memory": "1GB", "walltime": "00:01:00", "queue": "short"}
    assert asked == [job, {"jobs": 3}, 1, short, {"jobs": 1}, 1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "dask-jobqueue has taken Ctrl-C"
