r"""What a design asks of a network at initialisation: numbers of one network, each within its band.

  correlation   mean correlation ρ of different tokens after the last block
  stream        size of the stream after the last block over that before the first, √(tr V_L/tr V_0)
  effective     effective tokens over tokens seen, mean over heads: the least and the most of all blocks
  gradient      largest over smallest gradient of like weights by block, of the kind that is worst

A network meets the objective or not; how far it is from that, its distance, is 0 where it does. Distances are
differences of artanh ρ, and of logarithms of the others: on these scales curves are close to normal (`band`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.base.errors import InputError, require, require_real, set_fields
from limitformer.checking.curves import gradient_of_matrices, gradient_ratio
from limitformer.checking.thresholds import THRESHOLDS

Array = NDArray[np.float64]
Band = tuple[float, float]
Values = Mapping[str, tuple[Array, Array]]  # by name: the least and the most (sample,) of one network

SAFE = {name: each.watch for name, each in THRESHOLDS.items() if each.watch is not None}
LEVEL = 0.9  # of the interval of a risk: its upper end is exceeded with 5 % probability at the most
LARGEST = 1e6  # a distance that is no number


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Bands for what a network does at initialisation; None asks nothing.

    The defaults are the numbers at which `check` says watch (`limitformer.checking.THRESHOLDS`), and −0.5.

    Attributes:
        correlation: of different tokens after the last block, in [−1, 1].
        stream: size at the end over that at the start, positive.
        effective: effective tokens over tokens seen, in every block, in [0, 1].
        gradient: the most that gradients of like weights may differ between blocks; at least 1.

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
        """Those that are asked, by name."""
        found = {name: band for name, band in asdict(self).items() if band is not None}
        return {name: (1.0, band) if name == "gradient" else band for name, band in found.items()}

    def distance(self, values: Values) -> Array:
        """How far each network is from meeting it (sample,); 0 where it does."""
        found = [outside(name, *values[name], band) for name, band in self.bands.items()]
        return np.nan_to_num(np.max(found, 0), nan=LARGEST, posinf=LARGEST)

    def missed(self, values: Values) -> dict[str, NDArray[np.bool_]]:
        """By name: whether each network (sample,) is outside that band."""
        return {name: ~(outside(name, *values[name], band) <= 0) for name, band in self.bands.items()}

    def __str__(self) -> str:
        """Such as `correlation in [−0.5, 0.5], gradient at most 100`."""
        parts = [f"{name} in [{low:g}, {high:g}]" for name, (low, high) in self.bands.items() if name != "gradient"]
        return ", ".join([*parts, *([] if self.gradient is None else [f"gradient ratio at most {self.gradient:g}"])])


def checked_band(name: str, band: Any, least: float, most: float) -> Band | None:
    """Two numbers in order."""
    if band is None:
        return None
    kind = f"{name} must be two numbers in ascending order in [{least:g}, {most:g}]; got {band!r}."
    try:
        low, high = (float(end) for end in band)
    except (TypeError, ValueError) as error:
        raise InputError(kind) from error
    require(least <= low < high <= most, kind)
    return low, high


def outside(name: str, low: Array, high: Array, band: Band) -> Array:
    """How far values from `low` to `high` reach out of the band; NaN where they are no numbers."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = (lambda x: np.arctanh(np.clip(x, -1 + 1e-15, 1 - 1e-15))) if name == "correlation" else np.log
        below, above = scale(band[0]) - scale(low), scale(high) - scale(band[1])
        below, above = np.where(low == band[0], 0.0, below), np.where(high == band[1], 0.0, above)
        return np.maximum(np.maximum(below, above), 0.0) + 0.0 * (low + high)  # NaN where one of them is not finite


def values_of(curves: xr.Dataset, data: xr.Dataset) -> dict[str, tuple[Array, Array]]:
    """What an objective can ask of these curves and of the data that they are of, by sample."""
    found: dict[str, tuple[Array, Array]] = {}
    if "correlation" in curves:
        found["correlation"] = twice(curves["correlation"].values[:, -1])
    with np.errstate(divide="ignore", invalid="ignore"):
        found["stream"] = twice(curves["size"].values[:, -1] / curves["size"].values[:, 0])
    if "effective_tokens" in data:
        part = (data["effective_tokens"] / data["tokens_seen"]).mean("head").values
        found["effective"] = np.nanmin(part, 1), np.minimum(np.nanmax(part, 1), 1.0)  # but for rounding
    if "gradient" in curves and curves.sizes["block"] > 1 and gradient_of_matrices(curves).size:
        found["gradient"] = twice(gradient_ratio(gradient_of_matrices(curves).values)[0])
    return found


def twice(values: Array) -> tuple[Array, Array]:
    """Of one number the least and the most are the same."""
    return values, values
