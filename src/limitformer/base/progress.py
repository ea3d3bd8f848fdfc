"""What is shown of long work: nothing for two seconds, then a bar with the time that is left, or a line a minute where
there is no terminal; and a word before a first compilation. In a notebook the bar is HTML that is renewed in its place:
Rich's own wants ipywidgets there, and warns."""

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

PATIENCE = 2.0  # seconds before progress is shown
MINUTE = 60.0  # seconds between lines where there is no terminal
MOMENT = 0.5  # seconds between pictures of a bar in a notebook
LONG = 20.0  # seconds from which on a command estimates its time and names a quicker setting

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


def hide() -> None:
    """Show no progress in this process, one of several that share a terminal."""
    global PATIENCE
    PATIENCE = math.inf


def print_line(line: str) -> None:
    """Print one line on stderr as it is; a stderr that cannot be written ends no work."""
    with suppress(OSError):
        Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def delayed_notice(message: str) -> Iterator[Callable[[], None]]:
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
def notice_if_slow(message: str) -> Iterator[None]:
    """Say `message` on the terminal if the block takes more than a second."""
    with delayed_notice(message) as begin:
        begin()
        yield


@dataclass
class Bar:
    """A progress bar that waits `PATIENCE` seconds before it shows; or lines, where a bar cannot be seen."""

    progress: Progress
    task: Any
    began: float
    said: float
    first: float | None = None  # done when it began: a run that goes on does not begin at 0
    visible: bool = False
    estimated: bool = False

    def show(self, done: float) -> None:
        """Show the bar, with the time that is left."""
        now = time.perf_counter()
        self.estimate(done, now)
        if not self.visible and now - self.began > PATIENCE:
            self.visible = True
            self.progress.start()
        self.progress.update(self.task, completed=done, left=self.left(done, now).removeprefix(", "))

    def tell(self, done: float) -> None:
        """A line, if a minute has passed."""
        now = time.perf_counter()
        self.estimate(done, now)
        left = self.left(done, now)
        if now - self.said < MINUTE or math.isinf(PATIENCE):
            return
        self.said = now
        print_line(self.line(done, left))

    @property
    def total(self) -> float:
        """The number of pieces of work."""
        return self.progress.tasks[0].total or 0.0

    def left(self, done: float, now: float) -> str:
        """Return the time that is left, from all that was done since the bar began."""
        self.first = done if self.first is None else self.first
        return time_left(done - self.first, self.total - self.first, now - self.began)

    def estimate(self, done: float, now: float) -> None:
        """Print once how long the work takes and what would be quicker, if it takes more than `LONG` seconds."""
        seconds, first = now - self.began, self.first
        if not SUGGESTION or self.estimated or first is None or done <= first or seconds < PATIENCE:
            return
        self.estimated, whole = True, seconds * (self.total - first) / (done - first)
        if whole > LONG:
            print_line(f"{self.progress.tasks[0].description}: {duration(whole)} in all; {SUGGESTION}")

    def line(self, done: float, left: str) -> str:
        """Return what is done, of what, and the time that is left."""
        return f"{self.progress.tasks[0].description}: {int(done):,} of {int(self.total):,}{left}"

    def close(self) -> None:
        """The bar goes."""
        self.progress.stop()


@dataclass
class NotebookBar(Bar):
    """The same in a notebook."""

    handle: Any = None

    def show(self, done: float) -> None:
        """The bar, renewed in its place."""
        now = time.perf_counter()
        left = self.left(done, now)
        self.progress.update(self.task, completed=done)
        if now - self.began <= PATIENCE or (self.visible and now - self.said < MOMENT):
            return
        self.said, line = now, self.line(done, left)
        share = f'<progress value="{done}" max="{self.total or 0}"></progress>'
        self.put({"text/plain": line, "text/html": f"<div>{share} {html.escape(line)}</div>"})

    def put(self, picture: dict[str, str]) -> None:
        """The picture in the place of the one before."""
        if self.handle is not None:
            self.handle.update(picture, raw=True)
            return
        from IPython.display import display

        self.visible, self.handle = True, display(picture, raw=True, display_id=True)

    def close(self) -> None:
        """Nothing is left of it."""
        self.put({"text/plain": "", "text/html": ""})


def time_left(done: float, total: float, seconds: float) -> str:
    """Return ", about 5 min left", if this much was done in so many seconds; "" if nothing was done."""
    return f", {duration(seconds * (total / done - 1))} left" if done > 0 else ""


def duration(seconds: float) -> str:
    """Return such as "about 5 min".

    >>> duration(91), duration(90)
    ('about 2 min', 'about 90 s')
    """
    return f"about {seconds / 60:.0f} min" if seconds > 90 else f"about {seconds:.0f} s"


def progress_bar(description: str, total: int, first: float | None = None) -> Bar:
    """Make a bar for `total` pieces of work, `first` of which are done; None: as many as are at first shown.

    The time that is left is our own estimate: that of Rich forgets what is more than 30 seconds old.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    console = Console(stderr=True)
    unseen = not (console.is_interactive or console.is_jupyter)  # where a bar would leave an empty line and no more
    progress = Progress(*columns, console=console, transient=True, disable=unseen)
    now = time.perf_counter()
    kind = NotebookBar if console.is_jupyter else Bar
    return kind(progress, progress.add_task(description, total=total, left=""), now, now, first)


def advance(shown: Bar | None, done: float) -> None:
    """Show `done` pieces of work; a negative number closes the bar."""
    if shown is None:
        return
    if done >= 0:
        (shown.tell if shown.progress.disable else shown.show)(done)
    elif shown.visible:
        shown.close()


def track(items: Sequence[T], description: str) -> Iterator[T]:
    """The items one after the other, with a bar if they take more than `PATIENCE` seconds together."""
    shown = progress_bar(description, len(items), 0.0)
    try:
        for done, item in enumerate(items, 1):
            yield item
            advance(shown, done)
    finally:
        advance(shown, -1)
