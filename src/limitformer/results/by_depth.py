"""Mean and band by depth of what was simulated: correlations of tokens, and their size."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.base.errors import InputError, require
from limitformer.results.correlation import correlation

Array = NDArray[np.float64]
Results = xr.Dataset | Mapping[str, xr.Dataset] | Sequence[xr.Dataset]
Measure = Callable[[xr.Dataset], Array]

BAND = (0.05, 0.95)
LAYERS = ("depth", "layer")  # dims that count layers
# The limits' clocks, and the field of a finite model that a layer's number is divided by to tell that time.
CLOCKS = {"depth/width": "width", "layer/depth": "depth"}


@dataclass(frozen=True)
class Curve:
    """One result: `mean`, `low` and `high` (points,) at `at` (points,)."""

    label: str
    at: Array
    mean: Array
    low: Array
    high: Array


def curves_of(results: Results, measure: Measure) -> tuple[str, list[Curve]]:
    """What the axis of depth is called, and the curve of each result.

    `measure` makes an array (samples, values) of the result at one depth.

    Raises:
        InputError: as `lf.plot.correlation`.
    """
    named = by_label(results)
    unit = common_unit(list(named.values()))
    return unit, [curve_of(label, one, unit, measure) for label, one in named.items()]


def by_label(results: object) -> dict[str, xr.Dataset]:
    """The results by label; those of a list are called by what they describe, numbered if that is not enough."""
    if isinstance(results, xr.Dataset):
        results = [results]
    what = "This draws what lf.simulate returns, or a dict or list of such"
    if not isinstance(results, Mapping | Sequence) or isinstance(results, str):
        raise InputError(f"{what}; got {type(results).__name__}.")
    values = list(results.values() if isinstance(results, Mapping) else results)
    strange = next((type(one).__name__ for one in values if not isinstance(one, xr.Dataset)), None)
    require(strange is None, f"{what}; got one of {strange}.")
    require(len(values) > 0, f"{what}; got none.")
    if isinstance(results, Mapping):
        return {str(label): one for label, one in results.items()}
    names = [str(one.attrs.get("description", "result")) for one in values]
    alike = len(set(names)) < len(names)
    return {f"{name} {k}" if alike else name: one for k, (name, one) in enumerate(zip(names, values, strict=True), 1)}


def axis_of(result: xr.Dataset) -> str:
    """The dim that is depth."""
    kept = next((name for name in ("covariance", "variance", "overlap") if name in result), None)
    dims = [] if kept is None else [str(dim) for dim in result[kept].dims]
    if "sample" not in dims or len(dims) < 3:
        names = ", ".join(map(str, result.data_vars)) or "nothing"
        raise InputError(
            f"This draws covariances, pairs or overlaps by sample and depth; got a result with {names}. Nearest: what "
            "lf.simulate returns, on the sphere with keep='overlap'."
        )
    return dims[1]


def unit_of(result: xr.Dataset) -> str:
    """ "layer", or the unit of the time."""
    axis = axis_of(result)
    return "layer" if axis in LAYERS else str(result[axis].attrs.get("units", axis))


def common_unit(results: list[xr.Dataset]) -> str:
    """In what all can be told: layers go along with the time of a limit."""
    units = list(dict.fromkeys(map(unit_of, results)))
    clocks = [unit for unit in units if unit != "layer"] or units
    fits = len(clocks) == 1 and (len(units) == 1 or clocks[0] in CLOCKS)
    require(fits, f"These do not share an axis: {' and '.join(units)}. Nearest: draw each into an ax of its own.")
    return clocks[0]


def places(result: xr.Dataset, unit: str) -> Array:
    """Where the points of the result are, in `unit`."""
    axis = axis_of(result)
    at = np.asarray(result[axis].values if axis in result.coords else np.arange(result.sizes[axis]), float)
    if unit_of(result) == unit:
        return at
    field = CLOCKS[unit]
    count = json.loads(result.attrs.get("model", "{}")).get(field)
    require(count is not None, f"The attributes of a result do not say its model's {field}: its layers have no time.")
    return at / float(count)


def curve_of(label: str, result: xr.Dataset, unit: str, measure: Measure) -> Curve:
    """Mean and band at each point, one point at a time: a curve should not take more memory than its data."""
    axis = axis_of(result)
    rows = []
    for k in range(result.sizes[axis]):
        values = measure(result.isel({axis: [k]}))
        rows.append((values.mean(), *np.quantile(values, BAND)))
    require(bool(rows), f"There is nothing to draw: {label} has no points.")
    return Curve(label, places(result, unit), *np.array(rows).T)


def correlations_of(one: xr.Dataset) -> Array:
    """ρ of every two tokens (samples, pairs) at one depth; overlaps on the sphere."""
    if "overlap" in one:
        return required_pairs(one["overlap"].values[:, 0])
    rho = correlation(one).values[:, 0]
    if "covariance" not in one:
        return required_pairs(rho)
    first, second = np.triu_indices(one.sizes["token"], 1)
    return required_pairs(rho[:, first, second])


def required_pairs(rho: Array) -> Array:
    """`rho`, if there are samples and pairs."""
    require(
        rho.size > 0, f"Correlations need a sample and two tokens; got {rho.shape[0]} samples, {rho.shape[1]} pairs."
    )
    return rho


def sizes_of(one: xr.Dataset) -> Array:
    """q (samples, 1) at one depth: the mean over tokens of V_αα."""
    require("overlap" not in one, "Tokens on the sphere have size 1 at every depth. Nearest: lf.plot.correlation.")
    kept = one["covariance"].values if "covariance" in one else None
    variance = one["variance"].values if kept is None else np.diagonal(kept, axis1=-2, axis2=-1)
    require(variance.size > 0, "Sizes need a sample; got none.")
    return np.asarray(variance[:, 0].mean(-1, dtype=np.float64, keepdims=True))
