"""Handle Ctrl-C and time budgets while training: the current step is finished and saved first.

A second Ctrl-C ends it at once.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from limitformer.base.errors import PicklesArguments, require, require_real, set_fields
from limitformer.base.interrupts import route_interrupts, write_notice

ORDERS: list[Callable[[], bool]] = []  # in a process of a grid: whether its parent asks it to stop
UNFINISHED = 75  # the exit code after a time budget, EX_TEMPFAIL: the same command resumes


@dataclass(frozen=True)
class Budget:
    """A wall time for all runs of a command, which begins now. At its end the current step is finished and saved.

    Attributes:
        minutes: the length.
        clock: seconds; processes of one machine share the default one.
        end: the reading of the clock at which it is spent.

    Raises:
        InputError: minutes that are not positive.
    """

    minutes: float
    clock: Callable[[], float] = time.monotonic
    end: float = field(init=False)

    def __post_init__(self) -> None:
        require(require_real("minutes", self.minutes) > 0, f"minutes must be positive; got {self.minutes:g}.")
        set_fields(self, end=self.clock() + 60 * self.minutes)

    @property
    def spent(self) -> bool:
        return self.clock() >= self.end


BUDGETS: list[Budget] = []  # the budget of this process's runs, if they have one


@contextmanager
def within(budget: Budget | None) -> Iterator[None]:
    """Stop the runs of the block when the budget is spent."""
    before = BUDGETS[:]
    BUDGETS[:] = [] if budget is None else [budget]
    try:
        yield
    finally:
        BUDGETS[:] = before


def time_is_up() -> bool:
    """Return whether this process's budget is spent; False without one."""
    return any(budget.spent for budget in BUDGETS)


class TrainingInterrupted(PicklesArguments, KeyboardInterrupt):
    """Ctrl-C during training, or the end of its time budget; finished steps are in a checkpoint.

    Args:
        folder: folder of the run.
        step, steps: steps done and steps planned.
        minutes: the time budget that ended it; None after Ctrl-C.
    """

    resumes = True

    def __init__(self, folder: Path, step: int, steps: int, minutes: float | None = None) -> None:
        why = "Interrupted" if minutes is None else f"The {minutes:g} min are over: stopped"
        super().__init__(f"{why} at step {step} of {steps}, which is saved; start it again to resume: {folder}")
        self.pickled_arguments, self.minutes = (folder, step, steps, minutes), minutes
        self.exit_code = None if minutes is None else UNFINISHED


@dataclass
class Interrupt:
    """Whether a run should stop: Ctrl-C, here or in the parent of a worker, or the end of the time budget."""

    noted: bool = False

    @property
    def ordered(self) -> bool:
        """Whether Ctrl-C was pressed, here or in the parent of a worker."""
        return self.noted or any(asked() for asked in ORDERS)

    @property
    def requested(self) -> bool:
        """Whether the run should stop after this step."""
        return self.ordered or time_is_up()

    @property
    def minutes(self) -> float | None:
        """The time budget, unless Ctrl-C was pressed."""
        return BUDGETS[0].minutes if BUDGETS and not self.ordered else None


@contextmanager
def deferred() -> Iterator[Interrupt]:
    """Note a first Ctrl-C inside the block; threads and workers, which receive none, are left as they are."""
    interrupt = Interrupt()
    if ORDERS:
        yield interrupt
        return

    def note(number: int, frame: Any) -> None:
        interrupt.noted = True
        signal.signal(signal.SIGINT, before)
        write_notice("Finishing the current step; Ctrl-C again to stop at once.")

    with route_interrupts(note) as before:
        yield interrupt
