"""Fixtures for tests of commands."""

import re

import pytest
from typer.testing import CliRunner

from limitformer.cli.app import app


@pytest.fixture
def run(monkeypatch):
    """Run the command line in this process, on a wide terminal without colours."""
    monkeypatch.setenv("COLUMNS", "160")
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])


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
        assert "Traceback" not in result.stderr
        assert re.search(says, result.stderr), result.stderr
        assert sorted(tmp_path.rglob("*")) == before

    return check
