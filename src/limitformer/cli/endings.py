"""How a command ends: Ctrl-C before its work begins, and a standard output that cannot be written.

A KeyboardInterrupt inside an import leaves NumPy or torch half loaded, and what comes of that is a RecursionError, an
ImportError or an abort. So while a command only imports, Ctrl-C ends the process by itself; nothing is lost by that.
"""

import errno
import os
import signal
import sys
from typing import Any, NoReturn, TextIO

BAD_INPUT, CANNOT_WRITE, INTERRUPTED, CLOSED_PIPE = 2, 74, 130, 141  # 74: EX_IOERR; 128 + SIGINT and 128 + SIGPIPE
NOTHING_WRITTEN = "Interrupted; nothing was written."


class OutputError(OSError):
    """Standard output cannot be written."""


def end_at_once(number: int, frame: Any) -> NoReturn:
    """Handle Ctrl-C while modules are imported: one line, and no clean-up that half a module could break."""
    os.write(2, f"\n{NOTHING_WRITTEN}\n".encode())
    os._exit(INTERRUPTED)


def end_at_once_on_interrupt() -> None:
    """Let Ctrl-C end the process until `begin_work`; where it is ignored, as in the background, it stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)


def begin_work() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from here on: everything large is imported."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def finish_streams() -> int:
    """Write what is left in the buffers; the exit code where standard output does not take it, else 0.

    What cannot be written goes to the null device, so that the interpreter does not try again as it ends.
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
    """Send what is left in the buffer, and all that follows, to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
    stream.flush()


def code_of(error: OSError) -> int:
    """Return the exit code for a stream that cannot be written: a closed pipe ends commands without a word."""
    return CLOSED_PIPE if error.errno == errno.EPIPE else CANNOT_WRITE
