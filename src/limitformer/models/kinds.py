"""Which classes of models and parts are known, family by family: the one place that knows.

A kernel is written for a class, not for what a subclass makes of it. So a kind is a class itself, without those derived
from it. A model refuses parts of other kinds when it is made; whoever then does something else for each kind looks it
up in a table over exact classes (`of_kind`), which has no `else`.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from limitformer.base.errors import InputError, require
from limitformer.models.display import short, with_display

Kind = TypeVar("Kind", bound=type)
T = TypeVar("T")

KINDS: dict[str, type] = {}  # by the name that JSON has
FAMILIES: dict[str, list[type]] = {}


def register(family: str) -> Callable[[Kind], Kind]:
    """Enter the decorated class into the list of what is known, under its family; it is shown as `display` says."""

    def enter(kind: Kind) -> Kind:
        KINDS[kind.__name__] = kind
        FAMILIES.setdefault(family, []).append(kind)
        return with_display(kind)

    return enter


def require_kind(name: str, part: object, family: str, *words: str) -> None:
    """Raise `InputError` unless the class of `part` is a kind of this family; `words` are what else may stand there."""
    choices = [kind.__name__ for kind in FAMILIES[family]] + list(words)
    listed = ", ".join(choices[:-1]) + " or " + choices[-1] if len(choices) > 1 else choices[0]
    derived = any(isinstance(part, base) for kind in FAMILIES[family] for base in kind.__mro__[:-1])
    why = ": kernels know these classes alone, not what is derived from them" if derived else ""
    require(type(part) in FAMILIES[family], f"{name} must be one of {listed}; got {short(part)}{why}.")


def require_exact_kind(value: object, kind: type) -> None:
    """Raise `InputError` if `value` belongs to a class derived from `kind`, of which nothing else would take notice."""
    name = kind.__name__
    require(type(value) is kind, f"Only {name} itself is known here; got {type(value).__name__}, derived from it.")


def of_kind(part: object, table: Mapping[type, T]) -> T:
    """What `table` has for the class of `part`.

    Raises:
        InputError: it has nothing; the message lists the kinds that it has.

    >>> of_kind(True, {int: "a number"})
    Traceback (most recent call last):
    limitformer.base.errors.InputError: Known here are int; got True, a bool.
    """
    if type(part) not in table:
        names = ", ".join(kind.__name__ for kind in table)
        raise InputError(f"Known here are {names}; got {part!r}, a {type(part).__name__}.")
    return table[type(part)]


def all_kinds() -> dict[str, type]:
    """Every kind by its name, limits too, whose modules are heavy: they enter themselves when they are imported."""
    for home in ("covariance.limit", "sphere.limit"):
        importlib.import_module(f"limitformer.{home}")
    return KINDS


def kind_named(name: Any) -> type:
    """The kind of this name, or `InputError` with all names."""
    if name not in KINDS and name not in all_kinds():
        raise InputError(f'"kind" must be one of {", ".join(KINDS)}; got {name!r}.')
    return KINDS[name]
