"""Import works for any user; compiled kernels are cached in a private folder or in memory."""

import os
import subprocess
import sys
import time

import pytest

from limitformer.models import ShapedAttention, Transformer
from limitformer.numerics import kernels
from limitformer.simulation import simulate as engine
from sweep_grids import wait_until


@pytest.fixture
def places(monkeypatch, tmp_path):
    """A chosen folder, and the user's cache for a package that cannot be written to."""
    monkeypatch.setattr(kernels, "PACKAGE", kernels.Path("/dev/null"))
    monkeypatch.setattr(kernels, "fingerprint", lambda: "1")
    monkeypatch.setattr(kernels.config, "CACHE_DIR", str(tmp_path / "chosen"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "chosen" / "kernels-1", tmp_path / "home" / "limitformer" / "kernels-1"


def test_first_folder_that_can_be_made_is_used(places, monkeypatch):
    assert kernels.cache_folder() == places[0]
    assert (places[0].stat().st_mode & 0o777, places[0].stat().st_uid) == (0o700, os.geteuid())
    monkeypatch.setattr(kernels.config, "CACHE_DIR", "/dev/null/chosen")
    assert kernels.cache_folder() == places[1]
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # as ~ is without HOME and an entry in passwd
    assert kernels.cache_folder() is None


def others_can_open(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o750)


def of_another_user(folder):
    folder.mkdir(parents=True, mode=0o700)
    os.chown(folder, 4242, 4242)


def link(folder):
    folder.parent.mkdir(parents=True)
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize("make", [others_can_open, of_another_user, link])
def test_a_folder_that_is_not_private_is_not_used(places, make):
    if make is of_another_user and os.geteuid() != 0:
        pytest.skip("files of other users are made by root")
    make(places[0])
    assert kernels.cache_folder() == places[1]


def test_kernels_stay_in_memory_without_a_writable_folder():
    """A file on a full disk can be made, but not written."""
    code = """
import os, resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
from limitformer.numerics import kernels
os.write(1, f"{kernels.CACHE} {kernels.driver(lambda x: x + 1)(1)} {kernels.HOW_OFTEN}".encode())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=120, check=True)
    assert done.stdout == (
        "None 2 in every process: no folder of yours can keep them. Nearest: NUMBA_CACHE_DIR, a folder of mode 0700"
    )


def test_disabled_numba_is_refused_in_one_line():
    command = [sys.executable, "-m", "limitformer", "phase", "--samples", "2"]
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False)
    line = "NUMBA_DISABLE_JIT is set, but kernels run only compiled. Nearest: unset NUMBA_DISABLE_JIT."
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"Error: {line}\n")


def doubled(x):
    return 2 * x


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
