"""SIGTERM and SIGHUP end a command as Ctrl-C does: locks and temporary folders are removed, finished work is saved.

Processes send the signals to themselves at a known place, so that nothing depends on time.
"""

import getpass
import os
import signal
import subprocess
import sys

import pytest

from limitformer.base.interrupts import interrupts_wait
from limitformer.cli import endings

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
FIGURE = """
import os, signal, sys
import limitformer_papers.shaped_transformer.st_fig7 as module

def compute(config, run):
    assert ".st-fig7.lock" in os.listdir(sys.argv[-1])
    os.kill(os.getpid(), {number})
    raise AssertionError("the signal came too late")

module.compute = compute
{first}
sys.argv = ["limitformer", "figure", "st-fig7", "--scale", "quick", "--out", {out!r}]
from limitformer.cli import main
main()
"""
BUILD = """
import os, torch

def build():
    assert os.path.isdir(os.environ["TORCHINDUCTOR_CACHE_DIR"])  # the import of transformers makes it
    number = int(os.environ["SENDS"])
    if number:
        os.kill(os.getpid(), number)
    return torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 8))
"""
AT_IMPORT = """
import importlib.abc, os, signal, sys

class SignalAt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch._inductor.config":  # the folder is there
            os.kill(os.getpid(), {number})
        return None

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, SignalAt())
sys.argv = ["limitformer", "check", "gpt2"]
from limitformer.cli import main
main()
"""


@pytest.fixture(autouse=True)
def hangups_end_processes():
    """Processes inherit a signal that is ignored, as nohup does with SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def ended(command, **variables):
    """Return exit code, stdout and stderr of a process that has not chosen a folder for torch's compiler."""
    own = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment = {**own, "COLUMNS": "160", "PYTHONIOENCODING": "utf-8", **variables}
    done = subprocess.run(command, env=environment, encoding="utf-8", check=False, capture_output=True)
    return done.returncode, done.stdout, done.stderr


def figure(number, out, first="", **variables):
    program = FIGURE.format(number=int(number), first=first, out=str(out))
    return ended([sys.executable, "-c", program, str(out)], **variables)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_during_a_figure_removes_its_lock(number, tmp_path):
    code, out, errors = figure(number, tmp_path)
    assert (code, out) == (128 + number, "")
    assert errors.endswith("Interrupted; nothing was written.\n")
    assert list(tmp_path.iterdir()) == []


def test_signal_that_the_shell_ignores_stays_ignored(tmp_path):
    """`nohup` lets a process ignore SIGHUP."""
    code, _, errors = figure(signal.SIGHUP, tmp_path, first="signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    assert code == 1
    assert "the signal came too late" in errors


def test_process_of_torchrun_keeps_the_systems_sigterm(tmp_path):
    code, *_ = figure(signal.SIGTERM, tmp_path, WORLD_SIZE="2", RANK="0")
    assert code == -signal.SIGTERM


def check_built(number, folder, tmp_path):
    (tmp_path / "own.py").write_text(BUILD, encoding="utf-8")
    command = [sys.executable, "-m", "limitformer", "check", f"{tmp_path / 'own.py'}:build", "--samples", "1"]
    return ended([*command, "--tokens", "4"], TMPDIR=str(folder), SENDS=str(int(number)))


@pytest.mark.parametrize("number", [0, signal.SIGTERM])
def test_command_leaves_no_folder_of_the_compiler(number, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    code, _, errors = check_built(number, folder, tmp_path)
    assert code == (128 + number if number else 2), errors  # without a signal the module is refused: it has no blocks
    assert list(folder.iterdir()) == []


def test_full_folder_of_the_compiler_stays(tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    full = folder / f"torchinductor_{getpass.getuser()}"
    full.mkdir()
    (full / "compiled").write_text("by another process", encoding="utf-8")
    assert check_built(0, folder, tmp_path)[0] == 2
    assert (full / "compiled").read_text(encoding="utf-8") == "by another process"


@pytest.mark.parametrize("number", endings.ALIKE)
def test_signal_in_an_import_ends_the_process_at_once(number, tmp_path):
    program = AT_IMPORT.format(number=int(number))
    code, out, errors = ended([sys.executable, "-c", program], TMPDIR=str(tmp_path))
    assert (code, out, errors) == (128 + number, "", "\nInterrupted; nothing was written.\n")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def handlers(monkeypatch):
    """Let SIGTERM and SIGHUP do what Ctrl-C does, as in a command that works; restore them afterwards."""
    monkeypatch.setattr(endings, "RECEIVED", [])
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in endings.ALIKE:
        signal.signal(number, endings.end_at_once)
    endings.begin_work()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("number", endings.ALIKE)
def test_signal_waits_for_the_end_of_a_critical_block(number, ignored, handlers):
    """It is not lost where the shell ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    reached = []

    def critical():
        with interrupts_wait():
            os.kill(os.getpid(), number)
            reached.append(number)

    with pytest.raises(KeyboardInterrupt):
        critical()
    assert reached == [number]


@pytest.mark.parametrize("number", endings.ALIKE)
def test_signal_calls_the_handler_of_ctrl_c(number, handlers):
    """`train` and grids handle Ctrl-C themselves, to save first."""
    noted = []
    signal.signal(signal.SIGINT, lambda *arguments: noted.append(arguments[0]))
    os.kill(os.getpid(), number)
    assert noted == [number]
    assert endings.code_at_end(130) == 128 + number
    assert endings.code_at_end(0) == 0
    for again in endings.ALIKE:
        os.kill(os.getpid(), again)
    assert noted == [number]  # `timeout` sends SIGTERM twice, and the command still saves
    assert endings.code_at_end(130) == 128 + number
