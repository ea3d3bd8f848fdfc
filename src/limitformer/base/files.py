"""Paths from users, and files that are written completely or not at all."""

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from limitformer.base.errors import InputError, require

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a path has lost the second /; one letter is a drive
SHOWN = (
    40  # characters of a file's name in that of its temporary folder, which must not be too long if the file's is not
)


WRITTEN: dict[Path, int] = {}  # the files and folders that this command has written, with their inodes


def write_texts(folder: str | Path, texts: Mapping[str, Any]) -> list[Path]:
    """Write texts, and anything else as JSON, by name into a folder, each whole or not at all; return paths.

    Raises:
        InputError: the folder cannot be written.
    """
    place = local_path(folder)
    check_writable(place)
    for name, each in texts.items():
        text = each if isinstance(each, str) else json.dumps(each, indent=2, ensure_ascii=False, allow_nan=False)
        write_whole(place / name, partial(Path.write_text, data=text, encoding="utf-8"))
    return [place / name for name in texts]


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` on a temporary neighbour of `path`, then move it there: the file is complete or absent.

    Raises:
        InputError: the folder cannot be made or written, or a folder is in the way of a file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name[:SHOWN]}.", dir=path.parent))
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror} ({error.filename}).") from error
    try:
        write(folder / path.name)
        replaces = not path.is_dir() or (folder / path.name).is_dir()
        require(replaces, f"Cannot write {path}: a folder is in the way.")
        if path.is_dir():  # a folder cannot be replaced in one step: move the old one away first
            os.replace(path, folder / "old")
        WRITTEN[path] = (folder / path.name).stat().st_ino
        try:
            os.replace(folder / path.name, path)
        except OSError:
            if (folder / "old").exists():
                os.replace(folder / "old", path)
            raise
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror}.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def written_paths() -> list[str]:
    """Return the paths in `WRITTEN` that are there, also if a signal came in the middle of a write."""
    return [str(path) for path, inode in WRITTEN.items() if path.exists() and path.stat().st_ino == inode]


def check_regular(path: Path) -> None:
    """Raise `InputError` for a pipe, a device or a socket, which may have no end."""
    require(path.is_file() or path.is_dir() or not path.exists(), f"{path} is not a regular file.")


def local_path(given: str | Path) -> Path:
    """Return a path of this machine; raise `InputError` for an address (`s3://…`), which would become a folder."""
    require(isinstance(given, str | os.PathLike), f"A path must be a text or a Path; got {type(given).__name__}.")
    text = os.fsdecode(given)
    local = ADDRESS.match(text) is None
    require(local, f"{text} is an address, and only paths of this machine can be used. Nearest: a copy of it here.")
    require("\0" not in text, f"{text!r} is not a path.")
    return Path(text)


def file_path(given: str | Path) -> Path:
    """Return the path of a file as `local_path` does; raise `InputError` also if its name is too long."""
    path = local_path(given)
    try:
        os.lstat(path)
    except OSError as error:
        require(error.errno != errno.ENAMETOOLONG, f"Cannot use {path}: {error.strerror}. Nearest: a shorter name.")
    return path


def check_writable(folder: Path) -> None:
    """Make `folder`, and raise `InputError` unless a file can be written into it."""
    local_path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"Cannot write into the folder {folder}: {error.strerror}.") from error
