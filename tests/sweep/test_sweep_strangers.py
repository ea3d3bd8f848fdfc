"""Stores of unknown origin: whatever they contain is one line or a mark, and no other file is read or run."""

import builtins
import copy
import io
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.cli.app import app
from limitformer.sweep import OtherSweepError
from limitformer.sweep.cells import checksum
from limitformer.sweep.opening import description_of
from limitformer.sweep.show import progress_of
from sweep_grids import cell_path, describe, files, run, sweep

DEEP = json.loads(100 * "[" + 100 * "]")
NONSENSE = (None, -1, 10**13, 1e308, "../../x", "\x1b[31m\n", [], {}, [None], [[1], [2]], {"a": {"b": 1}}, DEEP)
PLACES = (
    ("base",), ("base", "kind"), ("base", "dim"), ("base", "values"), ("over",), ("over", "beta"), ("simulate",),
    ("simulate", "samples"), ("simulate", "record"), ("simulate", "as"), ("keep",), ("keep", "outcomes"), ("results",),
    ("results", "overlap"), ("codes",), ("format",),
)  # fmt: skip
F8 = "<f8"
KINDS = (
    [["point"], [10**13], F8], [["point"], [2**62], F8], [["point"], [-1], F8], [["point"], [1.0], F8],
    [["point"], [True], F8], [["point"], [2], F8], [["sample"], [1], F8], [["outcome"], [4], F8], [["beta"], [3], F8],
    [["point", "point"], [1, 1], F8], [["point"], [], F8], [["../x"], [1], F8], [[["point"]], [1], F8],
    [9 * ["p"], 9 * [1], F8], [["point"], [1], "|O"], [["point"], [1], "O"], [["point"], [1], "<U9"],
    [["point"], [1], "<M8[s]"], [["point"], [1], ">f8"], [["point"], [1], "<c16"], [["point"], [1], "f8,f8"],
    [["point"], [1], 8], [["point"], [1], None],
)  # fmt: skip
NAMES = ("../../x", "/etc/passwd", "a/b", "..", "", "status", "seconds", "beta", "code", "x" * 99, "sweep.json", "a\n")
CODES = (["x"], [{"a": 1}], [{"a": "x" * 9999}], [{str(k): "" for k in range(99)}], {"a": "b"}, 20_000 * [{}],
         [{"a": "\x1b[2J"}], [{"a\nb": "c"}])  # fmt: skip


def changed(description, place, value):
    """Return the description with another value at that place."""
    result = copy.deepcopy(description)
    inner = result
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return result


def nonsenses(description):
    """Yield descriptions that make no sense."""
    for place in PLACES:
        for value in NONSENSE:
            yield f"{place} {str(value)[:30]}", changed(description, place, value)
        without = changed(description, place, None)
        (without if len(place) == 1 else without[place[0]]).pop(place[-1])
        yield f"{place} gone", without
    for kind in KINDS:
        yield f"array {kind}", changed(description, ("results", "overlap_mean"), kind)
    for name in NAMES:
        yield f"array {name!r}", changed(description, ("results", name), [["point"], [1], "<f8"])
    for codes in CODES:
        yield f"codes {str(codes)[:30]}", changed(description, ("codes",), codes)
    yield "words that a terminal obeys", changed(description, ("over",), {"values": ["\x1b[2J", "gaussian"]})
    yield "many axes", changed(description, ("over",), {f"start.{k}": list(range(100)) for k in range(12)})
    yield (
        "many cells",
        changed(
            description, ("over",), {"seed": list(range(4000)), "dim": list(range(2, 4000)), "beta": list(range(10**4))}
        ),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A complete store to compare with; no test writes to it."""
    path = tmp_path_factory.mktemp("whole") / "s.sweep"
    run(sweep(), path)
    return path


@pytest.fixture(scope="module")
def truth(whole):
    return lf.load_sweep(whole)


@pytest.fixture
def store(whole, tmp_path):
    """A copy in a folder of its own, whose neighbours must not be read."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "secret").write_bytes(b"a secret")
    return Path(shutil.copytree(whole, tmp_path / "deep" / "er" / "s.sweep"))


@pytest.fixture
def opened(monkeypatch):
    """The real paths of all files that are opened."""
    paths = []

    def recorded(honest):
        def opens(path, *arguments, **options):
            file = honest(path, *arguments, **options)
            paths.append(os.path.realpath(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}"))
            return file

        return opens

    for module in (os, io, builtins):
        monkeypatch.setattr(module, "open", recorded(module.open))
    return paths


def outside(opened, store):
    """Return the opened files that lie outside the store and the system's own folders."""
    assert any(path.startswith(f"{store}/") for path in opened), "the store was not read"
    return {path for path in opened if not path.startswith((f"{store}/", "/proc/", "/sys/"))}


def refusal(use):
    """Return the message of the `InputError` that `use` raises, or None."""
    try:
        use()
    except InputError as error:
        return str(error)
    return None


def truthful(data, truth):
    """Whether every loaded result is right."""
    done = data["status"].values == 1
    return not done.any() or all(
        np.array_equal(data[name].values[done], truth[name].values[done]) for name in data.data_vars if name in truth
    )


def test_nonsense_in_a_description_is_one_line(store, truth, opened):
    """The digests are valid, as a stranger would make them."""
    lines = []
    for name, description in nonsenses(description_of(store)):
        describe(store, description)
        line = refusal(lambda: lf.load_sweep(store))
        if line is None:
            assert truthful(lf.load_sweep(store), truth), name
            continue
        assert line.startswith(str(store)) or " take " in line or " takes " in line, (name, line)
        assert line.isprintable(), name
        assert len(line) < 1000, name
        lines.append(line)
    assert len(lines) >= 190
    assert outside(opened, store) == set()


TEXTS = (
    b"", b"{", b"null", b"[]", b"42", b"\xff\xfe\0", b"[" * 10**5, b"PK\x03\x04", b"\x89HDF\r\n", b'{"sweep": 1}',
    b'{"sweep": {"format": 3}}', b'{"sweep": {"format": 3}, "digest": 1}', b'{"sweep": {"format": NaN}, "digest": ""}',
    b'{"sweep": ' + b"1" * 5000 + b"}",
)  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text[:24]))
def test_description_without_a_valid_digest_is_one_line(store, text):
    (store / "sweep.json").write_bytes(text)
    line = refusal(lambda: lf.load_sweep(store))
    assert re.fullmatch(rf"{store} has lost its description\..*", line)
    assert refusal(lambda: progress_of(store)) == line


HEADERS = (
    b"", b"{}", b"[]", b"1", b"[" * 10**4, b'{"status": 1}',
    b'{"status": 5, "seconds": 1, "finished": 1, "error": ""}',
    b'{"status": [], "seconds": 1, "finished": 1, "error": ""}',
    b'{"status": 1, "seconds": "x", "finished": 1, "error": ""}',
    b'{"status": 1, "seconds": 1, "finished": 1e999, "error": ""}',
    b'{"status": 1, "seconds": 1' + b"0" * 500 + b', "finished": 1, "error": ""}',
    b'{"status": 2, "seconds": 1, "finished": 1, "error": 3}',
)  # fmt: skip


def test_nonsense_in_a_cell_marks_it_as_damaged(store, truth):
    """The checksums are valid, as a stranger would make them."""
    path = cell_path(store, (0, 1))
    _, header, code, data = path.read_bytes().split(b"\n", 3)
    bodies = [[text, code, data] for text in HEADERS] + [
        [header, text, data] for text in (b"", b"{", b"[]", b'{"a": 1}')
    ]
    bodies += [[header, code, data[1:]], [header, code, b""], [header, code], [header], []]
    for parts in bodies:
        body = b"\n".join([b"", *parts])
        path.write_bytes(checksum(path.name, body) + body)
        loaded = lf.load_sweep(store)
        assert loaded["status"].values.tolist() == [[1, 3, 1], [1, 1, 1]], parts
        assert truthful(loaded, truth)


def test_error_of_a_cell_is_printed_as_one_plain_line(store):
    path = cell_path(store, (0, 1))
    code = path.read_bytes().split(b"\n", 3)[2]
    header = json.dumps({"status": 2, "seconds": 1, "finished": 1, "error": "\x1b[2J\nred"}).encode()
    body = b"\n".join([b"", header, code, b""])
    path.write_bytes(checksum(path.name, body) + body)
    assert dict(progress_of(store))["failed (0, 1)"] == "[2J red"


def pipe(path, _):
    os.mkfifo(path)


def folder(path, _):
    path.mkdir()


def link(path, target):
    path.symlink_to(target)


@pytest.mark.parametrize("kind", [pipe, folder, link])
def test_pipe_folder_or_link_is_not_read_as_a_file(store, opened, kind):
    cell, right_bytes = cell_path(store, (0, 1)), store.parents[2] / "outside"
    for path in (cell, store / "sweep.json"):
        shutil.move(path, right_bytes)
        opened.clear()
        kind(path, right_bytes)
        if path == cell:
            assert lf.load_sweep(store)["status"].values.tolist() == [[1, 3, 1], [1, 1, 1]]
            assert outside(opened, store) == set()
        else:
            assert "has lost its description" in refusal(lambda: lf.load_sweep(store))
        assert not any(path.endswith("outside") for path in opened)


@pytest.mark.parametrize("whole_folder", [True, False], ids=["cells", "subfolder"])
def test_folder_that_is_a_link_is_neither_read_nor_written(store, opened, whole_folder):
    folder = store / "cells" if whole_folder else cell_path(store, (0, 1)).parent
    target = store.parents[2] / "target"
    shutil.move(folder, target)
    folder.symlink_to(target)
    before = files(target)
    opened.clear()
    status = lf.load_sweep(store)["status"].values
    assert status[0, 1] == 0
    assert (status == 0).all() == whole_folder
    assert outside(opened, store) == set()
    line = refusal(lambda: run(sweep(), store))
    assert re.fullmatch(rf"Cannot write the store {store}: Not a directory.*", line)
    assert files(target) == before


def test_file_that_is_too_large_is_not_read(store):
    for path in (cell_path(store, (0, 1)), store / "sweep.json"):
        with path.open("r+b") as file:
            file.truncate(2**40)
        if path.suffix == ".cell":
            assert lf.load_sweep(store)["status"].values.tolist() == [[1, 3, 1], [1, 1, 1]]
    assert "has lost its description" in refusal(lambda: lf.load_sweep(store))


@pytest.mark.parametrize("command", [["status"], ["show"], ["export", "out.nc"]], ids=str)
def test_commands_refuse_other_folders_in_one_line(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("all my work")
    (tmp_path / "file").write_bytes(b"\x89HDF\r\n")
    before = files(tmp_path)
    for path in ("nothing", "folder", "file"):
        result = CliRunner().invoke(app, ["sweep", command[0], path, *command[1:]])
        assert (result.exit_code, result.stderr) == (2, f"Error: {path} is not the store of a sweep.\n")
    assert files(tmp_path) == before


def test_commands_warn_of_damaged_cells(store, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    for index in ((0, 2), (1, 2)):
        cell_path(store, index).write_bytes(b"damaged")
    line = "Careful: 2 cells are damaged and have no results. Nearest: run the sweep again.\n"
    commands = CliRunner()
    shown = commands.invoke(app, ["sweep", "show", str(store), "--variable", "overlap_mean", "--at", "beta=1.0"])
    assert (shown.exit_code, shown.stderr) == (0, line)
    assert shown.stdout.count("nan") == 2
    exported = commands.invoke(app, ["sweep", "export", str(store), str(tmp_path / "out.nc")])
    assert (exported.exit_code, exported.stderr) == (0, line)
    assert lf.load(tmp_path / "out.nc")["status"].values.tolist() == [[1, 1, 3], [1, 1, 3]]
    assert re.search(r"damaged\W+2\W", commands.invoke(app, ["sweep", "status", str(store)]).stdout)


def test_commands_name_the_codes_of_mixed_cells(store, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    other = {**description_of(store)["codes"][0], "numpy": "1.0"}
    monkeypatch.setattr("limitformer.sweep.store.code", lambda: other)
    monkeypatch.setattr("limitformer.sweep.opening.code", lambda: other)
    wider = sweep({"dim": [4, 6], "beta": [0.0, 0.5, 1.0, 2.0]})
    with pytest.raises(OtherSweepError):
        run(wider, store, extend=True)
    run(wider, store, extend=True, any_version=True)
    mixed = f"2 different codes made the cells (numpy 1.0 and {np.__version__})"
    line = f"Careful: {mixed}; `code` has the number of each cell's.\n"
    assert CliRunner().invoke(app, ["sweep", "show", str(store)]).stderr == line
    status = CliRunner().invoke(app, ["sweep", "status", str(store)]).stdout
    assert re.search(r"numpy 1\.0,.*: 2 cells", status)
    assert re.search(rf"numpy {np.__version__},.*: 6 cells", status)
