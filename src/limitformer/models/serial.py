"""Models to JSON and back: `{"kind": "Transformer", "width": 200, …}`, parts nested the same way."""

import json
from dataclasses import fields, is_dataclass
from typing import Any

from limitformer.errors import InputError, first_line, require
from limitformer.models.kinds import KINDS, all_kinds, kind_named


def to_json(model: Any, indent: int | None = None) -> str:
    """The model as JSON text, every field written out.

    >>> from limitformer.models import ReLU
    >>> to_json(ReLU(hidden=8))
    '{"kind": "ReLU", "hidden": 8}'
    """
    return json.dumps(as_record(model), indent=indent)


def as_record(part: Any) -> Any:
    """`part` as nested dicts of plain values."""
    if not is_dataclass(part):
        return part
    kind = type(part).__name__
    if KINDS.get(kind) is not type(part):
        raise InputError(f"JSON knows {', '.join(all_kinds())} alone; got {part!r}.")
    values = {field.name: as_record(getattr(part, field.name)) for field in fields(part)}
    return {"kind": kind, **values}


def from_json(text: str) -> Any:
    """The model that `text` describes; fields left out take their defaults.

    Raises:
        InputError: not JSON, an unknown kind or field, or a value that the model refuses.

    >>> from_json('{"kind": "ReLU", "hidden": 8}')
    ReLU(hidden=8)
    """
    record = json_object(text, "A model")
    try:
        return from_record(record)
    except RecursionError as error:
        raise InputError("A model has a few levels; got more than can be read.") from error


def json_object(text: str, what: str) -> dict[str, Any]:
    """The object that `text` is; `InputError` about `what` if it is none."""
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{what} must be JSON; line {error.lineno} is not: {error.msg}.") from error
    except (TypeError, ValueError, RecursionError) as error:  # no text, endless digits, endless brackets
        raise InputError(f"{what} must be JSON: {first_line(error)}.") from error
    if not isinstance(record, dict):
        raise InputError(f"{what} must be a JSON object; got {type(record).__name__}.")
    return record


def from_record(record: Any) -> Any:
    """The part that `record` describes; plain values stand for themselves."""
    if not isinstance(record, dict):
        return record
    kind = str(record.get("kind"))
    make = kind_named(kind)
    values = {name: from_record(value) for name, value in record.items() if name != "kind"}
    known = {field.name for field in fields(make)}
    strange = sorted(values.keys() - known)
    require(not strange, f"{kind} has no field {', '.join(strange)}; it has {', '.join(sorted(known))}.")
    try:
        return make(**values)
    except TypeError as error:
        raise InputError(f"{kind}: {error}.") from error
