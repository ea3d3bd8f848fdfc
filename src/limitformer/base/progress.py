"""Progress of long work: nothing for two seconds, then a bar; without a terminal, a line a minute.

In a notebook Rich shows its bar with ipywidgets; without them, lines.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.segment import Segment

from limitformer.base.errors import without_controls

PATIENCE = 2.0  # seconds before progress is shown
MINUTE = 60.0  # seconds between lines where there is no terminal
LONG = 20.0  # seconds above which a command prints its estimated time and a quicker setting

T = TypeVar("T")
SUGGESTION = ""  # the quicker setting of the command that runs


@contextmanager
def suggest_quicker(quicker: str) -> Iterator[None]:
    """Print the first estimate of long work in the block, with a quicker setting; "" prints none."""
    global SUGGESTION
    SUGGESTION = quicker
    try:
        yield
    finally:
        SUGGESTION = ""


class Terminal(Console):
    """A console that prints text as it is: no emoji for `:rocket:`, and no control characters, which it would obey."""

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
        """Yield the parts of what is printed; texts of any origin come without control characters."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else without_controls(text), style, control)


def hide() -> None:
    """Show no progress in this process, one of several that share a terminal."""
    global PATIENCE
    PATIENCE = math.inf


def print_line(line: str) -> None:
    """Print one line on stderr without markup; ignore a stderr that cannot be written."""
    with suppress(OSError):
        Terminal(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def delayed_notice(message: str) -> Iterator[Callable[[], None]]:
    """Print `message` if the block takes a second or more after it calls the function that it receives."""
    timer = threading.Timer(1.0, lambda: Terminal(stderr=True).print(f"{message} …", style="dim", highlight=False))
    timer.daemon = True

    def begin() -> None:
        if timer.ident is None and not math.isinf(PATIENCE):
            timer.start()

    try:
        yield begin
    finally:
        timer.cancel()


@dataclass
class Bar:
    """A progress bar that appears after `PATIENCE` seconds; lines where a bar cannot be shown.

    The remaining time is our own estimate from all the work since the bar began, because that of Rich has none before
    the second piece.
    """

    progress: Progress
    began: float
    printed: float
    first: float | None = None  # pieces done at the beginning: a resumed run does not begin at 0
    visible: bool = False
    estimated: bool = False
    part: str = ""  # the part of the work that runs, such as "width 256, 2 of 3"
    limit: float = math.inf  # seconds after which no more work begins

    def show(self, done: float) -> None:
        now, task = time.perf_counter(), self.progress.tasks[0]
        total, seconds = task.total or 0.0, now - self.began
        self.first = done if self.first is None else self.first
        whole = seconds * (total - self.first) / (done - self.first) if done > self.first else 0.0
        whole = min(whole, max(self.limit, seconds))
        if SUGGESTION and whole and seconds >= PATIENCE and not self.estimated:
            self.estimated = True
            if whole > LONG:
                print_line(f"{task.description}: {duration(whole)} in all; {SUGGESTION}")
        remaining = f"{duration(whole - seconds)} left" if whole else ""
        remaining = ", ".join(filter(None, (self.part, remaining)))
        self.progress.update(task.id, completed=done, left=remaining)
        if not self.progress.disable:
            if not self.visible and seconds > PATIENCE:
                self.visible = True
                self.progress.start()
        elif now - self.printed >= MINUTE and not math.isinf(PATIENCE):
            self.printed = now
            print_line(f"{task.description}: {int(done):,} of {int(total):,}, {remaining}".removesuffix(", "))
        if done <= self.first:
            self.began = now  # preparation before the first piece takes no share of the pieces


def duration(seconds: float) -> str:
    """Return such as "about 5 min".

    >>> duration(91), duration(90)
    ('about 2 min', 'about 90 s')
    """
    return f"about {seconds / 60:.0f} min" if seconds > 90 else f"about {seconds:.0f} s"


def progress_bar(description: str, total: int, first: float | None = None) -> Bar:
    """Make a bar for `total` pieces of work, `first` of which are done; None takes that of the first `advance`."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    console = Terminal(stderr=True)
    seen = console.is_interactive or (console.is_jupyter and find_spec("ipywidgets") is not None)
    progress = Progress(*columns, console=console, transient=True, disable=not seen)
    progress.add_task(description, total=total, left="")
    now = time.perf_counter()
    return Bar(progress, now, now, first)


@dataclass
class PartOfBar:
    """A phase of a longer bar: its `count` steps fill `size` steps of the bar."""

    whole: Bar | None
    first: float
    size: float
    count: int
    name: str = ""


def advance(bar: Bar | PartOfBar | None, done: float) -> None:
    """Show `done` pieces of work; a negative number closes the bar, unless it is that of longer work."""
    if bar is None:
        return
    if isinstance(bar, PartOfBar):
        if done >= 0 and bar.whole is not None:
            bar.whole.part = bar.name
            advance(bar.whole, bar.first + bar.size * done / bar.count)
        return
    if done >= 0:
        bar.show(done)
    elif bar.visible:
        bar.progress.stop()


def track(items: Sequence[T] | Iterator[T], description: str, total: int = 0, first: int = 0) -> Iterator[T]:
    """Yield the items, with a bar if they take more than `PATIENCE` seconds; `first` of `total` are done before.

    `total` is needed for items without a length.
    """
    bar = progress_bar(description, len(items) if isinstance(items, Sequence) else total, first)
    try:
        for done, item in enumerate(items, first + 1):
            yield item
            advance(bar, done)
    finally:
        advance(bar, -1)
