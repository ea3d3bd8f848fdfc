"""Ctrl-C between two steps: the step in work is finished and saved first; a second Ctrl-C ends it at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from limitformer.base.errors import PicklesArguments
from limitformer.base.interrupts import route_interrupts, write_notice
from limitformer_papers.training.plan import rank

ORDERS: list[Callable[[], bool]] = []  # in a worker of a grid: whether its parent wants it to stop


class TrainingInterrupted(PicklesArguments, KeyboardInterrupt):
    """Ctrl-C during training; what was done is in a checkpoint.

    Args:
        folder: of the run.
        step, steps: those done, and those planned.
    """

    resumes = True

    def __init__(self, folder: Path, step: int, steps: int) -> None:
        super().__init__(f"Interrupted at step {step} of {steps}, which is saved; start it again to go on: {folder}")
        self.pickled_arguments = folder, step, steps


@dataclass
class Interrupt:
    """Whether Ctrl-C was heard, here or by the parent of a worker."""

    noted: bool = False

    @property
    def heard(self) -> bool:
        """Whether the run should stop after this step."""
        return self.noted or any(asked() for asked in ORDERS)


def obey(asked: Callable[[], bool]) -> None:
    """Make this process a worker: its runs stop when `asked` says so."""
    ORDERS[:] = [asked]


@contextmanager
def deferred() -> Iterator[Interrupt]:
    """In the block, a first Ctrl-C is only noted; in a thread or a worker, which hear none, nothing changes."""
    interrupt = Interrupt()
    if ORDERS:
        yield interrupt
        return

    def note(number: int, frame: Any) -> None:
        interrupt.noted = True
        signal.signal(signal.SIGINT, before)
        if rank() == 0:
            write_notice("Finishing the step in work; Ctrl-C again to stop at once.")

    with route_interrupts(note) as before:
        yield interrupt
