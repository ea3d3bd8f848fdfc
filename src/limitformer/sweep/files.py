"""Files of a store: written whole or not at all, and read only if they lie in the store.

A file is written in the store's folder `cells` and moved to its place, so that it is whole or absent, whoever is
killed when. A store may come from a stranger: links inside it are not followed, pipes are not waited for, and a file
that is larger than it can be is not read.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from limitformer.base.errors import InputError

CELLS = "cells"  # of a store: finished cells that are not in the arrays yet, and files that are being written
UNFINISHED = ".unfinished"  # the ending of what a killed writer leaves behind
WRITING = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
READING = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def write_whole(store: Path, name: str, data: bytes, *, durable: bool) -> None:
    """Write the file `name` of the store, whole or not at all; if `durable`, it survives a loss of power too."""
    check_folders(store, name)
    beside = store / CELLS / f"{secrets.token_hex(8)}{UNFINISHED}"
    try:
        file = os.open(beside, WRITING, 0o666)
        try:
            put(file, data)
            if durable:
                os.fsync(file)
        finally:
            os.close(file)
        beside.replace(store / name)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def put(file: int, data: bytes) -> None:
    """Write all of it."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def check_folders(store: Path, name: str) -> None:
    """Raise `OSError` unless the folders of the file `name` are the store's own."""
    for folder in (store / CELLS, (store / name).parent):
        if not is_own_folder(folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def keep_names(folder: Path) -> None:
    """Make the names of the folder's files survive a loss of power."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def read_inside(store: Path, name: str, most: int) -> bytes | None:
    """The file `name` of the store; None if it is absent, and nothing (b"") of what is no file of at most `most` bytes.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        inside = all(is_own_folder(store / parent) for parent in Path(name).parents if parent.name)
        file = os.open(store / name, READING) if inside else -1
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if (store / name).is_symlink():
            return b""
        raise error
    if file < 0:
        return b""
    try:
        return regular(file, most)
    finally:
        os.close(file)


def regular(file: int, most: int) -> bytes:
    """All of it; nothing of what is no file of at most `most` bytes."""
    facts = os.fstat(file)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > most:
        return b""
    with open(file, "rb", buffering=0, closefd=False) as opened:  # `open` itself refuses a folder
        return opened.readall()


@contextmanager
def readable(store: Path) -> Iterator[None]:
    """A store that cannot be read ends the block with one line."""
    try:
        yield
    except OSError as error:
        raise InputError(f"Cannot read the store {store}: {error.strerror} ({error.filename}).") from error


def is_own_folder(folder: Path) -> bool:
    """Whether it is a folder, and not a link to one."""
    return stat.S_ISDIR(os.stat(folder, follow_symlinks=False).st_mode)


def loose_names(store: Path) -> Iterator[str]:
    """What is in the folder `cells`."""
    try:
        if is_own_folder(store / CELLS):
            yield from os.listdir(store / CELLS)
    except FileNotFoundError:
        return


def remove_unfinished(store: Path) -> None:
    """Remove what killed writers have left."""
    for name in list(loose_names(store)):
        if name.endswith(UNFINISHED):
            (store / CELLS / name).unlink(missing_ok=True)
