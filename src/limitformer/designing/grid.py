r"""The grid of a design: the same number of networks in every cell, with the same random numbers.

In the best cell the fewest networks miss the objective. Another cell is not distinguishable from it unless a sign test
of the networks that miss the objective in only one of both rejects it at 5 %: with equal random numbers, cells are
compared network by network.

The choice is among the cells that are not distinguishable from the best one and whose share of misses is allowed. It is
the one farthest, in steps of the grid, from all other cells: estimates are least certain at the edge, which moves with
depth, width and text. Cells beyond the grid count as others. Among equals the cell nearest to the present setting wins.
If no cell has an allowed share, the choice is the best cell, of those with equal misses the nearest to the objective.
"""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import xarray as xr
from scipy import stats
from scipy.ndimage import distance_transform_edt

from limitformer.base.errors import InputError
from limitformer.base.progress import Bar, PartOfBar
from limitformer.designing.objective import Array, Objective, Values
from limitformer.designing.report import clopper_pearson
from limitformer.designing.trials import Setting, Trials
from limitformer.sweep.reduce import Reduced
from limitformer.sweep.store import Store

EQUAL = 0.05  # p-value from which a cell is not distinguishable from the best one
ENDS = ("low", "high")


def settings_on(axes: Mapping[str, list[float]]) -> list[dict[str, float]]:
    """Return the settings of all cells, the last knob fastest."""
    shape = [len(values) for values in axes.values()]
    return [{name: axes[name][k] for name, k in zip(axes, place, strict=True)} for place in np.ndindex(*shape)]


def distances_on(
    axes: Mapping[str, list[float]],
    trials: Trials,
    objective: Objective,
    samples: int,
    seed: int,
    store: Store | None,
    bar: Bar | None,
) -> Array:
    """Return how far each network is from meeting the objective, (knobs…, sample); the store keeps finished cells."""
    settings = settings_on(axes)
    names = [""] * len(settings) if store is None else [name for _, name in store.names()]
    distances = []
    with nullcontext() if store is None else store.locked():
        for k, (setting, name) in enumerate(zip(settings, names, strict=True)):
            part = PartOfBar(bar, k * samples, samples, samples)
            distances.append(objective.distance(values_at(setting, trials, samples, seed, store, name, part)))
    return np.reshape(distances, (*map(len, axes.values()), samples))


def values_at(
    setting: Setting, trials: Trials, samples: int, seed: int, store: Store | None, name: str, bar: PartOfBar
) -> Values:
    """Return the values of the networks of a cell, from its file or by running them."""
    if store is None:
        return trials.values(setting, seed, samples, bar)
    try:
        stored = store.load(name, set())
        known = [each.removesuffix("_low") for each in stored if each.endswith("_low")]
        return {each: (stored[f"{each}_low"].values, stored[f"{each}_high"].values) for each in known}
    except (InputError, LookupError, TypeError, UserWarning):  # there is no such file, or it is damaged
        began = time.perf_counter()
        values = trials.values(setting, seed, samples, bar)
        ends = {f"{each}_{end}": both[k] for each, both in values.items() for k, end in enumerate(ENDS)}
        store.save(name, {each: Reduced(end, ("sample",)) for each, end in ends.items()}, time.perf_counter() - began)
        return values


def region_of(
    axes: Mapping[str, list[float]], distances: Array, trials: Trials, risk: float, about: dict[str, Any]
) -> xr.Dataset:
    """Return what is known of each cell as a dataset over the knobs."""
    missed, samples = distances > 0, distances.shape[-1]
    misses, mean = missed.sum(-1), distances.mean(-1)
    best = missed.reshape(-1, samples)[np.lexsort((mean.ravel(), misses.ravel()))[0]]
    only_here, only_best = (missed & ~best).sum(-1), (best & ~missed).sum(-1)
    p = 2 * stats.binom.cdf(np.minimum(only_here, only_best), only_here + only_best, 0.5)
    low, high = clopper_pearson(misses, samples)
    known = {
        "probability": 1 - misses / samples,
        "low": 1 - high,
        "high": 1 - low,
        "distance": mean,
        "safe": misses <= risk * samples,
        "best": p >= EQUAL,
    }
    exact = [trials.exact(setting) for setting in settings_on(axes)]
    known |= {name: np.reshape([each[name] for each in exact], misses.shape) for name in exact[0]}
    return xr.Dataset({name: (tuple(axes), values) for name, values in known.items()}, dict(axes), about)


def choose(region: xr.Dataset, present: Mapping[str, float]) -> dict[str, float]:
    """Return the chosen setting: inside the cells that are safe and not distinguishable from the best one."""
    dims = tuple(map(str, region["safe"].dims))
    away = sum(abs(np.log(region[name] / present[name])) for name in dims if present[name] > 0)
    steps = (xr.zeros_like(region["distance"]) + away).transpose(*dims).values
    inside = (region["safe"] & region["best"]).values
    depth = distance_transform_edt(np.pad(inside, 1))[(slice(1, -1),) * inside.ndim]
    order = (steps, -depth) if inside.any() else (steps, region["distance"].values, -region["probability"].values)
    place = np.unravel_index(np.lexsort([key.ravel() for key in order])[0], inside.shape)
    return {name: float(region[name][k]) for name, k in zip(dims, place, strict=True)}
