"""What the tests of sweeps do a few times, many times: python tests/sweep_torture.py [KILLS] [PARENTS] [DASK].

Kills workers (default 200) and parents (5) of a sweep on processes, and workers of a Dask cluster (20), whenever chance
says, starts it again each time, and compares the store with that of one process, byte by byte. As root, it also fills a
disk of 256 kilobytes.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import limitformer as lf
from limitformer.errors import InputError
from limitformer.sweep.cluster import local_cluster
from sweep_grids import (
    alive,
    assert_complete,
    assert_same_bits,
    chunks,
    done_cells,
    environment,
    run,
    slow_sweep,
    workers_of,
)

CHANCE = random.Random(7)
SAMPLES = 30_000  # of a cell: a tenth of a second
PROGRAM = str(Path(__file__).parent / "sweep_program.py")


def tortured(path, cells, kills, parents):
    """Run the program until it ends by itself, killing its workers and it; (workers, parents) killed and runs."""
    workers_killed, parents_killed, runs = 0, 0, 0
    while True:
        runs += 1
        parent = subprocess.Popen([sys.executable, PROGRAM, str(path), str(cells), str(SAMPLES)], env=environment())
        while parent.poll() is None:
            time.sleep(CHANCE.uniform(0.1, 3.0))
            victims = [pid for pid in workers_of(parent.pid) if alive(pid)]
            if victims and workers_killed < kills:
                os.kill(CHANCE.choice(victims), signal.SIGKILL)
                workers_killed += 1
            if parents_killed < parents and workers_killed >= kills * (parents_killed + 1) // (parents + 1):
                parent.kill()
                parents_killed += 1
                parent.wait()
        print(
            f"run {runs}: {workers_killed} workers and {parents_killed} parents killed, {done_cells(path)} cells done"
        )
        if parent.returncode == 0:
            return workers_killed, parents_killed, runs


def torture_processes(folder, kills, parents):
    """The issue's number of kills; a cell takes long enough that kills meet it."""
    cells = 12 * kills
    began = time.perf_counter()
    killed = tortured(folder / "tortured.zarr", cells, kills, parents)
    seconds = time.perf_counter() - began
    assert killed[:2] == (kills, parents), "the sweep was too short"
    run(slow_sweep(cells, SAMPLES), folder / "whole.zarr")
    assert_complete(folder / "tortured.zarr", cells)
    assert_same_bits(folder / "tortured.zarr", folder / "whole.zarr")
    print(f"processes: {cells} cells, (workers, parents, runs) = {killed}, {seconds:.0f} s: the same bits")


def torture_dask(folder, kills):
    """Workers of a cluster of two, while a sweep runs again and again until there were enough kills."""
    cells, killed, over = 40 * kills, [], threading.Event()
    made = local_cluster(2)

    def kill():
        while len(killed) < kills and not over.wait(CHANCE.uniform(0.2, 1.2)):
            victims = [worker.pid for worker in made.workers.values() if worker.pid and alive(worker.pid)]
            if victims:
                os.kill(CHANCE.choice(victims), signal.SIGKILL)
                killed.append(victims)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        report = run(slow_sweep(cells), folder / "dask.zarr", cluster=made.scheduler_address)
    finally:
        over.set()
        thread.join()
        made.close()
    print(f"Dask: {len(killed)} workers killed, {report.failed} cells given up")
    run(slow_sweep(cells), folder / "dask.zarr")
    run(slow_sweep(cells), folder / "dask-whole.zarr")
    assert_complete(folder / "dask.zarr", cells)
    assert_same_bits(folder / "dask.zarr", folder / "dask-whole.zarr")
    print(f"Dask: {cells} cells, the same bits")


def torture_disk(folder):
    """A disk that is really full: one error; with more room the store goes on."""
    small, cells = folder / "disk", 60
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(small)], check=True)
    try:
        for workers in (1, 2):
            try:
                run(slow_sweep(cells), small / "s.zarr", workers=workers)
            except InputError as error:
                print(f"disk, {workers} workers: {error} ({done_cells(small / 's.zarr')} cells done)")
            else:
                raise AssertionError("the disk was not full")
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        try:
            run(slow_sweep(cells), small / "s.zarr")
        except InputError as error:
            print(f"read-only: {error}")
        subprocess.run(["mount", "-o", "remount,rw,size=64m", str(small)], check=True)
        report = run(slow_sweep(cells), small / "s.zarr", workers=2)
        run(slow_sweep(cells), folder / "disk-whole.zarr")
        assert_complete(small / "s.zarr", cells)
        assert_same_bits(small / "s.zarr", folder / "disk-whole.zarr")
        print(f"disk: {report.skipped} cells were kept, the same {len(chunks(small / 's.zarr'))} chunks")
    finally:
        subprocess.run(["umount", str(small)], check=True)


if __name__ == "__main__":
    kills, parents, dask_kills = (int(text) for text in (*sys.argv[1:], *("200", "5", "20")[len(sys.argv) - 1 :]))
    with tempfile.TemporaryDirectory() as temporary:
        print(f"limitformer {lf.__version__}")
        if os.getuid() == 0:
            torture_disk(Path(temporary))
        if dask_kills:
            torture_dask(Path(temporary), dask_kills)
        torture_processes(Path(temporary), kills, parents)
