"""The layers or times of a recording, and equal steps of a horizon."""

from collections.abc import Sequence
from math import ceil
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import require, require_real
from limitformer.base.memory import check_scratch
from limitformer.models import Transformer

Record = Annotated[Sequence[float] | NDArray[Any], "points"] | None


def whole_steps(horizon: float, dt: float) -> int:
    """Return the least number of equal steps of at most `dt`, up to rounding, that make the horizon."""
    dt = require_real("dt", dt)
    require(dt > 0, f"dt must be positive; got {dt}.")
    require(horizon / dt <= 2**53, f"dt must be at least {horizon / 2**53:.3g} for this horizon; got {dt}.")
    return max(1, ceil(horizon / dt - 1e-9))


def recorded_layers(model: Transformer, record: Record) -> NDArray[np.int64]:
    """Return `record` as ascending layers of `model`; None means all of them, the start included."""
    if record is None:
        check_scratch(8 * (model.depth + 1), f"The list of all {model.depth + 1:,} depths", "give record")
        record = np.arange(model.depth + 1)
    layers = recorded_points("record", record)
    whole = bool((np.isfinite(layers) & (layers == np.rint(layers))).all())
    require(whole, f"Layers to record must be whole numbers; got {layers}.")
    in_range = bool((layers >= 0).all() and (layers <= model.depth).all())
    require(in_range, f"Layers to record must lie in 0 … {model.depth}; got {layers}.")
    return layers.astype(np.int64)


def recorded_points(name: str, record: Record) -> NDArray[Any]:
    """Return `record` as an ascending array."""
    points = np.asarray(record)
    numbers = points.ndim == 1 and points.size > 0 and points.dtype.kind in "iuf"
    require(numbers, f"{name} must be a list of layers or times; got {record!r}.")
    require(bool((points[1:] > points[:-1]).all()), f"{name} must be strictly ascending; got {record!r}.")
    return points
