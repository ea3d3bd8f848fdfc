"""Errors of one line: the value that came, the value that was needed, and the nearest repair."""

import math
import numbers
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class PicklesArguments(BaseException):
    """An exception that pickles its constructor arguments, `pickled_arguments`, instead of its message."""

    pickled_arguments: tuple[object, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.pickled_arguments, vars(self)


class InputError(ValueError):
    """An argument that cannot be used; the command line prints the message without a traceback."""


class NoLimitError(InputError):
    """The model has no known infinite-depth limit; the message names the scaling that is missing."""


class MissingExtraError(PicklesArguments, ImportError):
    """An optional package that is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"This needs {package}, which is not installed: pip install 'limitformer[{extra}]'.")
        self.package, self.extra = self.pickled_arguments = package, extra


class NotImportedError(InputError):
    """A stored file names a user function whose module is not imported; it is not imported, for safety."""


def require(condition: bool, message: str) -> None:
    """Raise `InputError(message)` unless `condition` holds."""
    if not condition:
        raise InputError(message)


@contextmanager
def about(what: str) -> Iterator[None]:
    """Begin the message of an `InputError` in the block with what it is about: an option, a cell, a file."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{what}: {error}") from error


def require_count(name: str, value: object, least: int = 1) -> int:
    """Return `value` as an int; raise `InputError` unless it is a whole number ≥ `least` that fits 64 bits."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    fits = number is None or abs(number) < 2**63
    require(fits, f"{name} must be below 2⁶³; got more.")  # first, because Python limits the digits that it writes
    whole = number is not None and not isinstance(value, bool)
    require(whole, f"{name} must be a whole number; got {value!r}.")
    assert number is not None
    require(number >= least, f"{name} must be at least {least}; got {value}.")
    return number


def require_real(name: str, value: object) -> float:
    """Return `value` as a float; raise `InputError` unless it is a finite number."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise InputError(f"{name} must be a number; got {value!r}.")
    try:
        real = float(value)
    except OverflowError:  # a whole number or a fraction, whose digits Python may not write
        raise InputError(f"{name} must be below 1.8e308 in size; got more.") from None
    require(math.isfinite(real), f"{name} must be finite; got {value}.")
    return real


def nearest(name: object, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ` Nearest: …` with the name that is most like this one; empty if none is."""
    from difflib import get_close_matches

    matches = get_close_matches(str(name), list(names), 1, cutoff)
    return f" Nearest: {matches[0]}." if matches else ""


def first_line(error: BaseException) -> str:
    """Return the first line of the message, or the exception's class name if it is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def unusable(error: OSError) -> str:
    """Return a sentence that names the file of the system's error."""
    return f"Cannot use {error.filename}: {error.strerror}."


def printable(text: str) -> str:
    """Return the text as one line without control characters."""
    return without_controls(text.replace("\n", " ")).strip()


def without_controls(text: str) -> str:
    """Return the text, a blank for each control character but the ends of lines: a terminal would obey them."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else " " for each in text)


def set_fields(part: object, **values: object) -> None:
    """Store validated values in a frozen dataclass."""
    for name, value in values.items():
        object.__setattr__(part, name, value)
