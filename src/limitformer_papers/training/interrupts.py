"""Handle Ctrl-C while training: the current step is finished and saved first; a second Ctrl-C ends it at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from limitformer.base.errors import PicklesArguments
from limitformer.base.interrupts import route_interrupts, write_notice
from limitformer_papers.training.plan import rank

ORDERS: list[Callable[[], bool]] = []  # in a worker of a grid: whether its parent asks it to stop


class TrainingInterrupted(PicklesArguments, KeyboardInterrupt):
    """Ctrl-C during training; finished steps are in a checkpoint.

    Args:
        folder: folder of the run.
        step, steps: steps done and steps planned.
    """

    resumes = True

    def __init__(self, folder: Path, step: int, steps: int) -> None:
        super().__init__(f"Interrupted at step {step} of {steps}, which is saved; start it again to resume: {folder}")
        self.pickled_arguments = folder, step, steps


@dataclass
class Interrupt:
    """Whether Ctrl-C was pressed, here or in the parent of a worker."""

    noted: bool = False

    @property
    def requested(self) -> bool:
        """Whether the run should stop after this step."""
        return self.noted or any(asked() for asked in ORDERS)


def obey(asked: Callable[[], bool]) -> None:
    """Make this process a worker: its runs stop when `asked` returns True."""
    ORDERS[:] = [asked]


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
        if rank() == 0:
            write_notice("Finishing the current step; Ctrl-C again to stop at once.")

    with route_interrupts(note) as before:
        yield interrupt
