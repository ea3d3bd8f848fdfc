"""Ctrl-C between two steps: the step in work is finished and saved first; a second Ctrl-C ends it at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C during training; what was done is in a checkpoint."""

    resumes = True

    def __init__(self, folder: Path, step: int, steps: int) -> None:
        super().__init__(f"Interrupted at step {step} of {steps}, which is saved; start it again to go on: {folder}")


@dataclass
class Interrupt:
    """Whether Ctrl-C was heard."""

    heard: bool = False


@contextmanager
def deferred() -> Iterator[Interrupt]:
    """In the block, a first Ctrl-C is only noted; in a thread, which hears none, nothing changes."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        interrupt.heard = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
