"""Progress of long work: nothing for two seconds, then a bar; without a terminal, a line a minute.

In a notebook the bar is HTML that replaces itself, because the bar of Rich needs ipywidgets there, and warns.
"""

import html
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.segment import Segment

from limitformer.base.errors import without_controls

PATIENCE = 2.0  # seconds before progress is shown
MINUTE = 60.0  # seconds between lines where there is no terminal
MOMENT = 0.5  # seconds between pictures of a bar in a notebook
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


@contextmanager
def notice_if_slow(message: str) -> Iterator[None]:
    """Print `message` if the block takes more than a second."""
    with delayed_notice(message) as begin:
        begin()
        yield


@dataclass
class Bar:
    """A progress bar that appears after `PATIENCE` seconds; lines where a bar cannot be shown."""

    progress: Progress
    task: Any
    began: float
    printed: float
    first: float | None = None  # pieces done at the beginning: a resumed run does not begin at 0
    visible: bool = False
    estimated: bool = False
    part: str = ""  # the part of the work that runs, such as "width 256, 2 of 3"

    def show(self, done: float) -> None:
        now = time.perf_counter()
        self.estimate(done, now)
        if not self.visible and now - self.began > PATIENCE:
            self.visible = True
            self.progress.start()
        left = (self.shown_part + self.time_left(done, now)).removeprefix(", ")
        self.progress.update(self.task, completed=done, left=left)

    def print(self, done: float) -> None:
        """Print a line if a minute has passed since the last one."""
        now = time.perf_counter()
        self.estimate(done, now)
        remaining = self.time_left(done, now)
        if now - self.printed < MINUTE or math.isinf(PATIENCE):
            return
        self.printed = now
        print_line(self.line(done, remaining))

    @property
    def total(self) -> float:
        return self.progress.tasks[0].total or 0.0

    @property
    def shown_part(self) -> str:
        return f", {self.part}" if self.part else ""

    def time_left(self, done: float, now: float) -> str:
        """Return the remaining time, estimated from all the work since the bar began."""
        self.first = done if self.first is None else self.first
        return time_left(done - self.first, self.total - self.first, now - self.began)

    def estimate(self, done: float, now: float) -> None:
        """Print the estimated time and a quicker setting, once, if the work takes more than `LONG` seconds."""
        seconds, first = now - self.began, self.first
        if not SUGGESTION or self.estimated or first is None or done <= first or seconds < PATIENCE:
            return
        self.estimated, total = True, seconds * (self.total - first) / (done - first)
        if total > LONG:
            print_line(f"{self.progress.tasks[0].description}: {duration(total)} in all; {SUGGESTION}")

    def line(self, done: float, remaining: str) -> str:
        return f"{self.progress.tasks[0].description}: {int(done):,} of {int(self.total):,}{self.shown_part}{remaining}"

    def close(self) -> None:
        self.progress.stop()


@dataclass
class NotebookBar(Bar):
    """A progress bar in a notebook."""

    handle: Any = None

    def show(self, done: float) -> None:
        now = time.perf_counter()
        remaining = self.time_left(done, now)
        self.progress.update(self.task, completed=done)
        if now - self.began <= PATIENCE or (self.visible and now - self.printed < MOMENT):
            return
        self.printed, line = now, self.line(done, remaining)
        share = f'<progress value="{done}" max="{self.total or 0}"></progress>'
        self.put({"text/plain": line, "text/html": f"<div>{share} {html.escape(line)}</div>"})

    def put(self, picture: dict[str, str]) -> None:
        """Replace the previous picture."""
        if self.handle is not None:
            self.handle.update(picture, raw=True)
            return
        from IPython.display import display

        self.visible, self.handle = True, display(picture, raw=True, display_id=True)

    def close(self) -> None:
        self.put({"text/plain": "", "text/html": ""})


def time_left(done: float, total: float, seconds: float) -> str:
    """Return ", about 5 min left" from the pieces done in `seconds`; "" if none was."""
    return f", {duration(seconds * (total / done - 1))} left" if done > 0 else ""


def duration(seconds: float) -> str:
    """Return such as "about 5 min".

    >>> duration(91), duration(90)
    ('about 2 min', 'about 90 s')
    """
    return f"about {seconds / 60:.0f} min" if seconds > 90 else f"about {seconds:.0f} s"


def progress_bar(description: str, total: int, first: float | None = None) -> Bar:
    """Make a bar for `total` pieces of work, `first` of which are done; None takes the number of the first `advance`.

    The remaining time is our own estimate, because that of Rich ignores everything older than 30 seconds.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    console = Terminal(stderr=True)
    unseen = not (console.is_interactive or console.is_jupyter)  # a bar would only leave an empty line
    progress = Progress(*columns, console=console, transient=True, disable=unseen)
    now = time.perf_counter()
    kind = NotebookBar if console.is_jupyter else Bar
    return kind(progress, progress.add_task(description, total=total, left=""), now, now, first)


@dataclass
class PartOfBar:
    """A part of longer work, shown on its bar: `count` pieces of the part are `size` pieces of the whole."""

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
        (bar.print if bar.progress.disable else bar.show)(done)
    elif bar.visible:
        bar.close()


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
