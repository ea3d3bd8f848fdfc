"""The store of a sweep: the same bits however it was filled, extension, refusals in one line, failed cells."""

import gc
import json
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr

import limitformer as lf
import own_parts_example
from limitformer.base.errors import InputError
from limitformer.sweep import OtherSweepError, SweepInterrupted, opening, origin, trial
from limitformer.sweep import store as store_module
from limitformer.sweep import work as work_module
from limitformer.sweep.cells import Names, place_of
from limitformer.sweep.opening import open_store
from limitformer.sweep.run import compute_sweep
from limitformer.sweep.work import StoreError, job_of, run_cell
from sweep_grids import (
    GRID,
    NETWORK,
    assert_complete,
    assert_same_bits,
    assert_same_numbers,
    cell_path,
    cells_written,
    described_as,
    environment,
    files,
    run,
    sweep,
    values_equal,
    written,
)

CELLS = 6
MOMENTS = {"moments": True}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A complete store to compare with; no test writes to it."""
    path = tmp_path_factory.mktemp("whole") / "s.sweep"
    report = run(sweep(), path)
    assert (report.cells, report.done, report.failed, report.skipped) == (CELLS, CELLS, 0, 0)
    return path


@pytest.fixture
def store(whole, tmp_path):
    """A copy that a test may change."""
    return Path(shutil.copytree(whole, tmp_path / "s.sweep"))


# Bits.


def test_store_has_the_bits_of_a_computation_in_memory(whole):
    loaded, direct = lf.load_sweep(whole), compute_sweep(sweep(), threads=1, progress=False)
    assert set(loaded.data_vars) == {*direct.data_vars, "status", "code", "seconds"}
    for name, values in direct.variables.items():
        assert loaded[name].dims == values.dims
        assert loaded[name].values.tobytes() == values.values.tobytes()
    assert json.loads(loaded.attrs["sweep"]) == sweep().record() == json.loads(direct.attrs["sweep"])
    assert (loaded["seconds"] > 0).all()


def test_random_order_of_cells_gives_the_same_bits(whole, tmp_path, monkeypatch):
    order, write = [], store_module.Store.write
    monkeypatch.setattr(
        store_module.Store, "write", lambda self, index, *rest: (order.append(index), write(self, index, *rest))
    )
    run(sweep(), tmp_path / "s.sweep", shuffle=True)
    assert sorted(order) == list(np.ndindex(2, 3)) != order
    assert_same_bits(tmp_path / "s.sweep", whole)


def test_threads_do_not_change_a_bit(whole, tmp_path):
    run(sweep(), tmp_path / "s.sweep", threads=2)
    assert_same_bits(tmp_path / "s.sweep", whole)


def test_wrong_twin_with_another_seed_has_other_bits(whole, tmp_path):
    run(sweep(seed=2), tmp_path / "s.sweep")
    with pytest.raises(AssertionError):
        assert_same_bits(tmp_path / "s.sweep", whole)


def test_second_run_computes_and_writes_nothing(store, whole, monkeypatch):
    before = files(store)
    monkeypatch.setattr(work_module, "compute", lambda *_, **__: pytest.fail("work was done"))
    report = run(sweep(), store)
    assert (report.done, report.skipped, report.failed) == (CELLS, CELLS, 0)
    assert files(store) == before
    assert_same_bits(store, whole)


@pytest.mark.parametrize("stop", [0, 1, 4])
def test_interrupted_sweep_resumes(whole, tmp_path, monkeypatch, stop):
    honest, calls = work_module.compute, []

    def compute(description, cell, **options):
        calls.append(cell.index)
        if len(calls) == stop + 1:
            raise KeyboardInterrupt
        return honest(description, cell, **options)

    monkeypatch.setattr(work_module, "compute", compute)
    path = tmp_path / "s.sweep"
    with pytest.raises(SweepInterrupted, match=f"Interrupted with {stop} of 6 cells done; start it again to go on: "):
        run(sweep(), path)
    assert int((lf.load_sweep(path)["status"] == 1).sum()) == stop
    report = run(sweep(), path)
    assert (report.done, report.skipped) == (CELLS, stop)
    assert len(calls) == CELLS + 1
    assert_same_bits(path, whole)


def test_store_can_be_read_while_the_sweep_runs(whole, tmp_path, monkeypatch):
    path, honest, seen, truth = tmp_path / "s.sweep", work_module.compute, [], lf.load_sweep(whole)

    def compute(description, cell, **options):
        data = lf.load_sweep(path)
        done = data["status"].values == 1
        assert values_equal(data["overlap"].values[done], truth["overlap"].values[done])
        assert np.isnan(data["overlap"].values[~done]).all()
        seen.append(int(done.sum()))
        return honest(description, cell, **options)

    monkeypatch.setattr(work_module, "compute", compute)
    run(sweep(), path)
    assert seen == list(range(CELLS))
    assert_complete(path, CELLS)


def test_cells_are_spread_evenly_over_4096_subfolders():
    """100,000 cells are 24.4 for each; more than 60 in one has a probability of 1e-6 for names drawn at random."""
    names = Names(sweep({"seed": list(range(100_000))}, keep=MOMENTS))
    places = {place_of(names.of((k,))) for k in range(100_000)}
    assert len(places) == 100_000
    folders = Counter(place.split("/")[0] for place in places)
    assert len(folders) == 4096
    assert max(folders.values()) <= 60


def test_slow_cells_are_flushed_to_the_disk_before_they_are_renamed(tmp_path, monkeypatch):
    """The description is flushed too. A quick cell costs less to compute again than to flush."""
    events, fsync, replace = [], store_module.os.fsync, Path.replace
    monkeypatch.setattr(store_module.os, "fsync", lambda file: (events.append("fsync"), fsync(file)))
    monkeypatch.setattr(Path, "replace", lambda path, target: (events.append(target.name), replace(path, target)))
    for limit in (0.0, 1e9):
        events.clear()
        monkeypatch.setattr(store_module, "LASTING_SECONDS", limit)
        run(sweep({"beta": [0.0]}), tmp_path / f"{limit}.sweep")
        *first, last = events
        assert first[:2] == ["fsync", "sweep.json"]
        assert last.endswith(".cell")
        assert (first[-1] == "fsync" and first[-2] == "fsync") == (limit == 0.0)


# Extension.


def test_extension_keeps_all_cells(store, tmp_path):
    before = written(store)
    larger = sweep({"dim": [4, 6, 8], "beta": [0.0, 0.5, 1.0, 2.0]})
    report = run(larger, store, extend=True)
    assert (report.cells, report.done, report.skipped) == (12, 12, CELLS)
    after = written(store)
    assert before.items() <= after.items()
    assert cells_written(before, after) == sorted(set(np.ndindex(3, 4)) - set(np.ndindex(2, 3)))
    run(larger, tmp_path / "new.sweep")
    assert_same_numbers(store, tmp_path / "new.sweep")
    assert_complete(store, 12)


def test_repeated_extension_appends_new_values(tmp_path):
    path = tmp_path / "s.sweep"
    steps = [([0.5], [4]), ([0.0, 0.5], [4]), ([0.0, 0.5], [6, 4]), ([2.0, 0.0, 1.0, 0.5], [4, 6, 3])]
    for betas, dims in steps:
        before = written(path)
        run(sweep({"beta": betas, "dim": dims}), path, extend=True)
        assert before.items() <= written(path).items()
    data = lf.load_sweep(path)
    assert data["beta"].values.tolist() == [0.5, 0.0, 2.0, 1.0]
    assert data["dim"].values.tolist() == [4, 6, 3]
    sorted_grid = {"beta": [0.0, 0.5, 1.0, 2.0], "dim": [3, 4, 6]}
    whole = compute_sweep(sweep(sorted_grid), threads=1, progress=False)
    for name in whole.data_vars:
        assert values_equal(data[name].sel(sorted_grid), whole[name])
    assert run(sweep(sorted_grid), path).skipped == 12


def test_extension_adds_words_and_seeds(tmp_path):
    path = tmp_path / "s.sweep"
    run(sweep({"values": ["gaussian"], "seed": [1]}), path)
    run(sweep({"values": ["gaussian", "uniform"], "seed": [1, 2**62]}), path, extend=True)
    data = lf.load_sweep(path)
    assert data["values"].values.tolist() == ["gaussian", "uniform"]
    assert data["seed"].values.tolist() == [1, 2**62]
    assert_complete(path, 4)


def test_values_in_another_order_are_the_same_sweep(store):
    before = files(store)
    report = run(sweep({"dim": [6, 4], "beta": [1.0, 0.0, 0.5]}), store)
    assert report.skipped == CELLS
    assert files(store) == before
    assert lf.load_sweep(store)["dim"].values.tolist() == [4, 6]


# Starting again.


def seconds_to_start(path, seeds):
    """Return the CPU seconds to open a store with `seeds` cells, none of them done."""
    description = sweep({"seed": list(range(seeds))}, keep=MOMENTS)
    with opening.ready(path, description, extend=True, any_version=False):
        began = time.process_time()
    with opening.ready(path, description, extend=True, any_version=False) as (_, survey):
        assert (survey.status == 0).sum() == seeds
    return time.process_time() - began


def test_time_to_resume_is_linear_in_the_cells(tmp_path):
    """A quadratic search would take 64 times as long for eight times the values."""
    seconds_to_start(tmp_path / "first", 10)
    few, many = (seconds_to_start(tmp_path / str(seeds), seeds) for seeds in (5_000, 40_000))
    assert many < 24 * few


# Refusals.


def other_code(path, **changes):
    """Change the code that began the store."""
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
        "{path} has dim = 6, which this sweep lacks. Nearest: add them.",
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
def test_store_of_another_sweep_is_refused_with_the_difference(store, whole, make, options, says):
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
    """Return a context in which this process has other code."""

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
def test_store_of_other_code_is_refused_unless_any_version_is_allowed(whole, tmp_path, elsewhere, changes):
    """A mixed store records the code of each cell."""
    path = tmp_path / "s.sweep"
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
    assert run(sweep(), path).skipped == CELLS, "it is accepted without the option now"
    data = lf.load_sweep(path)
    numbers = json.loads(data.attrs["codes"])
    found = [[numbers[str(number)] for number in row] for row in data["code"].values.tolist()]
    assert found == [[theirs, origin.code(), origin.code()]] * 2
    assert_same_values(path, whole)
    with elsewhere(**changes):
        assert run(sweep(), path).skipped == CELLS, "it is one of the store's codes"
    with elsewhere(version="9.9"), pytest.raises(OtherSweepError, match="begun by other code"):
        run(sweep(), path)


def test_cells_copied_in_from_other_code_are_refused_unless_any_version_is_allowed(whole, tmp_path, elsewhere):
    path, copied = Path(shutil.copytree(whole, tmp_path / "s.sweep")), tmp_path / "copied.sweep"
    with elsewhere(numba="9.9"):
        run(sweep(), copied)
    shutil.copy(cell_path(copied, (1, 1)), cell_path(path, (1, 1)))
    with pytest.raises(OtherSweepError, match="has cells that were copied into it from other code"):
        run(sweep(), path)
    assert run(sweep(), path, any_version=True).skipped == CELLS
    assert run(sweep(), path).skipped == CELLS, "it is one of the store's codes now"


def test_worker_refuses_a_user_function_that_differs_from_that_of_the_sweep(tmp_path):
    model = replace(NETWORK, feedforward=lf.Elementwise(own_parts_example.silu))
    options = {"samples": 2, "seed": 1, "start": {"tokens": 2, "correlation": 0.2}}
    description = lf.Sweep(model, over={"gamma": [0.5]}, simulate=options)
    run(description, tmp_path / "s.sweep")
    job = job_of(open_store(tmp_path / "s.sweep", imports=True), threads=1, tries=1, any_version=False)
    assert job.functions == (("own_parts_example:silu", job.functions[0][1]),)
    assert run_cell(job, (0,)).status == 1
    other = replace(job, functions=(("own_parts_example:silu", "0"),))
    with pytest.raises(StoreError, match="own_parts_example:silu has other code, or reads other values, in a"):
        run_cell(other, (0,))


def assert_same_values(path, other):
    """The results are equal; their code may differ."""
    one, two = lf.load_sweep(path), lf.load_sweep(other)
    for name in two.data_vars:
        assert name in ("code", "seconds") or values_equal(one[name], two[name]), name


def test_worker_with_other_code_is_refused_or_recorded(whole, tmp_path, monkeypatch):
    """The store was begun here, and the worker runs on a machine with another processor."""
    here = origin.code()
    theirs = {**here, "processor": "skylake-1"}

    def checked(path, codes, accepted):
        with monkeypatch.context() as patch:
            patch.setattr(opening, "code", lambda: theirs)
            opening.check_code(path, codes, accepted)

    def run_elsewhere(**options):
        with monkeypatch.context() as patch:
            patch.setattr(store_module, "code", lambda: theirs)
            patch.setattr(work_module, "check_code", checked)
            patch.setattr(work_module, "store_at", work_module.store_at.__wrapped__)
            return run(sweep(), tmp_path / "s.sweep", **options)

    says = r"^Cannot write the store .* begun by other code \(processor .* there, skylake-1 here\)"
    with pytest.raises(InputError, match=says):
        run_elsewhere()
    assert (lf.load_sweep(tmp_path / "s.sweep")["status"] == 0).all()
    report = run_elsewhere(any_version=True)
    assert report.done == CELLS
    data = lf.load_sweep(tmp_path / "s.sweep")
    codes = json.loads(data.attrs["codes"])
    assert list(codes.values()) == [here, theirs]
    assert {codes[str(number)]["processor"] for number in data["code"].values.ravel()} == {"skylake-1"}
    assert_same_values(tmp_path / "s.sweep", whole)


def test_processor_is_the_target_of_numba(tmp_path):
    """A target that is set by hand gives other bits than the processor of the machine."""
    program = "from limitformer.sweep.origin import code; print(code()['processor'])"
    options = {"env": {**environment(), "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2"}, "text": True}
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, **options).stdout.strip()
    assert found.startswith("haswell-")
    assert found != origin.code()["processor"]


def test_fingerprint_covers_the_sources_that_make_numbers(tmp_path, monkeypatch):
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


def foreign(path, kind):
    """Make a file or folder that is not a store."""
    path.mkdir()
    if kind == "folder":
        (path / "thesis.tex").write_text("all my work")
    elif kind == "folder with cells":
        (path / "cells").mkdir()
        (path / "cells" / "mitochondrion.tif").write_text("all my work")
    elif kind == "zarr group":
        zarr.open_group(path, mode="w")
    elif kind == "zarr array":
        zarr.create_array(path, shape=(3,), dtype=float)[:] = 1
    elif kind == "other sweep.json":
        (path / "sweep.json").write_text("{")
    else:
        path.rmdir()
        path.write_text("all my work")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "kind", ["folder", "folder with cells", "zarr group", "zarr array", "other sweep.json", "file"]
)
def test_other_folders_are_refused_and_left_alone(tmp_path, kind):
    path = tmp_path / "s.sweep"
    foreign(path, kind)
    before = contents(tmp_path)
    with pytest.raises(InputError, match=r"s\.sweep is not the store of a sweep\.$"):
        lf.load_sweep(path)
    with pytest.raises(
        InputError, match=r"s\.sweep is there and is not the store of a sweep\. Choose another folder\.$"
    ):
        run(sweep(), path, extend=True, any_version=True)
    assert contents(tmp_path) == before


def test_stores_of_other_versions_are_refused_and_left_alone(tmp_path):
    """Stores of version 0.2 and older were Zarr groups."""
    older, newer = tmp_path / "older", tmp_path / "newer"
    (older / "cells").mkdir(parents=True)
    (older / "zarr.json").write_text('{"node_type": "group", "attributes": {"sweep": {"format": 2}}}')
    run(sweep({"beta": [1.0]}), newer)
    described_as(newer, lambda description: description.update(format=4))
    before = contents(tmp_path)
    for path, message in (
        (older, "is a store of limitformer 0.2 or older, which this version cannot read. Nearest: read it with limitf"),
        (newer, "has the format '4' of a store; this version reads 3."),
    ):
        for use in (lambda path=path: lf.load_sweep(path), lambda path=path: run(sweep(), path)):
            with pytest.raises(OtherSweepError) as raised:
                use()
            assert str(raised.value).startswith(f"{path} {message}")
            assert "\n" not in str(raised.value)
    assert contents(tmp_path) == before


def test_empty_folder_becomes_a_store(tmp_path, whole):
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
        run(sweep(), tmp_path / "s.sweep", **options)
    assert str(raised.value) == says
    assert list(tmp_path.iterdir()) == []


# Failed cells.


class Trouble:
    """A `compute` that fails the first `times` times in some cells."""

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
def test_failing_cell_is_retried_then_recorded_and_others_continue(whole, tmp_path, tries):
    path, bad = tmp_path / "s.sweep", (1, 1)
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
    assert run(sweep(), path, retry_failed=False).failed == 1
    before = written(path)
    again = run(sweep(), path)
    assert (again.done, again.failed, again.skipped, again.errors) == (CELLS, 0, CELLS - 1, {})
    assert cells_written(before, written(path)) == [bad]
    assert_same_bits(path, whole)
    assert_complete(path, CELLS)


def test_cell_that_succeeds_at_the_second_try_has_the_same_bits(whole, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        trouble = Trouble(patch, {(0, 1), (1, 2)}, 1, MemoryError())
        report = run(sweep(), tmp_path / "s.sweep")
        assert trouble.calls[(0, 1)] == trouble.calls[(1, 2)] == 2
    assert (report.done, report.failed) == (CELLS, 0)
    assert_same_bits(tmp_path / "s.sweep", whole)


def test_bad_input_is_not_retried(tmp_path, monkeypatch):
    trouble = Trouble(monkeypatch, {(1, 2)}, 100, InputError("no"))
    report = run(sweep(), tmp_path / "s.sweep", tries=5)
    assert trouble.calls[(1, 2)] == 1
    assert report.errors == {(1, 2): "no"}


def test_failed_cells_stay_without_retry_failed(tmp_path, monkeypatch):
    Trouble(monkeypatch, {(0, 1)}, 100, RuntimeError("no"))
    run(sweep(), tmp_path / "s.sweep")
    before = files(tmp_path / "s.sweep")
    report = run(sweep(), tmp_path / "s.sweep", retry_failed=False)
    assert (report.done, report.failed, report.skipped) == (CELLS - 1, 1, CELLS - 1)
    assert report.errors == {(0, 1): "RuntimeError: no"}
    assert files(tmp_path / "s.sweep") == before


def test_first_cell_may_fail(whole, tmp_path):
    """The shapes are those of another cell."""
    with pytest.MonkeyPatch.context() as patch:
        Trouble(patch, {(0, 0)}, 100, RuntimeError("no"))
        report = run(sweep(), tmp_path / "s.sweep")
    assert report.errors == {(0, 0): "RuntimeError: no"}
    run(sweep(), tmp_path / "s.sweep")
    assert_same_bits(tmp_path / "s.sweep", whole)


def test_grid_whose_cells_all_fail_is_one_error(tmp_path, monkeypatch):
    Trouble(monkeypatch, set(np.ndindex(2, 3)), 100, RuntimeError("no"))
    says = r"^No cell of the grid can run\. Cell dim = 6, beta = 1\.0: RuntimeError: no$"
    with pytest.raises(InputError, match=says):
        run(sweep(), tmp_path / "s.sweep")
    monkeypatch.setattr(trial, "MOST_TRIALS", 4)
    with pytest.raises(InputError, match=r"^The first cells fail\. Cell dim = 6, beta = 0\.0: RuntimeError: no$"):
        run(sweep(), tmp_path / "s.sweep")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tokens", [[10**7], [10**7, 2 * 10**7]])
def test_grid_without_a_cell_that_fits_the_memory_is_refused_before_a_store_is_made(tmp_path, monkeypatch, tokens):
    monkeypatch.setattr(trial, "compute", lambda *_, **__: pytest.fail("work was done"))
    says = r"^No cell of the grid can run\. Cell .* GiB.* free\. Nearest: "
    for description in (sweep({"tokens": tokens}, keep=MOMENTS), sweep({"beta": [0.0, 1.0]}, samples=10**12)):
        with pytest.raises(InputError, match=says) as raised:
            run(description, tmp_path / "s.sweep")
        assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_cell_that_does_not_fit_the_memory_fails_and_others_continue(tmp_path):
    """A model that is too large is refused only when it runs, in the first cell too."""
    for place, tokens in enumerate([[10**7, 2], [2, 10**7]]):
        report = run(sweep({"tokens": tokens}, keep={"moments": True}), tmp_path / f"{place}.sweep")
        assert (report.done, report.failed) == (1, 1)
        assert "GiB, more than is free" in report.errors[(place,)]


# Memory.


def collecting(honest):
    """Collect garbage before each call: the interpreter may keep thousands of freed tuples."""

    def collected(*arguments, **options):
        gc.collect()
        return honest(*arguments, **options)

    return collected


def test_memory_grows_by_half_a_kilobyte_a_cell_at_most(tmp_path, monkeypatch):
    """A tenth of a cell's samples: only indices and marks are kept."""
    peaks = []
    monkeypatch.setattr(work_module, "compute", collecting(work_module.compute))
    monkeypatch.setattr(store_module, "decoded", collecting(store_module.decoded))
    for cells in (30, 30, 230):  # threads that meet add some kilobytes to any peak
        description = sweep({"seed": list(range(cells))}, keep={"samples": True}, samples=640)
        tracemalloc.start()
        run(description, tmp_path / f"{len(peaks)}.sweep")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] - peaks[1] < 512 * 200
