"""Locks on folders: one process works on a folder at a time, and a second one is refused with the name of the first.

A lock is a file that the system locks for its holder, so that it is free again when the holder is killed. The holder
writes its name into the file, and removes the file at the end.
"""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from limitformer.base.errors import InputError, printable
from limitformer.base.progress import print_line

WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors of file systems that cannot lock
LONGEST = 200  # characters of a holder's name


@contextmanager
def only_one(place: Path, what: str) -> Iterator[None]:
    """Hold the lock file `place` in the block, so that no other process works on `what`.

    Raises:
        InputError: another process holds it; the message names the process. Or the lock file cannot be made.
    """
    lock = FileLock(place, mode=0o644, fallback_to_soft=False, on_acquired=write_name)
    try:
        acquire(lock, what)
        yield
    finally:
        if lock.is_locked:
            try:
                with suppress(OSError):  # the folder may be gone
                    place.unlink()
            finally:  # also after Ctrl-C in the lines above
                lock.release()


def acquire(lock: FileLock, what: str) -> None:
    """Acquire the lock if it is free; on a file system without locks print a warning instead."""
    try:
        lock.acquire(blocking=False)
    except Timeout:
        line = f"{what} is in use by {holder(lock)}. Nearest: wait until it has ended, or another folder."
        raise InputError(line) from None
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise InputError(f"Cannot lock {what}: {error.strerror} ({error.filename}).") from error
        print_line(f"The file system of {what} has no locks: make sure that no other process works on it.")


def write_name(file: int) -> None:
    """Write the name of this process into its lock file."""
    os.ftruncate(file, 0)
    os.write(file, f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M}".encode())


def holder(lock: FileLock) -> str:
    """Return the holder's name in one line of printable characters, whatever the file contains."""
    try:
        with open(lock.lock_file, "rb") as file:
            return printable(file.read(LONGEST).decode("utf-8", "replace")) or "another process"
    except OSError:
        return "another process"
