"""Damage of a sweep's store, whoever has done it: found, never shown as a result, and repaired."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.sweep import OtherSweepError, opening, origin
from limitformer.sweep import files as files_module
from limitformer.sweep import layout as layout_module
from limitformer.sweep import run as run_module
from limitformer.sweep import work as work_module
from limitformer.sweep.opening import open_store
from limitformer.sweep.reduce import Reduced
from limitformer.sweep.rows import loose_data, loose_row
from limitformer.sweep.show import progress_of
from sweep_grids import (
    assert_complete,
    assert_same_bits,
    assert_same_numbers,
    cells_written,
    chunk_of,
    environment,
    files,
    flip,
    flip_value,
    run,
    sweep,
    written,
)

CELLS = 6
MOMENTS = {"moments": True}
DESCRIPTIONS = ("zarr.json", "cells/sweep.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A store with everything, to compare with; nobody writes to it."""
    path = tmp_path_factory.mktemp("whole") / "s.zarr"
    run(sweep(), path)
    return path


@pytest.fixture
def store(whole, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "s.zarr"))


def status_of(path):
    return lf.load_sweep(path)["status"].values.tolist()


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def assert_only_truth(path, whole):
    """What is not the result of a cell is no number, and what is one is right."""
    found, truth = lf.load_sweep(path), lf.load_sweep(whole)
    done = found["status"].values == 1
    for name in truth.data_vars:
        if name not in ("status", "seconds", "code"):
            assert found[name].values[done].tobytes() == truth[name].values[done].tobytes(), name
            assert np.isnan(found[name].values[~done]).all(), name


# Values.


@pytest.mark.parametrize(
    "array", ["overlap", "overlap_mean", "probability", "status", "seconds", "finished", "code", "checksum"]
)
def test_a_flipped_bit_is_seen_by_everybody_and_its_cell_alone_computed_again(store, whole, array):
    flip_value(store, array, (1, 2))
    assert status_of(store) == [[1, 1, 1], [1, 1, 3]]
    assert_only_truth(store, whole)
    assert dict(progress_of(store))["damaged"] == "1"
    assert dict(progress_of(store))["left"] == "1"
    before = written(store)
    report = run(sweep(), store)
    assert (report.done, report.skipped) == (CELLS, CELLS - 1)
    assert cells_written(before, written(store)) == [(1, 2)]
    assert_same_bits(store, whole)
    assert_complete(store, CELLS)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


def delete(path):
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "lost"),
    [(truncate, 0), (lengthen, 0), (halve, {"overlap": 3, "status": 1}), (empty, 6), (delete, 6)],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("array", ["overlap", "status"])
def test_a_damaged_chunk_costs_the_cells_that_it_has_lost(store, whole, array, damage, lost):
    damage(chunk_of(store, array, (0, 0))[0])
    lost = lost[array] if damage is halve else lost
    assert sum(row.count(3) for row in status_of(store)) == lost
    assert_only_truth(store, whole)
    report = run(sweep(), store)
    assert (report.done, report.skipped) == (CELLS, CELLS - lost)
    assert_same_bits(store, whole)
    assert_complete(store, CELLS)
    with xr.open_zarr(store) as data:
        assert np.isfinite(data["overlap_mean"]).all()


def test_every_bit_of_a_cells_own_file_counts(tmp_path):
    run(sweep({"beta": [0.5]}), tmp_path / "s.zarr")
    kept = open_store(tmp_path / "s.zarr")
    (part,) = kept.parts()
    data = bytearray(loose_data(part.rows[0], origin.code()))
    assert loose_row(bytes(data), kept.layout, kept.keys.of((0,))) is not None
    for place in range(8 * len(data)):
        data[place // 8] ^= 1 << place % 8
        assert loose_row(bytes(data), kept.layout, kept.keys.of((0,))) is None, place
        data[place // 8] ^= 1 << place % 8


def test_cells_of_another_place_or_another_sweep_are_damage(whole, tmp_path, monkeypatch):
    """Chunks that are whole, with checksums of their own, where they do not belong."""
    monkeypatch.setattr(layout_module, "MOST_CELLS", 3)
    run(sweep(), tmp_path / "s.zarr")
    run(sweep(seed=2), tmp_path / "other.zarr")
    for path in (tmp_path / "s.zarr").rglob("c.0.0*"):
        shutil.copy(path, path.with_name(path.name.replace("c.0.", "c.1.", 1)))
    assert status_of(tmp_path / "s.zarr") == [[1, 1, 1], [3, 3, 3]]
    assert_only_truth(tmp_path / "s.zarr", whole)
    for path in (tmp_path / "other.zarr").rglob("c.0.0*"):
        shutil.copy(path, tmp_path / "s.zarr" / path.relative_to(tmp_path / "other.zarr"))
    assert status_of(tmp_path / "s.zarr") == [[3, 3, 3], [3, 3, 3]]
    run(sweep(), tmp_path / "s.zarr")
    assert_same_numbers(tmp_path / "s.zarr", whole)


def test_a_damaged_file_of_a_cell_is_marked_until_it_is_computed_again(store, whole):
    for array in store.glob("*/c.0.0*"):
        array.unlink()
    (store / "cells" / "0.1").write_bytes(b"half a cell")
    (store / "cells" / "7.7").write_bytes(b"of no cell of this grid")
    (store / "cells" / "not.a.cell").write_bytes(b"of nobody")
    assert status_of(store) == [[0, 3, 0], [0, 0, 0]]
    assert run(sweep(), store).skipped == 0
    assert_same_bits(store, whole)
    assert status_of(store) == [[1, 1, 1], [1, 1, 1]]


def test_what_killed_writers_leave_is_removed(store):
    (store / "cells" / "0123456789abcdef.unfinished").write_bytes(b"half")
    run(sweep(), store)
    assert_complete(store, CELLS)


@pytest.mark.parametrize("array", ["status", "overlap", "beta", "error", "cells"])
def test_a_folder_that_somebody_deleted_is_made_again(store, whole, array):
    shutil.rmtree(store / array)
    assert_only_truth(store, whole)
    report = run(sweep(), store)
    assert report.done == CELLS
    assert_same_bits(store, whole)
    assert contents(store).keys() == contents(whole).keys()


# Descriptions.


def assert_documents_as(path, whole):
    """All that describes the store has the same bytes."""
    ours, theirs = contents(path), contents(whole)
    names = [name for name in theirs if name.endswith(".json") or name.startswith(("beta/", "dim/", "outcome/"))]
    assert len(names) > 15
    assert [name for name in names if ours.get(name) != theirs[name]] == []


@pytest.mark.parametrize("name", DESCRIPTIONS)
@pytest.mark.parametrize("damage", [flip, halve, empty, delete])
def test_one_of_two_descriptions_is_enough(store, whole, name, damage):
    damage(store / name)
    assert_same_numbers(store, whole)
    assert run(sweep(), store).skipped == CELLS
    assert_documents_as(store, whole)


def test_every_bit_of_a_description_counts(store, whole):
    """A seed or a value of an axis that a flipped bit has changed is not believed."""
    data = (whole / "cells" / "sweep.json").read_bytes()
    (store / "zarr.json").unlink()
    for place in range(0, 8 * len(data), 61):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        (store / "cells" / "sweep.json").write_bytes(damaged)
        with pytest.raises(InputError, match="has lost its description"):
            open_store(store)


def spoil(path):
    """Change the number of samples if it is there, else a bit."""
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"samples": 12', b'"samples": 13'))
    if path.read_bytes() == data:
        flip(path)


@pytest.mark.parametrize("lost", ["both descriptions", "all documents"])
@pytest.mark.parametrize("damage", [spoil, delete])
def test_a_store_without_a_description_is_restored_from_its_cells_and_the_sweep(store, whole, lost, damage):
    for path in list(store.rglob("*.json")) if lost == "all documents" else [store / name for name in DESCRIPTIONS]:
        damage(path)
    with pytest.raises(InputError) as raised:
        lf.load_sweep(store)
    says = f"{store} has lost its description. Nearest: run its sweep again with this store, which restores it."
    assert str(raised.value) == says
    report = run(sweep(), store)
    assert (report.done, report.skipped) == (CELLS, CELLS)
    assert_same_bits(store, whole)
    assert_documents_as(store, whole)


def test_of_a_restored_store_only_cells_of_the_sweep_are_kept(store, whole):
    """Of a larger grid those at the same place; and nothing if there is none, so that no other sweep is lost."""
    for name in DESCRIPTIONS:
        (store / name).unlink()
    before = files(store)
    with pytest.raises(
        OtherSweepError, match=r"lost its description, and none of its cells belongs to this sweep\. Choo"
    ):
        run(sweep(seed=2), store)
    assert {name: facts for name, facts in files(store).items() if name != "cells/lock"} == before
    wider = sweep({"dim": [4, 8, 6], "beta": [0.0, 0.5, 1.0]})
    assert run(wider, store).skipped == 3
    run(wider, store.parent / "wider.zarr")
    assert_same_numbers(store, store.parent / "wider.zarr")


def test_a_restored_store_knows_what_was_made_elsewhere(store, monkeypatch):
    for name in DESCRIPTIONS:
        (store / name).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(opening, "code", lambda: {**origin.code(), "numba": "9.9"})
        with pytest.raises(OtherSweepError, match="some of its cells were made by other code"):
            run(sweep(), store)
        assert run(sweep(), store, any_version=True).skipped == CELLS
    data = lf.load_sweep(store)
    assert str(int(data["code"][0, 0])) not in json.loads(data.attrs["codes"])
    assert "unknown code: 6 cells" in dict(progress_of(store))["made by"]


@pytest.mark.parametrize("name", ["beta/c.0", "beta/zarr.json", "outcome/zarr.json", "overlap/zarr.json"])
@pytest.mark.parametrize("damage", [flip, empty, delete])
def test_damaged_coordinates_and_arrays_are_restored(store, whole, name, damage):
    damage(store / name)
    assert_same_numbers(store, whole)
    assert run(sweep(), store).skipped == CELLS
    assert_documents_as(store, whole)
    with xr.open_zarr(store) as data:
        assert data["beta"].values.tolist() == [0.0, 0.5, 1.0]


def test_a_document_is_on_the_disk_before_it_is_moved_to_its_place(store, monkeypatch):
    """Every one that an extension changes; and the chunks before the cells' own files are gone."""
    events, fsync, replace, unlink = [], os.fsync, Path.replace, Path.unlink
    real = os.path.realpath

    def moved(path, target):
        events.append(("move", path.name, str(Path(target).relative_to(store))))
        return replace(path, target)

    monkeypatch.setattr(
        os, "fsync", lambda file: (events.append(("fsync", Path(real(f"/proc/self/fd/{file}")).name)), fsync(file))
    )
    monkeypatch.setattr(Path, "replace", moved)
    monkeypatch.setattr(
        Path, "unlink", lambda path, **options: (events.append(("unlink", path.name)), unlink(path, **options))
    )
    run(sweep({"dim": [4, 6], "beta": [0.0, 0.5, 1.0, 2.0]}), store, extend=True)
    kept = [
        place
        for place, event in enumerate(events)
        if event[0] == "move" and not event[2].startswith("cells/1.") and not event[2].startswith("cells/0.")
    ]
    assert {"zarr.json", "cells/sweep.json", "beta/c.0", "status/c.0.1"} <= {events[place][2] for place in kept}
    for place in kept:
        assert events[place - 1] == ("fsync", events[place][1])
    last = max(place for place in kept if events[place][2] == "status/c.0.1")
    assert all(place > last for place, event in enumerate(events) if event == ("unlink", "1.3"))


# Writers that are killed.


class Killed(BaseException):
    """Nothing catches it: what is on the disk stays as it is."""


def killed_at(monkeypatch, call):
    """A kill at the so many-th change of the disk, after which there is none; in a list, how many there were."""
    count = [0]

    def counted(honest, half=None):
        def change(*arguments, **options):
            count[0] += 1
            if count[0] == call and half is not None:
                half(*arguments, **options)
            if count[0] >= call:
                raise Killed
            return honest(*arguments, **options)

        return change

    put = files_module.put
    monkeypatch.setattr(files_module, "put", counted(put, lambda file, data: put(file, data[: len(data) // 2])))
    for owner, name in ((Path, "replace"), (Path, "unlink"), (Path, "mkdir"), (Path, "rename"), (os, "fsync")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    return count


def canned(description, cell, **options):
    """Results without work."""
    return {"number": Reduced(np.array([cell.model.beta, cell.model.dim]), ("point",))}


SMALL = {"beta": [0.0, 1.0, 2.0]}


def small(path, over=SMALL, **options):
    return run(sweep(over, keep=MOMENTS), path, **options)


def survivors(path, before):
    """The cells that are done; fails if one is damaged, or one of those before is gone."""
    if not path.exists():
        assert not before
        return set()
    status = lf.load_sweep(path)["status"].values
    assert not (status == 3).any()
    done = {index for index in np.ndindex(status.shape) if status[index] == 1}
    assert before <= done
    return done


@pytest.fixture
def gathered_at_once(monkeypatch):
    """Every finished cell is gathered, so that chunks are written again and again; and cells take no time."""
    monkeypatch.setattr(run_module, "SOONEST", 0.0)
    monkeypatch.setattr(run_module, "TIMES_AS_LONG", 0)
    for module in ("work", "trial"):
        monkeypatch.setattr(f"limitformer.sweep.{module}.compute", canned)


@pytest.mark.parametrize("begun", ["from nothing", "extended"])
def test_killed_at_any_change_of_the_disk_nothing_is_lost_and_it_goes_on(tmp_path, gathered_at_once, begun):
    """Half of the bytes are written if it is in the middle of a write."""
    first = tmp_path / "first.zarr"
    if begun == "extended":
        small(first, {"beta": [0.0]})
    with pytest.MonkeyPatch.context() as patch:
        count = killed_at(patch, 10**6)
        path = Path(shutil.copytree(first, tmp_path / "counted.zarr")) if first.exists() else tmp_path / "counted.zarr"
        small(path, extend=True)
    expected, before = lf.load_sweep(path), {(0,)} if begun == "extended" else set()
    assert count[0] > 40
    for call in range(1, count[0] + 1, 1 if begun == "extended" else 3):
        path = tmp_path / f"{call}.zarr"
        if first.exists():
            shutil.copytree(first, path)
        with pytest.MonkeyPatch.context() as patch:
            killed_at(patch, call)
            with pytest.raises(Killed):
                small(path, extend=True)
        done = survivors(path, before)
        assert small(path, extend=True).skipped == len(done)
        assert lf.load_sweep(path)["number"].values.tobytes() == expected["number"].values.tobytes()
        assert_complete(path, 3)
        shutil.rmtree(path)


@pytest.mark.parametrize("loose", [True, False], ids=["a cell", "a chunk"])
def test_the_test_before_finds_files_that_are_written_in_their_place(tmp_path, gathered_at_once, monkeypatch, loose):
    """Its wrong twin: without the move, some kill damages a cell."""
    honest = files_module.write_whole

    def in_place(store, name, data, *, durable):
        if name.startswith("cells/") != loose or name.endswith(".json"):
            return honest(store, name, data, durable=durable)
        with open(store / name, "wb", buffering=0) as file:
            files_module.put(file.fileno(), data)
        return None

    monkeypatch.setattr("limitformer.sweep.store.write_whole", in_place)
    damaged = 0
    for call in range(25, 90):
        path = tmp_path / f"{call}.zarr"
        with pytest.MonkeyPatch.context() as patch:
            killed_at(patch, call)
            try:
                small(path)
            except Killed:
                damaged += int((lf.load_sweep(path)["status"] == 3).sum()) if path.exists() else 0
    assert damaged > 0


PROGRAM = """
import resource, signal, sys
import limitformer.sweep.run as running, limitformer.sweep.work as work
from sweep_grids import run, sweep

path, after, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
running.SOONEST, running.TIMES_AS_LONG = (0.0, 0) if after > 1 else (1e9, 0)
honest, calls = work.compute, []

def compute(*arguments, **options):
    calls.append(1)
    if len(calls) == after:  # the system itself ends the process in the middle of the write that goes beyond
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return honest(*arguments, **options)

work.compute = compute
run(sweep({"seed": list(range(30))}), path)
"""


@pytest.mark.parametrize(("after", "size"), [(1, 200), (4, 1500)], ids=["in a cell's file", "in a chunk"])
def test_the_system_ends_a_process_in_the_middle_of_a_write(tmp_path, after, size):
    """Whatever the code does: a file that would be larger is written up to that byte, then there is no process."""
    path = tmp_path / "s.zarr"
    command = [sys.executable, "-c", PROGRAM, str(path), str(after), str(size)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert ended.returncode == -signal.SIGXFSZ, ended.stderr
    assert {name.stat().st_size for name in (path / "cells").glob("*.unfinished")} == {size}
    done = survivors(path, {(k,) for k in range(after - 1)})
    description = sweep({"seed": list(range(30))})
    assert run(description, path).skipped == len(done)
    run(description, tmp_path / "whole.zarr")
    assert_same_bits(path, tmp_path / "whole.zarr")
    assert_complete(path, 30)


# Disks.


def disk(monkeypatch, room, code):
    """So many files can be written, then there is an error in the middle of one."""
    honest, left = files_module.put, [room]

    def put(file, data):
        left[0] -= 1
        if left[0] < 0:
            honest(file, data[: len(data) // 2])
            raise OSError(code, os.strerror(code))
        honest(file, data)

    monkeypatch.setattr(files_module, "put", put)


@pytest.mark.parametrize("room", [0, 1, 5, 6, 12])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_a_disk_that_cannot_be_written_is_one_error_and_the_store_resumes(whole, tmp_path, room, code):
    """In a cell's file, or when all are there and are gathered."""
    path = tmp_path / "s.zarr"
    opening.create(path, sweep())
    with pytest.MonkeyPatch.context() as patch:
        disk(patch, room, code)
        with pytest.raises(InputError) as raised:
            run(sweep(), path)
    says = f"Cannot write the store {path}: {os.strerror(code)}. What is finished stays; start it again."
    assert str(raised.value) == says
    assert list(path.rglob("*.unfinished")) == []
    assert run(sweep(), path).skipped == min(room, CELLS)
    assert_same_bits(path, whole)
    assert_complete(path, CELLS)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
def test_a_disk_that_is_full_from_the_start_is_one_error(tmp_path, code):
    with pytest.MonkeyPatch.context() as patch:
        disk(patch, 3, code)
        with pytest.raises(InputError) as raised:
            run(sweep(), tmp_path / "s.zarr")
    assert str(raised.value) == f"Cannot make the store {tmp_path / 's.zarr'}: {os.strerror(code)}."
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused_before_any_work(monkeypatch):
    """/proc refuses also root."""
    monkeypatch.setattr("limitformer.sweep.trial.compute", lambda *_, **__: pytest.fail("work was done"))
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
        says = r"^Cannot write the store .*: No such file or directory .*start it again\.$"
        with pytest.raises(InputError, match=says):
            run(sweep(), path)
    assert run(sweep(), path).skipped == 0
    assert_same_bits(path, whole)


def test_files_that_cannot_be_read_are_one_line(store, monkeypatch):
    honest = os.open

    def refuse(path, *arguments, **options):
        if str(path).endswith("overlap/c.0.0.0.0.0"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return honest(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(
        InputError, match=r"^Cannot read the store .*: Permission denied \(.*/overlap/c\.0\.0\.0\.0\.0\)\.$"
    ):
        lf.load_sweep(store)
