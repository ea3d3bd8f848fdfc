"""Curves of simulations by depth: mean and band of the correlations of tokens, and of their sizes."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.base.errors import InputError, require
from limitformer.results.datasets import correlation

Array = NDArray[np.float64]
Results = xr.Dataset | Mapping[str, xr.Dataset] | Sequence[xr.Dataset]
Measure = Callable[[xr.Dataset], Array]

BAND = (0.05, 0.95)
LAYERS = ("depth", "layer")  # dims that count layers
# Units of the limits' times, and the field of the model that a layer's number is divided by for that time.
CLOCKS = {"depth/width": "width", "layer/depth": "depth"}


@dataclass(frozen=True)
class Curve:
    """The curve of one result: `mean`, `low` and `high` (points,) at `at` (points,)."""

    label: str
    at: Array
    mean: Array
    low: Array
    high: Array


def curves_of(results: Results, measure: Measure) -> tuple[str, list[Curve]]:
    """Return the unit of depth and the curve of each result.

    `measure` maps the result at one depth to an array (samples, values).

    Raises:
        InputError: as `lf.plot.correlation`.
    """
    named = by_label(results)
    units = list(dict.fromkeys(map(unit_of, named.values())))
    clocks = [unit for unit in units if unit != "layer"] or units  # layers can be converted to the time of a limit
    fits = len(clocks) == 1 and (len(units) == 1 or clocks[0] in CLOCKS)
    require(fits, f"These results do not share an axis: {' and '.join(units)}. Nearest: draw each into its own ax.")
    curves = []
    for label, result in named.items():
        axis, rows = axis_of(result), []
        for k in range(result.sizes[axis]):  # one point at a time: a curve should not take more memory than its data
            values = measure(result.isel({axis: [k]}))
            rows.append((values.mean(), *np.quantile(values, BAND)))
        require(bool(rows), f"There is nothing to draw: {label} has no points.")
        curves.append(Curve(label, positions(result, clocks[0]), *np.array(rows).T))
    return clocks[0], curves


def by_label(results: object) -> dict[str, xr.Dataset]:
    """Return the results by label; the labels of a list are their descriptions, numbered if two are equal."""
    if isinstance(results, xr.Dataset):
        results = [results]
    needed = "A plot needs a result of lf.simulate, or a dict or list of results"
    if not isinstance(results, Mapping | Sequence) or isinstance(results, str):
        raise InputError(f"{needed}; got {type(results).__name__}.")
    values = list(results.values() if isinstance(results, Mapping) else results)
    others = [type(result).__name__ for result in values if not isinstance(result, xr.Dataset)]
    require(not others, f"{needed}; got one of {''.join(others[:1])}.")
    require(len(values) > 0, f"{needed}; got none.")
    if isinstance(results, Mapping):
        return {str(label): result for label, result in results.items()}
    names = [str(result.attrs.get("description", "result")) for result in values]
    labels = [f"{name} {k}" for k, name in enumerate(names, 1)] if len(set(names)) < len(names) else names
    return dict(zip(labels, values, strict=True))


def axis_of(result: xr.Dataset) -> str:
    """Return the dim of depth.

    Raises:
        InputError: the result has none.
    """
    variable = next((name for name in ("covariance", "variance", "overlap") if name in result), None)
    dims = [] if variable is None else [str(dim) for dim in result[variable].dims]
    if "sample" not in dims or len(dims) < 3:
        names = ", ".join(map(str, result.data_vars)) or "nothing"
        raise InputError(
            f"A plot needs covariances, pairs or overlaps by sample and depth; got a result with {names}. Nearest: a "
            "result of lf.simulate, on the sphere with keep='overlap'."
        )
    return dims[1]


def unit_of(result: xr.Dataset) -> str:
    """Return "layer", or the unit of the time."""
    axis = axis_of(result)
    return "layer" if axis in LAYERS else str(result[axis].attrs.get("units", axis))


def positions(result: xr.Dataset, unit: str) -> Array:
    """Return the depths of the points of the result, in `unit`."""
    axis = axis_of(result)
    at = np.asarray(result[axis].values if axis in result.coords else np.arange(result.sizes[axis]), float)
    if unit_of(result) == unit:
        return at
    field = CLOCKS[unit]
    count = json.loads(result.attrs.get("model", "{}")).get(field)
    require(count is not None, f"The attributes of a result lack its model's {field}: its layers have no time.")
    return at / float(count)


def correlations_of(result: xr.Dataset) -> Array:
    """Return ρ of every two tokens (samples, pairs) at one depth; overlaps on the sphere."""
    if "overlap" in result:
        rho = result["overlap"].values[:, 0]
    else:
        rho = correlation(result).values[:, 0]
        if "covariance" in result:
            rho = rho[:, *np.triu_indices(result.sizes["token"], 1)]
    samples, pairs = rho.shape
    require(rho.size > 0, f"Correlations need a sample and two tokens; got {samples} samples, {pairs} pairs.")
    return rho


def sizes_of(result: xr.Dataset) -> Array:
    """Return q (samples, 1) at one depth: the mean over tokens of V_αα."""
    require("overlap" not in result, "Tokens on the sphere have size 1 at every depth. Nearest: lf.plot.correlation.")
    v = result["covariance"].values if "covariance" in result else None
    variance = result["variance"].values if v is None else np.diagonal(v, axis1=-2, axis2=-1)
    require(variance.size > 0, "Sizes need a sample; got none.")
    return np.asarray(variance[:, 0].mean(-1, dtype=np.float64, keepdims=True))
