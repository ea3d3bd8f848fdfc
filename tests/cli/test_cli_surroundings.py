"""Commands in bad surroundings: environment variables that break imports, and a working folder that is gone."""

import os
import subprocess
import sys

import pytest

from limitformer.cli.surroundings import OURS, check_folder, import_failure, prepare_environment

SIMULATE = ("simulate", "--width", "16", "--depth", "4", "--samples", "6", "--threads", "1")
PHASE = ("phase", "--dim", "4", "--beta", "1", "--samples", "9", "--horizon", "1", "--layers", "5", "--threads", "1")
CHECK = ("check", '{"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2}', "--tokens", "4", "--samples", "1")
GONE = """
import os, sys
folder, *arguments = sys.argv[1:]
os.chdir(folder)
os.rmdir(folder)
sys.argv = ["limitformer", *arguments]
from limitformer.cli import main
main()
"""


def ended(command, **variables):
    """Return exit code, stdout and stderr of a process."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "TORCH", "HF_"))}
    environment = {**own, "COLUMNS": "160", "PYTHONIOENCODING": "utf-8", **variables}
    done = subprocess.run(command, env=environment, encoding="utf-8", check=False, capture_output=True)
    return done.returncode, done.stdout, done.stderr


def limitformer(*arguments, **variables):
    return ended([sys.executable, "-m", "limitformer", *arguments], **variables)


@pytest.mark.parametrize(
    ("arguments", "variable", "value", "package"),
    [
        (SIMULATE, "NUMBA_NUM_THREADS", "0", "numba"),
        (SIMULATE, "NUMBA_NUM_THREADS", "-3", "numba"),
        (CHECK, "TORCHINDUCTOR_CACHE_DIR", "/dev/null/x", "torch"),
        (CHECK, "TORCH_LOGS", "nonsense", "torch"),
        (CHECK, "HF_HUB_ETAG_TIMEOUT", "nonsense", "huggingface_hub"),
    ],
)
def test_variable_that_breaks_an_import_is_named_in_one_line(arguments, variable, value, package):
    code, out, errors = limitformer(*arguments, **{variable: value})
    assert (code, out) == (2, "")
    assert errors.startswith(f"Error: {package} cannot be imported: ")
    assert errors.endswith(f" Nearest: without {variable} in the environment.\n")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("backend", ["nonsense", "module://nonsense"])
def test_pictures_need_no_backend(tmp_path, backend):
    code, _, errors = limitformer(*PHASE, "--out", str(tmp_path), MPLBACKEND=backend)
    assert code == 0, errors
    assert {path.name for path in tmp_path.iterdir()} == {"phase.png", "phase.nc"}


def test_terminal_of_no_columns_shows_the_table():
    code, out, _ = limitformer(*SIMULATE, COLUMNS="0")
    assert code == 0
    assert "6 samples" in out


@pytest.mark.parametrize("arguments", [SIMULATE, CHECK, ("sweep", "status", "s")], ids=lambda every: every[0])
def test_working_folder_that_is_gone_is_one_line(tmp_path, arguments):
    folder = tmp_path / "gone"
    folder.mkdir()
    code, out, errors = ended([sys.executable, "-c", GONE, str(folder), *arguments])
    assert (code, out) == (2, "")
    assert errors == "Error: The working folder is gone: No such file or directory. Nearest: cd to another one.\n"


def test_working_folder_that_exists_is_taken():
    check_folder()


def raised_by(text, path):
    """Return the error that a module of this text raises when it is imported."""
    from importlib.util import module_from_spec, spec_from_file_location

    path.write_text(text, encoding="utf-8")
    spec = spec_from_file_location(path.stem, path)
    try:
        spec.loader.exec_module(module_from_spec(spec))
    except Exception as error:  # noqa: BLE001  whatever it is
        return error


def test_error_of_a_call_is_not_an_import_failure(tmp_path):
    with pytest.raises(ValueError, match="invalid literal") as raised:
        int("x")
    assert import_failure(raised.value) is None
    ours = raised_by("import math\nmath.sqrt(-1)", tmp_path / "limitformer.py")
    assert import_failure(ours) is None  # a bug of ours keeps its traceback
    theirs = raised_by("import math\nmath.sqrt(-1)", tmp_path / "numba.py")
    assert import_failure(theirs).startswith("numba cannot be imported: ValueError: ")


def test_variables_without_relation_to_the_package_are_not_named(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("NUMBA_", "TORCH", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_LOGS", "x")
    error = raised_by("1 / 0", tmp_path / "numba.py")
    assert import_failure(error) == "numba cannot be imported: ZeroDivisionError: division by zero."
    monkeypatch.setenv("NUMBA_OPT", "x")
    assert import_failure(error).endswith(" Nearest: without NUMBA_OPT in the environment.")


def test_environment_keeps_a_level_of_messages_that_the_user_sets(monkeypatch):
    for name in (*OURS, "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    monkeypatch.setenv("COLUMNS", "80")
    prepare_environment()
    assert {name: os.environ[name] for name in OURS} == {**OURS, "TRANSFORMERS_VERBOSITY": "info"}
    assert os.environ["COLUMNS"] == "80"
