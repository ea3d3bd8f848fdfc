"""Read a sweep from a TOML file.

[model]                      # any model and its parts, as in `to_json`
kind = "StochasticTransformer"
tokens = 2
dim = 4
beta = 1.0
layers_per_unit_time = 100
[over]                       # lists, ranges with both ends, or a count of values in equal or logarithmic steps
dim = [4, 6, 8]
beta = { start = 0.0, stop = 2.0, step = 0.25 }
[simulate]                   # the options of `simulate`
samples = 2000
horizon = 20.0
seed = 0
[keep]                       # see `sweep.reduce`
outcomes = true
"""

import tomllib
from collections.abc import Mapping
from math import floor, log10
from pathlib import Path
from typing import Any

import numpy as np

from limitformer.base.errors import InputError, about, require
from limitformer.base.files import check_regular
from limitformer.models.serial import from_record
from limitformer.sweep.describe import Sweep
from limitformer.sweep.grid import unknown_field

SECTIONS = ("model", "over", "simulate", "keep")
MOST_VALUES = 1_000_000
LARGEST = 1e300


def read_sweep(path: str | Path) -> Sweep:
    """Read the sweep that a TOML file describes.

    Raises:
        InputError: the file cannot be read, is not TOML, or describes a sweep that cannot run.
    """
    record = read_toml(path)
    with about(str(path)):
        for name in record:
            require(name in SECTIONS, unknown_field("A sweep's file", name, list(SECTIONS)))
        for name in ("model", "over", "simulate"):
            require(isinstance(record.get(name), dict), f"A sweep's file needs the table [{name}].")
        keep = record.get("keep", {"moments": True})
        require(isinstance(keep, dict), f"[keep] must be a table; got {keep!r}.")
        over = {name: values_of(name, values) for name, values in dotted(record["over"]).items()}
        return Sweep(from_record(record["model"]), over=over, simulate=record["simulate"], reduce=keep)


def read_toml(path: str | Path) -> dict[str, Any]:
    check_regular(Path(path))
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not TOML: {error}.") from error


def dotted(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return dotted names for nested tables: TOML reads `attention.tau0 = …` as a table in a table."""
    values: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict) and "start" not in value:
            values |= dotted(value, f"{before}{name}.")
        else:
            values[before + name] = value
    return values


def values_of(name: str, axis: Any) -> list[Any]:
    """Return the values of an axis: a list, {start, stop, step} or {start, stop, count, scale}."""
    if isinstance(axis, list):
        return axis
    what = "a list, {start, stop, step}, or {start, stop, count, scale} with scale linear or log"
    require(isinstance(axis, dict), f"The axis {name!r} must be {what}; got {axis!r}.")
    keys = set(axis)
    steps, counted = keys == {"start", "stop", "step"}, keys - {"scale"} == {"start", "stop", "count"}
    require(steps or counted, f"The axis {name!r} must be {what}; got {', '.join(axis)}.")
    numbers = [axis[key] for key in keys - {"scale"}]
    real = all(isinstance(number, int | float) and -LARGEST <= number <= LARGEST for number in numbers)
    require(real, f"The axis {name!r} must have finite numbers; got {axis!r}.")
    return stepped_values(name, **axis) if steps else counted_values(name, **axis)


def stepped_values(name: str, start: float, stop: float, step: float) -> list[Any]:
    """Return start, start + step, … up to stop, with stop itself if a step ends there; integers stay integers."""
    require(step > 0, f"The axis {name!r} needs a positive step; got {step}.")
    steps = (stop - start) / step + 1e-9
    require(steps < MOST_VALUES, f"The axis {name!r} has {steps:,.0f} values; at most {MOST_VALUES:,} are taken.")
    whole = all(isinstance(number, int) for number in (start, step))
    values = [start + k * step for k in range(floor(steps) + 1)]
    return values if whole else [tidy(value, max(abs(start), abs(stop))) for value in values]


def counted_values(name: str, start: float, stop: float, count: int, scale: str = "linear") -> list[float]:
    """Return `count` values from start to stop, in equal steps or in equal ratios."""
    require(isinstance(count, int) and 0 < count <= MOST_VALUES, f"The axis {name!r} needs a count; got {count!r}.")
    require(scale in ("linear", "log"), f"The scale of {name!r} must be linear or log; got {scale!r}.")
    require(scale == "linear" or (start > 0 and stop > 0), f"The axis {name!r} needs positive ends for scale log.")
    if scale == "log":
        return [tidy(float(value), float(value)) for value in np.geomspace(start, stop, count)]
    return [tidy(float(value), max(abs(start), abs(stop))) for value in np.linspace(start, stop, count)]


def tidy(value: float, scale: float) -> float:
    """Round to twelve digits of `scale`: 0.3 instead of 0.30000000000000004, and 0 instead of -0."""
    return round(value, 12 - floor(log10(scale))) + 0.0 if scale > 0 else 0.0
