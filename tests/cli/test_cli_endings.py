"""The ends of commands: a failing standard output, Ctrl-C during imports, and typos.

Ctrl-C is sent by an import hook, at the import of a named module, so that nothing depends on time.
"""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import limitformer as lf
from limitformer.checking.thresholds import VERDICTS
from limitformer.checking.verdicts import RULES
from limitformer.cli import check as check_module
from limitformer.cli.app import COMMANDS, command_of
from limitformer.designing import names as knob_names
from limitformer.hf import Shaping

QUICK = ("simulate", "--width", "16", "--depth", "4", "--samples", "6", "--threads", "1")
SIGNALS_AT = """
import importlib.abc, os, signal, sys

class SignalAt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {module!r} and {module!r} not in seen:
            seen.add(name)
            os.kill(os.getpid(), signal.SIGINT)
        return None

seen = set()
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, SignalAt())
sys.argv = ["limitformer", *{arguments!r}]
from limitformer.cli import main
main()
"""


def ended(command, **options):
    """Return exit code, stdout and stderr of a process."""
    environment = {**os.environ, "COLUMNS": "160", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, env=environment, encoding="utf-8", check=False, **options)
    return done.returncode, done.stdout, done.stderr


def announced(errors):
    """Remove what only a first run or a slow machine prints: lines about compiling, and estimates of time."""
    lines = errors.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("Compiling ") and ", about " not in line
                   and ": about " not in line)  # fmt: skip


# A standard output that cannot be written.


@pytest.fixture
def closed_pipe():
    """Return the write end of a pipe without a reader."""
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as stream:
        yield stream


@pytest.fixture
def full():
    """Open a device that is always full."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w", encoding="utf-8") as stream:
        yield stream


WRITING = {
    "simulate": ((*QUICK, "--out", "{out}/q.nc"), ("q.nc",)),
    "phase": (
        ("phase", "--dim", "4", "--beta", "1", "--samples", "20", "--horizon", "1", "--layers", "5", "--out", "{out}"),
        ("phase.nc", "phase.png"),
    ),
    "overlap": (("overlap", "--json"), ()),
    "help": (("check", "--help"), ()),
    "version": (("--version",), ()),
    "list": (("check", "list"), ()),
}


def begun(name, folder):
    """Return the command and the files that it should leave."""
    arguments, files = WRITING[name]
    command = [sys.executable, "-m", "limitformer", *(one.format(out=folder) for one in arguments)]
    return command, [folder / file for file in files]


@pytest.mark.parametrize("name", WRITING)
def test_a_full_disk_behind_stdout_is_one_line_and_files_are_saved(name, tmp_path, full):
    command, files = begun(name, tmp_path)
    code, _, errors = ended(command, stdout=full, stderr=subprocess.PIPE)
    assert code == 74
    assert announced(errors) == "Error: Standard output cannot be written: No space left on device.\n"
    assert all(file.is_file() for file in files)


@pytest.mark.parametrize("name", WRITING)
def test_a_closed_pipe_ends_a_command_without_a_word_and_files_are_saved(name, tmp_path, closed_pipe):
    command, files = begun(name, tmp_path)
    code, _, errors = ended(command, stdout=closed_pipe, stderr=subprocess.PIPE)
    assert (code, announced(errors)) == (141, "")
    assert all(file.is_file() for file in files)


def test_a_check_is_saved_before_it_is_printed(tmp_path, full):
    command = [
        sys.executable,
        "-m",
        "limitformer",
        "check",
        '{"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2}',
    ]
    command += ["--tokens", "4", "--samples", "2", "--no-gradients", "--out", str(tmp_path / "out")]
    code, _, errors = ended(command, stdout=full, stderr=subprocess.PIPE)
    assert (code, errors) == (74, "Error: Standard output cannot be written: No space left on device.\n")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"check.{e}" for e in ("html", "png", "nc", "json")}


def test_a_stderr_that_cannot_be_written_ends_nothing(tmp_path, full):
    command, files = begun("simulate", tmp_path)
    code, out, _ = ended(command, stdout=subprocess.PIPE, stderr=full)
    assert code == 0
    assert "6 samples" in out
    assert all(file.is_file() for file in files)
    assert ended([sys.executable, "-m", "limitformer", "simulate", "--gamma", "2"], stderr=full)[0] == 2


def test_streams_that_the_shell_has_closed_are_no_failure(tmp_path):
    command, files = begun("simulate", tmp_path)
    code, _, _ = ended(["sh", "-c", '"$@" >&- 2>&-', "sh", *command])
    assert code == 0
    assert all(file.is_file() for file in files)


# Ctrl-C while modules are imported.


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("typer", ("check", "list")),
        ("rich.console", ("check", "gpt2")),
        ("numpy", ("check", "gpt2")),
        ("torch", ("check", "gpt2")),
        ("transformers", ("check", "gpt2")),
        ("numba", ("simulate",)),
        ("scipy", ("overlap",)),
        ("xarray", ("phase",)),
        ("xarray", ("sweep", "status", "s.zarr")),
        ("torch", ("train", "vit")),
        ("torch", ("design", "gpt2")),
    ],
)
def test_ctrl_c_in_an_import_is_one_line(module, arguments, tmp_path):
    program = SIGNALS_AT.format(module=module, arguments=arguments)
    code, out, errors = ended([sys.executable, "-c", program], capture_output=True, cwd=tmp_path)
    assert (code, out, errors) == (130, "", "\nInterrupted; nothing was written.\n")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_stays_ignored_where_it_is(tmp_path):
    """Shells let background jobs ignore Ctrl-C."""
    program = SIGNALS_AT.format(module="typer", arguments=("check", "list"))
    ignoring = program.replace("signal.default_int_handler", "signal.SIG_IGN")
    code, out, errors = ended([sys.executable, "-c", ignoring], capture_output=True, cwd=tmp_path)
    assert (code, errors) == (0, "")
    assert "gpt2" in out


# Typos.


TYPOS = {
    "a shape": (("check", "gpt3"), "no public shape, file or folder 'gpt3'. Nearest: gpt2"),
    "a file": (("check", "nosuchfile.json"), "no public shape, file or folder 'nosuchfile.json'"),
    "a second shape": (("check", "gpt2", "--against", "gpt3"), "no public shape, file or folder 'gpt3'"),
    "a verdict": (("check", "gpt2", "--fail-on", "collapst"), "--fail-on: there is no verdict 'collapst'"),
    "a threshold": (("check", "gpt2", "--threshold", "colapse=1"), "--threshold: thresholds has no 'colapse'"),
    "a threshold's value": (("check", "gpt2", "--threshold", "collapse=x"), "must be a number; got 'x'"),
    "a threshold's range": (("check", "gpt2", "--threshold", "collapse=7"), "--threshold: thresholds['collapse'] must"),
    "no value": (("check", "gpt2", "--set", "n_layer"), "--set takes KEY=VALUE; got 'n_layer'."),
    "twice": (("check", "gpt2", "--set", "n_layer=1", "--set", "n_layer=2"), "--set gives n_layer twice"),
    "a shaping": (("check", "gpt2", "--shaped", "foo=1"), "--shaped has no option 'foo'; there are gamma, tau0"),
    "a shaping's value": (("check", "gpt2", "--shaped", "gamma=big"), "--shaped gamma takes a number; got 'big'."),
    "a shaping's switch": (("check", "gpt2", "--shaped", "per_head=3"), "--shaped per_head is true or false; got 3."),
    "one token": (("check", "gpt2", "--tokens", "1"), "--tokens must be at least 2; got 1."),
    "no sample": (("check", "gpt2", "--samples", "0"), "--samples must be at least 1; got 0."),
    "a text": (("check", "gpt2", "--text", "no.txt"), "Cannot read the text no.txt"),
    "a knob": (("design", "gpt2", "--knobs", "x"), "there is no knob 'x'; there are initializer_range"),
    "three knobs": (("design", "gpt2", "--knobs", "output,logits,embedding"), "knobs must be one or two names; got 3."),
    "a grid": (("design", "gpt2", "--grid", "outputs=1,2"), "--grid has no knob 'outputs'"),
    "a design's shape": (("design", "gpt3"), "no public shape, file or folder 'gpt3'"),
    "a design's token": (("design", "gpt2", "--tokens", "1"), "--tokens must be at least 2; got 1."),
    "a risk": (("design", "gpt2", "--risk", "0"), "--risk must lie in (0, 1); got 0."),
    "a scan": (("design", "gpt2", "--scan", "0"), "--scan must be at least 1; got 0."),
}
ASKED = """
import sys
sys.argv = ["limitformer", *{arguments!r}]
from limitformer.cli import main
try:
    main()
except SystemExit as end:
    print(end.code, [name for name in ("torch", "transformers", "numba", "xarray") if name in sys.modules])
"""


@pytest.mark.parametrize("typo", TYPOS)
def test_typos_are_answered_before_anything_large_is_imported(typo, tmp_path):
    arguments, says = TYPOS[typo]
    code, out, errors = ended(
        [sys.executable, "-c", ASKED.format(arguments=arguments)], capture_output=True, cwd=tmp_path
    )
    assert (code, out) == (0, "2 []\n"), errors
    assert errors.startswith("Error: ")
    assert says in errors
    assert errors.count("\n") == 1


def test_the_list_of_shapes_needs_no_torch(tmp_path):
    _, out, errors = ended([sys.executable, "-c", ASKED.format(arguments=("check", "list"))], capture_output=True)
    assert errors == ""
    assert out.endswith("0 []\n")
    assert all(f"{name} " in out for name in lf.shapes())


def test_names_of_options_are_those_of_the_library():
    assert tuple(dict.fromkeys(rule.name for rule in RULES)) == VERDICTS
    own = {field.name for field in fields(Shaping)} - {"residual_gamma"}
    assert set(check_module.SHAPED) == own | {"gamma"}
    assert {field.name for field in fields(Shaping) if field.type == "bool" or field.type is bool} == set(
        check_module.SWITCHES
    )
    assert {knob_names.FIELD, *knob_names.SCALES[1:2], *knob_names.SHAPED} == set(command_defaults())


def command_defaults():
    from limitformer.cli.design import USUAL

    return USUAL


# The page of the documentation.


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
