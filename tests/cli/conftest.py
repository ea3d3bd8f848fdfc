"""Fixtures for tests of commands."""

import os
import re
import subprocess

import pytest
from typer.testing import CliRunner

from limitformer.cli.app import app

MODEL = """[model]
kind = "Transformer"
width = 16
depth = 4
gamma = 0.3535533905932738
attention = {kind = "ShapedAttention", tau0 = 1.0}
feedforward = {kind = "ShapedReLU", c_plus = 0.0, c_minus = -1.0}
"""


@pytest.fixture
def run(monkeypatch):
    """Run the command line in this process, on a wide terminal without colours."""
    monkeypatch.setenv("COLUMNS", "160")
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def model_file(tmp_path):
    """Write a small model to a file of a folder of its own."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "model.toml").write_text(MODEL, encoding="utf-8")
    return folder / "model.toml"


@pytest.fixture
def refused(run, tmp_path, monkeypatch):
    """Assert that a command is refused: exit code 2, one line on stderr, nothing on stdout, no files."""
    monkeypatch.chdir(tmp_path)

    def check(*arguments, says):
        before = sorted(tmp_path.rglob("*"))
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1
        assert result.stderr.endswith("\n")
        assert re.search(says, result.stderr), result.stderr
        assert sorted(tmp_path.rglob("*")) == before

    return check


@pytest.fixture
def process():
    """Run a program to its end in a process of its own; return its exit code, stdout and stderr."""

    def ended(command, *, without=(), variables=(), **options):
        own = {name: value for name, value in os.environ.items() if not name.startswith(tuple(without))}
        environment = {**own, "COLUMNS": "160", "PYTHONIOENCODING": "utf-8", **dict(variables)}
        options = options or {"capture_output": True}
        done = subprocess.run([*map(str, command)], env=environment, encoding="utf-8", check=False, **options)
        return done.returncode, done.stdout, done.stderr

    return ended
