"""The store of a sweep: the same bits however it was filled, damage is found, errors in one line, extension."""

import gc
import json
import shutil
import subprocess
import sys
import time
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.sweep import OtherSweepError, SweepInterrupted, opening, origin, trial
from limitformer.sweep import layout as layout_module
from limitformer.sweep import run as run_module
from limitformer.sweep import store as store_module
from limitformer.sweep import work as work_module
from limitformer.sweep.layout import block_shape, blocks
from limitformer.sweep.metadata import chunk, chunk_values
from limitformer.sweep.opening import open_store
from limitformer.sweep.run import compute_sweep
from sweep_grids import (
    AT_ANY_TIME,
    GRID,
    NETWORK,
    assert_complete,
    assert_same_bits,
    assert_same_numbers,
    cells_written,
    described_as,
    environment,
    files,
    flip,
    run,
    sweep,
    values_equal,
    written,
)

CELLS = 6
MOMENTS = {"moments": True}


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
    assert set(kept.data_vars) == {*direct.data_vars, "status", "code", "seconds"}
    for name, values in direct.variables.items():
        assert kept[name].dims == values.dims
        assert kept[name].values.tobytes() == values.values.tobytes()
    assert json.loads(kept.attrs["sweep"]) == sweep().record() == json.loads(direct.attrs["sweep"])
    assert (kept["seconds"] > 0).all()


def test_cells_in_random_order_give_the_same_bits(whole, tmp_path, monkeypatch):
    seen, write = [], store_module.Store.write
    monkeypatch.setattr(
        store_module.Store, "write", lambda self, index, row: (seen.append(index), write(self, index, row))
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
    """And writes nothing."""
    before = files(store)
    monkeypatch.setattr(work_module, "compute", lambda *_, **__: pytest.fail("work was done"))
    report = run(sweep(), store)
    assert (report.done, report.skipped, report.failed) == (CELLS, CELLS, 0)
    assert files(store) == before
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


# Blocks.


@pytest.mark.parametrize("most", [1, 2, 4, 5])
def test_cells_that_share_chunks_otherwise_have_the_same_bits(whole, tmp_path, monkeypatch, most):
    """Also with chunks that reach beyond the grid."""
    monkeypatch.setattr(layout_module, "MOST_CELLS", most)
    run(sweep(), tmp_path / "s.zarr", shuffle=True)
    kept = open_store(tmp_path / "s.zarr")
    assert kept.block == {1: (1, 1), 2: (1, 2), 4: (1, 3), 5: (1, 3)}[most]
    one, two = lf.load_sweep(tmp_path / "s.zarr").drop_vars("seconds"), lf.load_sweep(whole).drop_vars("seconds")
    assert all(one[name].values.tobytes() == two[name].values.tobytes() for name in two.variables)
    assert_same_arrays(opened(tmp_path / "s.zarr"), opened(whole))


@pytest.mark.parametrize(
    ("shape", "row", "expected"),
    [
        ((2, 3), 500, (2, 3)),
        ((5000,), 500, (2500,)),
        ((1_000_000,), 500, (4082,)),
        ((1000, 1000), 500, (4, 1000)),
        ((3, 5), 2**20, (1, 3)),
        ((7, 7), 2**30, (1, 1)),
    ],
)
def test_blocks_are_large_but_not_too_large_and_have_every_cell_once(shape, row, expected):
    lengths = block_shape(shape, row)
    assert lengths == expected
    times = np.zeros(shape, int)
    for block in blocks(shape, lengths):
        times[block.cells] += 1
    assert (times == 1).all()


def test_finished_cells_are_gathered_while_the_sweep_runs(whole, tmp_path, monkeypatch):
    """A file each until then; every gathering leaves a store that is right."""
    path, honest, seen = tmp_path / "s.zarr", work_module.compute, []

    def compute(description, cell, **options):
        loose = [name for name in (path / "cells").iterdir() if name.name[0].isdigit()]
        done = [int((data["status"] == 1).sum()) for data in (opened(path), lf.load_sweep(path))]
        seen.append((len(loose), *done))
        return honest(description, cell, **options)

    monkeypatch.setattr(work_module, "compute", compute)
    monkeypatch.setattr(run_module, "TIMES_AS_LONG", 0)
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "SOONEST", 0.0)
        run(sweep(), path)
    assert seen == [(0, k, k) for k in range(CELLS)]
    assert_same_bits(path, whole)
    shutil.rmtree(path)
    seen.clear()
    monkeypatch.setattr(run_module, "SOONEST", 1e9)
    run(sweep(), path)
    assert seen == [(k, 0, k) for k in range(CELLS)]
    assert_same_bits(path, whole)
    assert_complete(path, CELLS)


def assert_same_arrays(one, other):
    """All but the seconds and the errors, wherever both have them."""
    names = [name for name in other.variables if name in one.variables and name not in (*AT_ANY_TIME, "error")]
    assert {"overlap", "overlap_mean", "probability", "status", "beta", "dim"} <= set(names)
    for name in names:
        if other[name].dtype.kind in "fiu" and one[name].dtype.kind in "fiu":
            assert values_equal(one[name], other[name]), name


# Zarr and xarray.


@pytest.mark.parametrize("consolidated", [True, False])
def test_xarray_opens_the_store(whole, consolidated):
    data, ours = opened(whole, consolidated), lf.load_sweep(whole)
    assert set(ours.data_vars) | {"error", "finished", "checksum"} == set(data.data_vars)
    assert dict(data.sizes).items() >= dict(ours.sizes).items()
    assert_same_arrays(data, ours)
    assert data["beta"].values.tolist() == GRID["beta"]
    for name in ours.data_vars:
        assert data[name].dims == ours[name].dims
    assert json.loads(data["outcome"].attrs["values"]) == ours["outcome"].values.tolist()


def test_the_documents_are_those_that_zarr_writes(whole, tmp_path):
    """Made by Zarr from the same parameters."""
    group = zarr.open_group(tmp_path / "theirs", mode="w", zarr_format=3)
    for name, array in zarr.open_group(whole, mode="r").arrays():
        group.create_array(
            name,
            shape=array.shape,
            chunks=array.chunks,
            dtype=array.dtype,
            compressors=[zarr.codecs.Crc32cCodec()],
            fill_value=array.fill_value,
            dimension_names=array.metadata.dimension_names,
            chunk_key_encoding={"name": "default", "separator": "."},
            attributes=dict(array.attrs),
        )
        theirs, ours = (json.loads((path / name / "zarr.json").read_text()) for path in (tmp_path / "theirs", whole))
        assert ours == theirs
    with pytest.warns(UserWarning, match="Consolidated metadata"):  # xarray wants it, Zarr 3 has not fixed it yet
        zarr.consolidate_metadata(str(tmp_path / "theirs"))
    theirs, ours = (json.loads((path / "zarr.json").read_text()) for path in (tmp_path / "theirs", whole))
    assert ours["consolidated_metadata"] == theirs["consolidated_metadata"]
    assert ours | {"attributes": {}} == theirs


def test_words_on_an_axis_are_in_its_attributes(tmp_path):
    description = sweep({"values": ["gaussian", "uniform"], "beta": [0, 2]})
    run(description, tmp_path / "s.zarr")
    data = opened(tmp_path / "s.zarr")
    assert data["values"].values.tolist() == [0, 1]
    assert json.loads(data["values"].attrs["values"]) == ["gaussian", "uniform"]
    assert lf.load_sweep(tmp_path / "s.zarr")["values"].values.tolist() == ["gaussian", "uniform"]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int8, np.int64, np.uint8])
def test_zarr_reads_our_chunks_and_we_read_zarrs(tmp_path, dtype):
    values = (100 * np.random.default_rng(0).standard_normal((2, 3, 4))).astype(dtype)
    array = zarr.create_array(
        tmp_path / "a",
        shape=(5, 3, 4),
        chunks=(2, 3, 4),
        dtype=dtype,
        compressors=[zarr.codecs.Crc32cCodec()],
        chunk_key_encoding={"name": "default", "separator": "."},
    )
    ours, theirs = tmp_path / "a" / "c.0.0.0", tmp_path / "a" / "c.1.0.0"
    ours.write_bytes(chunk(values))
    np.testing.assert_array_equal(array[:2], values)
    array[2:4] = values
    found, sound = chunk_values(theirs.read_bytes(), np.dtype(dtype), (2, 3, 4))
    np.testing.assert_array_equal(found, values)
    assert sound
    assert ours.read_bytes() == theirs.read_bytes()
    flip(theirs)
    assert not chunk_values(theirs.read_bytes(), np.dtype(dtype), (2, 3, 4))[1]
    with pytest.raises(ValueError, match="checksum"):
        array[2:4]


def test_a_result_of_the_store_may_be_written_by_zarr(store, whole):
    """Chunks that Zarr writes into the store have the same bytes as ours."""
    array = zarr.open_array(store / "overlap", mode="r+")
    values = array[:]
    for path in store.glob("overlap/c.*"):
        path.unlink()
    array[:] = values
    assert_same_bits(store, whole)
    assert run(sweep(), store).skipped == CELLS


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
    assert_same_numbers(store, tmp_path / "new.zarr")
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
    before = files(store)
    report = run(sweep({"dim": [6, 4], "beta": [1.0, 0.0, 0.5]}), store)
    assert report.skipped == CELLS
    assert files(store) == before
    assert lf.load_sweep(store)["dim"].values.tolist() == [4, 6]


# Starting again.


def seconds_to_start(path, seeds):
    """Of the processor, for a store that has as many cells, none of them done."""
    description = sweep({"seed": list(range(seeds))}, keep=MOMENTS)
    opening.create(path, description)
    began = time.process_time()
    with opening.ready(path, description, extend=True, any_version=False) as kept:
        assert (kept.survey().status == 0).sum() == seeds
    return time.process_time() - began


def test_starting_again_takes_a_time_that_grows_with_the_cells_and_not_their_square(tmp_path):
    """Eight times as many values on an axis: 64 times as long if each is looked for among the others."""
    seconds_to_start(tmp_path / "first", 10)
    few, many = (seconds_to_start(tmp_path / str(seeds), seeds) for seeds in (5_000, 40_000))
    assert many < 24 * few


# Refusals.


def other_code(path, **changes):
    """As if other code had begun the store, and made none of its cells yet."""
    described_as(path, lambda kept: kept.update(codes=[kept["codes"][0] | changes]))


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
    before = files(store)
    with pytest.raises(OtherSweepError) as raised:
        run(make(), store, **options)
    assert str(raised.value).startswith(says.format(path=store))
    assert "\n" not in str(raised.value)
    assert files(store) == before
    assert_same_bits(store, whole)


CODES = [
    {"version": "0.0.1"},
    {"sources": "0123456789abcdef"},
    {"numpy": "1.0"},
    {"numba": "0.1"},
    {"processor": "haswell-0"},
]


@pytest.fixture
def elsewhere(monkeypatch):
    """Make everything that is computed in the block come from other code."""

    @contextmanager
    def other(**changes):
        with monkeypatch.context() as patch:
            made = {**origin.code(), **changes}
            for module in (opening, store_module):
                patch.setattr(module, "code", lambda: made)
            work_module.store_at.cache_clear()
            yield made
        work_module.store_at.cache_clear()

    return other


@pytest.mark.parametrize("changes", CODES, ids=lambda changes: next(iter(changes)))
def test_a_store_of_other_code_is_refused_unless_that_does_not_matter(whole, tmp_path, elsewhere, changes):
    """And then each cell says what made it."""
    path = tmp_path / "s.zarr"
    with elsewhere(**changes) as theirs:
        run(sweep({"dim": [4, 6], "beta": [0.0]}), path)
    before, (name, there) = files(path), next(iter(changes.items()))
    with pytest.raises(OtherSweepError) as raised:
        run(sweep(), path, extend=True)
    assert f"begun by other code ({name} {there} there, {origin.code()[name]} here), whose num" in str(raised.value)
    assert "--any-version" in str(raised.value)
    assert files(path) == before
    report = run(sweep(), path, extend=True, any_version=True)
    assert (report.done, report.skipped) == (CELLS, 2)
    assert run(sweep(), path).skipped == CELLS, "accepted once, it goes on"
    data = lf.load_sweep(path)
    numbers = json.loads(data.attrs["codes"])
    found = [[numbers[str(number)] for number in row] for row in data["code"].values.tolist()]
    assert found == [[theirs, origin.code(), origin.code()]] * 2
    assert opened(path)["code"].values.tolist() == data["code"].values.tolist()
    assert_same_values(path, whole)
    with elsewhere(**changes):
        assert run(sweep(), path).skipped == CELLS, "it is one of the store's codes"
    with elsewhere(version="9.9"), pytest.raises(OtherSweepError, match="begun by other code"):
        run(sweep(), path)


def assert_same_values(path, other):
    """The results are the same, whatever made them."""
    one, two = lf.load_sweep(path), lf.load_sweep(other)
    for name in two.data_vars:
        assert name in ("code", "seconds") or values_equal(one[name], two[name]), name


def test_a_worker_of_other_code_is_refused_or_marked(whole, tmp_path, monkeypatch):
    """As on a cluster of unequal machines: the store was begun here, and the worker computes elsewhere."""
    here = origin.code()
    theirs = {**here, "processor": "skylake-1"}

    def checked(path, codes, accepted):
        """The worker's check."""
        with monkeypatch.context() as patch:
            patch.setattr(opening, "code", lambda: theirs)
            opening.check_code(path, codes, accepted)

    def run_elsewhere(**options):
        with monkeypatch.context() as patch:
            patch.setattr(store_module, "code", lambda: theirs)
            patch.setattr(work_module, "check_code", checked)
            patch.setattr(work_module, "store_at", work_module.store_at.__wrapped__)
            return run(sweep(), tmp_path / "s.zarr", **options)

    says = r"^Cannot write the store .* begun by other code \(processor .* there, skylake-1 here\)"
    with pytest.raises(InputError, match=says):
        run_elsewhere()
    assert (lf.load_sweep(tmp_path / "s.zarr")["status"] == 0).all()
    report = run_elsewhere(any_version=True)
    assert report.done == CELLS
    data = lf.load_sweep(tmp_path / "s.zarr")
    codes = json.loads(data.attrs["codes"])
    assert list(codes.values()) == [here, theirs]
    assert {codes[str(number)]["processor"] for number in data["code"].values.ravel()} == {"skylake-1"}
    assert_same_values(tmp_path / "s.zarr", whole)


def test_the_processor_is_what_numba_compiles_for(tmp_path):
    """And not only what the machine calls itself: a target that is set by hand makes other bits."""
    program = "from limitformer.sweep.origin import code; print(code()['processor'])"
    options = {"env": {**environment(), "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2"}, "text": True}
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, **options).stdout.strip()
    assert found.startswith("haswell-")
    assert found != origin.code()["processor"]


def test_the_fingerprint_is_that_of_the_sources_that_make_numbers(tmp_path, monkeypatch):
    def fingerprint():
        return origin.sources()

    for name in ("simulation/simulate.py", "sphere/pair/chain.py", "cli/app.py", "plot.py", "base/lock.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(origin, "PACKAGE", tmp_path)
    first = fingerprint()
    for name, matters in {
        "cli/app.py": False,
        "plot.py": False,
        "base/lock.py": False,
        "simulation/simulate.py": True,
        "sphere/pair/chain.py": True,
    }.items():
        before = fingerprint()
        (tmp_path / name).write_text("2")
        assert (fingerprint() != before) == matters, name
    assert fingerprint() != first


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
        described_as(path, lambda kept: kept.update(format=1))
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
        monkeypatch.setattr(trial, "compute", self)

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
    before = files(tmp_path / "s.zarr")
    report = run(sweep(), tmp_path / "s.zarr", retry_failed=False)
    assert (report.done, report.failed, report.skipped) == (CELLS - 1, 1, CELLS - 1)
    assert report.errors == {(0, 1): "RuntimeError: no"}
    assert files(tmp_path / "s.zarr") == before


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
    says = r"^No cell of the grid can run\. Cell dim = 6, beta = 1\.0: RuntimeError: no$"
    with pytest.raises(InputError, match=says):
        run(sweep(), tmp_path / "s.zarr")
    monkeypatch.setattr(trial, "MOST_TRIALS", 4)
    with pytest.raises(InputError, match=r"^The first cells fail\. Cell dim = 6, beta = 0\.0: RuntimeError: no$"):
        run(sweep(), tmp_path / "s.zarr")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tokens", [[10**7], [10**7, 2 * 10**7]])
def test_a_grid_none_of_whose_cells_fits_the_memory_is_refused_before_anything_is_made(tmp_path, monkeypatch, tokens):
    monkeypatch.setattr(trial, "compute", lambda *_, **__: pytest.fail("work was done"))
    says = r"^No cell of the grid can run\. Cell .* GiB.* free\. Nearest: "
    for description in (sweep({"tokens": tokens}, keep=MOMENTS), sweep({"beta": [0.0, 1.0]}, samples=10**12)):
        with pytest.raises(InputError, match=says) as raised:
            run(description, tmp_path / "s.zarr")
        assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_cells_that_do_not_fit_the_memory_fail_alone(tmp_path):
    """Nothing is patched here: a value that only the run refuses, wherever it stands."""
    for place, tokens in enumerate([[10**7, 2], [2, 10**7]]):
        report = run(sweep({"tokens": tokens}, keep={"moments": True}), tmp_path / f"{place}.zarr")
        assert (report.done, report.failed) == (1, 1)
        assert "GiB, more than is free" in report.errors[(place,)]


# Memory.


def collecting(honest):
    """Garbage is collected first: until then the interpreter keeps thousands of freed tuples."""

    def collected(*arguments, **options):
        gc.collect()
        return honest(*arguments, **options)

    return collected


@pytest.fixture
def collected(monkeypatch):
    """Before each cell and each block."""
    monkeypatch.setattr(work_module, "compute", collecting(work_module.compute))
    monkeypatch.setattr(store_module.Store, "part", collecting(store_module.Store.part))


def test_memory_does_not_grow_with_the_cells(tmp_path, monkeypatch, collected):
    """Their indices and marks alone: half a kilobyte a cell at most, a tenth of what a cell's samples are."""
    peaks = []
    monkeypatch.setattr(layout_module, "MOST_BYTES", 2**16)  # what is read and written at a time
    monkeypatch.setattr(run_module, "SOONEST", 1e9)  # so that all cells are loose at the end
    for cells in (30, 30, 130):
        description = sweep({"seed": list(range(cells))}, keep={"samples": True}, samples=640)
        tracemalloc.start()
        run(description, tmp_path / f"{len(peaks)}.zarr")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] - peaks[1] < 512 * 100
