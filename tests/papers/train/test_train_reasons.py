"""Runs that fail: each reason, and each traceback, is printed once, however many runs it ends."""

import errno

import pytest

from grid_program import of_all_kinds
from limitformer.base.errors import InputError
from limitformer_papers.commands.train_parts import finish_all
from limitformer_papers.training import grid
from limitformer_papers.training.grid import run_all

pytestmark = pytest.mark.xdist_group("training")
LINE = 'raise ZeroDivisionError("by nothing")'


def line_of(run, summary):
    return f"{run} is finished"


def test_reason_that_ends_several_runs_is_printed_once(capsys, monkeypatch):
    monkeypatch.setenv(grid.DEVICES, "0")
    with pytest.raises(InputError, match=r"^3 of 4 runs failed, for the 2 reasons above\.$"):
        finish_all(["bad", "bug", "good", "bad"], of_all_kinds, 1, line_of)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line[1:3] == "/4"] == [
        "1/4 failed: got 0, at least 1",
        "2/4 failed: ZeroDivisionError: by nothing",
        "3/4 good is finished",
        "4/4 failed as 1/4 did",
    ]


def test_reason_of_a_run_alone_is_the_error(capsys):
    with pytest.raises(InputError, match=r"^got 0, at least 1$"):
        finish_all(["bad"], of_all_kinds, 1, line_of)
    assert "got 0" not in capsys.readouterr().err


@pytest.mark.parametrize("workers", [1, 2])
def test_traceback_is_printed_once(capfd, workers):
    outcomes = [outcome for _, outcome in run_all(["bug", "bug", "bug"], of_all_kinds, workers=workers)]
    assert [str(outcome) for outcome in outcomes] == 3 * ["ZeroDivisionError: by nothing"]
    assert capfd.readouterr().err.count(LINE) == 1


def test_file_that_cannot_be_used_gives_no_traceback(capfd):
    def long_name(run):
        raise OSError(errno.ENAMETOOLONG, "File name too long", "aaa")

    ((_, outcome),) = run_all([1], long_name)
    assert str(outcome) == "Cannot use aaa: File name too long."
    assert "Traceback" not in capfd.readouterr().err
