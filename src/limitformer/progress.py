"""What the terminal shows of long work: nothing for two seconds, then a bar; and a word before a first compilation."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PATIENCE = 2.0  # seconds before progress is shown

T = TypeVar("T")


def hide() -> None:
    """Show no progress in this process, one of several that share a terminal."""
    global PATIENCE
    PATIENCE = math.inf


def say(line: str) -> None:
    """One line on stderr, as it is."""
    Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def announcement(message: str) -> Iterator[Callable[[], None]]:
    """Say `message` on the terminal if the block takes a second after the call of what it is given."""
    timer = threading.Timer(1.0, lambda: Console(stderr=True).print(f"{message} …", style="dim", highlight=False))
    timer.daemon = True

    def begin() -> None:
        if timer.ident is None and not math.isinf(PATIENCE):
            timer.start()

    try:
        yield begin
    finally:
        timer.cancel()


@contextmanager
def announced(message: str) -> Iterator[None]:
    """Say `message` on the terminal if the block takes more than a second."""
    with announcement(message) as begin:
        begin()
        yield


@dataclass
class Bar:
    """A progress bar that waits `PATIENCE` seconds before it shows."""

    progress: Progress
    task: Any
    began: float
    visible: bool = False


def bar(description: str, total: int) -> Bar:
    """A bar for `total` pieces of work."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    unseen = not (console.is_interactive or console.is_jupyter)  # where a bar would leave an empty line and no more
    progress = Progress(*columns, console=console, transient=True, disable=unseen)
    return Bar(progress, progress.add_task(description, total=total), time.perf_counter())


def advance(shown: Bar | None, done: int) -> None:
    """Show `done` pieces of work; a negative number closes the bar."""
    if shown is None:
        return
    if done < 0:
        if shown.visible:
            shown.progress.stop()
        return
    if not shown.visible and time.perf_counter() - shown.began > PATIENCE:
        shown.visible = True
        shown.progress.start()
    shown.progress.update(shown.task, completed=done)


def tracked(items: Sequence[T], description: str) -> Iterator[T]:
    """The items one after the other, with a bar if they take more than `PATIENCE` seconds together."""
    shown = bar(description, len(items))
    try:
        for done, item in enumerate(items, 1):
            yield item
            advance(shown, done)
    finally:
        advance(shown, -1)
