"""What goes wrong, said in one line: what came, what was needed, and the nearest repair."""

import math
import numbers
import operator
from collections.abc import Iterable
from typing import Any


class PicklesArguments(BaseException):
    """An exception that is made of something else than its message, and is pickled as that: `pickled_arguments`."""

    pickled_arguments: tuple[object, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """Exceptions go between processes; the message alone makes none of these."""
        return type(self), self.pickled_arguments, vars(self)


class InputError(ValueError):
    """An argument that cannot be used; the command line prints its message alone."""


class NoLimitError(InputError):
    """The model has no infinite-depth limit that is known; the message names the scaling that is missing."""


class MissingExtraError(PicklesArguments, ImportError):
    """An optional package that is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"This needs {package}, which is not installed: pip install 'limitformer[{extra}]'.")
        self.package, self.extra = self.pickled_arguments = package, extra


class NotImportedError(InputError):
    """A function of one's own whose module nobody has imported: a file of unknown origin names it, so it stays so."""


def require(condition: bool, message: str) -> None:
    """Raise `InputError(message)` unless `condition` holds."""
    if not condition:
        raise InputError(message)


def require_count(name: str, value: object, least: int = 1) -> int:
    """`value` as a plain int, or `InputError` unless it is a whole number of at least `least` that fits 64 bits."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    fits = number is None or abs(number) < 2**63
    require(fits, f"{name} must be below 2⁶³; got more.")  # first, as Python does not write the digits of any number
    whole = number is not None and not isinstance(value, bool)
    require(whole, f"{name} must be a whole number; got {value!r}.")
    assert number is not None
    require(number >= least, f"{name} must be at least {least}; got {value}.")
    return number


def require_real(name: str, value: object) -> float:
    """`value` as a plain float, or `InputError` unless it is a finite number."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise InputError(f"{name} must be a number; got {value!r}.")
    try:
        real = float(value)
    except OverflowError:  # of a whole number or a fraction, whose digits Python may not write
        raise InputError(f"{name} must be below 1.8e308 in size; got more.") from None
    require(math.isfinite(real), f"{name} must be finite; got {value}.")
    return real


def nearest(name: object, names: Iterable[str], cutoff: float = 0.6) -> str:
    """` Nearest: …` with that of the names which is most like this one; empty if none is."""
    from difflib import get_close_matches

    found = get_close_matches(str(name), list(names), 1, cutoff)
    return f" Nearest: {found[0]}." if found else ""


def first_line(error: BaseException) -> str:
    """Of what an error says; its name if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def printable(text: str) -> str:
    """One line of it that a terminal shows as it is, whoever has written it."""
    return "".join(character if character.isprintable() else " " for character in text).strip()


def set_fields(part: object, **values: object) -> None:
    """Set fields of a frozen dataclass to the plain values that they were checked to be."""
    for name, value in values.items():
        object.__setattr__(part, name, value)
