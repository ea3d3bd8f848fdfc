"""Programs that tests start."""

import signal


def hear_interrupts() -> None:
    """In a new process, before its program: hear Ctrl-C, which shells switch off for what runs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
