"""What the tests of sweeps share: cheap grids, comparison of stores bit by bit, and traps for workers."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.sweep.metadata import description_of, digest
from limitformer.sweep.opening import open_store

PAIR = lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=20)
NETWORK = lf.Transformer(width=20, depth=6, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0))
GRID = {"dim": [4, 6], "beta": [0.0, 0.5, 1.0]}
KEEP = {"moments": True, "outcomes": True, "samples": True}
CELLS = 30  # of the slow sweep
AT_ANY_TIME = ("seconds", "finished", "checksum")  # arrays that are not the same every time

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
    """A cheap one."""
    return lf.Sweep(base, over=over, simulate={"samples": 12, "horizon": 1.0, "seed": 1, **simulate}, reduce=keep)


def run(description, store, **options):
    """In this process, silently."""
    return lf.run_sweep(description, store, **{"workers": 1, "threads": 1, "progress": False, **options})


def chunks(store):
    """The bytes of every chunk of the store's arrays, but of those that tell the time."""
    files = (path for path in Path(store).rglob("c.*") if path.parent.name not in AT_ANY_TIME)
    return {str(path.relative_to(store)): path.read_bytes() for path in files}


def assert_same_bits(store, other):
    """Both stores have the same chunks, and give the same arrays."""
    one, two = chunks(store), chunks(other)
    assert sorted(one) == sorted(two)
    assert [name for name in one if one[name] != two[name]] == []
    assert_same_numbers(store, other)


def assert_same_numbers(store, other):
    """Both give the same arrays, whatever shares a chunk in them."""
    a, b = (lf.load_sweep(path).drop_vars("seconds") for path in (store, other))
    assert set(a.variables) == set(b.variables)
    for name in a.variables:
        assert a[name].dtype == b[name].dtype
        assert a[name].values.tobytes() == b[name].values.tobytes(), name


def assert_complete(store, cells):
    """Every cell is done and in the arrays, and nothing else is left in the store."""
    found = open_store(Path(store)).survey()
    assert found.status.size == cells
    assert (found.status == 1).all()
    assert found.broken == set()
    assert sorted(os.listdir(Path(store) / "cells")) == ["sweep.json", "zarr.json"]


def described_as(store, change):
    """Change what the store says of itself, with digests that prove it."""
    description = description_of(Path(store))
    change(description)
    proven = {"sweep": description, "digest": digest(description)}
    (Path(store) / "cells" / "sweep.json").write_text(json.dumps(proven))
    group = json.loads((Path(store) / "zarr.json").read_text())
    (Path(store) / "zarr.json").write_text(json.dumps({**group, "attributes": proven}))


def files(folder):
    """Time and place of every file: one that is written again has another."""
    facts = {str(path.relative_to(folder)): path.stat() for path in Path(folder).rglob("*") if path.is_file()}
    return {name: (fact.st_mtime_ns, fact.st_ino) for name, fact in facts.items()}


def written(store):
    """When each cell that is done or failed was written, by its index."""
    if not Path(store).exists():
        return {}
    found = open_store(Path(store)).survey().finished
    return {index: found[index] for index in np.ndindex(found.shape) if found[index] > 0}


def cells_written(before, after):
    """Indices of the cells that were written since."""
    return sorted(index for index in after if before.get(index) != after[index])


def done_cells(store):
    """How many cells are done, in the arrays or loose; 0 if there is no store."""
    try:
        return int((open_store(Path(store)).survey().status == 1).sum())
    except InputError:
        return 0


def chunk_of(store, name, index):
    """The file in which a cell's value of the array is, and its first byte there."""
    kept = open_store(Path(store))
    field = kept.layout.fields[name]
    number, place = zip(*(divmod(k, length) for k, length in zip(index, kept.block, strict=True)), strict=True)
    file = ".".join(map(str, ["c", *number, *[0] * len(field.dims)]))
    return Path(store) / name / file, int(np.ravel_multi_index(place, kept.block)) * field.size


def flip_value(store, name, index, bit=3):
    """One bit of a cell's value in the array."""
    path, start = chunk_of(store, name, index)
    data = bytearray(path.read_bytes())
    data[start] ^= 1 << bit
    path.write_bytes(data)


def flip(path, bit=3):
    """One bit of a file, in its middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1 << bit
    path.write_bytes(data)


def set_trap(folder, monkeypatch, **traps):
    """Workers to come `raise` or `exit` in cells with these betas, or end as they `start`."""
    (folder / "sitecustomize.py").write_text(TRAP)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *source_folders()]))
    monkeypatch.setenv("SWEEP_TRAP", ",".join(f"{beta}={what}" for what, beta in traps.items()))


def source_folders():
    """Where limitformer and these helpers are, for other processes."""
    return [str(Path(lf.__file__).parents[1]), str(Path(__file__).parent)]


def alive(pid):
    """Whether the process runs; one that waits to be buried does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def values_equal(one, other):
    """As arrays, NaN equal to itself."""
    return np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True)


def slow_sweep(cells=CELLS, samples=4000):
    """Cells of some 15 milliseconds."""
    return sweep({"seed": list(range(cells))}, keep={"moments": True}, samples=samples, horizon=20.0)


def slurm_is(monkeypatch, cluster):
    """In the place of dask-jobqueue's class; the package around it is imported anew."""
    for name in [name for name in sys.modules if name.split(".")[0] == "dask_jobqueue"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "dask_jobqueue.slurm", SimpleNamespace(SLURMCluster=cluster))


def wait_until(condition, seconds=120.0):
    """Fail unless it becomes true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def children(pid):
    """Processes that `pid` has started, and those that they have."""
    try:
        own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return own + [child for one in own for child in children(one)]


def workers_of(pid):
    """Those that compute cells."""
    return [child for child in children(pid) if b"spawn_main" in command(child)]


def command(pid):
    """What the process was started with."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def environment():
    """For other processes that use limitformer and these helpers; unfinished warnings are errors there too."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(source_folders()), "COLUMNS": "160"}
