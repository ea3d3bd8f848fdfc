"""Models to JSON and back: `{"kind": "Transformer", "width": 200, …}`, parts nested the same way.

User functions are written as the paths by which they are imported, "package.module:function".
"""

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from limitformer.base.errors import InputError, first_line, require
from limitformer.models.functions import Function, import_function, is_path, name_of, path_of
from limitformer.models.kinds import KINDS, all_kinds, kind_named

# Metadata of fields that were added later: at its default such a field is left out, as in older records.
LATER = {"later": True}
MOST_LEVELS = 32  # of parts within parts


def to_json(model: Any, indent: int | None = None) -> str:
    """Return the model as JSON text with every field.

    Raises:
        InputError: not a model or part, or one with a function that cannot be imported, such as a lambda.

    >>> from limitformer.models import ReLU
    >>> to_json(ReLU(hidden=8))
    '{"kind": "ReLU", "hidden": 8}'
    """
    return json.dumps(as_record(model), indent=indent)


def describe(model: Any) -> str:
    """Return the JSON for a result's provenance, where a function that cannot be imported is "<module:name>"."""
    return json.dumps(as_record(model, lambda function: path_of(function) or f"<{name_of(function)}>"))


def path_or_refusal(function: Function) -> str:
    """Return the path of a function; raise `InputError` if it has none."""
    path = path_of(function)
    if path is None:
        raise InputError(
            f"JSON names a function by the path that imports it, which {name_of(function)} does not have. "
            "Nearest: a function at the top level of a module that can be imported."
        )
    return path


def as_record(part: Any, written: Callable[[Function], str] = path_or_refusal) -> Any:
    """Return `part` as nested dicts of numbers and texts, with functions as `written` returns them."""
    if not is_dataclass(part):
        return written(part) if callable(part) else part
    kind = type(part).__name__
    if KINDS.get(kind) is not type(part):
        raise InputError(f"JSON takes only {', '.join(all_kinds())}; got {part!r}.")
    entries = [one for one in fields(part) if one.metadata != LATER or getattr(part, one.name) != one.default]
    return {"kind": kind} | {one.name: as_record(getattr(part, one.name), written) for one in entries}


def from_json(text: str) -> Any:
    """Return the model that `text` describes; missing fields take their defaults.

    This imports user functions from the modules that the text names, and runs their code: read only texts that you
    trust.

    Raises:
        InputError: not JSON, an unknown kind or field, a value that the model refuses, or a function that cannot be
            imported.

    >>> from_json('{"kind": "ReLU", "hidden": 8}')
    ReLU(hidden=8)
    """
    return from_record(json_object(text, "A model"))


def json_object(text: str, what: str) -> dict[str, Any]:
    """Return the JSON object in `text`; raise `InputError` about `what` if it is anything else."""
    try:
        record = json.loads(text, object_pairs_hook=distinct)
    except InputError as error:
        raise InputError(f"{what} must be JSON: {error}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{what} must be JSON; line {error.lineno} is not: {error.msg}.") from error
    except (TypeError, ValueError, RecursionError) as error:  # not a text, too many digits, too many brackets
        raise InputError(f"{what} must be JSON: {first_line(error)}.") from error
    if not isinstance(record, dict):
        raise InputError(f"{what} must be a JSON object; got {type(record).__name__}.")
    return record


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise `InputError` if a name occurs twice."""
    record: dict[str, Any] = {}
    for name, value in pairs:
        require(name not in record, f"{name!r:.80} is given twice.")
        record[name] = value
    return record


def from_record(record: Any, *, imports: bool = True, level: int = 1) -> Any:
    """Return the part that `record` describes, `level` deep in a model, or a value as it is.

    With `imports=False` no module is imported: a function must belong to a module that is already imported.
    """
    if not isinstance(record, dict):
        return record
    require(level <= MOST_LEVELS, f"A model has a few levels; got more than {MOST_LEVELS}.")
    kind = str(record.get("kind"))
    part_class = kind_named(kind)
    inner = {name: value for name, value in record.items() if name != "kind"}
    values = {name: from_record(value, imports=imports, level=level + 1) for name, value in inner.items()}
    for name in ("function", "torch"):
        written = values.get(name)
        marked = isinstance(written, str) and written.startswith("<") and written.endswith(">")  # see `describe`
        require(
            not marked,
            f"{name} of {kind} was {str(written)[1:-1]}, a function that cannot be imported, and cannot be restored "
            "from JSON. Nearest: the model made again from its source.",
        )
    if is_path(values.get("function")):
        values["function"] = import_function(values["function"], imports=imports)
    names = {one.name for one in fields(part_class)}
    unknown = sorted(values.keys() - names)
    require(not unknown, f"{kind} has no field {', '.join(unknown)}; it has {', '.join(sorted(names))}.")
    try:
        return part_class(**values)
    except TypeError as error:
        raise InputError(f"{kind}: {error}.") from error
