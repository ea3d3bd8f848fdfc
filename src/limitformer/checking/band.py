r"""The law's band: where a new network's curve lies with 90 % probability, given a few samples of the law.

x₁ … x_n are a curve's values at one layer in n networks, taken on the scale on which they are close to normal: log for
what is positive, artanh for correlations. A further one lies in

  x̄ ± t_{n−1}(0.95) s √(1 + 1/n)

with probability 0.9, for every n ≥ 2: quantiles of eight samples would hold 78 % at the most.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy import special  # its `stats` takes a second to import

Array = NDArray[np.float64]

CORRELATIONS = ("correlation", "correlation_abs", "correlation_95")
ANY_SIGN = ("logits_mean", "largest_logit")
LEVEL = 0.9
WITHOUT_BAND = ("tokens_seen",)  # chance has no part in it
LEAST = {"stable_rank": 1.0, "effective_rank": 1.0, "effective_tokens": 1.0, "correlation_abs": 0.0}


def band(curves: xr.Dataset) -> xr.Dataset:
    """`middle`, `low` and `high` (edge) of each curve: the mean on its scale, and the band of one more network."""
    lawful = {name: each for name, each in curves.items() if "sample" in each.dims and name not in WITHOUT_BAND}
    found = xr.Dataset({name: edges(each, str(name)) for name, each in lawful.items()})
    return found.assign_attrs(samples=curves.sizes["sample"])


def edges(values: xr.DataArray, name: str) -> xr.DataArray:
    """(edge, …) of low, middle, high."""
    there, back = scale_of(name)
    values = values.transpose("sample", ...)
    with np.errstate(all="ignore"):
        found = back(low_middle_high(there(values.values.astype(float))))
    found = np.clip(found, LEAST[name], None) if name in LEAST else found
    kept = {label: each for label, each in values.coords.items() if "sample" not in each.dims}
    kept["edge"] = ["low", "middle", "high"]
    return xr.DataArray(found, dims=("edge", *values.dims[1:]), coords=kept, attrs=values.attrs)


def low_middle_high(x: Array) -> Array:
    """The three of x (sample, …), one after the other: (3, …); what is NaN is left out."""
    known = ~np.isnan(x)
    count = known.sum(0)
    middle = np.where(known, x, 0).sum(0) / count
    apart = np.where(known, x - middle, 0)
    spread = np.sqrt((apart * apart).sum(0) / (count - 1))
    reach = special.stdtrit(np.where(count > 1, count - 1, np.nan), (1 + LEVEL) / 2)
    half = reach * spread * np.sqrt(1 + 1 / count)
    return np.stack([middle - half, middle, middle + half])


def scale_of(name: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """The function to the scale on which a curve is near normal, and back."""
    if name in CORRELATIONS:
        return lambda x: np.arctanh(x.clip(-1 + 1e-15, 1 - 1e-15)), np.tanh
    if name in ANY_SIGN:
        return lambda x: x, lambda x: x
    return lambda x: np.log(x / (x > 0)), np.exp  # NaN at 0 and below


def inside(curves: xr.Dataset, law: xr.Dataset) -> xr.Dataset:
    """Whether each value lies in the law's band; what the law has no band for is left out."""
    found = {}
    for name, each in curves.items():
        if name in law and bool(law[name].notnull().any()):
            low, high = law[name].sel(edge="low", drop=True), law[name].sel(edge="high", drop=True)
            rounding = 1e-6 * abs(high) + 1e-12  # of numbers that chance has no part in
            known = each.notnull() & low.notnull()
            found[name] = ((each >= low - rounding) & (each <= high + rounding)).where(known)
    return xr.Dataset(found)


def surprises(curves: xr.Dataset, law: xr.Dataset) -> dict[str, float]:
    """Of the curves of one network: how probable its worst point is under the law, corrected for the number of points.

    A point is x̄ + t s √(1 + 1/n), and t has Student's law with n − 1 degrees of freedom. All points of all curves are
    counted (Bonferroni), so that a sound network has a p below 0.01 in some curve with probability 0.01 at the most.
    """
    freedom = int(law.attrs["samples"]) - 1
    reach = special.stdtrit(freedom, (1 + LEVEL) / 2)
    worst, points = {}, 0
    for name, each in curves.items():
        if name in law and bool(law[name].notnull().any()):
            there, _ = scale_of(str(name))
            with np.errstate(all="ignore"):
                low, middle, high = (there(law[name].sel(edge=edge, drop=True)) for edge in ("low", "middle", "high"))
                spread = (high - low) / 2 + 1e-9 * abs(middle) + 1e-12  # of numbers that chance has no part in
                t = reach * abs(there(each.isel(sample=0)) - middle) / spread
            known = t.values[np.isfinite(t.values)]
            if known.size:  # a kind of weight that the law has not is not compared
                points += known.size
                worst[str(name)] = 2 * float(special.stdtr(freedom, -known.max()))
    return {name: min(1.0, p * points) for name, p in worst.items()}
