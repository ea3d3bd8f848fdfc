"""Ctrl-C before a command begins its work, and a standard output that cannot be written.

A KeyboardInterrupt inside an import leaves NumPy or torch half loaded, which then raises RecursionError or ImportError,
or aborts. While a command only imports, Ctrl-C therefore ends the process at once; nothing is lost.
"""

import errno
import os
import signal
import sys
from typing import Any, NoReturn, TextIO

BAD_INPUT, CANNOT_WRITE, INTERRUPTED, CLOSED_PIPE = 2, 74, 130, 141  # 74: EX_IOERR; 128 + SIGINT and 128 + SIGPIPE
NOTHING_WRITTEN = "Interrupted; nothing was written."


class OutputError(OSError):
    """Raised if standard output cannot be written."""


def end_at_once(number: int, frame: Any) -> NoReturn:
    """Handle Ctrl-C during imports: print one line and exit without clean-up, which half-loaded modules could break."""
    os.write(2, f"\n{NOTHING_WRITTEN}\n".encode())
    os._exit(INTERRUPTED)


def end_at_once_on_interrupt() -> None:
    """Let Ctrl-C end the process until `begin_work`. If the shell ignores it (background jobs), it stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)


def begin_work() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on, because all large packages are imported."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def finish_streams() -> int:
    """Flush both streams. Return the exit code for a failing standard output, or 0.

    Data that cannot be written go to the null device, so that the interpreter does not try again when it exits.
    """
    code = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            discard(stream)
            code = code or (code_of(error) if stream is sys.stdout else 0)
    return code


def discard(stream: TextIO) -> None:
    """Redirect the stream and its buffer to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
    stream.flush()


def code_of(error: OSError) -> int:
    """Return the exit code for a stream that cannot be written: commands end silently on a closed pipe."""
    return CLOSED_PIPE if error.errno == errno.EPIPE else CANNOT_WRITE
