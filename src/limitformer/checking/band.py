r"""The law's band: where the curve of a new network lies with 90 % probability, given a few samples of the law.

x₁ … x_n are a curve's values at one layer in n networks, on the scale on which they are nearly normal: log for
positive numbers, artanh for correlations. A further one lies in

  x̄ ± t_{n−1}(0.95) s √(1 + 1/n)

with probability 0.9, for every n ≥ 2. (Quantiles of eight samples would hold at most 78 %.)
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy import special  # scipy.stats takes a second to import

from limitformer.checking.curves import ARTANH, CURVES, LOG, CurveInfo

Array = NDArray[np.float64]

LEVEL = 0.9
WITHOUT_BAND = ("tokens_seen", "unrelated_experts", "chosen_experts")  # not random


def band(curves: xr.Dataset) -> xr.Dataset:
    """Return `low`, `middle` and `high` (edge) of each curve: its mean, and the band of one more network."""
    lawful = {name: each for name, each in curves.items() if "sample" in each.dims and name not in WITHOUT_BAND}
    return xr.Dataset(
        {name: edges(each, str(name)) for name, each in lawful.items()}, attrs={"samples": curves.sizes["sample"]}
    )


def edges(values: xr.DataArray, name: str) -> xr.DataArray:
    """Return (edge, …) of low, middle, high."""
    forward, back = scale_of(name)
    values = values.transpose("sample", ...)
    with np.errstate(all="ignore"):
        result = back(low_middle_high(forward(values.values.astype(float))))
    coordinates: dict[Any, Any] = {label: each for label, each in values.coords.items() if "sample" not in each.dims}
    coordinates["edge"] = ["low", "middle", "high"]
    result = np.clip(result, CURVES.get(name, CurveInfo()).least, None)
    return xr.DataArray(result, dims=("edge", *values.dims[1:]), coords=coordinates, attrs=values.attrs)


def low_middle_high(x: Array) -> Array:
    """Return the three edges (3, …) of x (sample, …), ignoring NaN."""
    known = ~np.isnan(x)
    count = known.sum(0)
    middle = np.where(known, x, 0).sum(0) / count
    apart = np.where(known, x - middle, 0)
    spread = np.sqrt((apart * apart).sum(0) / (count - 1))
    reach = special.stdtrit(np.where(count > 1, count - 1, np.nan), (1 + LEVEL) / 2)
    half = reach * spread * np.sqrt(1 + 1 / count)
    return np.stack([middle - half, middle, middle + half])


def scale_of(name: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the function to the scale on which a curve is nearly normal, and its inverse."""
    scale = CURVES.get(name, CurveInfo()).scale
    if scale == ARTANH:
        return lambda x: np.arctanh(x.clip(-1 + 1e-15, 1 - 1e-15)), np.tanh
    if scale == LOG:
        return lambda x: np.log(x / (x > 0)), np.exp  # NaN at 0 and below
    return lambda x: x, lambda x: x


def inside(curves: xr.Dataset, law: xr.Dataset) -> xr.Dataset:
    """Return whether each value lies in the law's band; curves without a band are left out."""
    result = {}
    for name, each in curves.items():
        if name in law and bool(law[name].notnull().any()):
            low, high = law[name].sel(edge="low", drop=True), law[name].sel(edge="high", drop=True)
            rounding = 1e-6 * abs(high) + 1e-12  # of numbers that are not random
            known = each.notnull() & low.notnull()
            result[name] = ((each >= low - rounding) & (each <= high + rounding)).where(known)
    return xr.Dataset(result)


def surprises(curves: xr.Dataset, law: xr.Dataset) -> dict[str, float]:
    """Return, for each curve of one network, how probable its worst point is under the law.

    A point is x̄ + t s √(1 + 1/n), and t has Student's law with n − 1 degrees of freedom. Probabilities are corrected
    for the number of points of all curves (Bonferroni): in a sound network any of them is below 0.01 with probability
    at most 0.01.
    """
    freedom = int(law.attrs["samples"]) - 1
    reach = special.stdtrit(freedom, (1 + LEVEL) / 2)
    worst, points = {}, 0
    for name, each in curves.items():
        if name in law and bool(law[name].notnull().any()):
            forward, _ = scale_of(str(name))
            with np.errstate(all="ignore"):
                low, middle, high = (forward(law[name].sel(edge=edge, drop=True)) for edge in ("low", "middle", "high"))
                spread = (high - low) / 2 + 1e-9 * abs(middle) + 1e-12  # not 0 for numbers that are not random
                t = reach * abs(forward(each.isel(sample=0)) - middle) / spread
            known = t.values[np.isfinite(t.values)]
            if known.size:  # kinds of weight that the law lacks are not compared
                points += known.size
                worst[str(name)] = 2 * float(special.stdtr(freedom, -known.max()))
    return {name: min(1.0, p * points) for name, p in worst.items()}
