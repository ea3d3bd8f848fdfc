"""The surroundings of a command and its ends: its environment, signals, and a standard output that cannot be written.

A KeyboardInterrupt inside an import leaves NumPy or torch half loaded, which then raises RecursionError or ImportError,
or aborts. While a command only imports, a signal therefore ends the process at once; nothing is lost. Afterwards
SIGTERM and SIGHUP do what Ctrl-C does, which saves finished samples and removes locks, with their own exit codes.
"""

import errno
import os
import signal
import sys
from typing import Any, NoReturn, TextIO

from limitformer.base.errors import InputError
from limitformer.base.interrupts import interrupt

BAD_INPUT, CANNOT_WRITE, INTERRUPTED, CLOSED_PIPE = 2, 74, 130, 141  # 74: EX_IOERR; 128 + SIGINT and 128 + SIGPIPE
NOTHING_WRITTEN = "Interrupted; nothing was written."


class OutputError(OSError):
    """Raised if standard output cannot be written."""


ALIKE = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # handled as Ctrl-C is
RECEIVED: list[int] = []  # the signals among `ALIKE` that came


def end_at_once(number: int, frame: Any) -> NoReturn:
    """Handle a signal during imports: print one line and exit; clean-up would need modules that are half loaded."""
    os.write(2, f"\n{NOTHING_WRITTEN}\n".encode())
    os._exit(128 + number)


def end_at_once_on_interrupt() -> None:
    """Let signals end the process until `begin_work`. If the shell ignores one (background jobs), it stays ignored.

    Processes that torchrun has started keep the system's SIGTERM: it ends those that wait for one that is gone.
    """
    os.register_at_fork(after_in_child=end_silently)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
    for number in ALIKE if "WORLD_SIZE" not in os.environ else ():
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end_at_once)


def end_silently() -> None:
    """Let the system end a process that the user's code has forked: only the command itself prints and cleans up."""
    for number in (signal.SIGINT, *ALIKE):
        if signal.getsignal(number) in (end_at_once, interrupt_once, signal.default_int_handler):
            signal.signal(number, signal.SIG_DFL)


def begin_work() -> None:
    """Let signals raise KeyboardInterrupt from now on, because all large packages are imported."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in ALIKE:
        if signal.getsignal(number) is end_at_once:
            signal.signal(number, interrupt_once)


def interrupt_once(number: int, frame: Any) -> None:
    """Do what Ctrl-C does now, at the first signal; `timeout` sends SIGTERM twice, and terminals SIGHUP."""
    RECEIVED.append(number)
    if len(RECEIVED) == 1:
        interrupt(number, frame)


def code_at_end(code: str | int | None) -> str | int | None:
    """Return the exit code of the process: that of the signal if one has ended the command."""
    return 128 + RECEIVED[0] if code and RECEIVED else code


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


OURS = {
    "MPLBACKEND": "agg",  # pictures are files: no window opens, and a backend that is not installed does no harm
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def prepare_environment() -> None:
    """Set the variables that other packages read when they are imported; what a user chose for messages stays."""
    for name, value in OURS.items():
        os.environ[name] = value if name == "MPLBACKEND" else os.environ.get(name, value)
    if os.environ.get("COLUMNS", "").strip() == "0":  # which Rich takes for the width, and prints nothing
        del os.environ["COLUMNS"]


def check_folder() -> None:
    """Raise `InputError` unless there is a working folder: without one torch ends the process in its import."""
    try:
        os.getcwd()
    except OSError as error:
        raise InputError(f"The working folder is gone: {error.strerror}. Nearest: cd to another one.") from error
