"""Grids of models: any field of a model or of its parts, set to each of its values.

Parts are named with dots, such as `attention.tau0`. The order of cells is fixed: the last field runs fastest.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from itertools import product
from typing import Any

import numpy as np

from limitformer.base.errors import InputError, about, require

Index = tuple[int, ...]  # the place of a cell on each axis

SEED, START = "seed", "start."  # axes that are not fields of the model


@dataclass(frozen=True)
class Cell:
    """A point of a grid.

    Attributes:
        index: its place on each axis.
        model: the model there.
        changes: the other values there: "seed" and fields of the start, such as "start.correlation".
    """

    index: Index
    model: Any
    changes: dict[str, Any]


def replace_fields(part: Any, changes: Mapping[str, Any]) -> Any:
    """Return `part` with these fields replaced at once; dotted names are fields of its parts.

    Raises:
        InputError: an unknown field (with the nearest names), a part that is absent, or a value that is refused.

    >>> import limitformer as lf
    >>> net = lf.Transformer(width=8, depth=8, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0))
    >>> replace_fields(net, {"gamma": 0.1, "attention.tau0": 2.0}).attention.tau0
    2.0
    """
    kind, known = type(part).__name__, [field.name for field in fields(part)]
    own: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        first, _, rest = name.partition(".")
        if first not in known:  # tested first, because to find the nearest names is slow
            raise InputError(unknown_field(kind, first, known))
        if rest:
            inner.setdefault(first, {})[rest] = value
        else:
            own[first] = value
    for first, deeper in inner.items():
        present = is_dataclass(getattr(part, first))
        require(present, f"{kind} has no part {first!r} to set {', '.join(deeper)} of; it is {getattr(part, first)!r}.")
        own[first] = replace_fields(getattr(part, first), deeper)
    return replace(part, **own)


def unknown_field(kind: str, name: str, known: list[str]) -> str:
    """Return the message about a field that does not exist."""
    near = get_close_matches(name, known)
    hint = f"Nearest: {', '.join(near)}." if near else f"It has {', '.join(known)}."
    return f"{kind} has no field {name!r}. {hint}"


def check_axes(over: Mapping[str, Any]) -> None:
    """Raise `InputError` unless every axis has values that are different numbers or words."""
    require(len(over) > 0, "A grid needs at least one field to vary; got none.")
    for name, values in over.items():
        several = isinstance(values, Sequence | np.ndarray) and not isinstance(values, str)
        if not several:  # the message is made only then: a list may be long
            raise InputError(f"The axis {name!r} must be a list of values; got {values!r}.")
        require(len(values) > 0, f"The axis {name!r} has no value; a grid needs at least one on each axis.")
        simple = str | int | float | np.number | None
        strange = {type(value).__name__ for value in values if not isinstance(value, simple)}
        require(not strange, f"The axis {name!r} must be numbers or words; got {', '.join(sorted(strange))}.")
        unseen = [value for value in values if isinstance(value, str) and not value.isprintable()]
        require(not unseen, f"The words on the axis {name!r} must be printable; got {unseen[:1]!r}.")
        if len(set(values)) != len(values):
            raise InputError(f"The values of {name!r} must differ; got {', '.join(map(str, values))}.")


def cells(base: Any, over: Mapping[str, Sequence[Any]]) -> Iterator[Cell]:
    """Yield every cell, its model validated.

    Raises:
        InputError: an axis without values, an unknown field, or a value that the model refuses; the message names the
            cell.
    """
    check_axes(over)
    for index in product(*(range(len(values)) for values in over.values())):
        changes = {name: values[k] for (name, values), k in zip(over.items(), index, strict=True)}
        with about(f"Cell {name_of(changes)}"):
            model = replace_fields(base, {name: value for name, value in changes.items() if not is_outside(name)})
        yield Cell(index, model, {name: value for name, value in changes.items() if is_outside(name)})


def is_outside(name: str) -> bool:
    """Whether an axis is the seed or a field of the start."""
    return name == SEED or name.startswith(START)


def name_of(changes: Mapping[str, Any]) -> str:
    """Return the name of a cell for messages."""
    return ", ".join(f"{name} = {value}" for name, value in changes.items())
