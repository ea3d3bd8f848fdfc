"""Files of a store: written whole or not at all, and read only if they are regular files of the expected size.

A file is written under a temporary name in the folder `cells` and then renamed, so that a kill at any moment leaves
the whole file or none. A store may be of unknown origin: links in it are not followed, a pipe is not waited for, and a
file larger than its limit is not read.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from limitformer.base.errors import InputError

CELLS = "cells"  # the folder of finished cells
UNFINISHED = ".unfinished"  # the ending of temporary names; a killed writer leaves such files
WRITING = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
READING = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def write_whole(store: Path, name: str, data: bytes, *, durable: bool) -> None:
    """Write the file `name` of the store, whole or not at all; if `durable`, its bytes survive a loss of power too."""
    target, temporary = store / name, store / CELLS / f"{secrets.token_hex(8)}{UNFINISHED}"
    check_own_folder(store / CELLS)
    if target.parent != store:
        target.parent.mkdir(exist_ok=True)
        check_own_folder(target.parent)
    try:
        file = os.open(temporary, WRITING, 0o666)
        try:
            put(file, data)
            if durable:
                os.fsync(file)
        finally:
            os.close(file)
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def put(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def sync_names(folder: Path) -> None:
    """Make the names of the folder's files survive a loss of power."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def read_regular(path: str | Path, limit: int) -> bytes | None:
    """Return the bytes of a file; None if it is absent, b"" if it is not a regular file of at most `limit` bytes.

    Raises:
        OSError: the file exists and cannot be read.
    """
    try:
        file = os.open(path, READING)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        if os.path.islink(path):
            return b""
        raise
    try:
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > limit:
            return b""
        with open(file, "rb", buffering=0, closefd=False) as opened:
            return opened.readall()
    finally:
        os.close(file)


@contextmanager
def readable(store: Path) -> Iterator[None]:
    """Turn an `OSError` within the block into one line that names the store."""
    try:
        yield
    except OSError as error:
        raise InputError(f"Cannot read the store {store}: {error.strerror} ({error.filename}).") from error


def check_own_folder(folder: Path) -> None:
    """Raise `OSError` unless `folder` is a folder and not a link to one."""
    if not stat.S_ISDIR(os.stat(folder, follow_symlinks=False).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def names_in_cells(store: Path) -> list[os.DirEntry[str]]:
    """Return the entries of the folder `cells`; none if it is absent or a link."""
    try:
        check_own_folder(store / CELLS)
        with os.scandir(store / CELLS) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove_unfinished(store: Path) -> None:
    for entry in names_in_cells(store):
        if entry.name.endswith(UNFINISHED):
            Path(entry.path).unlink(missing_ok=True)
