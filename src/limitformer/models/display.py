"""Display of declarations: a short repr without default values, and a small table in notebooks."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=type)

LONGEST = 200  # characters of a value that is shown completely


def with_display(kind: Kind) -> Kind:
    """Give the decorated dataclass the short repr and the table, without a base class (see `kinds`)."""
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
