"""The model and the start of `limitformer simulate`, from files and options."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from limitformer.base.errors import InputError, require

if TYPE_CHECKING:
    from limitformer.models import Start, Transformer

LONGEST_TEXT = 64  # tokens; a longer text needs --tokens


def read_model(path: Path, changes: Mapping[str, Any]) -> "Transformer":
    """Return the Transformer of a file as if the file had these values. User functions may be in this folder.

    The file is TOML with a table [model], as of a sweep, or the JSON of `to_json` if its name ends in .json.
    """
    from limitformer.models import Transformer
    from limitformer.models.serial import from_record, json_object
    from limitformer.models.text import read_text
    from limitformer.sweep.file import read_toml

    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    record = None if path.suffix == ".json" else read_toml(path).get("model")
    try:
        record = json_object(read_text(path), "A model") if path.suffix == ".json" else record
        require(
            isinstance(record, dict), "A model's file needs the table [model]; 'limitformer simulate --help' has one."
        )
        for name, value in changes.items():
            set_in(record, name, value)
        model = from_record(record)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    fits = isinstance(model, Transformer)
    require(fits, f"{path} describes a {type(model).__name__}, not a Transformer.")
    return model


def set_in(record: Any, name: str, value: Any) -> None:
    """Set a field of a model's record; a dotted name is a field of a part, which is made if there is none."""
    *parts, last = name.split(".")
    for part in parts:
        record[part] = {} if record.get(part) is None else record[part]
        record = record[part]
        require(isinstance(record, dict), f"--set {name}: {part} is {record!r}, which has no fields.")
    record[last] = value


def start_of(path: Path | None, width: int, options: Mapping[str, Any]) -> "Start":
    """Return the start from the words of a text, or from tokens of equal variances and correlations."""
    from limitformer.models import equicorrelated, from_text
    from limitformer.models.text import words_of

    tokens, equal = options["tokens"], {name: options[name] for name in ("correlation", "variance")}
    given = {name: value for name, value in equal.items() if value is not None}
    if path is None:
        require(not options["positions"], "--positions would change nothing: there is no --text.")
        return equicorrelated(**{"tokens": 2 if tokens is None else tokens, "correlation": 0.2, **given})
    require(not given, f"--{', --'.join(given)} would change nothing: --text is the start.")
    if tokens is None:
        few = len(words_of(path, LONGEST_TEXT + 1)) <= LONGEST_TEXT
        require(few, f"{path} has more than {LONGEST_TEXT} tokens; give a number, e.g. --tokens {LONGEST_TEXT}.")
    positions: Any = "sinusoidal" if options["positions"] else None
    return from_text(path, width=width, tokens=tokens, positions=positions, seed=options["seed"])
