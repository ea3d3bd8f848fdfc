"""Chains on the sphere, shares of their outcomes by time, and colours, shared by the figures of [CT]."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.colors import LinearSegmentedColormap
from numpy.typing import ArrayLike, NDArray

from limitformer.models import HybridTransformer, StochasticTransformer
from limitformer.simulation.simulate import simulate
from limitformer.sphere.overlap import overlap
from limitformer.sweep.describe import model_seed
from limitformer_papers.common.claims import FigureRun

SphereKind = StochasticTransformer | HybridTransformer

# As in [CT, Fig. 4]; they differ in lightness too.
SINGLE_COLOUR, ANTIPODAL_COLOUR, UNRESOLVED_COLOUR = "#E0409A", "#4A2A8C", "#8A8A8A"
# From −1, all in a single cluster, to 1, all antipodal.
OUTCOME_COLOURS = LinearSegmentedColormap.from_list("outcome", [SINGLE_COLOUR, "white", ANTIPODAL_COLOUR])


def tokens_chain(model: SphereKind, times: ArrayLike, samples: int, run: FigureRun, **options: Any) -> xr.Dataset:
    """Simulate the exact chain of `model` at `times`, the last of which is the horizon; each model has its own seed."""
    record = np.asarray(times, np.float64)
    return simulate(
        model,
        options.pop("start", None),
        samples=samples,
        seed=model_seed(run.seed, model),
        threads=run.threads,
        record=record.tolist(),
        horizon=float(record[-1]),
        progress=False,
        **options,
    )


def shares(samples: xr.Dataset) -> xr.Dataset:
    """Return shares of the samples by time from outcomes; the first three add up to 1.

    `single`: all tokens together; `antipodal`: every pair together or antipodal, some antipodal ([CT, Fig. 9] calls it
    a loop); `unresolved`: some pair is neither; `some_pair`: some pair is antipodal.
    """
    resolved, some = samples["unresolved_pairs"] == 0, samples["antipodal_pairs"] > 0
    parts = {"single": resolved & ~some, "antipodal": resolved & some, "unresolved": ~resolved, "some_pair": some}
    return xr.Dataset({name: part.mean("sample") for name, part in parts.items()}, attrs={})


def exact_shares(model: SphereKind, times: ArrayLike, tolerance: float) -> NDArray[np.float64]:
    """Return the shares of two tokens together, antipodal and neither, (3, time), by the law of their overlap."""
    law = overlap(model).density(times)
    width, edge = law.attrs["spacing"], np.arctanh(1 - tolerance)
    below = law["below"].values[:, None] + np.cumsum(law["density"].values, axis=1) * width
    upper_ends = law["artanh_overlap"].values + width / 2
    antipodal, not_together = (np.array([np.interp(u, upper_ends, row) for row in below]) for u in (-edge, edge))
    return np.stack([1 - not_together, antipodal, not_together - antipodal])


def evenly(horizon: float, points: int, layers_per_unit_time: int) -> NDArray[np.float64]:
    """Return about `points` times from 0 to `horizon`, each after a whole number of layers."""
    steps = np.linspace(0, horizon * layers_per_unit_time, points)
    return np.unique(np.rint(steps)) / layers_per_unit_time


def standard_error(probability: ArrayLike, samples: int) -> NDArray[np.float64]:
    """Return the standard error of the share of `samples` with this probability; at least that of one sample."""
    p = np.asarray(probability, np.float64)
    return np.maximum(np.sqrt(p * (1 - p) / samples), 1 / samples)


def text_of(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)
