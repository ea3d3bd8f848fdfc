"""The store of a sweep: the same bits however it was filled, damage is found, errors in one line, extension."""

import errno
import json
import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

import limitformer as lf
from limitformer.errors import InputError
from limitformer.sweep import OtherSweepError, SweepInterrupted
from limitformer.sweep import store as store_module
from limitformer.sweep import work as work_module
from limitformer.sweep.chunks import chunk_path, read_chunk, remove_unfinished, write_chunk
from limitformer.sweep.run import compute_sweep
from limitformer.sweep.store import open_store
from sweep_grids import (
    GRID,
    NETWORK,
    assert_complete,
    assert_same_bits,
    cells_written,
    flip,
    run,
    sweep,
    values_equal,
    written,
)

CELLS = 6


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A store with everything, to compare with; nobody writes to it."""
    path = tmp_path_factory.mktemp("whole") / "s.zarr"
    report = run(sweep(), path)
    assert (report.cells, report.done, report.failed, report.skipped) == (CELLS, CELLS, 0, 0)
    return path


@pytest.fixture
def store(whole, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "s.zarr"))


def opened(path, consolidated=True):
    """As xarray has it, in memory."""
    with xr.open_zarr(path, consolidated=consolidated) as data:
        return data.load()


# Bits.


def test_the_store_has_what_is_computed_in_memory(whole):
    kept, direct = lf.load_sweep(whole), compute_sweep(sweep(), threads=1, progress=False)
    assert set(kept.data_vars) == {*direct.data_vars, "status", "seconds"}
    for name, values in direct.variables.items():
        assert kept[name].dims == values.dims
        assert kept[name].values.tobytes() == values.values.tobytes()
    assert json.loads(kept.attrs["sweep"]) == sweep().record() == json.loads(direct.attrs["sweep"])
    assert (kept["seconds"] > 0).all()


def test_cells_in_random_order_give_the_same_bits(whole, tmp_path, monkeypatch):
    seen, write = [], store_module.Store.write
    monkeypatch.setattr(
        store_module.Store, "write", lambda self, index, *rest: (seen.append(index), write(self, index, *rest))
    )
    run(sweep(), tmp_path / "s.zarr", shuffle=True)
    assert sorted(seen) == list(np.ndindex(2, 3)) != seen
    assert_same_bits(tmp_path / "s.zarr", whole)


def test_threads_do_not_change_a_bit(whole, tmp_path):
    run(sweep(), tmp_path / "s.zarr", threads=2)
    assert_same_bits(tmp_path / "s.zarr", whole)


def test_another_seed_gives_other_bits(whole, tmp_path):
    """The wrong twin of all comparisons."""
    run(sweep(seed=2), tmp_path / "s.zarr")
    with pytest.raises(AssertionError):
        assert_same_bits(tmp_path / "s.zarr", whole)


def test_starting_again_computes_nothing(store, whole, monkeypatch):
    before = written(store)
    monkeypatch.setattr(work_module, "compute", lambda *_, **__: pytest.fail("work was done"))
    report = run(sweep(), store)
    assert (report.done, report.skipped, report.failed) == (CELLS, CELLS, 0)
    assert written(store) == before
    assert_same_bits(store, whole)


@pytest.mark.parametrize("stop", [0, 1, 4])
def test_interrupted_it_goes_on(whole, tmp_path, monkeypatch, stop):
    honest, calls = work_module.compute, []

    def compute(description, cell, **options):
        calls.append(cell.index)
        if len(calls) == stop + 1:
            raise KeyboardInterrupt
        return honest(description, cell, **options)

    monkeypatch.setattr(work_module, "compute", compute)
    path = tmp_path / "s.zarr"
    with pytest.raises(SweepInterrupted, match=f"Interrupted with {stop} of 6 cells done; start it again to go on: "):
        run(sweep(), path)
    assert int((lf.load_sweep(path)["status"] == 1).sum()) == stop
    report = run(sweep(), path)
    assert (report.done, report.skipped) == (CELLS, stop)
    assert len(calls) == CELLS + 1
    assert_same_bits(path, whole)


# Damage.


def delete(path):
    path.unlink()


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize("damage", [flip, truncate, empty, lengthen, delete])
@pytest.mark.parametrize("array", ["overlap", "overlap_mean", "probability", "status", "seconds"])
def test_a_damaged_chunk_is_found_and_its_cell_computed_again(store, whole, array, damage):
    (path,) = store.glob(f"{array}/c.1.2*")
    damage(path)
    before = written(store)
    report = run(sweep(), store)
    assert (report.done, report.skipped) == (CELLS, CELLS - 1)
    assert cells_written(before, written(store)) == [(1, 2)]
    assert_same_bits(store, whole)
    assert_complete(store, CELLS)
    assert_same_arrays(opened(store), lf.load_sweep(store))


def test_every_bit_of_a_chunk_counts(store):
    path = store / "overlap_mean" / "c.0.1.0"
    for place in range(8 * path.stat().st_size):
        data = bytearray(path.read_bytes())
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        assert open_store(store).read("overlap_mean", (0, 1)) is None
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
    assert open_store(store).read("overlap_mean", (0, 1)) is not None


@pytest.mark.parametrize("array", ["status", "overlap", "beta", "error"])
def test_an_array_that_somebody_deleted_is_made_again(store, whole, array):
    shutil.rmtree(store / array)
    report = run(sweep(), store)
    assert report.done == CELLS
    assert_same_bits(store, whole)
    assert_same_arrays(opened(store), opened(whole))


def test_what_killed_writers_leave_is_removed(store, whole):
    orphans = [store / "overlap" / "c.0.0.0.0.0.123.unfinished", store / "status" / "c.1.1.99.unfinished"]
    for orphan in orphans:
        orphan.write_bytes(b"half")
    run(sweep(), store)
    assert not any(orphan.exists() for orphan in orphans)
    assert_complete(store, CELLS)
    assert remove_unfinished(store) == 0


def assert_same_arrays(one, other):
    """All but the seconds and the errors, wherever both have them."""
    names = [name for name in other.variables if name in one.variables and name not in ("seconds", "error")]
    assert {"overlap", "overlap_mean", "probability", "status", "beta", "dim"} <= set(names)
    for name in names:
        if other[name].dtype.kind in "fiu" and one[name].dtype.kind in "fiu":
            assert values_equal(one[name], other[name]), name


# Zarr and xarray.


@pytest.mark.parametrize("consolidated", [True, False])
def test_xarray_opens_the_store(whole, consolidated):
    data, ours = opened(whole, consolidated), lf.load_sweep(whole)
    assert set(ours.data_vars) | {"error"} == set(data.data_vars)
    assert dict(data.sizes).items() >= dict(ours.sizes).items()
    assert_same_arrays(data, ours)
    assert data["beta"].values.tolist() == GRID["beta"]
    for name in ours.data_vars:
        assert data[name].dims == ours[name].dims
    assert json.loads(data["outcome"].attrs["values"]) == ours["outcome"].values.tolist()


def test_xarray_opens_the_store_while_the_sweep_runs(tmp_path, monkeypatch):
    path, seen, honest = tmp_path / "s.zarr", [], work_module.compute

    def compute(description, cell, **options):
        data = opened(path)
        assert_same_arrays(data, lf.load_sweep(path))
        seen.append(int(np.isfinite(data["overlap_mean"]).sum()))
        return honest(description, cell, **options)

    monkeypatch.setattr(work_module, "compute", compute)
    run(sweep(), path)
    assert seen == [0, 1, 2, 3, 4, 5]


def test_words_on_an_axis_are_in_its_attributes(tmp_path):
    description = sweep({"values": ["gaussian", "uniform"], "beta": [0, 2]})
    run(description, tmp_path / "s.zarr")
    data = opened(tmp_path / "s.zarr")
    assert data["values"].values.tolist() == [0, 1]
    assert json.loads(data["values"].attrs["values"]) == ["gaussian", "uniform"]
    assert lf.load_sweep(tmp_path / "s.zarr")["values"].values.tolist() == ["gaussian", "uniform"]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int8, np.int64, np.uint8, ">f8"])
def test_zarr_reads_our_chunks_and_we_read_zarrs(tmp_path, dtype):
    values = (100 * np.random.default_rng(0).standard_normal((3, 4))).astype(dtype)
    array = zarr.create_array(
        tmp_path / "a",
        shape=(5, 3, 4),
        chunks=(1, 3, 4),
        dtype=np.dtype(dtype).newbyteorder("="),
        compressors=[zarr.codecs.Crc32cCodec()],
        chunk_key_encoding={"name": "default", "separator": "."},
    )
    ours, theirs = (chunk_path(tmp_path / "a", (k,), 2) for k in (1, 3))
    write_chunk(ours, values)
    np.testing.assert_array_equal(array[1], values)
    array[3] = values
    native = np.dtype(dtype).newbyteorder("=")
    np.testing.assert_array_equal(read_chunk(theirs, native, (3, 4)), values)
    assert ours.read_bytes() == theirs.read_bytes()
    flip(theirs)
    assert read_chunk(theirs, native, (3, 4)) is None
    with pytest.raises(ValueError, match="checksum"):
        array[3]


def test_a_result_of_the_store_may_be_written_by_zarr(store, whole):
    """Chunks that Zarr writes into the store have the same bytes as ours."""
    array = zarr.open_array(store / "overlap", mode="r+")
    values = array[:]
    for path in store.glob("overlap/c.*"):
        path.unlink()
    array[:] = values
    assert_same_bits(store, whole)
    assert run(sweep(), store).skipped == CELLS


# Disks.


class Disk:
    """Chunks can be written so often, then there is an error."""

    def __init__(self, monkeypatch, room, code):
        self.room, self.code, self.honest = room, code, Path.write_bytes
        monkeypatch.setattr(Path, "write_bytes", self.write)

    def write(self, path, data):
        self.room -= 1
        if self.room < 0:
            self.honest(path, data[: len(data) // 2])
            raise OSError(self.code, os.strerror(self.code), str(path))
        return self.honest(path, data)


def disk(monkeypatch, room, code):
    trouble = Disk(monkeypatch, room, code)
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: trouble.write(path, data))


@pytest.mark.parametrize("room", [0, 1, 20, 33])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
def test_a_disk_that_cannot_be_written_is_one_error_and_the_store_resumes(whole, tmp_path, room, code):
    path = tmp_path / "s.zarr"
    with pytest.MonkeyPatch.context() as patch:
        disk(patch, room, code)
        with pytest.raises(InputError) as raised:
            run(sweep(), path)
    message = str(raised.value)
    assert message.startswith(f"Cannot write the store {path}: {os.strerror(code)} ({path}/")
    assert message.endswith("What is finished stays; start it again.")
    assert "\n" not in message
    assert list(path.rglob("*.unfinished")) == []
    done = int((lf.load_sweep(path)["status"] == 1).sum())
    assert run(sweep(), path).skipped == done == room // 11  # arrays
    assert_same_bits(path, whole)
    assert_complete(path, CELLS)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
def test_a_disk_that_is_full_from_the_start_is_one_error(tmp_path, monkeypatch, code):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(zarr, "open_group", refuse)
    with pytest.raises(InputError, match=os.strerror(code)) as raised:
        run(sweep(), tmp_path / "s.zarr")
    assert str(tmp_path / "s.zarr") in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused_before_any_work(monkeypatch):
    """/proc refuses also root."""
    monkeypatch.setattr(store_module, "compute", lambda *_, **__: pytest.fail("work was done"))
    with pytest.raises(InputError, match=r"^Cannot write into the folder /proc: "):
        run(sweep(), "/proc/s.zarr")


@pytest.mark.parametrize("left", ["nothing", "metadata", "empty folder"])
def test_a_folder_removed_while_it_runs_is_one_error_and_a_new_start(whole, tmp_path, monkeypatch, left):
    path, honest = tmp_path / "s.zarr", work_module.compute

    def compute(description, cell, **options):
        if cell.index == (0, 2):
            for place in path.iterdir():
                if left != "metadata" or place.name != "zarr.json":
                    shutil.rmtree(place) if place.is_dir() else place.unlink()
            if left == "nothing":
                path.rmdir()
        return honest(description, cell, **options)

    with monkeypatch.context() as patch:
        patch.setattr(work_module, "compute", compute)
        with pytest.raises(
            InputError, match=r"^Cannot write the store .*: No such file or directory .*start it again\.$"
        ):
            run(sweep(), path)
    assert run(sweep(), path).skipped == 0
    assert_same_bits(path, whole)


# Kills in the middle of the metadata.


class Killed(BaseException):
    """Nothing catches it: what is on the disk stays as it is."""


def killed_after(monkeypatch, calls):
    """A kill when the store's metadata has been written so often."""
    count, atomic = [0], zarr.storage._local._atomic_write

    def write(*arguments, **options):
        count[0] += 1
        if count[0] > calls:
            raise Killed
        return atomic(*arguments, **options)

    monkeypatch.setattr(zarr.storage._local, "_atomic_write", write)


@pytest.mark.parametrize("calls", [0, 1, 9, 33])
def test_killed_while_the_store_is_made_it_starts_again(whole, tmp_path, calls):
    path = tmp_path / "s.zarr"
    with pytest.MonkeyPatch.context() as patch:
        killed_after(patch, calls)
        with pytest.raises(Killed):
            run(sweep(), path)
    assert not path.exists()
    run(sweep(), path)
    assert_same_bits(path, whole)


@pytest.mark.parametrize("calls", [0, 2, 9, 18])
@pytest.mark.parametrize("then", ["the same", "as before"])
def test_killed_while_the_store_is_extended_it_goes_on(store, whole, tmp_path, calls, then):
    larger = sweep({"dim": [4, 6, 8], "beta": [0.0, 0.5, 1.0, 2.0]})
    with pytest.MonkeyPatch.context() as patch:
        killed_after(patch, calls)
        with pytest.raises(Killed):
            run(larger, store, extend=True)
    assert int((lf.load_sweep(store)["status"] == 1).sum()) == CELLS
    if then == "as before":
        assert run(sweep(), store).skipped == CELLS
        assert_same_bits(store, whole)
        assert_same_arrays(opened(store), opened(whole))
        assert_same_arrays(opened(store, consolidated=False), opened(whole))
        return
    assert run(larger, store, extend=True).skipped == CELLS
    run(larger, tmp_path / "new.zarr")
    assert_same_bits(store, tmp_path / "new.zarr")
    assert_same_arrays(opened(store), opened(tmp_path / "new.zarr"))


# Extension.


def test_extended_it_keeps_what_is_there(store, tmp_path):
    before = written(store)
    larger = sweep({"dim": [4, 6, 8], "beta": [0.0, 0.5, 1.0, 2.0]})
    report = run(larger, store, extend=True)
    assert (report.cells, report.done, report.skipped) == (12, 12, CELLS)
    after = written(store)
    assert before.items() <= after.items()
    assert cells_written(before, after) == sorted(set(np.ndindex(3, 4)) - set(np.ndindex(2, 3)))
    run(larger, tmp_path / "new.zarr")
    assert_same_bits(store, tmp_path / "new.zarr")
    assert_complete(store, 12)
    assert_same_arrays(opened(store), lf.load_sweep(tmp_path / "new.zarr"))


def test_extended_several_times_new_values_come_last_in_any_order(tmp_path):
    path = tmp_path / "s.zarr"
    steps = [([0.5], [4]), ([0.0, 0.5], [4]), ([0.0, 0.5], [6, 4]), ([2.0, 0.0, 1.0, 0.5], [4, 6, 3])]
    for betas, dims in steps:
        before = written(path)
        run(sweep({"beta": betas, "dim": dims}), path, extend=True)
        assert before.items() <= written(path).items()
    data = lf.load_sweep(path)
    assert data["beta"].values.tolist() == [0.5, 0.0, 2.0, 1.0]
    assert data["dim"].values.tolist() == [4, 6, 3]
    assert opened(path)["beta"].values.tolist() == [0.5, 0.0, 2.0, 1.0]
    sorted_grid = {"beta": [0.0, 0.5, 1.0, 2.0], "dim": [3, 4, 6]}
    whole = compute_sweep(sweep(sorted_grid), threads=1, progress=False)
    for name in whole.data_vars:
        assert values_equal(data[name].sel(sorted_grid), whole[name])
    assert run(sweep(sorted_grid), path).skipped == 12


def test_words_and_seeds_can_be_added(tmp_path):
    path = tmp_path / "s.zarr"
    run(sweep({"values": ["gaussian"], "seed": [1]}), path)
    run(sweep({"values": ["gaussian", "uniform"], "seed": [1, 2**62]}), path, extend=True)
    data = lf.load_sweep(path)
    assert data["values"].values.tolist() == ["gaussian", "uniform"]
    assert data["seed"].values.tolist() == [1, 2**62]
    assert json.loads(opened(path)["values"].attrs["values"]) == ["gaussian", "uniform"]
    assert_complete(path, 4)


def test_values_in_another_order_are_the_same_sweep(store):
    before = written(store)
    report = run(sweep({"dim": [6, 4], "beta": [1.0, 0.0, 0.5]}), store)
    assert report.skipped == CELLS
    assert written(store) == before
    assert lf.load_sweep(store)["dim"].values.tolist() == [4, 6]


# Refusals.


def other_code(path, **changes):
    """As if other code had begun the store."""
    record = json.loads((path / "zarr.json").read_text())
    record["attributes"]["sweep"] |= changes
    (path / "zarr.json").write_text(json.dumps(record))


REFUSALS = {
    "new value": (
        lambda: sweep({"dim": [4, 6], "beta": [0.0, 0.5, 1.0, 2.0]}),
        {},
        "{path} has no beta = 2.0. Nearest: extend it (extend, --extend).",
    ),
    "value gone": (
        lambda: sweep({"dim": [4], "beta": [0.0, 0.5, 1.0]}),
        {"extend": True},
        "{path} has dim = 6, which this sweep has not. Add them.",
    ),
    "seed": (lambda: sweep(seed=2), {}, "{path} belongs to another sweep (simulate.seed: 1 there, 2 here). Choose"),
    "samples": (lambda: sweep(samples=13), {"extend": True}, "{path} belongs to another sweep (simulate.samples: 12 t"),
    "field of the model": (
        lambda: sweep(base=lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=20, sigma=2.0)),
        {},
        "{path} belongs to another sweep (base.sigma: 1.0 there, 2.0 here). Choose another store.",
    ),
    "kind": (
        lambda: sweep(base=lf.HybridTransformer(tokens=2, dim=4, beta=1.0, epsilon=1.0, layers_per_unit_time=20)),
        {},
        "{path} belongs to another sweep (base.epsilon: None there, 1.0 here; base.kind: 'StochasticTransformer' th",
    ),
    "keep": (lambda: sweep(keep={"moments": True}), {}, "{path} belongs to another sweep (keep.outcomes.level: 0.95"),
    "axes": (
        lambda: sweep({**GRID, "seed": [1]}),
        {"extend": True},
        "{path} belongs to another sweep (over: ['dim', 'beta'] there, ['dim', 'beta', 'seed'] here)",
    ),
    "all": (
        lambda: lf.Sweep(NETWORK, over={"gamma": [0.1]}, simulate={"samples": 2, "start": {"tokens": 2}}),
        {"any_version": True},
        "{path} belongs to another sweep (",
    ),
}


@pytest.mark.parametrize(("make", "options", "says"), REFUSALS.values(), ids=list(REFUSALS))
def test_a_store_of_another_sweep_is_refused_with_the_difference(store, whole, make, options, says):
    before = written(store)
    with pytest.raises(OtherSweepError) as raised:
        run(make(), store, **options)
    assert str(raised.value).startswith(says.format(path=store))
    assert "\n" not in str(raised.value)
    assert written(store) == before
    assert_same_bits(store, whole)


@pytest.mark.parametrize("changes", [{"version": "0.0.1"}, {"sources": "0123456789abcdef"}], ids=str)
def test_a_store_of_other_code_is_refused_unless_that_does_not_matter(store, whole, changes):
    (store / "overlap" / "c.0.1.0.0.0").unlink()
    other_code(store, **changes)
    (name, there), before = *changes.items(), written(store)
    with pytest.raises(InputError) as raised:
        run(sweep(), store)
    assert f"begun by other code ({name} {there} there, " in str(raised.value)
    assert "--any-version" in str(raised.value)
    assert written(store) == before
    report = run(sweep(), store, any_version=True)
    assert (report.done, report.skipped) == (CELLS, CELLS - 1)
    assert run(sweep(), store).skipped == CELLS
    assert_same_bits(store, whole)


def test_the_fingerprint_is_that_of_the_sources_that_make_numbers(tmp_path, monkeypatch):
    def fingerprint():
        store_module.code.cache_clear()
        return store_module.code()["sources"]

    for name in ("engine.py", "sphere/pair.py", "cli/app.py", "plot.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(store_module, "PACKAGE", tmp_path)
            first = fingerprint()
            for name, matters in {
                "cli/app.py": False,
                "plot.py": False,
                "engine.py": True,
                "sphere/pair.py": True,
            }.items():
                before = fingerprint()
                (tmp_path / name).write_text("2")
                assert (fingerprint() != before) == matters, name
            assert fingerprint() != first
    finally:
        store_module.code.cache_clear()


@pytest.mark.parametrize("there", ["folder", "file", "zarr group", "array", "not JSON", "other format"])
def test_what_is_no_store_is_refused_and_left_alone(tmp_path, there):
    path = tmp_path / "s.zarr"
    if there == "folder":
        path.mkdir()
        (path / "thesis.tex").write_text("all my work")
    elif there == "file":
        path.write_text("all my work")
    elif there == "zarr group":
        zarr.open_group(path, mode="w")
    elif there == "array":
        zarr.create_array(path, shape=(3,), dtype=float)[:] = 1
    elif there == "not JSON":
        path.mkdir()
        (path / "zarr.json").write_text("{")
    else:
        run(sweep({"beta": [1.0]}), path)
        other_code(path, format=2)
    before = {one: one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()}
    with pytest.raises(InputError) as raised:
        run(sweep(), path, extend=True, any_version=True)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert {one: one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()} == before


def test_an_empty_folder_is_a_place_for_a_store(tmp_path, whole):
    run(sweep(), tmp_path)
    assert_same_bits(tmp_path, whole)


@pytest.mark.parametrize("path", ["nothing", "."])
def test_only_stores_are_loaded(tmp_path, path):
    with pytest.raises(InputError, match="is not the store of a sweep"):
        lf.load_sweep(tmp_path / path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"workers": 0}, "workers must be at least 1; got 0."),
        ({"workers": 1.5}, "workers must be a whole number; got 1.5."),
        ({"threads": 0}, "threads must be at least 1; got 0."),
        ({"tries": 0}, "tries must be at least 1; got 0."),
    ],
    ids=str,
)
def test_options_are_checked_before_a_store_is_made(tmp_path, options, says):
    with pytest.raises(InputError) as raised:
        run(sweep(), tmp_path / "s.zarr", **options)
    assert str(raised.value) == says
    assert list(tmp_path.iterdir()) == []


# Failed cells.


class Trouble:
    """`compute` that fails in some cells, the first times that it is asked."""

    def __init__(self, monkeypatch, cells, times, error):
        self.calls, self.honest = {}, work_module.compute
        self.cells, self.times, self.error = cells, times, error
        monkeypatch.setattr(work_module, "compute", self)
        monkeypatch.setattr(store_module, "compute", self)

    def __call__(self, description, cell, **options):
        self.calls[cell.index] = self.calls.get(cell.index, 0) + 1
        if cell.index in self.cells and self.calls[cell.index] <= self.times:
            raise self.error
        return self.honest(description, cell, **options)


@pytest.mark.parametrize("tries", [1, 2, 5])
def test_a_cell_that_fails_is_tried_again_then_recorded_and_the_others_go_on(whole, tmp_path, tries):
    path, bad = tmp_path / "s.zarr", (1, 1)
    with pytest.MonkeyPatch.context() as patch:
        trouble = Trouble(patch, {bad}, 100, RuntimeError("the ärray\nfell over " + 400 * "ä"))
        report = run(sweep(), path, tries=tries)
        assert trouble.calls[bad] == tries
    assert (report.cells, report.done, report.failed, report.skipped) == (CELLS, CELLS - 1, 1, 0)
    assert list(report.errors) == [bad]
    assert report.errors[bad].startswith("RuntimeError: the ärray\nfell over ää")
    data = lf.load_sweep(path)
    assert data["status"].values.tolist() == [[1, 1, 1], [1, 2, 1]]
    assert np.isnan(data["overlap"][bad]).all()
    assert np.isfinite(data["overlap_mean"].values.ravel()).sum() == CELLS - 1
    assert opened(path)["status"].values.tolist() == [[1, 1, 1], [1, 2, 1]]
    assert run(sweep(), path, retry_failed=False).failed == 1
    before = written(path)
    again = run(sweep(), path)
    assert (again.done, again.failed, again.skipped, again.errors) == (CELLS, 0, CELLS - 1, {})
    assert cells_written(before, written(path)) == [bad]
    assert_same_bits(path, whole)
    assert_complete(path, CELLS)


def test_a_cell_that_succeeds_the_second_time_is_like_any_other(whole, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        trouble = Trouble(patch, {(0, 1), (1, 2)}, 1, MemoryError())
        report = run(sweep(), tmp_path / "s.zarr")
        assert trouble.calls[(0, 1)] == trouble.calls[(1, 2)] == 2
    assert (report.done, report.failed) == (CELLS, 0)
    assert_same_bits(tmp_path / "s.zarr", whole)


def test_bad_input_is_not_tried_again(tmp_path, monkeypatch):
    trouble = Trouble(monkeypatch, {(1, 2)}, 100, InputError("no"))
    report = run(sweep(), tmp_path / "s.zarr", tries=5)
    assert trouble.calls[(1, 2)] == 1
    assert report.errors == {(1, 2): "no"}


def test_without_retries_failed_cells_stay_and_are_not_among_the_finished(tmp_path, monkeypatch):
    Trouble(monkeypatch, {(0, 1)}, 100, RuntimeError("no"))
    run(sweep(), tmp_path / "s.zarr")
    before = written(tmp_path / "s.zarr")
    report = run(sweep(), tmp_path / "s.zarr", retry_failed=False)
    assert (report.done, report.failed, report.skipped) == (CELLS - 1, 1, CELLS - 1)
    assert report.errors == {(0, 1): "RuntimeError: no"}
    assert written(tmp_path / "s.zarr") == before


def test_the_first_cell_may_fail(whole, tmp_path):
    """The shapes are those of another one."""
    with pytest.MonkeyPatch.context() as patch:
        Trouble(patch, {(0, 0)}, 100, RuntimeError("no"))
        report = run(sweep(), tmp_path / "s.zarr")
    assert report.errors == {(0, 0): "RuntimeError: no"}
    run(sweep(), tmp_path / "s.zarr")
    assert_same_bits(tmp_path / "s.zarr", whole)


def test_if_all_cells_fail_there_is_one_error(tmp_path, monkeypatch):
    Trouble(monkeypatch, set(np.ndindex(2, 3)), 100, RuntimeError("no"))
    with pytest.raises(InputError, match=r"^The first cells fail: RuntimeError: no$"):
        run(sweep(), tmp_path / "s.zarr")
    assert list(tmp_path.iterdir()) == []


def test_cells_that_do_not_fit_the_memory_fail_alone(tmp_path):
    """Nothing is patched here: a value that only the run refuses."""
    description = sweep({"tokens": [2, 10**7]}, keep={"moments": True})
    report = run(description, tmp_path / "s.zarr")
    assert (report.done, report.failed) == (1, 1)
    assert "GiB, more than is free" in report.errors[(1,)]


# Memory.


def test_memory_does_not_grow_with_the_cells(tmp_path):
    """Their indices and marks alone: half a kilobyte a cell at most, a tenth of what a cell's samples are."""
    peaks = []
    for cells in (50, 50, 350):
        description = sweep({"seed": list(range(cells))}, keep={"samples": True}, samples=320)
        tracemalloc.start()
        run(description, tmp_path / f"{len(peaks)}.zarr")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] - peaks[1] < 512 * 300
