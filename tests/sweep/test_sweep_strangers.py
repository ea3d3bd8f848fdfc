"""Stores from strangers: whatever they say of themselves is one line or a mark, and nothing else is read."""

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
import zarr
from typer.testing import CliRunner

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.cli.app import app
from limitformer.sweep import OtherSweepError
from limitformer.sweep.metadata import description_of, digest
from limitformer.sweep.show import progress_of
from sweep_grids import described_as, files, run, sweep

DEEP = json.loads(100 * "[" + 100 * "]")
NONSENSE = (None, -1, 10**13, 1e308, "../../x", "\x1b[31m\n", [], {}, [None], [[1], [2]], {"a": {"b": 1}}, DEEP)
PLACES = (
    ("base",), ("base", "kind"), ("base", "dim"), ("base", "values"), ("over",), ("over", "beta"), ("simulate",),
    ("simulate", "samples"), ("simulate", "record"), ("simulate", "as"), ("keep",), ("keep", "outcomes"), ("layout",),
    ("layout", "overlap"), ("block",), ("codes",), ("format",),
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
NAMES = ("../../x", "/etc/passwd", "a/b", "..", "", "status", "checksum", "beta", "cells", "x" * 99, "zarr.json", "a\n")
BLOCKS = ([0, 3], [-2, 3], [2], [2, 3, 1], [2.0, 3], [True, 3], [10**13, 1], [2**11, 2**11], "23", [None, 3])
CODES = (["x"], [{"a": 1}], [{"a": "x" * 9999}], [{str(k): "" for k in range(99)}], {"a": "b"}, 20_000 * [{}],
         [{"a": "\x1b[2J"}], [{"a\nb": "c"}])  # fmt: skip


def changed(description, place, value):
    """The description with another value at that place."""
    found = copy.deepcopy(description)
    inner = found
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return found


def nonsenses(description):
    """Descriptions that make no sense."""
    for place in PLACES:
        for value in NONSENSE:
            yield f"{place} {str(value)[:30]}", changed(description, place, value)
        without = changed(description, place, None)
        (without if len(place) == 1 else without[place[0]]).pop(place[-1])
        yield f"{place} gone", without
    for kind in KINDS:
        yield f"array {kind}", changed(description, ("layout", "overlap_mean"), kind)
    for name in NAMES:
        yield f"array {name!r}", changed(description, ("layout", name), [["point"], [1], "<f8"])
    for lengths in BLOCKS:
        yield f"block {lengths}", changed(description, ("block",), lengths)
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
    """A store with everything, to compare with; nobody writes to it."""
    path = tmp_path_factory.mktemp("whole") / "s.zarr"
    run(sweep(), path)
    return path


@pytest.fixture(scope="module")
def truth(whole):
    """What is in it."""
    return lf.load_sweep(whole)


@pytest.fixture
def store(whole, tmp_path):
    """A copy in a folder of its own; beside it lies what nobody may read."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "c.0.0.0").write_bytes(b"a secret")
    return Path(shutil.copytree(whole, tmp_path / "deep" / "er" / "s.zarr"))


@pytest.fixture
def opened(monkeypatch):
    """The files that are really opened, wherever a name leads; what the system says of itself is no file."""
    found = []

    def recorded(honest):
        def opens(path, *arguments, **options):
            file = honest(path, *arguments, **options)
            found.append(os.path.realpath(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}"))
            return file

        return opens

    for module in (os, io, builtins):
        monkeypatch.setattr(module, "open", recorded(module.open))
    return found


def outside(opened, store):
    """Those that are not the store's."""
    assert any(path.startswith(f"{store}/") for path in opened), "nobody looked"
    return {path for path in opened if not path.startswith((f"{store}/", "/proc/", "/sys/"))}


def refusal(use):
    """The one line with which it is refused, or None."""
    try:
        use()
    except InputError as error:
        line = str(error)
        assert len(line) < 1000
        return line
    return None


def truthful(found, truth):
    """Whether every value that is shown as a result is one."""
    done = found["status"].values == 1
    return not done.any() or all(
        np.array_equal(found[name].values[done], truth[name].values[done]) for name in found.data_vars if name in truth
    )


def test_two_hundred_nonsenses_are_two_hundred_lines(store, truth, opened):
    """With digests that prove them: somebody has made them on purpose."""
    description, lines = description_of(store), []
    group = json.loads((store / "zarr.json").read_text())
    for name, made in nonsenses(description):
        proven = {"sweep": made, "digest": digest(made)}
        (store / "cells" / "sweep.json").write_text(json.dumps(proven))
        (store / "zarr.json").write_text(json.dumps({**group, "attributes": proven}))
        line = refusal(lambda: lf.load_sweep(store))
        if line is None:
            assert truthful(lf.load_sweep(store), truth), name
            continue
        assert line.startswith(str(store)) or "takes" in line or "take" in line, (name, line)
        assert line.isprintable(), name
        lines.append(line)
    assert len(lines) >= 200
    assert outside(opened, store) == set()


TEXTS = (
    b"", b"{", b"null", b"[]", b"42", b"\xff\xfe\0", b"[" * 10**5, b"PK\x03\x04", b"\x89HDF\r\n", b'{"attributes": 1}',
    b'{"attributes": {"sweep": []}}', b'{"sweep": 1, "attributes": {"sweep": {"format": 2}}}',
    b'{"attributes": {"sweep": ' + b"1" * 5000 + b"}}", b'{"attributes": {"sweep": {"format": NaN}}}',
    b'{"attributes": {"sweep": {"format": 10000}}}',
)  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text[:24]))
def test_documents_that_are_none_are_one_line(store, text):
    for name in ("zarr.json", "cells/sweep.json"):
        (store / name).write_bytes(text)
    line = refusal(lambda: lf.load_sweep(store))
    assert re.fullmatch(rf"{store} has (lost its description|the format 10000 of a sweep's store; this).*", line)
    assert refusal(lambda: progress_of(store)) == line


def pipe(path, _):
    os.mkfifo(path)


def folder(path, _):
    path.mkdir()


def link(path, data):
    """To a file outside, which has what should be there."""
    outside = path.parents[3] / "outside"
    outside.write_bytes(data)
    path.symlink_to(outside)


@pytest.mark.parametrize("kind", [pipe, folder, link])
@pytest.mark.parametrize("name", ["zarr.json", "overlap/c.0.0.0.0.0", "status/c.0.0", "cells/0.1"])
def test_what_is_no_file_of_the_store_is_not_read(store, truth, opened, kind, name):
    """A pipe is not waited for either; the description's spare is used."""
    data = b"whatever"
    if name != "cells/0.1":
        data = (store / name).read_bytes()
        (store / name).unlink()
    kind(store / name, data)
    opened.clear()
    found = lf.load_sweep(store)
    expected = 3 if name.startswith(("overlap", "status")) else 1
    assert (found["status"] == expected).all()
    assert truthful(found, truth)
    assert outside(opened, store) == set()


@pytest.mark.parametrize("name", ["overlap", "status", "cells", "beta"])
def test_a_folder_that_is_a_link_is_neither_read_nor_written(store, opened, name):
    shutil.move(store / name, store.parents[2] / name)
    (store / name).symlink_to(store.parents[2] / name)
    (store.parents[2] / "cells").mkdir(exist_ok=True)
    (store.parents[2] / "cells" / "0.1").write_bytes(b"mine")
    before = files(store.parents[2] / name)
    opened.clear()
    found = lf.load_sweep(store)["status"].values
    assert (found == (3 if name in ("overlap", "status") else 1)).all()
    assert outside(opened, store) == set()
    line = refusal(lambda: run(sweep(), store))
    assert re.fullmatch(
        rf"Cannot write the store {store}: Not a directory.*|{store} is damaged: cells is no folder.*", line
    )
    assert files(store.parents[2] / name) == before


def test_a_file_that_is_too_large_is_not_read(store):
    path = store / "overlap_mean" / "c.0.0.0"
    with path.open("r+b") as file:
        file.truncate(2**40)
    assert (lf.load_sweep(store)["status"] == 3).all()
    for name in ("zarr.json", "cells/sweep.json"):
        with (store / name).open("r+b") as file:
            file.truncate(2**40)
    assert "has lost its description" in refusal(lambda: lf.load_sweep(store))


@pytest.mark.parametrize("foreign", ["nothing", "file", "empty folder", "folder", "zarr group", "zarr array", "zarr 2"])
def test_what_is_no_store_is_one_line_for_every_command(tmp_path, foreign, monkeypatch):
    path = tmp_path / "s.zarr"
    if foreign == "file":
        path.write_bytes(b"\x89HDF\r\n")
    elif foreign != "nothing":
        path.mkdir()
    if foreign == "folder":
        (path / "thesis.tex").write_text("all my work")
    if foreign.startswith("zarr"):
        group = zarr.open_group(path, mode="a", zarr_format=2 if foreign == "zarr 2" else 3)
        if foreign == "zarr array":
            group.create_array("status", shape=(2, 3), dtype="i1")[:] = 1
    before = files(tmp_path)
    for command in (["status"], ["show"], ["export", str(tmp_path / "out.nc")]):
        result = CliRunner().invoke(app, ["sweep", command[0], str(path), *command[1:]])
        assert result.exit_code == 2
        assert result.stderr == f"Error: {path} is not the store of a sweep.\n"
    assert files(tmp_path) == before


def test_every_command_marks_what_is_damaged(store, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    described_as(store, lambda kept: kept["over"].update(beta=[0.0, 0.5, 1.25]))
    line = "Careful: 2 cells are damaged and have no results. Nearest: run the sweep again.\n"
    commands = CliRunner()
    shown = commands.invoke(app, ["sweep", "show", str(store), "--variable", "overlap_mean", "--at", "beta=1.25"])
    assert (shown.exit_code, shown.stderr) == (0, line)
    assert shown.stdout.count("nan") == 2
    exported = commands.invoke(app, ["sweep", "export", str(store), str(tmp_path / "out.nc")])
    assert (exported.exit_code, exported.stderr) == (0, line)
    assert lf.load(tmp_path / "out.nc")["status"].values.tolist() == [[1, 1, 3], [1, 1, 3]]
    assert re.search(r"damaged\W+2\W", commands.invoke(app, ["sweep", "status", str(store)]).stdout)


def test_every_command_says_what_made_the_cells(store, tmp_path, monkeypatch):
    """If it was not always the same."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("limitformer.sweep.store.code", lambda: {**description_of(store)["codes"][0], "numpy": "1.0"})
    monkeypatch.setattr("limitformer.sweep.opening.code", lambda: {**description_of(store)["codes"][0], "numpy": "1.0"})
    wider = sweep({"dim": [4, 6], "beta": [0.0, 0.5, 1.0, 2.0]})
    with pytest.raises(OtherSweepError):
        run(wider, store, extend=True)
    run(wider, store, extend=True, any_version=True)
    line = (
        f"Careful: 2 different codes made the cells (numpy 1.0 and {np.__version__}); `code` says which made which.\n"
    )
    assert CliRunner().invoke(app, ["sweep", "show", str(store)]).stderr == line
    status = CliRunner().invoke(app, ["sweep", "status", str(store)]).stdout
    assert re.search(r"numpy 1\.0,.*: 2 cells", status)
    assert re.search(rf"numpy {np.__version__},.*: 6 cells", status)
