"""Helpers of the tests of sweeps: cheap grids, comparison of stores bit by bit, and traps for workers."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.sweep.cells import decoded, place_of
from limitformer.sweep.files import remove_unfinished
from limitformer.sweep.opening import description_of, open_store
from limitformer.sweep.store import digest

PAIR = lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=20)
NETWORK = lf.Transformer(width=20, depth=6, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0))
GRID = {"dim": [4, 6], "beta": [0.0, 0.5, 1.0]}
KEEP = {"moments": True, "outcomes": True, "samples": True}
CELLS = 30  # of the slow sweep

TRAP = """
import os, sys
if os.environ.get("SWEEP_TRAP", "").endswith("=start") and "--multiprocessing-fork" in sys.argv:
    os._exit(3)
if "SWEEP_TRAP" in os.environ:
    import limitformer.sweep.work as work

    honest, traps = work.compute, dict(trap.split("=") for trap in os.environ["SWEEP_TRAP"].split(","))

    def trapped(sweep, cell, **options):
        what = traps.get(str(cell.model.beta))
        if what == "raise":
            raise RuntimeError("a trap")
        if what == "exit":
            os._exit(3)
        return honest(sweep, cell, **options)

    work.compute = trapped
"""


def sweep(over=GRID, base=PAIR, keep=KEEP, **simulate):
    """Return a cheap sweep."""
    return lf.Sweep(base, over=over, simulate={"samples": 12, "horizon": 1.0, "seed": 1, **simulate}, reduce=keep)


def run(description, store, **options):
    """Run a sweep in this process, silently."""
    return lf.run_sweep(description, store, **{"workers": 1, "threads": 1, "progress": False, **options})


def cell_path(store, index):
    """Return the file of a cell."""
    opened = open_store(Path(store))
    return Path(store) / "cells" / place_of(opened.names.of(index))


def cell_contents(store):
    """Return the status, error, code and results of every file of a cell, without its times."""
    kinds = open_store(Path(store)).kinds
    cells = {path.name: decoded(path.name, path.read_bytes(), kinds) for path in Path(store).glob("cells/*/*")}
    return {name: cell and (cell.status, cell.error, cell.code, cell.data) for name, cell in cells.items()}


def assert_same_bits(store, other):
    """Both stores have the same cells with the same bytes, and the same axes."""
    one, two = cell_contents(store), cell_contents(other)
    assert sorted(one) == sorted(two)
    assert [name for name in one if one[name] != two[name]] == []
    assert_same_numbers(store, other)


def assert_same_numbers(store, other):
    """Both stores load as the same arrays."""
    a, b = (lf.load_sweep(path).drop_vars("seconds") for path in (store, other))
    assert set(a.variables) == set(b.variables)
    for name in a.variables:
        assert a[name].dtype == b[name].dtype
        assert a[name].values.tobytes() == b[name].values.tobytes(), name


def assert_complete(store, cells):
    """Every cell is done, and the store has no other file.

    A worker that was killed while it wrote leaves an unfinished file, which the next run removes.
    """
    remove_unfinished(Path(store))
    opened = open_store(Path(store))
    status = opened.survey().status
    assert status.size == cells
    assert (status == 1).all()
    assert len(opened.present()) == cells
    files = [path for path in Path(store).rglob("*") if path.is_file()]
    assert len(files) == cells + 1


def described_as(store, change):
    """Change the description of a store, with a digest that proves it."""
    description = description_of(Path(store))
    change(description)
    describe(store, description)


def describe(store, description):
    """Give a store this description, with a digest that proves it."""
    proven = {"sweep": description, "digest": digest(description)}
    (Path(store) / "sweep.json").write_text(json.dumps(proven))


def files(folder):
    """Return time and place of every file: a file that is written again has others."""
    facts = {str(path.relative_to(folder)): path.stat() for path in Path(folder).rglob("*") if path.is_file()}
    return {name: (fact.st_mtime_ns, fact.st_ino) for name, fact in facts.items()}


def written(store):
    """Return when each done or failed cell was written, by its index."""
    if not Path(store).exists():
        return {}
    finished = open_store(Path(store)).survey().finished
    return {index: finished[index] for index in np.ndindex(finished.shape) if finished[index] > 0}


def cells_written(before, after):
    """Return the indices of the cells that were written since."""
    return sorted(index for index in after if before.get(index) != after[index])


def done_cells(store):
    """Return how many cells are done; 0 if there is no store."""
    try:
        return int((open_store(Path(store)).survey().status == 1).sum())
    except InputError:
        return 0


def flip(path, bit=3):
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1 << bit
    path.write_bytes(data)


def set_trap(folder, monkeypatch, **traps):
    """Make new workers `raise` or `exit` in cells with these betas, or exit as they `start`."""
    (folder / "sitecustomize.py").write_text(TRAP)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *source_folders()]))
    monkeypatch.setenv("SWEEP_TRAP", ",".join(f"{beta}={what}" for what, beta in traps.items()))


def source_folders():
    """Return the folders that other processes need to import limitformer and these helpers."""
    return [str(Path(lf.__file__).parents[1]), str(Path(__file__).parent)]


def alive(pid):
    """Whether the process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def values_equal(one, other):
    """Whether two arrays are equal, NaN to itself too."""
    return np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True)


def slow_sweep(cells=CELLS, samples=4000):
    """Return a sweep whose cells take about 15 milliseconds."""
    return sweep({"seed": list(range(cells))}, keep={"moments": True}, samples=samples, horizon=20.0)


def slurm_is(monkeypatch, cluster):
    """Replace the class of dask-jobqueue; the package around it is imported again."""
    for name in [name for name in sys.modules if name.split(".")[0] == "dask_jobqueue"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "dask_jobqueue.slurm", SimpleNamespace(SLURMCluster=cluster))


def wait_until(condition, seconds=120.0):
    """Wait until `condition()` is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.005)


def children(pid):
    """Return the processes that `pid` has started, and their own."""
    try:
        own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return own + [child for one in own for child in children(one)]


def workers_of(pid):
    """Return the processes of `pid` that compute cells."""
    return [child for child in children(pid) if b"spawn_main" in command(child)]


def command(pid):
    """Return the command line of a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def environment():
    """Return the environment of other processes that use limitformer and these helpers."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(source_folders()), "COLUMNS": "160"}
