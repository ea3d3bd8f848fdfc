"""Kill sweeps hundreds of times: python tests/sweep_torture.py [PROCESSES] [DASK].

Processes are killed inside their writes (by default 200 of a sweep on processes, 100 of one on a Dask cluster): each
write, move and flush of a file may be the last action of a worker, and sometimes of the parent, with any number of the
bytes written. The sweep is started again until it ends by itself. Its store is then compared, byte by byte, with the
store of one process that is never killed. As root, the program also fills a disk of 256 kilobytes.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import limitformer as lf
from limitformer.base.errors import InputError
from sweep_grids import (
    assert_complete,
    assert_same_bits,
    cell_contents,
    done_cells,
    environment,
    run,
    slow_sweep,
    source_folders,
)

PROGRAM = str(Path(__file__).parent / "sweep_program.py")
SAMPLES = 300  # in a cell, which takes a few milliseconds
MORTAL = """
import os, random, signal
if "SWEEP_DEATHS" in os.environ:
    import multiprocessing
    from pathlib import Path

    import limitformer.sweep.files as files
    import limitformer.sweep.store as store

    store.LASTING_SECONDS = 0.0  # every cell is flushed
    deaths, chance = os.environ["SWEEP_DEATHS"], random.Random(os.urandom(8))
    worker = multiprocessing.parent_process() is not None or "SWEEP_PARENT" not in os.environ
    mortality = 0.06 if worker else 0.15  # the parent writes only the description
    os.environ.pop("SWEEP_PARENT", None)

    def die(what):
        with open(deaths, "a") as file:
            file.write(f"{'worker' if worker else 'parent'} {what}\\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def mortal(honest, what):
        def change(*arguments, **options):
            if chance.random() < mortality / 2:
                die(f"before {what}")
            result = honest(*arguments, **options)
            if chance.random() < mortality / 2:
                die(f"after {what}")
            return result
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
    """Run the program until it ends by itself and `kills` processes were killed; return (deaths, runs, cells)."""
    deaths, path = folder / f"{engine}.deaths", folder / f"{engine}.sweep"
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
    """Kill processes, and compare the bits of the store with those of a run without kills."""
    began = time.perf_counter()
    deaths, runs, cells = tortured(folder, engine, kills)
    seconds = time.perf_counter() - began
    whole = folder / f"{engine}-whole.sweep"
    for count in range(200, cells + 1, 200):
        run(slow_sweep(count, SAMPLES), whole, extend=True)
    assert_complete(folder / f"{engine}.sweep", cells)
    assert_same_bits(folder / f"{engine}.sweep", whole)
    kinds = {kind: deaths.count(kind) for kind in sorted(set(deaths))}
    print(f"{engine}: {cells} cells, {len(deaths)} killed in {runs} runs, {seconds:.0f} s: the same bits. {kinds}")


def torture_disk(folder):
    """Fill a disk, which is one error, resume with more room, and use a disk that is read-only."""
    small, cells = folder / "disk", 120
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(small)], check=True)
    try:
        for workers in (1, 2):
            refused(f"disk, {workers} workers", slow_sweep(cells), small / "s.sweep", workers=workers)
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        refused("read-only", slow_sweep(cells), small / "s.sweep")
        subprocess.run(["mount", "-o", "remount,rw,size=64m", str(small)], check=True)
        report = run(slow_sweep(cells), small / "s.sweep", workers=2)
        run(slow_sweep(cells), folder / "disk-whole.sweep")
        assert_complete(small / "s.sweep", cells)
        assert_same_bits(small / "s.sweep", folder / "disk-whole.sweep")
        print(f"disk: {report.skipped} cells were there, the same {len(cell_contents(small / 's.sweep'))} cells")
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        assert run(slow_sweep(cells), small / "s.sweep").skipped == cells
        print("read-only: the complete store is complete")
    finally:
        subprocess.run(["umount", str(small)], check=True)


def refused(what, description, path, **options):
    """Run a sweep that must be refused, and print the line."""
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
