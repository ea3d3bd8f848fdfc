"""Ctrl-C, and signals that do the same: which handler receives them, and when."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Handler = Callable[[int, Any], object]


@contextmanager
def route_interrupts(handler: Handler) -> Iterator[Any]:
    """Route Ctrl-C to `handler` within the block and yield the previous handler; do nothing outside the main thread."""
    ours = threading.current_thread() is threading.main_thread()  # the only one that may set handlers
    before = signal.signal(signal.SIGINT, handler) if ours else None
    try:
        yield before
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block; processes that start in it ignore Ctrl-C.

    So are signals whose handler is `interrupt`.
    """
    from multiprocessing import resource_tracker  # the command line imports this module before anything large

    resource_tracker.ensure_running()  # a helper of multiprocessing, which would unblock Ctrl-C when it starts
    waiting: list[int] = []
    try:
        with route_interrupts(lambda number, _: waiting.append(number)):
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        for number in waiting[:1]:
            signal.raise_signal(number) if number == signal.SIGINT else interrupt(number, None)


def interrupt(number: int, frame: Any) -> None:
    """Do what Ctrl-C does now, for another signal; raise KeyboardInterrupt if Ctrl-C is ignored."""
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(number, frame)


def write_notice(line: str) -> None:
    """Write one line to stderr from a signal handler, where a stream may be in the middle of a write."""
    os.write(2, f"\n{line}\n".encode())
