"""The registry of the classes of models and parts, family by family, and their display: a short repr, and a table.

A kernel is written for a class, not for its subclasses. So a kind is an exact class. A model refuses parts of other
kinds when it is made; code that differs by kind looks the kind up in a table (`of_kind`), which has no `else`.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

from limitformer.base.errors import InputError, require

Kind = TypeVar("Kind", bound=type)

LONGEST = 200  # characters of a value that is shown completely


def with_display(kind: Kind) -> Kind:
    """Give the decorated dataclass the short repr and the table, without a base class."""
    kind.__repr__ = short_repr  # type: ignore[assignment]  # set on the class
    kind._repr_html_ = html_table  # type: ignore[attr-defined]  # the method that notebooks call
    return kind


def short_repr(part: Any) -> str:
    """Return the call that makes `part`, without defaults.

    >>> from limitformer.models import SoftmaxAttention, Transformer
    >>> Transformer(width=200, depth=150, gamma=0.35, attention=SoftmaxAttention(), mask="causal")
    Transformer(width=200, depth=150, gamma=0.35, attention=SoftmaxAttention(), mask='causal')
    """
    arguments = [(one.name, getattr(part, one.name)) for one in fields(part) if one.repr and not is_default(one, part)]
    return f"{type(part).__name__}({', '.join(f'{name}={short(value)}' for name, value in arguments)})"


def is_default(one: "Field[Any]", part: Any) -> bool:
    value = getattr(part, one.name)
    default = one.default if one.default_factory is MISSING else one.default_factory()
    return type(value) is type(default) and bool(value == default)


def short(value: Any) -> str:
    """Return the repr of a value, a function's name, or the ends or shape of a long list, table or array."""
    if callable(value) and hasattr(value, "__name__"):
        return str(value.__name__)
    whole = repr(value)
    if len(whole) <= LONGEST or hasattr(value, "_repr_html_"):
        return whole
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {short(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple) and len(value) > 4:
        return "[" + ", ".join([*map(short, value[:3]), "…", short(value[-1])]) + "]"
    shape = getattr(value, "shape", None)
    return whole[:LONGEST] + "…" if shape is None else f"array of shape {shape}"


def html_table(part: Any) -> str:
    """Return a table of all fields, without the later ones (`serial.LATER`) at their defaults."""
    rows = [one for one in fields(part) if one.repr and not (one.metadata and is_default(one, part))]
    return table(type(part).__name__, [(one.name, short(getattr(part, one.name))) for one in rows])


def table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    from html import escape

    lines = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table><caption>{escape(title)}</caption><tbody>{lines}</tbody></table>"


T = TypeVar("T")

KINDS: dict[str, type] = {}  # by the name in JSON
FAMILIES: dict[str, list[type]] = {}


def register(family: str) -> Callable[[Kind], Kind]:
    """Enter the decorated class into the registry under its family, and give it the short repr."""

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
