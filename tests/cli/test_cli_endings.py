"""The ends of a command: a failing standard output, signals, a working folder that is gone.

Signals are sent by the process itself, at the import of a named module or at a known place of the work, so that nothing
depends on time.
"""

import errno
import os
import signal
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import limitformer as lf
from limitformer.base.interrupts import interrupts_wait
from limitformer.checking.thresholds import VERDICTS
from limitformer.checking.verdicts import RULES
from limitformer.cli import check as check_module
from limitformer.cli import endings
from limitformer.cli.app import COMMANDS, command_of
from limitformer.cli.design import USUAL
from limitformer.cli.report import OutputError, Screen
from limitformer.designing import names as knob_names
from limitformer.hf import Shaping

COMMAND = [sys.executable, "-m", "limitformer"]
SMALL = '{"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2}'
PHASE = ("phase", "--dim", "4", "--beta", "1", "--samples", "9", "--horizon", "1", "--layers", "5")
NOTHING = "Interrupted; nothing was written.\n"
SIGNAL_AT = """
import importlib.abc, os, signal, sys

class SignalAt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {module!r} and name not in seen:
            seen.add(name)
            os.kill(os.getpid(), {number})
        return None

seen = set()
signal.signal(signal.SIGINT, {first})
sys.meta_path.insert(0, SignalAt())
from limitformer.cli import main
main()
"""


def saves(command, model_file, out):
    """Return the arguments of a quick command that saves files, and their names."""
    arguments, names = {
        "simulate": (("simulate", model_file, "--samples", 6, "--out", out / "q.nc"), ("q.nc",)),
        "check": (
            ("check", SMALL, "--tokens", 4, "--samples", 2, "--no-gradients", "--out", out),
            ("check.html", "check.png", "check.nc", "check.json"),
        ),
    }[command]
    return arguments, [out / name for name in names]


# A standard output that cannot be written.


@pytest.mark.parametrize("command", ["simulate", "check"])
def test_files_are_saved_before_anything_is_printed(run, model_file, tmp_path, monkeypatch, command):
    def full(*_, **__):
        raise OutputError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Screen, "print", full)
    arguments, files = saves(command, model_file, tmp_path / "out")
    result = run(*arguments)
    assert result.exit_code == 74
    assert result.stderr.endswith("Error: Standard output cannot be written: No space left on device.\n")
    assert all(file.is_file() for file in files)


@pytest.fixture(params=["full disk", "closed pipe"])
def broken(request):
    """Return a standard output that cannot be written, the exit code and the line about it."""
    if request.param == "closed pipe":
        ours, theirs = os.pipe()
        os.close(ours)
        with os.fdopen(theirs, "w") as stream:
            yield stream, 141, ""
    elif not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    else:
        with open("/dev/full", "w", encoding="utf-8") as stream:
            yield stream, 74, "Error: Standard output cannot be written: No space left on device.\n"


def test_a_standard_output_that_cannot_be_written_is_an_exit_code(process, broken):
    stream, wanted, line = broken
    code, _, errors = process([*COMMAND, "recipes"], stdout=stream, stderr=-1)
    assert (code, errors) == (wanted, line)


# Signals.


@pytest.fixture
def sent(process):
    """Run a command that sends itself a signal when it imports a module."""

    def ended(number, module, *arguments, first="signal.default_int_handler"):
        program = SIGNAL_AT.format(module=module, number=int(number), first=first)
        return process([sys.executable, "-c", program, *arguments])

    return ended


@pytest.mark.parametrize(
    ("number", "module", "arguments"),
    [
        (signal.SIGINT, "typer", ("check", "list")),
        (signal.SIGINT, "numba", ("phase",)),
        (signal.SIGTERM, "numpy", ("check", "gpt2")),
        (signal.SIGHUP, "numpy", ("check", "gpt2")),
    ],
)
def test_signal_in_an_import_is_one_line(sent, number, module, arguments):
    assert sent(number, module, *arguments) == (128 + number, "", "\n" + NOTHING)


def test_ctrl_c_stays_ignored_where_it_is(sent):
    """Shells let background jobs ignore Ctrl-C."""
    code, out, errors = sent(signal.SIGINT, "typer", "check", "list", first="signal.SIG_IGN")
    assert (code, errors) == (0, "")
    assert all(f"{name} " in out for name in lf.shapes())


FIGURE = f"""
import os, sys
import limitformer_papers.shaped_transformer.st_fig7 as module

def compute(config, run):
    assert ".st-fig7.lock" in os.listdir(sys.argv[-1])
    os.kill(os.getpid(), {int(signal.SIGTERM)})
    raise AssertionError("the signal came too late")

module.compute = compute
from limitformer.cli import main
main()
"""


def test_signal_during_a_figure_removes_its_lock(process, tmp_path):
    arguments = ["figure", "st-fig7", "--scale", "quick", "--out", tmp_path]
    code, out, errors = process([sys.executable, "-c", FIGURE, *arguments])
    assert (code, out) == (128 + signal.SIGTERM, "")
    assert errors.endswith(NOTHING)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def handlers(monkeypatch):
    """Let SIGTERM and SIGHUP do what Ctrl-C does, as in a command that works; restore them afterwards."""
    monkeypatch.setattr(endings, "RECEIVED", [])
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *endings.ALIKE)}
    for number in endings.ALIKE:
        signal.signal(number, endings.end_at_once)
    endings.begin_work()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "ignored"), [*zip(endings.ALIKE, (False, True), strict=True)])
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


# The environment.


def test_pictures_need_no_backend_and_tables_no_columns(process, tmp_path):
    variables = {"MPLBACKEND": "nonsense", "COLUMNS": "0"}
    code, out, errors = process([*COMMAND, *PHASE, "--out", tmp_path], variables=variables)
    assert code == 0, errors
    assert {path.name for path in tmp_path.iterdir()} == {"phase.png", "phase.pdf", "phase.nc"}
    assert "95 % interval" in out


def test_working_folder_that_is_gone_is_one_line(run, tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    result = run(*PHASE)
    monkeypatch.undo()
    line = "Error: The working folder is gone: No such file or directory. Nearest: cd to another one.\n"
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", line)


# Names of options, and the page of the documentation.


def test_names_of_options_are_those_of_the_library():
    assert tuple(dict.fromkeys(rule.name for rule in RULES)) == VERDICTS
    own = {field.name for field in fields(Shaping)} - {"residual_gamma"}
    assert set(check_module.SHAPED) == own | {"gamma"}
    assert {field.name for field in fields(Shaping) if field.type in ("bool", bool)} == set(check_module.SWITCHES)
    assert {knob_names.FIELD, *knob_names.SCALES[1:2], *knob_names.SHAPED} == set(USUAL)


def options_of(command, name):
    """Return the names of the options and arguments in a command's help, or in that of a group's commands."""
    if hasattr(command, "commands"):
        return {
            key: own
            for word, each in command.commands.items()
            for key, own in options_of(each, f"{name} {word}").items()
        }
    return {name: {each.name for each in command.params if each.name != "help"}}


def test_the_page_has_a_row_for_each_option():
    """Options are counted from the functions' own parameters and not from the page's generator."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "api" / "command-line.md").read_text(encoding="utf-8")
    sections = {section.split("\n", 1)[0]: section for section in page.split("\n## ")[1:]}
    wanted = {key: own for name in COMMANDS for key, own in options_of(command_of(name), f"limitformer {name}").items()}
    assert set(sections) == set(wanted)
    for name, parameters in wanted.items():
        rows = [line for line in sections[name].splitlines() if line.startswith("| `")]
        assert len(rows) == len(parameters) > 0, name
