"""Folders, files and configurations of others: no name leads out of a folder, and every error is one line.

Files may be links within their folder, or into the `blobs` of Hugging Face's cache, whose snapshots are made of links.
Other links out of the folder are refused: a downloaded folder must not choose which of the user's files are read.
Fields of configurations have other names and places in each family: `lookup` finds them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from limitformer.base.errors import InputError, MissingExtraError, printable, require

LONGEST = 240  # characters of another package's message
OURS = (InputError, MissingExtraError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit)


@contextmanager
def one_line(what: str) -> Iterator[None]:
    """Turn every error of a package about a foreign file into an `InputError` that begins with `what`."""
    try:
        yield
    except OURS:
        raise
    except BaseException as error:  # a panic of Rust is not an Exception
        raise InputError(f"{what}: {message_of(error)}") from error


@contextmanager
def escaped_errors() -> Iterator[None]:
    """Remove control characters, which may be part of foreign names, from the message of every `InputError`."""
    try:
        yield
    except InputError as error:
        if str(error).isprintable():
            raise
        raise InputError(printable(str(error))) from error


def message_of(error: BaseException) -> str:
    """Return the class of an error and the beginning of its message, without control characters."""
    text = printable(" ".join(f"{type(error).__name__}: {error}".split())).removesuffix(":")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def readable_name(path: Path) -> str:
    """Return the name of a file or folder as printable text, whatever its bytes are."""
    return printable(path.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))


def file_in(folder: Path, name: object) -> Path:
    """Return the path of the regular file of this name in `folder`.

    Raises:
        InputError: the name is a path, or does not belong to a regular file that lies in the folder.
    """
    is_name = isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")
    require(is_name, f"{folder} names the file {name!r}; only names of files in the folder itself are read.")
    path, home = folder / str(name), folder.resolve()
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    inside = any(path.resolve().is_relative_to(one) for one in homes)
    require(inside, f"{name!r} in {folder} is a link out of the folder. Nearest: a copy of that file.")
    require(path.is_file(), f"There is no file {name!r} in {folder}.")
    return path


def lookup(config: Any, names: tuple[str, ...], kind: tuple[str, ...] = ()) -> Any:
    """Return the first of these fields that a configuration has: in its parts of this kind, itself, or other parts."""
    for part in sorted(parts_of(config), key=lambda part: not any(word in part[0] for word in kind)):
        for name in names:
            value = getattr(part[1], name, None)
            if value is not None:
                return value
    return None


def parts_of(config: Any, name: str = "", level: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield a configuration and all that it holds, with their names."""
    yield name, config
    for key, value in vars(config).items() if level < 4 else ():
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from parts_of(value, f"{name}.{key}", level + 1)


def pair(value: Any, default: int) -> tuple[int, int]:
    """Return (height, width) of a size that is one number, two, a dictionary, or missing."""
    if isinstance(value, dict):
        value = [value.get("height"), value.get("width")]
    if isinstance(value, list | tuple) and value and all(isinstance(each, int) for each in value):
        return (value[-2], value[-1]) if len(value) > 1 else (value[0], value[0])
    return (value, value) if isinstance(value, int) and value > 0 else (default, default)
