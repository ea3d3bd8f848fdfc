"""One process at a time on a sweep's store and on a figure in a folder, and the places of a store."""

import errno
import os
import re
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure
from typer.testing import CliRunner

import limitformer as lf
from limitformer.base import lock
from limitformer.base.errors import InputError
from limitformer.base.lock import CannotLockError, only_one
from limitformer.cli.app import app
from limitformer.sweep import opening
from limitformer.sweep import work as work_module
from limitformer_papers import making
from limitformer_papers.common.grids import on_grid
from sweep_grids import assert_complete, files, run, sweep

NEAREST = "Nearest: wait until it has ended, or another folder."


def ours(what):
    """Return a pattern for the refusal that names this process."""
    who = re.escape(f"process {os.getpid()} on {socket.gethostname()}")
    return rf"{re.escape(str(what))} is in use by {who} since \d{{4}}-"


# The lock itself.


def test_second_lock_is_refused_with_the_name_of_the_holder(tmp_path):
    place = tmp_path / "lock"
    with only_one(place, "the thing"):
        with (
            pytest.raises(InputError, match=ours("the thing") + rf".* {NEAREST}$") as raised,
            only_one(place, "the thing"),
        ):
            pass
        assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []
    with only_one(place, "the thing"):
        assert place.exists()


def test_lock_is_free_after_an_interrupt_or_a_deleted_folder(tmp_path):
    with pytest.raises(KeyboardInterrupt), only_one(tmp_path / "lock", "it"):
        raise KeyboardInterrupt
    with only_one(tmp_path / "lock", "it"):
        shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    with only_one(tmp_path / "lock", "it"):
        pass


def test_lock_is_free_after_an_interrupted_removal_of_its_file(tmp_path, monkeypatch):
    def interrupt(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", interrupt)
        with pytest.raises(KeyboardInterrupt) as raised, only_one(tmp_path / "lock", "it"):
            pass
    assert (tmp_path / "lock").exists()
    with only_one(tmp_path / "lock", "it"):
        pass
    assert raised.traceback  # it has kept the first lock, which would be released by its deletion


def test_shorter_name_of_a_holder_replaces_a_longer_one(tmp_path):
    """A process that was killed has left its name."""
    (tmp_path / "lock").write_bytes(9999 * b"x")
    with only_one(tmp_path / "lock", "it"):
        assert re.fullmatch(
            rf"process {os.getpid()} on [^ ]+ since \d{{4}}-\d\d-\d\d \d\d:\d\d", (tmp_path / "lock").read_text()
        )


def test_a_lock_whose_file_the_holder_has_removed_is_not_a_lock(tmp_path):
    """The file of a holder that has ended guards nothing: a second process makes a new one, and a third is refused."""
    place = tmp_path / "lock"
    with only_one(place, "it"):
        place.rename(tmp_path / "removed")
        with only_one(place, "it"):
            assert not place.samefile(tmp_path / "removed")
            with pytest.raises(InputError, match="in use by process"), only_one(place, "it"):
                pass


@pytest.mark.parametrize(
    ("text", "says"), [(b"", "another process"), (b"\x1b[31m\nme\0\xff\n", "[31m me \ufffd"), (9999 * b"x", 200 * "x")]
)
def test_any_content_of_a_lock_gives_one_line(tmp_path, text, says):
    with only_one(tmp_path / "lock", "it"):
        (tmp_path / "lock").write_bytes(text)
        with pytest.raises(InputError) as raised, only_one(tmp_path / "lock", "it"):
            pass
    assert str(raised.value) == f"it is in use by {says}. {NEAREST}"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS], ids=errno.errorcode.get)
def test_without_locks_a_line_warns_and_work_continues(tmp_path, monkeypatch, capfd, code):
    refuse_to_lock(monkeypatch, code)
    with only_one(tmp_path / "lock", "it"):
        pass
    assert capfd.readouterr().err == (
        "The file system of it has no locks: make sure that no other process works on it.\n"
    )


def test_a_lock_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotLockError, match="Too many levels of symbolic links"), only_one(tmp_path / "lock", "it"):
        pass
    assert not (tmp_path / "elsewhere").exists()


# A store.


def test_second_run_is_refused_and_changes_nothing(tmp_path, monkeypatch):
    """A complete store is refused too."""
    path = tmp_path / "s.sweep"
    run(sweep(), path)
    (path / "cells" / "0123456789abcdef.unfinished").write_bytes(b"a cell that the first one is writing")
    monkeypatch.setattr(work_module, "compute", lambda *_, **__: pytest.fail("work was done"))
    with only_one(path / "lock", str(path)):
        before = files(path)
        for description, options in (
            (sweep(), {}),
            (sweep(), {"workers": 2}),
            (sweep({"dim": [4, 6, 8], "beta": [0.0, 0.5, 1.0]}), {"extend": True}),
        ):
            with pytest.raises(InputError, match="^" + ours(path) + rf".* {NEAREST}$"):
                run(description, path, **options)
        assert files(path) == before
        assert (lf.load_sweep(path)["status"] == 1).all(), "it can be read all the same"
    assert run(sweep(), path).skipped == 6


def test_two_runs_that_begin_a_store_at_the_same_time_share_it(tmp_path, monkeypatch):
    """The second one makes the store and ends while the first one is about to make it."""
    path, honest = tmp_path / "s.sweep", opening.kinds_of

    def meanwhile(description):
        with monkeypatch.context() as patch:
            patch.setattr(opening, "kinds_of", honest)
            run(sweep(), path)
        return honest(description)

    monkeypatch.setattr(opening, "kinds_of", meanwhile)
    assert run(sweep(), path).skipped == 6
    assert_complete(path, 6)


# Places.


def refuse_to_lock(monkeypatch, code):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code), "lock")

    monkeypatch.setattr(lock.FileLock, "acquire", refuse)


def refuse_to_write(monkeypatch, code):
    """Refuse writes as a disk that is mounted read-only does; nothing is patched that reads."""
    refuse_to_lock(monkeypatch, code)
    monkeypatch.setattr("limitformer.sweep.store.write_whole", lambda *_, **__: pytest.fail("it was written"))


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC], ids=errno.errorcode.get)
def test_complete_store_on_a_read_only_disk_is_complete(tmp_path, monkeypatch, code):
    run(sweep({"beta": [0.0, 1.0]}), tmp_path / "s.sweep")
    before = files(tmp_path / "s.sweep")
    refuse_to_write(monkeypatch, code)
    report = run(sweep({"beta": [0.0, 1.0]}), tmp_path / "s.sweep")
    assert (report.done, report.skipped, report.failed) == (2, 2, 0)
    with pytest.raises(InputError) as raised:
        run(sweep({"beta": [0.0, 1.0, 2.0]}), tmp_path / "s.sweep", extend=True)
    says = f"Cannot write the store {tmp_path}/s.sweep: {os.strerror(code)}. 1 cells are missing."
    assert str(raised.value) == says
    assert files(tmp_path / "s.sweep") == before


def test_complete_store_without_write_permission_is_complete(tmp_path):
    """Root has no such limits; for root this is an ordinary complete store."""
    path = tmp_path / "s.sweep"
    run(sweep({"beta": [0.0]}), path)
    folders = [path, *(one for one in path.rglob("*") if one.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert run(sweep({"beta": [0.0]}), path).skipped == 1
        assert (lf.load_sweep(path)["status"] == 1).all()
    finally:
        for folder in folders:
            folder.chmod(0o755)


ADDRESSES = [
    "s3://bucket/s.sweep",
    "gs://bucket/s.sweep",
    "file:///tmp/s.sweep",
    "https://host/s.sweep",
    Path("s3://bucket/s"),
]


@pytest.mark.parametrize("address", ADDRESSES, ids=str)
def test_address_is_refused_and_no_folder_is_made(tmp_path, monkeypatch, address):
    monkeypatch.chdir(tmp_path)
    says = f"{address} is an address, and only paths of this machine can be used. Nearest: a copy of it here."
    for use in (lambda: run(sweep(), address), lambda: lf.load_sweep(address)):
        with pytest.raises(InputError) as raised:
            use()
        assert str(raised.value) == says
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["run", "status", "show", "export", "out"])
def test_address_on_the_command_line_is_one_line(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    run(sweep({"beta": [0.0]}), "s.sweep")
    (tmp_path / "sweep.toml").write_text(
        '[model]\nkind = "StochasticTransformer"\ntokens = 2\ndim = 4\nbeta = 1.0\nlayers_per_unit_time = 20\n'
        "[over]\nbeta = [0.0]\n[simulate]\nsamples = 12\nhorizon = 1.0\n"
    )
    before = files(tmp_path)
    arguments = {
        "run": ["run", "sweep.toml", "--store", "s3://a/b"],
        "status": ["status", "s3://a/b"],
        "show": ["show", "s3://a/b"],
        "export": ["export", "s3://a/b", "out.nc"],
        "out": ["export", "s.sweep", "s3://a/out.nc"],
    }
    result = CliRunner().invoke(app, ["sweep", *arguments[command]])
    assert result.exit_code == 2
    assert re.fullmatch(
        r"Error: s3:/a.* is an address, and only paths of this machine can be used\..*\n", result.stderr
    )
    assert files(tmp_path) == before


def test_longest_possible_name_is_accepted_and_longer_ones_are_refused(tmp_path):
    path = tmp_path / ("s" * 255)
    run(sweep({"beta": [0.0]}), path)
    assert (lf.load_sweep(path)["status"] == 1).all()
    for name in ("s" * 256, "a\0b"):
        for use in (lambda name=name: run(sweep(), tmp_path / name), lambda name=name: lf.load_sweep(tmp_path / name)):
            with pytest.raises(InputError, match=r"^Cannot use the folder .*: File name too long\.$|is not a path\.$"):
                use()
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_store_behind_a_link_is_the_same_store(tmp_path):
    """The store is made through the link, and there is one lock."""
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "s.sweep")
    run(sweep({"beta": [0.0]}), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert run(sweep({"beta": [0.0]}), tmp_path / "deep" / "s.sweep").skipped == 1
    with only_one(tmp_path / "deep" / "s.sweep" / "lock", "it"), pytest.raises(InputError, match="in use by"):
        run(sweep({"beta": [0.0]}), tmp_path / "link")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for use in (lambda: run(sweep(), tmp_path / "loop"), lambda: lf.load_sweep(tmp_path / "loop")):
        with pytest.raises(InputError, match=r"^Cannot use the folder .*/loop: Too many levels of symbolic links\.$"):
            use()


# Figures.


@pytest.fixture
def figure(monkeypatch):
    """Replace a slow figure by one of a small grid; tests append functions that run while it computes."""
    meanwhile = []

    def compute(config, run):
        found = on_grid(sweep({"beta": [0.0, 1.0]}, keep={"moments": True}), run, "grid")
        for action in meanwhile:
            action()
        return xr.Dataset({"mean": (("beta",), found["overlap_mean"].values[:, 0])})

    module = SimpleNamespace(
        quick=lambda: making.Claim("the configuration", 1.0),
        paper=lambda: making.Claim("the configuration", 2.0),
        compute=compute,
        claims=lambda data: [],
        draw=lambda data: Figure(),
    )
    monkeypatch.setattr(making, "import_module", lambda name: module)
    return meanwhile


def test_second_run_of_a_figure_in_a_folder_is_refused(tmp_path, figure):
    """A second run would delete the grids of the first; other figures and other folders are independent."""
    said = []

    def again():
        figure.clear()
        with pytest.raises(InputError) as raised:
            making.make("ct-fig6", scale="quick", out=tmp_path, seed=7)
        said.append(str(raised.value))
        making.make("ct-fig4", scale="quick", out=tmp_path)
        making.make("ct-fig6", scale="quick", out=tmp_path / "other")

    figure.append(again)
    made = making.make("ct-fig6", scale="quick", out=tmp_path)
    assert re.match(ours(f"Figure ct-fig6 in {tmp_path}") + rf".* {NEAREST}$", said[0])
    assert made.data.attrs["seed"] == 0
    names = {"ct-fig6.png", "ct-fig6.nc", "ct-fig6.json", "ct-fig4.png", "ct-fig4.nc", "ct-fig4.json", "other"}
    assert {one.name for one in tmp_path.iterdir()} == names


def test_interrupted_figure_resumes_and_leaves_no_lock(tmp_path, figure, monkeypatch):
    def interrupt():
        figure.clear()
        raise KeyboardInterrupt

    figure.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        making.make("ct-fig6", scale="quick", out=tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == [".ct-fig6.sweeps"]
    monkeypatch.setattr(work_module, "compute", lambda *_, **__: pytest.fail("work was done"))
    made = making.make("ct-fig6", scale="quick", out=tmp_path)
    assert np.isfinite(made.data["mean"]).all()
    assert not (tmp_path / ".ct-fig6.sweeps").exists()


def test_locked_figure_on_the_command_line_is_one_line(tmp_path):
    with only_one(tmp_path / ".ct-fig6.lock", f"Figure ct-fig6 in {tmp_path}"):
        result = CliRunner().invoke(app, ["figure", "ct-fig6", "--scale", "quick", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert re.fullmatch("Error: " + ours(f"Figure ct-fig6 in {tmp_path}") + rf".* {NEAREST}\n", result.stderr)


def test_figure_replaces_its_own_store_of_an_older_version(tmp_path, figure):
    store = tmp_path / ".ct-fig6.sweeps" / "grid"
    store.mkdir(parents=True)
    (store / "zarr.json").write_text('{"attributes": {"sweep": {"format": 2}}}')
    making.make("ct-fig6", scale="quick", out=tmp_path)
    assert not store.exists()
