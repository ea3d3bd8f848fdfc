"""Folders and files of unknown origin: no name leads out of a folder, and every error about them is one line.

Files may be links within their folder, or into the `blobs` of Hugging Face's cache, whose snapshots are made of links.
Other links out of the folder are refused: a downloaded folder must not choose which of the user's files are read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from limitformer.base.errors import InputError, MissingExtraError, printable, require

MOST_JSON = 2**25  # bytes of a configuration or an index
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
        InputError: a name that is a path, a file that is missing or not a regular one, or a link out of the folder.
    """
    is_name = isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")
    require(is_name, f"{folder} names the file {name!r}; only names of files in the folder itself are read.")
    path, home = folder / str(name), folder.resolve()
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError before Python 3.13
        raise InputError(f"{name!r} in {folder} cannot be read: it is a link that leads back to itself.") from error
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    inside = any(target.is_relative_to(one) for one in homes)
    require(inside, f"{name!r} in {folder} is a link to {target}, outside the folder. Nearest: a copy of that file.")
    if target.is_dir():
        raise InputError(f"{name!r} in {folder} is a folder; it must be a file.")
    require(target.exists(), f"There is no {printable(str(name))} in {folder}.")
    require(target.is_file(), f"{name!r} in {folder} is not a regular file.")
    return path


def small_file_in(folder: Path, name: object) -> Path:
    """Return the same for a file of at most `MOST_JSON` bytes; raise `InputError` for a longer one."""
    path = file_in(folder, name)
    size = path.stat().st_size
    require(size <= MOST_JSON, f"{name!r} in {folder} has {size:,} bytes; at most {MOST_JSON:,} are read.")
    return path
