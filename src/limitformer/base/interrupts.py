"""Ctrl-C: who hears it, and when."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

Handler = Callable[[int, Any], object]


@contextmanager
def route_interrupts(handler: Handler) -> Iterator[Any]:
    """In the block Ctrl-C goes to `handler`; gives the one before. In another than the main thread, nothing changes."""
    ours = threading.current_thread() is threading.main_thread()  # no other has a handler
    before = signal.signal(signal.SIGINT, handler) if ours else None
    try:
        yield before
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C waits until the end of the block, and processes that start in it never hear it."""
    resource_tracker.ensure_running()  # multiprocessing's own helper, which would let Ctrl-C in when it starts
    waiting: list[int] = []
    try:
        with route_interrupts(lambda number, _: waiting.append(number)):
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        if waiting:
            signal.raise_signal(signal.SIGINT)


def write_notice(line: str) -> None:
    """One line on stderr from within a handler of signals, where a stream may be in the middle of a write."""
    os.write(2, f"\n{line}\n".encode())
