"""The registry of the classes of models and parts, family by family.

A kernel is written for a class, not for its subclasses. So a kind is an exact class. A model refuses parts of other
kinds when it is made; code that differs by kind looks the kind up in a table (`of_kind`), which has no `else`.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from limitformer.base.errors import InputError, require
from limitformer.models.display import short, with_display

Kind = TypeVar("Kind", bound=type)
T = TypeVar("T")

KINDS: dict[str, type] = {}  # by the name in JSON
FAMILIES: dict[str, list[type]] = {}


def register(family: str) -> Callable[[Kind], Kind]:
    """Enter the decorated class into the registry under its family, and give it the repr of `display`."""

    def enter(kind: Kind) -> Kind:
        KINDS[kind.__name__] = kind
        FAMILIES.setdefault(family, []).append(kind)
        return with_display(kind)

    return enter


def require_kind(name: str, part: object, family: str, *words: str) -> None:
    """Raise `InputError` unless the class of `part` is a kind of this family; the message also lists `words`."""
    choices = [kind.__name__ for kind in FAMILIES[family]] + list(words)
    listed = ", ".join(choices[:-1]) + " or " + choices[-1] if len(choices) > 1 else choices[0]
    derived = any(isinstance(part, base) for kind in FAMILIES[family] for base in kind.__mro__[:-1])
    why = ": kernels take exactly these classes, no subclasses" if derived else ""
    require(type(part) in FAMILIES[family], f"{name} must be one of {listed}; got {short(part)}{why}.")


def require_exact_kind(value: object, kind: type) -> None:
    """Raise `InputError` if `value` belongs to a subclass of `kind`, whose changes kernels would ignore."""
    name = kind.__name__
    require(type(value) is kind, f"This must be a {name} itself; got the subclass {type(value).__name__}.")


def of_kind(part: object, table: Mapping[type, T]) -> T:
    """Return the entry of `table` for the class of `part`.

    Raises:
        InputError: the class has no entry; the message lists the kinds of the table.

    >>> of_kind(True, {int: "a number"})
    Traceback (most recent call last):
    limitformer.base.errors.InputError: The part must be one of int; got True, a bool.
    """
    if type(part) not in table:
        names = ", ".join(kind.__name__ for kind in table)
        raise InputError(f"The part must be one of {names}; got {part!r}, a {type(part).__name__}.")
    return table[type(part)]


def all_kinds() -> dict[str, type]:
    """Import the limits, whose modules are heavy, and return every kind by its name."""
    for home in ("covariance.limit", "sphere.limit"):
        importlib.import_module(f"limitformer.{home}")
    return KINDS


def kind_named(name: Any) -> type:
    """Return the kind of this name; raise `InputError` with all names if there is none."""
    if name not in KINDS and name not in all_kinds():
        raise InputError(f'"kind" must be one of {", ".join(KINDS)}; got {name!r}.')
    return KINDS[name]
