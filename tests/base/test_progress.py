"""The remaining time, and a command's estimate with a quicker setting."""

from types import SimpleNamespace

import pytest

from limitformer.base import progress


@pytest.fixture
def clock(monkeypatch):
    time = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: time.now))
    return time


@pytest.fixture
def terminal(monkeypatch):
    """Standard error looks like a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


def test_bar_estimates_remaining_time_of_minute_long_pieces(clock, terminal, capsys):
    """Rich's own estimate shows -:--:-- where a piece takes more than 30 s."""
    bar = progress.progress_bar("networks", 8, 0.0)
    for done in range(1, 5):
        clock.now = 60.0 * done
        progress.advance(bar, done)
    assert bar.progress.tasks[0].fields["left"] == "about 4 min left"
    progress.advance(bar, -1)
    assert "-:--:--" not in capsys.readouterr().err


def test_bar_names_the_part_that_runs_before_the_time_left(clock, terminal):
    bar = progress.progress_bar("networks", 8, 0.0)
    first, second = (progress.PartOfBar(bar, 4.0 * k, 4.0, 2, f"width {size}") for k, size in enumerate((16, 32)))
    progress.advance(first, 0)
    assert bar.progress.tasks[0].fields["left"] == "width 16"
    clock.now = 60.0
    progress.advance(first, 2)
    progress.advance(second, 0)
    assert bar.progress.tasks[0].fields["left"] == "width 32, about 60 s left"
    assert bar.progress.tasks[0].completed == 4.0
    progress.advance(bar, -1)


def test_line_without_a_terminal_names_the_part(clock, capsys):
    bar = progress.progress_bar("networks", 8, 0.0)
    clock.now = 120.0
    progress.advance(progress.PartOfBar(bar, 0.0, 8.0, 4, "depth 12, 1 of 3"), 2)
    assert capsys.readouterr().err == "networks: 4 of 8, depth 12, 1 of 3, about 2 min left\n"


def test_estimate_excludes_work_done_before_the_bar(clock, terminal):
    bar = progress.progress_bar("cells", 100, 90)
    clock.now = 50.0
    progress.advance(bar, 95)
    assert bar.progress.tasks[0].fields["left"] == "about 50 s left"
    progress.advance(bar, -1)


def test_estimate_excludes_preparation_before_the_first_piece(clock, terminal):
    bar = progress.progress_bar("networks", 8, 0.0)
    for now, done in ((30.0, 0), (40.0, 1)):
        clock.now = now
        progress.advance(bar, done)
    assert bar.progress.tasks[0].fields["left"] == "about 70 s left"  # the twin that counts 40 s for one says 280
    progress.advance(bar, -1)


@pytest.mark.parametrize(("second", "says"), [(10.0, "networks: about 80 s in all; fewer samples.\n"), (2.4, "")])
def test_long_work_is_estimated_once_with_a_quicker_setting(clock, capsys, second, says):
    """It is printed after the first piece; 19.2 s in all are not long."""
    with progress.suggest_quicker("fewer samples."):
        bar = progress.progress_bar("networks", 8, 0.0)
        for done in (1, 2, 3):
            clock.now = second * done
            progress.advance(bar, done)
    assert capsys.readouterr().err == says


def test_estimate_ends_at_the_time_after_which_no_work_begins(clock, capsys):
    with progress.suggest_quicker("fewer samples."):
        bar = progress.progress_bar("networks", 80, 0.0)
        bar.limit = 100.0
        clock.now = 10.0
        progress.advance(bar, 1)
    assert capsys.readouterr().err == "networks: about 2 min in all; fewer samples.\n"  # 800 s without the limit
    progress.advance(bar, -1)


def test_estimate_is_not_printed_without_a_suggestion(clock, capsys):
    with pytest.raises(ZeroDivisionError), progress.suggest_quicker("fewer samples."):
        raise ZeroDivisionError
    bar = progress.progress_bar("networks", 8, 0.0)
    clock.now = 30.0
    progress.advance(bar, 1)
    assert capsys.readouterr().err == ""
