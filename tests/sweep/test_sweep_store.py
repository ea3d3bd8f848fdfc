"""The store of a sweep: the same bits however it was filled, extension, refusals in one line, damage, kills."""

import importlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

import limitformer as lf
import own_parts_example
from limitformer.base.errors import InputError
from limitformer.base.lock import only_one
from limitformer.results import storage
from limitformer.sweep import OtherSweepError, SweepInterrupted, compute_sweep
from limitformer.sweep.reduce import Reduced
from sweep_grids import (
    GRID,
    assert_complete,
    assert_same_bits,
    cell_path,
    done_cells,
    files,
    run,
    sweep,
    values_equal,
)

work = importlib.import_module("limitformer.sweep.run")
store_module = importlib.import_module("limitformer.sweep.store")
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


@pytest.fixture
def no_work(monkeypatch):
    monkeypatch.setattr(work, "compute", lambda *_, **__: pytest.fail("work was done"))


def refusal(use):
    """Return the message of the `InputError` that `use` raises."""
    with pytest.raises(InputError) as raised:
        use()
    assert str(raised.value).isprintable()
    return str(raised.value)


# Bits.


def test_store_has_the_bits_of_a_computation_in_memory(whole):
    loaded, direct = lf.load_sweep(whole), compute_sweep(sweep(), threads=1, progress=False)
    assert set(loaded.data_vars) == {*direct.data_vars, "status", "seconds"}
    for name, values in direct.variables.items():
        assert loaded[name].dims == values.dims
        assert loaded[name].values.tobytes() == values.values.tobytes()
    assert json.loads(loaded.attrs["sweep"]) == sweep().record() == json.loads(direct.attrs["sweep"])
    assert (loaded["seconds"] > 0).all()
    assert f"limitformer {lf.__version__}, numpy {np.__version__}, numba " in loaded.attrs["origins"]


def test_wrong_twin_with_another_seed_has_other_bits(whole, tmp_path):
    run(sweep(seed=2), tmp_path / "s.sweep")
    with pytest.raises(AssertionError):
        assert_same_bits(tmp_path / "s.sweep", whole)


def test_second_run_computes_and_writes_nothing(store, no_work):
    before = files(store)
    report = run(sweep({"dim": [6, 4], "beta": [1.0, 0.0, 0.5]}), store)  # the order of the values has no effect
    assert (report.done, report.skipped, report.failed) == (CELLS, CELLS, 0)
    assert files(store) == before
    assert lf.load_sweep(store)["dim"].values.tolist() == [4, 6]


@pytest.mark.parametrize("stop", [0, 4])
def test_interrupted_sweep_resumes(whole, tmp_path, monkeypatch, stop):
    """The store is read meanwhile, and has what is done."""
    path, honest, seen = tmp_path / "s.sweep", work.compute, []

    def compute(description, cell, **options):
        if "samples" in options:  # the trial of a new store
            return honest(description, cell, **options)
        seen.append(int((lf.load_sweep(path)["status"] == 1).sum()))
        if len(seen) == stop + 1:
            raise KeyboardInterrupt
        return honest(description, cell, **options)

    monkeypatch.setattr(work, "compute", compute)
    with pytest.raises(SweepInterrupted, match=f"Interrupted with {stop} of 6 cells done; start it again to go on: "):
        run(sweep(), path)
    report = run(sweep(), path)
    assert (report.done, report.skipped) == (CELLS, stop)
    assert seen == [*range(stop + 1), *range(stop, CELLS)]
    assert_same_bits(path, whole)
    assert_complete(path, CELLS)


# Extension, and other sweeps.


def test_extension_appends_new_values_and_keeps_all_cells(tmp_path):
    path, seen = tmp_path / "s.sweep", {}
    steps = [([0.5], [4]), ([0.0, 0.5], [4]), ([0.0, 0.5], [6, 4]), ([2.0, 0.0, 1.0, 0.5], [4, 6, 3])]
    for betas, dims in steps:
        run(sweep({"beta": betas, "dim": dims}), path, extend=True)
        now = {name: place for name, place in files(path).items() if name.startswith("cells")}
        assert seen.items() <= now.items()
        seen = now
    data = lf.load_sweep(path)
    assert data["beta"].values.tolist() == [0.5, 0.0, 2.0, 1.0]
    assert data["dim"].values.tolist() == [4, 6, 3]
    sorted_grid = {"beta": [0.0, 0.5, 1.0, 2.0], "dim": [3, 4, 6]}
    direct = compute_sweep(sweep(sorted_grid), threads=1, progress=False)
    for name in direct.data_vars:
        assert values_equal(data[name].sel(sorted_grid), direct[name])
    assert run(sweep(sorted_grid), path).skipped == 12


REFUSALS = {
    "new value": (
        lambda: sweep({"dim": [4, 6], "beta": [0.0, 0.5, 1.0, 2.0]}),
        "has no beta = 2.0. Nearest: extend it (extend, --extend).",
    ),
    "value gone": (lambda: sweep({"dim": [4], "beta": [0.0, 0.5, 1.0]}), "has dim = 6, which this sweep lacks."),
    "seed": (lambda: sweep(seed=2), "belongs to another sweep (simulate.seed: 1 there, 2 here). Choose"),
    "kind": (
        lambda: sweep(base=lf.HybridTransformer(tokens=2, dim=4, beta=1.0, epsilon=1.0, layers_per_unit_time=20)),
        "belongs to another sweep (base.epsilon: None there, 1.0 here; base.kind: 'StochasticTransformer' th",
    ),
    "keep": (lambda: sweep(keep={"moments": True}), "belongs to another sweep (keep.outcomes.level: 0.95"),
    "axes": (
        lambda: sweep({**GRID, "seed": [1]}),
        "belongs to another sweep (over: ['dim', 'beta'] there, ['dim', 'beta', 'seed'] here)",
    ),
}


@pytest.mark.parametrize(("make", "says"), REFUSALS.values(), ids=list(REFUSALS))
def test_store_of_another_sweep_is_refused_with_the_difference(store, make, says):
    before = files(store)
    with pytest.raises(OtherSweepError) as raised:
        run(make(), store)
    assert str(raised.value).startswith(f"{store} {says}")
    assert files(store) == before


def test_cells_of_other_code_are_loaded_with_a_warning(tmp_path, monkeypatch):
    path = tmp_path / "s.sweep"
    run(sweep({"dim": [4, 6], "beta": [0.0]}), path)
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "origin", lambda: "limitformer 9.9")
        run(sweep(), path, extend=True)
    with pytest.warns(
        UserWarning, match=r"2 different codes made the cells of .*: limitformer 0.*; limitformer 9\.9\.$"
    ):
        assert (lf.load_sweep(path)["status"] == 1).all()


def test_user_function_that_has_changed_is_refused(tmp_path, monkeypatch):
    net = lf.Transformer(width=8, depth=4, gamma=0.5, feedforward=lf.Elementwise(own_parts_example.silu))
    description = lf.Sweep(net, over={"gamma": [0.5]}, simulate={"samples": 2, "start": {"tokens": 2}})
    assert run(description, tmp_path / "s.sweep").done == 1
    monkeypatch.setattr(own_parts_example, "silu", lambda x: x)
    line = refusal(lambda: run(description, tmp_path / "t.sweep"))
    assert "silu" in line
    assert done_cells(tmp_path / "t.sweep") == 0


# Failures.


def test_failed_cells_are_recorded_and_tried_again(whole, tmp_path, monkeypatch):
    path, honest = tmp_path / "s.sweep", work.compute

    def compute(description, cell, **options):
        if cell.model.beta == 0.5:
            raise RuntimeError("\x1b[2J")
        return honest(description, cell, **options)

    with monkeypatch.context() as patch:
        patch.setattr(work, "compute", compute)
        report = run(sweep(), path)
    assert (report.done, report.failed) == (4, 2)
    assert report.errors[0, 1].startswith("RuntimeError: ")
    data = lf.load_sweep(path)
    assert data["status"].values.tolist() == [[1, 2, 1], [1, 2, 1]]
    assert np.isnan(data["overlap_mean"].values[:, 1]).all()
    again = run(sweep(), path, retry_failed=False)
    assert (again.failed, again.errors[1, 1]) == (2, "RuntimeError:  [2J")
    assert run(sweep(), path).done == CELLS
    assert_same_bits(path, whole)


def test_cell_that_does_not_fit_the_memory_fails_and_others_continue(tmp_path):
    description = lf.Sweep(sweep().base, over={"tokens": [10**7, 2]}, simulate={"samples": 4, "horizon": 0.2})
    report = run(description, tmp_path / "s.sweep")
    assert (report.done, list(report.errors)) == (1, [(0,)])
    nothing = lf.Sweep(sweep().base, over={"tokens": [10**7]}, simulate={"samples": 4, "horizon": 0.2})
    line = refusal(lambda: run(nothing, tmp_path / "t.sweep"))
    assert line.startswith("No cell can run of the 1 that were tried. Cell tokens = 10000000: ")
    assert not (tmp_path / "t.sweep").exists()


# Damage, and folders of unknown origin.


def flip(path):
    """Flip a bit of an array; the middle of the file may be a byte that fills a gap, which means nothing."""
    arrays = [each.values for each in lf.load(path).data_vars.values() if each.dtype == np.float64 and each.size > 1]
    data = bytearray(path.read_bytes())
    data[data.index(arrays[0].astype(">f8").tobytes()) + 3] ^= 8
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["flip", "empty", "no checksum", "other cell", "other sweep"])
def test_damaged_cells_are_named_and_computed_again_after_deletion(store, whole, tmp_path, damage):
    path = cell_path(store, (1, 2))
    if damage == "flip":
        flip(path)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "no checksum":
        lf.load(path).to_netcdf(path, engine="scipy", format="NETCDF3_64BIT")
    elif damage == "other cell":
        shutil.copy(cell_path(store, (0, 0)), path)
    else:
        run(sweep(seed=2), tmp_path / "other.sweep")
        shutil.copy(cell_path(tmp_path / "other.sweep", (1, 2)), path)
    line = refusal(lambda: lf.load_sweep(store))
    assert line == f"{store} has damaged cells. Nearest: delete them and run the sweep again: {path}."
    path.unlink()
    assert lf.load_sweep(store)["status"].values.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert run(sweep(), store).skipped == CELLS - 1
    assert_same_bits(store, whole)


@pytest.mark.parametrize("text", [b"[]", b"\xff", b'{"format": 4, "base": 1}'])
def test_nonsense_in_a_description_is_one_line(store, text):
    (store / "sweep.json").write_bytes(text)
    for use in (lambda: lf.load_sweep(store), lambda: run(sweep(), store)):
        assert refusal(use).startswith(f"{store}/sweep.json is damaged.")


@pytest.mark.parametrize("older", ["zarr.json", "sweep.json"])
def test_stores_of_other_versions_are_refused_with_the_way_out(tmp_path, older):
    text = '{"attributes": {"sweep": {"format": 2}}}' if older == "zarr.json" else '{"sweep": {"format": 3}}'
    (tmp_path / older).write_text(text)
    for use in (lambda: lf.load_sweep(tmp_path), lambda: run(sweep(), tmp_path)):
        line = refusal(use)
        assert line.startswith(f"{tmp_path} is a store of another version of limitformer. Nearest: export it to .nc ")


def test_other_folders_and_addresses_are_refused(tmp_path, no_work):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("all my work")
    before = files(tmp_path)
    assert refusal(lambda: lf.load_sweep(tmp_path / "none")).endswith("/none is not the store of a sweep.")
    assert refusal(lambda: lf.load_sweep(tmp_path / "thesis")).endswith("/thesis is not the store of a sweep.")
    line = refusal(lambda: run(sweep(), tmp_path / "thesis"))
    assert line.endswith("/thesis is there and is not the store of a sweep. Choose another folder.")
    for use in (lambda: run(sweep(), "s3://a/b"), lambda: lf.load_sweep("s3://a/b")):
        assert refusal(use).startswith("s3://a/b is an address, and only paths of this machine can be used.")
    assert refusal(lambda: lf.load_sweep(tmp_path / ("s" * 256))).endswith("File name too long.")
    assert files(tmp_path) == before


# Disks, locks and kills.


def test_second_run_is_refused_and_changes_nothing(store, no_work):
    cell_path(store, (0, 0)).unlink()
    (store / "cells" / ".a.nc.xyz").mkdir()  # the first one writes a cell
    with only_one(store / "lock", str(store)):
        before = files(store)
        line = refusal(lambda: run(sweep(), store))
        assert re.fullmatch(
            rf"{store} is in use by process {os.getpid()} on .* since .*\. Nearest: wait until .*", line
        )
        assert files(store) == before
        assert (store / "cells" / ".a.nc.xyz").exists()
        assert int((lf.load_sweep(store)["status"] == 1).sum()) == 5, "it can be read all the same"


def test_two_runs_that_begin_a_store_at_the_same_time_share_it(tmp_path, monkeypatch):
    """The second one makes the store, with more cells, and ends while the first one is about to make it."""
    path, honest, larger = tmp_path / "s.sweep", work.check_some_cell_runs, {**GRID, "dim": [4, 6, 8]}

    def meanwhile(description):
        monkeypatch.setattr(work, "check_some_cell_runs", honest)
        run(sweep(larger), path)

    monkeypatch.setattr(work, "check_some_cell_runs", meanwhile)
    with pytest.raises(OtherSweepError, match=r"has dim = 8, which this sweep lacks\. Nearest: add them\."):
        run(sweep(), path)
    assert_complete(path, 9)


class Killed(BaseException):
    """No code catches it, so that the disk stays as it is."""


def killed_at(monkeypatch, call):
    """Kill the process at change number `call` of the disk; return a list with the number of changes so far."""
    count = [0]

    def counted(honest, half=None):
        def change(*arguments, **options):
            count[0] += 1
            if count[0] == call and half is not None:
                half(*arguments)
            if count[0] >= call:
                raise Killed
            return honest(*arguments, **options)

        return change

    def half(dataset, place):
        place.write_bytes(b"half of a file")

    monkeypatch.setattr(storage, "write_netcdf", counted(storage.write_netcdf, half))
    places = ((os, "replace"), (Path, "unlink"), (Path, "mkdir"), (Path, "write_text"), (tempfile, "mkdtemp"))
    for owner, name in (*places, (shutil, "rmtree")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    return count


@pytest.mark.parametrize("begun", ["from nothing", "extended"])
def test_kill_at_any_change_of_the_disk_loses_nothing(tmp_path, monkeypatch, begun):
    """The next run finds every cell that was renamed, and computes the others."""

    def canned(description, cell, **options):
        return {"number": Reduced(np.array([cell.model.beta, cell.model.dim]), ("point",))}

    monkeypatch.setattr(work, "compute", canned)
    description, first = sweep({"beta": [0.0, 1.0]}, keep=MOMENTS), tmp_path / "first.sweep"
    if begun == "extended":
        run(sweep({"beta": [0.0]}, keep=MOMENTS), first)
    call = 0
    while True:
        call, path = call + 1, tmp_path / f"{call + 1}.sweep"
        if first.exists():
            shutil.copytree(first, path)
        with monkeypatch.context() as patch:
            count = killed_at(patch, call)
            try:
                run(description, path, extend=True)
            except Killed:
                pass
            else:
                break
        done = done_cells(path)
        assert done >= done_cells(first)
        if (path / "sweep.json").exists():
            assert int((lf.load_sweep(path)["status"] == 1).sum()) == done
        assert run(description, path, extend=True).skipped == done
        assert lf.load_sweep(path)["number"].values.tolist() == [[0.0, 4.0], [1.0, 4.0]]
        assert_complete(path, 2)
    assert count[0] == call - 1 > 8
