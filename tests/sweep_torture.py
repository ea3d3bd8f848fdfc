"""What the tests of sweeps do a few times, many times: python tests/sweep_torture.py [PROCESSES] [DASK].

Kills processes inside their writes (default 200 of a sweep on processes, 100 of one on a Dask cluster): each write of
a file, each move and each flush may be the last thing that a worker does, and now and then the last of the parent,
with any number of the bytes written. The sweep is started again until it ends by itself, and its store is compared
with that of one process that nobody kills, byte by byte. As root, it also fills a disk of 256 kilobytes.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import limitformer as lf
import limitformer.sweep.run as running
from limitformer.base.errors import InputError
from sweep_grids import (
    assert_complete,
    assert_same_bits,
    chunks,
    done_cells,
    environment,
    run,
    slow_sweep,
    source_folders,
)

PROGRAM = str(Path(__file__).parent / "sweep_program.py")
SAMPLES = 300  # of a cell: some milliseconds
MORTAL = """
import os, random, signal
if "SWEEP_DEATHS" in os.environ:
    import multiprocessing
    from pathlib import Path

    import limitformer.sweep.files as files

    deaths, chance = os.environ["SWEEP_DEATHS"], random.Random(os.urandom(8))
    worker = multiprocessing.parent_process() is not None or "SWEEP_PARENT" not in os.environ
    mortality = 0.06 if worker else 0.01
    os.environ.pop("SWEEP_PARENT", None)

    def die(what):
        with open(deaths, "a") as file:
            file.write(f"{'worker' if worker else 'parent'} {what}\\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def mortal(honest, what):
        def change(*arguments, **options):
            if chance.random() < mortality / 2:
                die(f"before {what}")
            found = honest(*arguments, **options)
            if chance.random() < mortality / 2:
                die(f"after {what}")
            return found
        return change

    def put(file, data, honest=files.put):
        if chance.random() < mortality:
            honest(file, data[: chance.randrange(len(data) + 1)])
            die("in write")
        honest(file, data)

    files.put = put
    os.fsync = mortal(os.fsync, "fsync")
    Path.replace = mortal(Path.replace, "move")
"""


def tortured(folder, engine, kills):
    """Run the program until it ends by itself and enough processes were killed; (deaths, runs, cells)."""
    deaths, path = folder / f"{engine}.deaths", folder / f"{engine}.zarr"
    deaths.touch()
    (folder / "sitecustomize.py").write_text(MORTAL)
    mortal = {
        **environment(),
        "PYTHONPATH": os.pathsep.join([str(folder), *source_folders()]),
        "SWEEP_DEATHS": str(deaths),
        "SWEEP_PARENT": "1",
    }
    cells, runs = 200, 0
    while True:
        runs += 1
        command = [sys.executable, PROGRAM, str(path), str(cells), str(SAMPLES), engine]
        enough = len(deaths.read_text().splitlines()) >= kills
        ended = subprocess.run(command, env=environment() if enough else mortal, stderr=subprocess.PIPE, text=True)
        killed = len(deaths.read_text().splitlines())
        print(f"{engine}, run {runs}: {killed} killed, {done_cells(path)} of {cells} cells done", flush=True)
        assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
        if ended.returncode == 0 and enough:
            return deaths.read_text().splitlines(), runs, cells
        if ended.returncode == 0:
            cells += 200  # the store is extended


def torture(folder, engine, kills):
    """The issue's number of kills: nothing is lost, and every bit is as if nobody had been killed."""
    began = time.perf_counter()
    deaths, runs, cells = tortured(folder, engine, kills)
    seconds = time.perf_counter() - began
    whole = folder / f"{engine}-whole.zarr"
    for count in range(200, cells + 1, 200):
        run(slow_sweep(count, SAMPLES), whole, extend=True)
    assert_complete(folder / f"{engine}.zarr", cells)
    assert_same_bits(folder / f"{engine}.zarr", whole)
    kinds = {kind: deaths.count(kind) for kind in sorted(set(deaths))}
    print(f"{engine}: {cells} cells, {len(deaths)} killed in {runs} runs, {seconds:.0f} s: the same bits. {kinds}")


def torture_disk(folder):
    """A disk that is really full: one error; with more room the store goes on. One that is for reading alone."""
    small, cells = folder / "disk", 60
    small.mkdir()
    running.SOONEST = 1e9  # until they are gathered, cells take a page each: more than there are
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(small)], check=True)
    try:
        for workers in (1, 2):
            refused(f"disk, {workers} workers", slow_sweep(cells), small / "s.zarr", workers=workers)
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        refused("read-only", slow_sweep(cells), small / "s.zarr")
        subprocess.run(["mount", "-o", "remount,rw,size=64m", str(small)], check=True)
        report = run(slow_sweep(cells), small / "s.zarr", workers=2)
        run(slow_sweep(cells), folder / "disk-whole.zarr")
        assert_complete(small / "s.zarr", cells)
        assert_same_bits(small / "s.zarr", folder / "disk-whole.zarr")
        print(f"disk: {report.skipped} cells were kept, the same {len(chunks(small / 's.zarr'))} chunks")
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        assert run(slow_sweep(cells), small / "s.zarr").skipped == cells
        print("read-only: what is complete is complete")
    finally:
        subprocess.run(["umount", str(small)], check=True)


def refused(what, description, path, **options):
    """Say with which line."""
    try:
        run(description, path, **options)
    except InputError as error:
        print(f"{what}: {error} ({done_cells(path)} cells done)")
    else:
        raise AssertionError("nothing went wrong")


if __name__ == "__main__":
    kills = [int(text) for text in (*sys.argv[1:], *("200", "100")[len(sys.argv) - 1 :])]
    with tempfile.TemporaryDirectory() as temporary:
        print(f"limitformer {lf.__version__}")
        if os.getuid() == 0:
            torture_disk(Path(temporary))
        for engine, count in zip(("processes", "dask"), kills, strict=True):
            torture(Path(temporary), engine, count)
