"""Locks on folders: one process at a time, and whoever comes second is told who the first is.

A lock is a file that the system locks for its holder (`flock`), so that it is free again when the holder is killed.
The holder writes into it who it is, and removes it at the end. So whoever gets a lock makes sure that the file is
still the one at that place: the holder before may have removed it in the meantime.
"""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from limitformer.base.errors import InputError, PicklesArguments, printable
from limitformer.base.progress import print_line

try:
    import fcntl
except ImportError:  # a system without `flock`
    fcntl = None  # type: ignore[assignment]

WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # what file systems say that have none
LONGEST = 200  # characters of a holder's description
NEAREST = "Nearest: wait until it has ended, or another folder."


class CannotLockError(PicklesArguments, InputError):
    """The lock file cannot be made; the `reason` as the system numbers it."""

    def __init__(self, what: str, error: OSError) -> None:
        super().__init__(f"Cannot lock {what}: {error.strerror} ({error.filename}).")
        self.reason, self.pickled_arguments = error.errno, (what, error)


@contextmanager
def only_one(place: Path, what: str) -> Iterator[None]:
    """Hold the lock file `place` in the block, so that nobody else works on `what`.

    Raises:
        InputError: somebody else holds it; the line names the process.
        CannotLockError: the lock file cannot be made.
    """
    try:
        file = acquired(place, what)
    except OSError as error:
        raise CannotLockError(what, error) from error
    try:
        yield
    finally:
        try:
            with suppress(OSError):  # the folder may be gone
                place.unlink()
        finally:
            os.close(file)


def acquired(place: Path, what: str) -> int:
    """The lock file, open and locked by us."""
    while True:
        file = os.open(place, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            if not locked(file, what):
                raise InputError(f"{what} is in use by {holder(file)}. {NEAREST}")
            if still_there(place, file):
                os.ftruncate(file, 0)
                os.write(file, description().encode())
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def locked(file: int, what: str) -> bool:
    """Lock the file if it is free; where there are no locks, say so and go on."""
    if fcntl is None:
        print_line(f"Nobody can lock {what} on this system: see to it that no other process works on it.")
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in WITHOUT_LOCKS:
            print_line(f"The file system of {what} has no locks: see to it that no other process works on it.")
            return True
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def still_there(place: Path, file: int) -> bool:
    """Whether the open file is the one at that place."""
    try:
        return os.path.samestat(os.stat(place, follow_symlinks=False), os.fstat(file))
    except FileNotFoundError:
        return False


def description() -> str:
    """Who we are."""
    return f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M}"


def holder(file: int) -> str:
    """Who holds the lock, in one line of plain characters whatever is in the file."""
    return printable(os.read(file, LONGEST).decode("utf-8", "replace")) or "another process"
