r"""The region of settings that meet an objective: a grid over the knobs, coarse first and then finer at its edge.

Sampling of a cell ends as soon as it cannot be safe: with at most n samples and risk ε, when more than ε n networks
missed. The finer grid halves the steps, on a logarithmic scale. A finer cell is sampled if its coarse neighbours are
neither all safe nor all missed by every network; if no coarse cell is safe, also around the one nearest to the
objective. Other finer cells lie between cells of one kind, and get their mean.

The choice is the safe cell farthest from the region's edge, in steps of the grid: estimates are least certain at the
edge, which moves with depth, width and text. Cells beyond the grid count as unsafe. Among equals the cell nearest to
the present setting wins.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import floor, log
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy.ndimage import distance_transform_edt

from limitformer.base.progress import advance, progress_bar
from limitformer.designing.objective import Objective
from limitformer.designing.trials import Trials

Array = NDArray[np.float64]
Place = tuple[int, ...]


@dataclass
class Region:
    """The state of each cell of the finer grid; cells with even numbers are the coarse grid.

    Attributes:
        axes: values by knob.
        probability: that the objective is met; NaN where nothing was sampled.
        distance: the mean distance from meeting it.
        samples: networks that were sampled.
        safe: whether few enough of them miss the objective.
        exact: numbers that are known exactly, by name.
    """

    axes: dict[str, list[float]]
    probability: Array
    distance: Array
    samples: NDArray[np.int64]
    safe: NDArray[np.bool_]
    exact: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def over(cls, coarse: dict[str, list[float]]) -> "Region":
        """Return a region without any trials yet."""
        axes = {name: finer(values) for name, values in coarse.items()}
        shape = tuple(len(values) for values in axes.values())
        unknown = np.full(shape, np.nan)
        return cls(axes, unknown, unknown.copy(), np.zeros(shape, int), np.zeros(shape, bool))

    def resume(self, partial: xr.Dataset) -> None:
        """Copy the cells that an interrupted search of the same question sampled."""
        seen = partial["samples"].values > 0
        self.samples[seen] = partial["samples"].values[seen]
        self.safe[seen] = partial["safe"].values.astype(bool)[seen]
        self.probability[seen] = partial["probability"].values[seen]
        self.distance[seen] = partial["distance"].values[seen]
        for name in set(partial.data_vars) - {"probability", "distance", "samples", "safe"}:
            self.exact[str(name)] = np.where(seen, partial[name].values, np.nan)

    def setting(self, place: Place) -> dict[str, float]:
        """Return the knobs at a cell."""
        return {name: values[k] for (name, values), k in zip(self.axes.items(), place, strict=True)}

    @property
    def coarse(self) -> list[Place]:
        """The cells of the coarse grid."""
        return list(product(*(range(0, n, 2) for n in self.probability.shape)))

    def neighbours(self, place: Place) -> list[Place]:
        """Return the coarse cells around a cell; a coarse cell has itself."""
        return list(product(*({k - k % 2, k + k % 2} for k in place)))

    def undecided(self) -> list[Place]:
        """Return the finer cells to sample."""
        coarse = set(self.coarse)
        finer = [place for place in np.ndindex(self.probability.shape) if place not in coarse]
        safe = any(self.safe[place] for place in coarse)
        nearest = None if safe else min(self.coarse, key=lambda place: self.distance[place])
        return [place for place in finer if nearest in self.neighbours(place) or not self.alike(place)]

    def alike(self, place: Place) -> bool:
        """Return whether the coarse cells around it are all safe, or all missed by every network."""
        around = self.neighbours(place)
        return all(self.safe[one] for one in around) or all(self.probability[one] == 0 for one in around)

    def fill(self) -> None:
        """Give cells without samples the mean of their coarse neighbours, which agree."""
        for place in np.ndindex(self.probability.shape):
            if self.samples[place] == 0 and all(self.samples[one] for one in self.neighbours(place)):
                around = self.neighbours(place)
                self.probability[place] = np.mean([self.probability[one] for one in around])
                self.distance[place] = np.mean([self.distance[one] for one in around])
                self.safe[place] = all(self.safe[one] for one in around)

    def dataset(self, about: dict[str, Any]) -> xr.Dataset:
        """Return the region as a dataset over the knobs."""
        known = {"probability": self.probability, "distance": self.distance, "samples": self.samples, "safe": self.safe}
        dims = tuple(self.axes)
        variables = {name: (dims, np.array(values)) for name, values in (known | self.exact).items()}
        return xr.Dataset(variables, dict(self.axes), about)


def finer(values: list[float]) -> list[float]:
    """Return the values with the geometric mean between every two."""
    between = [float(f"{(a * b) ** 0.5:.4g}") for a, b in pairwise(values)]
    return [value for pair in zip(values, [*between, 0.0], strict=True) for value in pair][:-1]


def search(
    region: Region, trials: Trials, objective: Objective, risk: float, samples: int, seed: int, progress: bool
) -> None:
    """Sample the coarse cells, then the finer ones at the edge; results are stored in `region`."""
    for description, places in stages(region):
        new = [place for place in places if region.samples[place] == 0]
        before = len(places) - len(new)
        bar = progress_bar(description, len(places), before) if progress else None
        try:
            for done, place in enumerate(new, before + 1):
                sample(region, place, trials, objective, risk, samples, seed)
                advance(bar, done)
        finally:
            advance(bar, -1)
    region.fill()


def stages(region: Region) -> Iterator[tuple[str, list[Place]]]:
    """Yield the coarse cells, then, once those are sampled, the undecided ones."""
    yield "settings", region.coarse
    yield "settings at the edge", region.undecided()


def sample(
    region: Region, place: Place, trials: Trials, objective: Objective, risk: float, samples: int, seed: int
) -> None:
    """Sample one cell until it is shown to be unsafe, or has all its samples."""
    setting, misses, distances = region.setting(place), 0, list[float]()
    while len(distances) < samples and misses <= floor(risk * samples):
        part = range(len(distances), min(samples, len(distances) + trials.chunk))
        distance = objective.distance(trials.values(setting, seed, part))
        misses += int((distance > 0).sum())
        distances.extend(distance)
    region.samples[place] = len(distances)
    region.probability[place] = 1 - misses / len(distances)
    region.distance[place] = float(np.mean(distances))
    region.safe[place] = misses <= floor(risk * samples)
    for name, value in trials.exact(setting).items():
        region.exact.setdefault(name, np.full(region.probability.shape, np.nan))[place] = value


def choose(region: Region, present: dict[str, float]) -> Place:
    """Return the safe cell farthest from the edge; if none is safe, the one nearest to the objective."""
    steps = np.array([abs_steps(region, place, present) for place in np.ndindex(region.safe.shape)])
    away = steps.reshape(region.safe.shape)
    if not region.safe.any():
        score = np.where(region.samples > 0, -region.distance - 1e-9 * away, -np.inf)
    else:
        depth = distance_transform_edt(np.pad(region.safe, 1))[(slice(1, -1),) * region.safe.ndim]
        score = np.where(region.safe, depth - 1e-6 * away, -np.inf)
    return tuple(int(k) for k in np.unravel_index(np.argmax(score), score.shape))


def abs_steps(region: Region, place: Place, present: dict[str, float]) -> float:
    """Return how many factors of e a cell is from the present setting, over all knobs."""
    setting = region.setting(place)
    return sum(abs(log(setting[name] / present[name])) for name in present if present[name] > 0)
