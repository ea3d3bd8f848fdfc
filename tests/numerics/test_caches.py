"""Import works for any user; compiled kernels are cached in a private folder or in memory."""

import contextlib
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from limitformer.models import ShapedAttention, Transformer
from limitformer.numerics import caches, kernels
from limitformer.simulation import simulate as engine
from sweep_grids import wait_until

AS_ROOT = pytest.mark.skipif(caches.user() != 0, reason="files of other users are made by root")
STRANGER = 4242


@pytest.fixture
def places(monkeypatch, tmp_path):
    """A read-only source, a cache of the user, and a temporary folder that all users share."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(caches.tempfile, "gettempdir", lambda: str(shared))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return {"": tmp_path / "home" / "limitformer", "shared": shared / f"limitformer-{caches.user()}"}


def cache_folder(chosen=""):
    return caches.folder(str(chosen), caches.Path("/dev/null"), "kernels-1")


def test_folder_is_private_to_its_user(places, tmp_path):
    assert cache_folder() == places[""] / "kernels-1"
    assert cache_folder(tmp_path / "chosen") == tmp_path / "chosen" / "kernels-1"
    assert cache_folder("/dev/null/chosen") == places[""] / "kernels-1"
    for folder in (cache_folder(), cache_folder(tmp_path / "chosen")):
        assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, os.geteuid())


@pytest.mark.parametrize("home", ["/dev/null/home", "relative"])
def test_shared_folder_has_a_private_one_for_each_user_without_home(places, monkeypatch, home):
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert cache_folder() == places["shared"] / "kernels-1"
    assert places["shared"].stat().st_mode & 0o777 == 0o700


def test_without_home_and_passwd_entry_no_folder_is_named_tilde(places, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(caches.os.path, "expanduser", lambda path: path)
    assert cache_folder() == places["shared"] / "kernels-1"
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o750, 0o701])
def test_a_folder_that_others_can_open_is_not_used(places, mode):
    cache_folder().chmod(mode)
    assert cache_folder() == places["shared"] / "kernels-1"


def test_a_link_is_not_followed(places, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    places[""].mkdir(parents=True)
    (places[""] / "kernels-1").symlink_to(tmp_path / "elsewhere")
    assert cache_folder() == places["shared"] / "kernels-1"


def test_a_folder_that_others_can_rename_is_not_used(places):
    cache_folder()
    places[""].chmod(0o777)
    assert cache_folder() == places["shared"] / "kernels-1"


@AS_ROOT
@pytest.mark.parametrize("whose", ["", "kernels-1"])
def test_a_folder_of_another_user_is_not_used(places, monkeypatch, whose):
    """Another user made it, or the folder above it, in the shared folder with the right mode."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/home")
    os.chown(cache_folder().parent / whose, STRANGER, STRANGER)
    assert cache_folder() is None


@AS_ROOT
def test_folders_of_another_user_are_not_trusted(places, monkeypatch):
    """Another user than the owner checks the same folders."""
    monkeypatch.setattr(caches, "user", lambda: STRANGER)
    assert cache_folder() is None


def program(code, **environment):
    """Return the output of a new process whose user has no entry in passwd."""
    before = "import pwd, tempfile\ndef missing(_): raise KeyError('uid not found')\npwd.getpwuid = missing\n"
    variables = {name: value for name, value in os.environ.items() if name not in ("HOME", "USER", "LOGNAME")}
    options = {"env": {**variables, **environment}, "capture_output": True, "encoding": "utf-8", "timeout": 120}
    done = subprocess.run([sys.executable, "-c", before + code], **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_without_a_passwd_entry_and_with_a_cache_folder_that_cannot_be_made():
    code = "from limitformer.numerics import kernels; print(kernels.CACHE.name, kernels.HOW_OFTEN)"
    printed = program(code, NUMBA_CACHE_DIR="/dev/null/kernels")
    assert printed.startswith(f"{kernels.CACHE.name} the first time only; kept in /")
    assert printed.endswith(", as NUMBA_CACHE_DIR=/dev/null/kernels is not a safe folder\n")


def test_kernels_stay_in_memory_without_a_writable_folder():
    code = """
def readonly(**_): raise OSError
tempfile.TemporaryFile = readonly
from limitformer.numerics import kernels
print(kernels.CACHE, kernels.driver(lambda x: x + 1)(1), kernels.HOW_OFTEN)
"""
    assert program(code) == (
        "None 2 in every process: no folder of yours can keep them. Nearest: NUMBA_CACHE_DIR, a folder of mode 0700\n"
    )


def test_disabled_numba_is_refused_in_one_line():
    command = [sys.executable, "-m", "limitformer", "phase", "--samples", "2"]
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False)
    line = "NUMBA_DISABLE_JIT is set, but kernels run only compiled. Nearest: unset NUMBA_DISABLE_JIT."
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"Error: {line}\n")


def doubled(x):
    return 2 * x


def tripled(x):
    return 3 * x


def test_at_compilation_ignores_loaded_kernels(monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "CACHE", tmp_path)
    begun = []
    for value in (1.0, 2.0):  # the second finds the kernels of the first
        with kernels.at_compilation(lambda: begun.append(value)):  # noqa: B023  called in the block alone
            kernels.driver(doubled)(np.full(2, value))
    assert set(begun) == {1.0}


@contextlib.contextmanager
def hardly_room():
    """No file may have more than 100 bytes, as on a disk that is almost full."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_prints_one_line_and_keeps_results(monkeypatch, tmp_path, capsys):
    """The line is printed once, and the files that were written do not harm the next process."""
    monkeypatch.setattr(kernels, "CACHE", tmp_path)
    with hardly_room():
        results = [kernels.driver(function)(2.0) for function in (doubled, tripled)]
    assert results == [4.0, 6.0]
    line = f"Kernels cannot be cached in {tmp_path} (File too large): each process compiles them.\n"
    assert capsys.readouterr().err == line
    assert kernels.driver(doubled)(3.0) == 6.0
    assert any(tmp_path.rglob("*.nbc"))


@pytest.mark.parametrize("damaged", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("content", [b"", b"junk"])
def test_damaged_kernel_is_compiled_again(monkeypatch, tmp_path, damaged, content):
    """A loss of power can leave such files without their content. The kernel is then cached again."""
    monkeypatch.setattr(kernels, "CACHE", tmp_path)
    kernels.driver(doubled)(1.0)
    (path,) = tmp_path.rglob(damaged)
    path.write_bytes(content)
    begun = []
    for turn in range(2):
        with kernels.at_compilation(lambda: begun.append(turn)):  # noqa: B023  called in the block alone
            assert kernels.driver(doubled)(1.5) == 3.0
    assert set(begun) == {0}


def small():
    model = Transformer(width=8, depth=2, gamma=0.5, attention=ShapedAttention(tau0=1.0))
    engine.simulate(model, [[1.0]], samples=1, seed=0)


def simulate_slowly(monkeypatch, wait):
    """Run a simulation whose first part waits."""
    part_of, waited = engine.part_of, []

    def slow(*arguments):
        if not waited:
            waited.append(True)
            wait()
        return part_of(*arguments)

    monkeypatch.setattr(engine, "part_of", slow)
    small()


def test_compilation_notice_appears_only_when_compiling(monkeypatch, tmp_path, capsys):
    """It comes after a second; a simulation without a compilation waits longer and prints nothing."""
    small()
    capsys.readouterr()
    monkeypatch.setattr(kernels, "CACHE", tmp_path)
    with monkeypatch.context() as patch:
        simulate_slowly(patch, lambda: time.sleep(1.3))
    assert capsys.readouterr().err == ""

    def compile_until_it_is_noticed():
        kernels.driver(doubled)(1)
        wait_until(lambda: "Compiling the chain's kernels (the first time only" in capsys.readouterr().err)

    simulate_slowly(monkeypatch, compile_until_it_is_noticed)
