"""How declarations are shown: a short repr without what is left at its default, and a small table in notebooks."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=type)

LONGEST = 200  # characters of a value that are shown whole


def with_display(kind: Kind) -> Kind:
    """Give the decorated dataclass the short repr, and the table."""
    # Not by a common base: what is derived from a kind is no kind (`kinds`).
    kind.__repr__ = short_repr  # type: ignore[assignment]  # of the class, not of one object
    kind._repr_html_ = html_table  # type: ignore[attr-defined]  # what notebooks look for
    return kind


def short_repr(part: Any) -> str:
    """The call that makes `part`, without defaults.

    >>> from limitformer.models import SoftmaxAttention, Transformer
    >>> Transformer(width=200, depth=150, gamma=0.35, attention=SoftmaxAttention(), mask="causal")
    Transformer(width=200, depth=150, gamma=0.35, attention=SoftmaxAttention(), mask='causal')
    """
    given = [(one.name, getattr(part, one.name)) for one in fields(part) if one.repr and not is_default(one, part)]
    return f"{type(part).__name__}({', '.join(f'{name}={short(value)}' for name, value in given)})"


def is_default(one: "Field[Any]", part: Any) -> bool:
    """Whether the field has the value that it has when it is left out."""
    value = getattr(part, one.name)
    default = one.default if one.default_factory is MISSING else one.default_factory()
    return type(value) is type(default) and bool(value == default)


def short(value: Any) -> str:
    """The value; a function by its name; of a long list, table or array only how it begins and ends, or its shape."""
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
    """Every field in a row, defaults too, but for what records leave out."""
    shown = [one for one in fields(part) if one.repr and not (one.metadata and is_default(one, part))]
    return table(type(part).__name__, [(one.name, short(getattr(part, one.name))) for one in shown])


def table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Names and values as HTML."""
    from html import escape

    lines = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table><caption>{escape(title)}</caption><tbody>{lines}</tbody></table>"
