r"""The reductions of a sweep: each turns the samples of a cell into results that the sweep keeps.

Statistics are means over all pairs (or tokens) of a sample: `correlation` and `variance` of a covariance, `overlap` of
tokens on the sphere. The results of a reduction have the dimension `point` (recorded layers or times) and other
dimensions, the same in every cell.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.base.errors import about, require
from limitformer.covariance.limit.covariance import CovarianceLimit, crossing_chances
from limitformer.numerics.random import key, replica_normals
from limitformer.results.datasets import correlation
from limitformer.results.outcomes import OUTCOMES, labels_of, outcomes
from limitformer.simulation.processes import limit
from limitformer.simulation.simulate import simulate
from limitformer.sphere.limit import TokenLimit
from limitformer.sphere.outcome import ANTIPODAL, CLUSTERS, LARGEST
from limitformer.sweep.grid import unknown_field

Array = NDArray[Any]


@dataclass(frozen=True)
class Reduced:
    """One result of a cell: its values and the names of their dimensions."""

    values: Array
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """The input of a reduction: the samples, and the arguments of `simulate` that gave them."""

    model: Any
    start: Any
    settings: Mapping[str, Any]
    samples: xr.Dataset


def statistics(samples: xr.Dataset) -> dict[str, Array]:
    """Return the statistics of the samples, each (sample, point)."""
    if "covariance" in samples:
        v = samples["covariance"].values
        variance = np.diagonal(v, axis1=-2, axis2=-1).mean(-1)
        pairs = np.triu_indices(v.shape[-1], 1)
        rho = correlation(samples).values[..., pairs[0], pairs[1]].mean(-1) if pairs[0].size else np.ones(v.shape[:2])
        return {"correlation": rho, "variance": variance}
    require("overlap" in samples, "Statistics need overlaps: leave out keep, or reduce to outcomes.")
    return {"overlap": samples["overlap"].values.mean(-1, dtype=np.float64)}


def full_samples(work: Work) -> dict[str, Reduced]:
    """Return all variables of the samples."""
    axis = str(next(iter(work.samples.data_vars.values())).dims[1])
    return {
        str(name): Reduced(variable.values, tuple("point" if dim == axis else str(dim) for dim in variable.dims))
        for name, variable in work.samples.data_vars.items()
        if "sample" in variable.dims
    }


def moments(work: Work) -> dict[str, Reduced]:
    """Return mean, variance and standard error of the mean."""
    results = {}
    for name, x in statistics(work.samples).items():
        variance = x.var(0, ddof=1) if len(x) > 1 else np.full(x.shape[1], np.nan)
        results[f"{name}_mean"] = Reduced(x.mean(0), ("point",))
        results[f"{name}_variance"] = Reduced(variance, ("point",))
        results[f"{name}_error"] = Reduced(np.sqrt(variance / len(x)), ("point",))
    return results


def quantiles(work: Work, levels: tuple[float, ...]) -> dict[str, Reduced]:
    return {
        f"{name}_quantile": Reduced(np.quantile(x, levels, axis=0), ("quantile", "point"))
        for name, x in statistics(work.samples).items()
    }


def outcome_counts(work: Work, level: float) -> dict[str, Reduced]:
    """Return probabilities of the outcomes with Wilson intervals; `equal` is that of two equal antipodal clusters."""
    dataset = outcomes(work.samples, level=level)
    counted = {name: Reduced(dataset[name].values, ("outcome", "point")) for name in ("probability", "low", "high")}
    labels = labels_of(work.samples, None)
    tokens = (work.model.model if isinstance(work.model, TokenLimit) else work.model).tokens
    alike = (labels[..., CLUSTERS] == 2) & (2 * labels[..., LARGEST] == tokens) & (labels[..., ANTIPODAL] > 0)
    return counted | {"equal": Reduced(alike.mean(0), ("point",))}


def stopping_times(work: Work, largest: float, smallest: float) -> dict[str, Reduced]:
    """Return the first layer/width (or time) with an eigenvalue of V outside, or the last one recorded.

    Between two recorded times of a limit an eigenvalue may be outside too (`crossing_chances`).
    """
    require("covariance" in work.samples, "Stopping times need a covariance.")
    several = work.samples["covariance"].shape[1] > 1
    require(several, 'Stopping times need more than the last point: record = "all", or a list.')
    values = np.linalg.eigvalsh(work.samples["covariance"].values)
    outside = (values[..., -1] > largest) | (values[..., 0] < smallest)
    if isinstance(work.model, CovarianceLimit):
        from scipy.special import ndtr  # slow to import, and only this reduction needs it

        v, times = work.samples["covariance"].values.astype(np.float64), work.samples["time"].values
        chances = crossing_chances(work.model, v, times, smallest, largest)
        normals = replica_normals(key(work.settings["seed"], "stopping times"), *chances.shape)
        before_exit = work.samples["exit"].values[:, None] > times[:-1]
        outside[:, 1:] |= before_exit & (ndtr(normals) < chances)
    last = outside.shape[1] - 1
    first = np.where(outside.any(1), outside.argmax(1), last)
    axis = str(work.samples["covariance"].dims[1])
    unit = work.model.width if axis == "depth" else 1
    return {"stopping_time": Reduced(work.samples[axis].values[first] / unit, ("sample",))}


def exits(work: Work) -> dict[str, Reduced]:
    """Return the share of the paths that have left the ball by each point, and its standard error √(p(1 − p)/n)."""
    require("exit" in work.samples, "Exits need a covariance.")
    axis = str(work.samples["covariance"].dims[1])
    share = (work.samples["exit"].values[:, None] <= work.samples[axis].values).mean(0)
    error = np.sqrt(share * (1 - share) / work.samples.sizes["sample"])
    return {"left": Reduced(share, ("point",)), "left_error": Reduced(error, ("point",))}


def ks_against_limit(work: Work) -> dict[str, Reduced]:
    """Return the Kolmogorov-Smirnov distance of each statistic from that of the limit, at the last point."""
    from scipy.stats import ks_2samp  # the import takes half a second

    settings = {name: value for name, value in work.settings.items() if name not in ("record", "method", "early_stop")}
    axis = str(next(iter(work.samples.data_vars.values())).dims[1])
    last = float(work.samples[axis].values[-1]) / (work.model.width if axis == "depth" else 1)
    other = simulate(limit(work.model), work.start, record=[last], progress=False, **settings)
    theirs = statistics(other)
    return {
        f"{name}_ks": Reduced(np.array(ks_2samp(x[:, -1], theirs[name][:, -1], method="asymp").statistic), ())
        for name, x in statistics(work.samples).items()
    }


REDUCTIONS: dict[str, Callable[..., dict[str, Reduced]]] = {
    "samples": full_samples,
    "moments": moments,
    "quantiles": quantiles,
    "outcomes": outcome_counts,
    "stopping_times": stopping_times,
    "exits": exits,
    "ks": ks_against_limit,
}
DEFAULT_LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
DEFAULT_COVERAGE = 0.95
DEFAULT_ENDS = {"largest": 1e4, "smallest": 1e-4}
LABELS: dict[str, list[Any]] = {"outcome": list(OUTCOMES)}


def checked_keep(keep: Mapping[str, Any]) -> dict[str, Any]:
    """Return `keep` as reduction → options, with defaults filled in.

    Raises:
        InputError: nothing to keep, an unknown reduction, or options of a wrong form.

    >>> checked_keep({"outcomes": True, "quantiles": [0.5], "samples": False})
    {'outcomes': {'level': 0.95}, 'quantiles': {'levels': [0.5]}}
    """
    reductions: dict[str, Any] = {}
    for name, value in keep.items():
        require(name in REDUCTIONS, unknown_field("A sweep's keep", name, list(REDUCTIONS)))
        if value is not False:
            reductions[name] = options_of(name, value)
    require(len(reductions) > 0, f"A sweep must keep something: {', '.join(REDUCTIONS)}.")
    return reductions


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def options_of(name: str, value: Any) -> dict[str, Any]:
    if name == "quantiles":
        value = value["levels"] if isinstance(value, Mapping) and set(value) == {"levels"} else value
        levels = list(DEFAULT_LEVELS if value is True else value if isinstance(value, list | tuple) else ())
        numbers = all(is_number(level) and 0 <= level <= 1 for level in levels) and len(set(levels)) == len(levels)
        valid = len(levels) > 0 and numbers
        require(valid, f"quantiles must be true or a list of different levels in [0, 1]; got {value!r}.")
        return {"levels": [float(level) for level in levels]}
    if name == "outcomes":
        options = {} if value is True else value
        valid = isinstance(options, Mapping) and set(options) <= {"level"}
        level: Any = options.get("level", DEFAULT_COVERAGE) if valid else None
        number = is_number(level) and 0 < level < 1
        require(number, f"outcomes must be true or have a level in (0, 1); got {value!r}.")
        return {"level": float(level)}
    if name == "stopping_times":
        ends = DEFAULT_ENDS if value is True else {**DEFAULT_ENDS, **value} if isinstance(value, Mapping) else {}
        known = set(ends) == set(DEFAULT_ENDS) and all(map(is_number, ends.values()))
        ordered = known and ends["smallest"] < ends["largest"]  # NaN is not
        require(ordered, f"stopping_times must be true or have numbers smallest < largest; got {value!r}.")
        return {end: float(number) for end, number in ends.items()}
    require(value is True or value == {}, f"{name} must be true or false; got {value!r}.")
    return {}


def reduced(work: Work, keep: Mapping[str, Any]) -> dict[str, Reduced]:
    """Apply all reductions of a sweep to a cell."""
    results: dict[str, Reduced] = {}
    for name, options in keep.items():
        with about(f"keep {name}"):
            results |= REDUCTIONS[name](work, **options)
    return results
