r"""Parts of a page's data: axes to choose on, plots, and facts in words.

A page's JSON has

* `axes`: `name`, `label`, `values`, `start` (the index that is chosen first), `group` (the heading that it stands
  under), `kind` ("slider" or "choice"), `texts` where the values are not shown as they are;
* `plots`: `title`, `x`, `y` and whether these are logarithmic, `range` of y (null: what the curves need), `at` (places
  on x; null: 0, 1, …), `by` (axes), `marker` (the axis whose value is a place on x), `curves` ({label, kind, column})
  and `band` ({label, low, high}, two columns), and `cells`: for every cell of the axes in `by`, the last of which runs
  fastest, its columns of numbers, null where there is none;
* `facts`: `label`, `by`, and `cells` of text or numbers;
* `sphere`, where there is one: `times`, the `group` of its axes, and `sets` of trajectories: `by`, and `cells` of
  thousandths of coordinates (time, token, coordinate), one after the other;
* `about`: what made them.

An axis, a plot or a fact with `only` = {axis: value} is shown where that axis has that value.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from joblib import Memory
from numpy.typing import ArrayLike

from limitformer.base.extras import package_version

DIGITS = 4


def axis(name: str, label: str, values: Sequence[Any], start: Any, group: str, **more: Any) -> dict[str, Any]:
    """Return a slider over `values` that starts at `start`."""
    slider = {"name": name, "label": label, "values": list(values), "start": list(values).index(start)}
    return slider | {"group": group, "kind": "slider"} | more


def choice(name: str, label: str, texts: dict[str, str], start: str, group: str, **more: Any) -> dict[str, Any]:
    """Return a list of words to choose from: value → text."""
    return axis(name, label, list(texts), start, group, kind="choice", texts=list(texts.values()), **more)


def curve(label: str, kind: str, column: int) -> dict[str, Any]:
    """Return one line of a plot; `kind` is law, own, other or fourth."""
    return {"label": label, "kind": kind, "column": column}


def plot(title: str, x: str, y: str, by: Sequence[str], cells: Iterable[Any], **more: Any) -> dict[str, Any]:
    """Return a plot of `cells`, each (columns, places)."""
    usual: dict[str, Any] = {"log": False, "range": None, "at": None, "marker": None, "band": None, "curves": []}
    return {"title": title, "x": x, "y": y, "by": list(by), **usual, **more, "cells": [rounded(each) for each in cells]}


def rounded(values: ArrayLike) -> Any:
    """Round numbers in nested lists to four digits; a number that is not finite becomes None.

    >>> rounded([[0.123456, 2.0], [float("nan"), float("inf")]])
    [[0.1235, 2], [None, None]]
    """
    return short(np.asarray(values, np.float64).tolist())


def short(values: Any) -> Any:
    if isinstance(values, list):
        return [short(each) for each in values]
    if not math.isfinite(values):
        return None
    number = float(f"{values:.{DIGITS}g}")
    return int(number) if number.is_integer() and abs(number) < 10**DIGITS else number


def as_json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def cached(function: Callable[..., Any], folder: Path | None) -> Any:
    """Return a function that stores its results in `folder` by arguments and version; None stores nothing."""
    return Memory(None if folder is None else folder / package_version(), verbose=0).cache(function)
