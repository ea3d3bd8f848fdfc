r"""The objective of a design: numbers of a network at initialisation, each within its band.

  correlation   mean correlation ρ of different tokens after the last block
  stream        size of the stream after the last block over that before the first, √(tr V_L/tr V_0), or over that after
                the first where a norm sets it (`stream_ratio`)
  effective     effective tokens over tokens seen, mean over heads: the smallest and the largest of all blocks
  gradient      largest over smallest gradient of like weights by block, for the worst kind

Of several stacks, such as encoder and decoder, all must be in the bands.

The distance of a network from the objective is 0 if it meets it. Distances are differences of artanh ρ, and of
logarithms of the other numbers: on these scales curves are nearly normal (`band`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.base.errors import InputError, require, require_real, set_fields
from limitformer.checking.curves import curves, gradient_of_matrices, gradient_ratio, stream_ratio
from limitformer.checking.thresholds import THRESHOLDS
from limitformer.weightless.arrays import split_stacks

Array = NDArray[np.float64]
Band = tuple[float, float]
Values = Mapping[str, tuple[Array, Array]]  # by name: smallest and largest (sample,) of each network

SAFE = {name: each.watch for name, each in THRESHOLDS.items() if each.watch is not None}
LARGEST = 1e6  # replaces a distance that is not finite


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Bands for what a network does at initialisation; None asks nothing.

    The defaults are the numbers at which `check` says watch (`limitformer.checking.THRESHOLDS`), and −0.5.

    Attributes:
        correlation: mean correlation of different tokens after the last block, in [−1, 1].
        stream: size of the stream at the end over that at the start, positive.
        effective: effective tokens over tokens seen, in every block, in [0, 1].
        gradient: the largest allowed ratio of gradients of like weights between blocks; at least 1.

    Raises:
        InputError: a band whose ends are in the wrong order or out of range, or no band at all.

    >>> Objective(correlation=(0.5, 0.1))
    Traceback (most recent call last):
    limitformer.base.errors.InputError: correlation must be two numbers in ascending order in [-1, 1]; got (0.5, 0.1).
    """

    correlation: Band | None = (-0.5, SAFE["collapse"])
    stream: Band | None = (SAFE["decay"], SAFE["growth"])
    effective: Band | None = (SAFE["narrow"], SAFE["uniform"])
    gradient: float | None = SAFE["gradient"]

    def __post_init__(self) -> None:
        for name, least, most in (("correlation", -1.0, 1.0), ("stream", 0.0, np.inf), ("effective", 0.0, 1.0)):
            set_fields(self, **{name: checked_band(name, getattr(self, name), least, most)})
        if self.gradient is not None:
            set_fields(self, gradient=require_real("gradient", self.gradient))
            require(self.gradient >= 1, f"gradient, largest over smallest, must be at least 1; got {self.gradient}.")
        require(bool(self.bands), "an objective must ask something; got None for everything.")

    @property
    def bands(self) -> dict[str, Band]:
        """The bands that are not None, by name."""
        bands = {name: band for name, band in asdict(self).items() if band is not None}
        return {name: (1.0, band) if name == "gradient" else band for name, band in bands.items()}

    def distance(self, values: Values) -> Array:
        """Return how far each network is from meeting the objective (sample,); 0 if it does.

        Raises:
            InputError: a band asks for what was not measured, such as the attention of a module without any.
        """
        for name in self.bands:
            hint = f"Nearest: objective={{{name!r}: None}} (--{name} none)."
            require(name in values, f"the objective asks for {name}, which was not measured in this network. {hint}")
        distances = [outside(name, *values[name], band) for name, band in self.bands.items()]
        return np.nan_to_num(np.max(distances, 0), nan=LARGEST, posinf=LARGEST)

    def missed(self, values: Values) -> dict[str, NDArray[np.bool_]]:
        """Return, by name, whether each network (sample,) is outside that band."""
        return {name: ~(outside(name, *values[name], band) <= 0) for name, band in self.bands.items()}

    def __str__(self) -> str:
        """Return text such as `correlation in [-0.5, 0.5], gradient ratio at most 100`."""
        parts = [f"{name} in [{low:g}, {high:g}]" for name, (low, high) in self.bands.items() if name != "gradient"]
        return ", ".join([*parts, *([] if self.gradient is None else [f"gradient ratio at most {self.gradient:g}"])])


def checked_band(name: str, band: Any, least: float, most: float) -> Band | None:
    if band is None:
        return None
    message = f"{name} must be two numbers in ascending order in [{least:g}, {most:g}]; got {band!r}."
    try:
        low, high = (float(end) for end in band)
    except (TypeError, ValueError) as error:
        raise InputError(message) from error
    require(least <= low < high <= most, message)
    return low, high


def outside(name: str, low: Array, high: Array, band: Band) -> Array:
    """Return how far values from `low` to `high` reach out of the band; NaN if they are not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = (lambda x: np.arctanh(np.clip(x, -1 + 1e-15, 1 - 1e-15))) if name == "correlation" else np.log
        below, above = scale(band[0]) - scale(low), scale(high) - scale(band[1])
        below, above = np.where(low == band[0], 0.0, below), np.where(high == band[1], 0.0, above)
        return np.maximum(np.maximum(below, above), 0.0) + 0.0 * (low + high)  # NaN where one of them is not finite


def values_of(curves: xr.Dataset, data: xr.Dataset) -> dict[str, tuple[Array, Array]]:
    """Return what an objective can ask of these curves and their data, by sample."""
    result: dict[str, tuple[Array, Array]] = {}
    if "correlation" in curves:
        result["correlation"] = as_range(curves["correlation"].values[:, -1])
    with np.errstate(divide="ignore", invalid="ignore"):
        result["stream"] = as_range(stream_ratio(curves["size"].values))
    if "effective_tokens" in data:
        part = (data["effective_tokens"] / data["tokens_seen"]).mean("head").values
        result["effective"] = np.nanmin(part, 1), np.minimum(np.nanmax(part, 1), 1.0)  # rounding can exceed 1
    if "gradient" in curves and curves.sizes["block"] > 1 and gradient_of_matrices(curves).size:
        result["gradient"] = as_range(gradient_ratio(gradient_of_matrices(curves).values)[0])
    return result


def values_of_stacks(data: xr.Dataset) -> dict[str, tuple[Array, Array]]:
    """Return `values_of` all stacks of a network: the smallest and the largest of each number."""
    every = [values_of(curves(part), part) for part in split_stacks(data).values()]
    result: dict[str, tuple[Array, Array]] = {}
    for name in dict.fromkeys(name for one in every for name in one):
        low, high = zip(*(one[name] for one in every if name in one), strict=True)
        result[name] = np.minimum.reduce(low), np.maximum.reduce(high)
    return result


def as_range(values: Array) -> tuple[Array, Array]:
    return values, values
