"""Helpers of the tests of sweeps: cheap grids, and comparison of stores bit by bit."""

import os
import time
from pathlib import Path

import numpy as np

import limitformer as lf
from limitformer.sweep.store import DONE, open_store

PAIR = lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=20)
NETWORK = lf.Transformer(width=20, depth=6, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0))
GRID = {"dim": [4, 6], "beta": [0.0, 0.5, 1.0]}
KEEP = {"moments": True, "outcomes": True, "samples": True}
CELLS = 30  # of the slow sweep


def sweep(over=GRID, base=PAIR, keep=KEEP, **simulate):
    return lf.Sweep(base, over=over, simulate={"samples": 12, "horizon": 1.0, "seed": 1, **simulate}, reduce=keep)


def run(description, store, **options):
    """Run a sweep in this process, silently."""
    return lf.run_sweep(description, store, **{"workers": 1, "threads": 1, "progress": False, **options})


def slow_sweep(cells=CELLS, samples=4000):
    """Return a sweep whose cells take about 15 milliseconds."""
    return sweep({"seed": list(range(cells))}, keep={"moments": True}, samples=samples, horizon=20.0)


def cell_path(store, index):
    """Return the file of a cell."""
    opened = open_store(store)
    return opened.file(dict(opened.names())[index], DONE)


def done_cells(store):
    """Return how many cells are done."""
    return len(list(Path(store).glob("cells/*.nc")))


def assert_same_bits(store, other):
    """Both stores have the same cells, and load as the same arrays.

    A worker that was killed while it wrote leaves a hidden folder, which the next run removes.
    """
    names = [sorted(place.name for place in Path(path).glob("cells/[!.]*")) for path in (store, other)]
    assert names[0] == names[1]
    a, b = (lf.load_sweep(path).drop_vars("seconds") for path in (store, other))
    assert list(a.variables) == list(b.variables)
    for name in a.variables:
        assert a[name].dtype == b[name].dtype
        assert a[name].values.tobytes() == b[name].values.tobytes(), name


def assert_complete(store, cells):
    """Every cell is done, and the store has no other file; a kill at the very end leaves the lock's."""
    status = lf.load_sweep(store)["status"].values
    assert status.size == cells
    assert (status == DONE).all()
    files = [path for path in Path(store).rglob("*") if path.is_file() and path.name != "lock"]
    assert len(files) == cells + 1, files


def files(folder):
    """Return time and place of every file: a file that is written again has others."""
    facts = {str(path.relative_to(folder)): path.stat() for path in Path(folder).rglob("*") if path.is_file()}
    return {name: (fact.st_mtime_ns, fact.st_ino) for name, fact in facts.items()}


def environment():
    """Return the environment of other processes that use limitformer and these helpers."""
    folders = [str(Path(lf.__file__).parents[1]), str(Path(__file__).parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "COLUMNS": "160"}


def values_equal(one, other):
    """Whether two arrays are equal, NaN to itself too."""
    return np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True)


def wait_until(condition, seconds=120.0):
    """Wait until `condition()` is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.005)


def alive(pid):
    """Whether the process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def workers_of(pid):
    """Return the processes of `pid` that compute cells."""
    try:
        own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [child for child in own if b"popen_loky" in Path(f"/proc/{child}/cmdline").read_bytes()]
    except OSError:
        return []
