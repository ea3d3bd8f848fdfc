"""Damage of a sweep's store by accidents, kills and full disks: found, never loaded as a result, and repaired."""

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

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.sweep import OtherSweepError, origin
from limitformer.sweep import files as files_module
from limitformer.sweep import work as work_module
from limitformer.sweep.cells import decoded
from limitformer.sweep.opening import open_store
from limitformer.sweep.reduce import Reduced
from limitformer.sweep.show import progress_of
from sweep_grids import (
    KEEP,
    assert_complete,
    assert_same_bits,
    assert_same_numbers,
    cell_path,
    cells_written,
    environment,
    files,
    flip,
    run,
    sweep,
    written,
)

CELLS = 6
MOMENTS = {"moments": True}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A complete store to compare with; no test writes to it."""
    path = tmp_path_factory.mktemp("whole") / "s.sweep"
    run(sweep(), path)
    return path


@pytest.fixture
def store(whole, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "s.sweep"))


def status_of(path):
    return lf.load_sweep(path)["status"].values.tolist()


def assert_only_truth(path, whole):
    """Cells that are done have the right results, and all others have none."""
    data, truth = lf.load_sweep(path), lf.load_sweep(whole)
    done = data["status"].values == 1
    for name in truth.data_vars:
        if name not in ("status", "seconds", "code"):
            assert data[name].values[done].tobytes() == truth[name].values[done].tobytes(), name
            assert np.isnan(data[name].values[~done]).all(), name


# Cells.


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


def delete_folder(path):
    shutil.rmtree(path.parent)


@pytest.mark.parametrize("damage", [flip, truncate, halve, empty, lengthen, delete, delete_folder])
def test_damaged_cell_has_no_results_and_is_computed_again(store, whole, damage):
    damage(cell_path(store, (1, 2)))
    status = 0 if damage in (delete, delete_folder) else 3
    assert status_of(store) == [[1, 1, 1], [1, 1, status]]
    assert_only_truth(store, whole)
    assert dict(progress_of(store))["damaged"] == str(status // 3)
    assert dict(progress_of(store))["left"] == "1"
    before = written(store)
    report = run(sweep(), store)
    assert (report.done, report.skipped) == (CELLS, CELLS - 1)
    assert cells_written(before, written(store)) == [(1, 2)]
    assert_same_bits(store, whole)
    assert_complete(store, CELLS)


def test_checksum_covers_every_bit_of_a_cell(tmp_path):
    run(sweep({"beta": [0.5]}), tmp_path / "s.sweep")
    path, kinds = cell_path(tmp_path / "s.sweep", (0,)), open_store(tmp_path / "s.sweep").kinds
    data = bytearray(path.read_bytes())
    assert decoded(path.name, bytes(data), kinds) is not None
    for place in range(8 * len(data)):
        data[place // 8] ^= 1 << place % 8
        assert decoded(path.name, bytes(data), kinds) is None, place
        data[place // 8] ^= 1 << place % 8


def test_cell_of_another_place_or_another_sweep_is_damaged(store, whole, tmp_path):
    """Both files are whole and have valid checksums."""
    run(sweep(seed=2), tmp_path / "other.sweep")
    shutil.copy(cell_path(store, (0, 0)), cell_path(store, (1, 1)))
    shutil.copy(cell_path(tmp_path / "other.sweep", (0, 2)), cell_path(store, (0, 2)))
    assert status_of(store) == [[1, 1, 3], [1, 3, 1]]
    assert_only_truth(store, whole)
    assert run(sweep(), store).skipped == 4
    assert_same_bits(store, whole)


def test_files_of_killed_writers_are_removed_and_strange_ones_are_ignored(store, whole):
    (store / "cells" / "0123456789abcdef.unfinished").write_bytes(b"half")
    run(sweep(), store)
    assert list(store.rglob("*.unfinished")) == []
    assert_complete(store, CELLS)
    (store / "cells" / "notes.txt").write_bytes(b"mine")
    (cell_path(store, (0, 0)).parent / f"{32 * '0'}.cell").write_bytes(b"a cell of no sweep")
    assert run(sweep(), store).skipped == CELLS
    assert_same_numbers(store, whole)
    assert (store / "cells" / "notes.txt").read_bytes() == b"mine"


def test_deleted_folder_of_cells_is_made_again(store, whole):
    shutil.rmtree(store / "cells")
    assert status_of(store) == [[0, 0, 0], [0, 0, 0]]
    assert run(sweep(), store).done == CELLS
    assert_same_bits(store, whole)


# The description.


def test_digest_covers_every_bit_of_the_description(store, whole):
    """A flipped bit in a seed or in a value of an axis is not believed."""
    data = (whole / "sweep.json").read_bytes()
    for place in range(0, 8 * len(data), 61):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        (store / "sweep.json").write_bytes(damaged)
        with pytest.raises(InputError, match="has lost its description"):
            open_store(store)


def spoil(path):
    """Change the number of samples."""
    path.write_bytes(path.read_bytes().replace(b'"samples": 12', b'"samples": 13'))


@pytest.mark.parametrize("damage", [spoil, flip, halve, empty, delete])
def test_store_without_a_description_is_restored_by_running_its_sweep(store, whole, damage):
    damage(store / "sweep.json")
    with pytest.raises(InputError) as raised:
        lf.load_sweep(store)
    message = f"{store} has lost its description. Nearest: run its sweep again with this store, which restores it."
    assert str(raised.value) == message
    report = run(sweep(), store)
    assert (report.done, report.skipped) == (CELLS, CELLS)
    assert_same_bits(store, whole)
    assert (store / "sweep.json").read_bytes() == (whole / "sweep.json").read_bytes()


def test_restored_store_has_the_cells_of_its_sweep(store):
    """If no cell belongs to the sweep the store is refused, so that the store of another sweep is not changed."""
    (store / "sweep.json").unlink()
    before = files(store)
    with pytest.raises(
        OtherSweepError, match=r"lost its description, and none of its cells belongs to this sweep\. Choo"
    ):
        run(sweep(seed=2), store)
    assert files(store) == before
    wider = sweep({"dim": [4, 8, 6], "beta": [0.0, 0.5, 1.0]})
    assert run(wider, store).skipped == CELLS
    run(wider, store.parent / "wider.sweep")
    assert_same_numbers(store, store.parent / "wider.sweep")


def test_restored_store_finds_its_results_by_name(store, whole):
    """The restored description lists the results in the order of the caller's `keep`, the cells by name."""
    (store / "sweep.json").unlink()
    keep = dict(reversed(KEEP.items()))
    assert list(keep) != list(KEEP)
    assert run(sweep(keep=keep), store).skipped == CELLS
    assert_same_numbers(store, whole)


def test_restored_store_refuses_other_code(store, monkeypatch):
    (store / "sweep.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("limitformer.sweep.opening.code", lambda: {**origin.code(), "numba": "9.9"})
        with pytest.raises(OtherSweepError, match=r"was begun by other code \(numba .* there, 9\.9 here\)"):
            run(sweep(), store)
        assert run(sweep(), store, any_version=True).skipped == CELLS
    data = lf.load_sweep(store)
    assert json.loads(data.attrs["codes"])[str(int(data["code"][0, 0]))] == origin.code()


# Writers that are killed.


class Killed(BaseException):
    """No code catches it, so that the disk stays as it is."""


def killed_at(monkeypatch, call):
    """Kill the process at change number `call` of the disk; return a list with the number of changes so far."""
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
    for owner, name in ((Path, "replace"), (Path, "unlink"), (Path, "mkdir"), (os, "fsync")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    return count


def canned(description, cell, **options):
    """Return results without work."""
    return {"number": Reduced(np.array([cell.model.beta, cell.model.dim]), ("point",))}


SMALL = {"beta": [0.0, 1.0, 2.0]}


def small(path, over=SMALL, **options):
    return run(sweep(over, keep=MOMENTS), path, **options)


def survivors(path, before):
    """Return the cells that are done; fail if a cell is damaged, or one of `before` is lost."""
    try:
        status = lf.load_sweep(path)["status"].values
    except InputError:
        assert not before
        return set()
    assert not (status == 3).any()
    done = {index for index in np.ndindex(status.shape) if status[index] == 1}
    assert before <= done
    return done


@pytest.fixture
def no_work(monkeypatch):
    """Cells take no time, and are flushed to the disk all the same."""
    monkeypatch.setattr("limitformer.sweep.store.LASTING_SECONDS", 0.0)
    for module in ("work", "trial"):
        monkeypatch.setattr(f"limitformer.sweep.{module}.compute", canned)


@pytest.mark.parametrize("begun", ["from nothing", "extended"])
def test_kill_at_any_change_of_the_disk_loses_nothing(tmp_path, no_work, begun):
    """A kill in the middle of a write leaves half of its bytes."""
    first = tmp_path / "first.sweep"
    if begun == "extended":
        small(first, {"beta": [0.0]})
    with pytest.MonkeyPatch.context() as patch:
        count = killed_at(patch, 10**6)
        path = tmp_path / "counted.sweep"
        if first.exists():
            shutil.copytree(first, path)
        small(path, extend=True)
    expected, before = lf.load_sweep(path), {(0,)} if begun == "extended" else set()
    assert count[0] > 12
    for call in range(1, count[0] + 1):
        path = tmp_path / f"{call}.sweep"
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


def test_wrong_twin_that_writes_cells_in_place_is_damaged_by_a_kill(tmp_path, no_work, monkeypatch):
    honest = files_module.write_whole

    def in_place(store, name, data, *, durable):
        if name.endswith(".json"):
            return honest(store, name, data, durable=durable)
        (store / name).parent.mkdir(exist_ok=True)
        with open(store / name, "wb", buffering=0) as file:
            files_module.put(file.fileno(), data)
        return None

    monkeypatch.setattr("limitformer.sweep.store.write_whole", in_place)
    damaged = 0
    for call in range(1, 20):
        path = tmp_path / f"{call}.sweep"
        with pytest.MonkeyPatch.context() as patch:
            killed_at(patch, call)
            try:
                small(path)
            except Killed:
                damaged += 3 in status_of(path) if (path / "sweep.json").exists() else 0
    assert damaged > 0


PROGRAM = """
import resource, signal, sys
import limitformer.sweep.work as work
from sweep_grids import run, sweep

path, after, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
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


def test_process_that_the_system_ends_in_the_middle_of_a_write_loses_nothing(tmp_path):
    """A file is written up to its limit of 200 bytes, and then the process is gone."""
    path, after, size = tmp_path / "s.sweep", 4, 200
    command = [sys.executable, "-c", PROGRAM, str(path), str(after), str(size)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert ended.returncode == -signal.SIGXFSZ, ended.stderr
    assert {name.stat().st_size for name in (path / "cells").glob("*.unfinished")} == {size}
    done = survivors(path, {(k,) for k in range(after - 1)})
    description = sweep({"seed": list(range(30))})
    assert run(description, path).skipped == len(done) == after - 1
    run(description, tmp_path / "whole.sweep")
    assert_same_bits(path, tmp_path / "whole.sweep")
    assert_complete(path, 30)


# Disks.


def limit_writes(monkeypatch, room, code):
    """Let `room` files be written; the next write fails in its middle."""
    honest, rest = files_module.put, [room]

    def put(file, data):
        rest[0] -= 1
        if rest[0] < 0:
            honest(file, data[: len(data) // 2])
            raise OSError(code, os.strerror(code))
        honest(file, data)

    monkeypatch.setattr(files_module, "put", put)


@pytest.mark.parametrize("room", [0, 1, 2, 6])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_disk_that_cannot_be_written_is_one_error_and_the_store_resumes(whole, tmp_path, room, code):
    """The first file is the description, the others are cells."""
    path = tmp_path / "s.sweep"
    with pytest.MonkeyPatch.context() as patch:
        limit_writes(patch, room, code)
        with pytest.raises(InputError) as raised:
            run(sweep(), path)
    rest = " What is finished stays; start it again." if room else ""
    assert str(raised.value) == f"Cannot write the store {path}: {os.strerror(code)}.{rest}"
    assert list(path.rglob("*.unfinished")) == []
    assert run(sweep(), path).skipped == max(room - 1, 0)
    assert_same_bits(path, whole)
    assert_complete(path, CELLS)


def test_place_that_cannot_be_written_is_refused_before_any_work(monkeypatch):
    """/proc refuses root too."""
    monkeypatch.setattr("limitformer.sweep.trial.compute", lambda *_, **__: pytest.fail("work was done"))
    with pytest.raises(InputError, match=r"^Cannot write into the folder /proc: "):
        run(sweep(), "/proc/s.sweep")


@pytest.mark.parametrize("rest", ["nothing", "description", "empty folder"])
def test_store_that_is_removed_while_it_runs_is_one_error_and_a_new_start(whole, tmp_path, monkeypatch, rest):
    path, honest = tmp_path / "s.sweep", work_module.compute

    def compute(description, cell, **options):
        if cell.index == (0, 2):
            for place in path.iterdir():
                if rest != "description" or place.name != "sweep.json":
                    shutil.rmtree(place) if place.is_dir() else place.unlink()
            if rest == "nothing":
                path.rmdir()
        return honest(description, cell, **options)

    with monkeypatch.context() as patch:
        patch.setattr(work_module, "compute", compute)
        with pytest.raises(InputError, match=r"^Cannot write the store .*: No such file or directory .*again\.$"):
            run(sweep(), path)
    assert run(sweep(), path).skipped == 0
    assert_same_bits(path, whole)


def test_file_that_cannot_be_read_is_one_line(store, monkeypatch):
    honest, cell = os.open, str(cell_path(store, (0, 1)))

    def refuse(path, *arguments, **options):
        if str(path) == cell:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return honest(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(InputError) as raised:
        lf.load_sweep(store)
    assert str(raised.value) == f"Cannot read the store {store}: Permission denied ({cell})."
