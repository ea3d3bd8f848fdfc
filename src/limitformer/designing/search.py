r"""The region of settings that meet an objective: a grid over the knobs, coarse first and then finer at its edge.

A cell ends as soon as it cannot be safe any more: with n samples at the most and risk ε, when more than ε n networks
have missed. The finer grid halves the steps, on the scale of logarithms. Of its cells those are looked at whose coarse
neighbours are not all safe, nor all missed by every network; where none is safe, those around the one that comes
nearest too. The others are between cells of one kind, and are read from them.

Chosen is the safe cell that lies furthest from the region's edge, in steps of the grid: estimates are least sure at the
edge, and it moves with depth, width and text. What is beyond the grid was not looked at and counts as unsafe. Of equals
the one nearest to the present setting.
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
    """What was found of each cell of the finer grid; those with even numbers are the coarse one.

    Attributes:
        axes: values by knob.
        probability: that the objective is met; NaN where it was not looked at.
        distance: the mean distance from meeting it.
        samples: networks that were looked at.
    """

    axes: dict[str, list[float]]
    probability: Array
    distance: Array
    samples: NDArray[np.int64]
    safe: NDArray[np.bool_]
    beside: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def over(cls, coarse: dict[str, list[float]]) -> "Region":
        """Of which nothing is known."""
        axes = {name: finer(values) for name, values in coarse.items()}
        shape = tuple(len(values) for values in axes.values())
        unknown = np.full(shape, np.nan)
        return cls(axes, unknown, unknown.copy(), np.zeros(shape, int), np.zeros(shape, bool))

    def resume(self, partial: xr.Dataset) -> None:
        """Take over the cells that an interrupted search of the same question looked at."""
        seen = partial["samples"].values > 0
        self.samples[seen] = partial["samples"].values[seen]
        self.safe[seen] = partial["safe"].values.astype(bool)[seen]
        self.probability[seen] = partial["probability"].values[seen]
        self.distance[seen] = partial["distance"].values[seen]
        for name in set(partial.data_vars) - {"probability", "distance", "samples", "safe"}:
            self.beside[str(name)] = np.where(seen, partial[name].values, np.nan)

    def setting(self, place: Place) -> dict[str, float]:
        """The knobs at a cell."""
        return {name: values[k] for (name, values), k in zip(self.axes.items(), place, strict=True)}

    @property
    def coarse(self) -> list[Place]:
        """Cells of the coarse grid."""
        return list(product(*(range(0, n, 2) for n in self.probability.shape)))

    def neighbours(self, place: Place) -> list[Place]:
        """The coarse cells around a cell; of a coarse one itself."""
        return list(product(*({k - k % 2, k + k % 2} for k in place)))

    def undecided(self) -> list[Place]:
        """Finer cells to be looked at."""
        coarse = set(self.coarse)
        finer = [place for place in np.ndindex(self.probability.shape) if place not in coarse]
        safe = any(self.safe[place] for place in coarse)
        nearest = None if safe else min(self.coarse, key=lambda place: self.distance[place])
        return [place for place in finer if nearest in self.neighbours(place) or not self.alike(place)]

    def alike(self, place: Place) -> bool:
        """Whether the coarse cells around it are all safe, or all missed by every network."""
        around = self.neighbours(place)
        return all(self.safe[one] for one in around) or all(self.probability[one] == 0 for one in around)

    def fill(self) -> None:
        """Give the cells that were not looked at the mean of their coarse neighbours, which agree."""
        for place in np.ndindex(self.probability.shape):
            if self.samples[place] == 0 and all(self.samples[one] for one in self.neighbours(place)):
                around = self.neighbours(place)
                self.probability[place] = np.mean([self.probability[one] for one in around])
                self.distance[place] = np.mean([self.distance[one] for one in around])
                self.safe[place] = all(self.safe[one] for one in around)

    def dataset(self, about: dict[str, Any]) -> xr.Dataset:
        """Over the knobs."""
        known = {"probability": self.probability, "distance": self.distance, "samples": self.samples, "safe": self.safe}
        dims = tuple(self.axes)
        variables = {name: (dims, np.array(values)) for name, values in (known | self.beside).items()}
        return xr.Dataset(variables, dict(self.axes), about)


def finer(values: list[float]) -> list[float]:
    """With the geometric mean between every two."""
    between = [float(f"{(a * b) ** 0.5:.4g}") for a, b in pairwise(values)]
    return [value for pair in zip(values, [*between, 0.0], strict=True) for value in pair][:-1]


def search(
    region: Region, trials: Trials, objective: Objective, risk: float, samples: int, seed: int, progress: bool
) -> None:
    """Look at the coarse cells, and then at the finer ones at the edge; what is known stays in `region`."""
    for description, places in stages(region):
        new = [place for place in places if region.samples[place] == 0]
        before = len(places) - len(new)
        shown = progress_bar(description, len(places), before) if progress else None
        try:
            for done, place in enumerate(new, before + 1):
                look(region, place, trials, objective, risk, samples, seed)
                advance(shown, done)
        finally:
            advance(shown, -1)
    region.fill()


def stages(region: Region) -> Iterator[tuple[str, list[Place]]]:
    """The second begins when the first is done."""
    yield "settings", region.coarse
    yield "settings at the edge", region.undecided()


def look(
    region: Region, place: Place, trials: Trials, objective: Objective, risk: float, samples: int, seed: int
) -> None:
    """At one cell, until it cannot be safe any more."""
    setting, misses, distances = region.setting(place), 0, list[float]()
    while len(distances) < samples and misses <= floor(risk * samples):
        part = range(len(distances), min(samples, len(distances) + trials.chunk))
        found = objective.distance(trials.values(setting, seed, part))
        misses += int((found > 0).sum())
        distances.extend(found)
    region.samples[place] = len(distances)
    region.probability[place] = 1 - misses / len(distances)
    region.distance[place] = float(np.mean(distances))
    region.safe[place] = misses <= floor(risk * samples)
    for name, value in trials.beside(setting).items():
        region.beside.setdefault(name, np.full(region.probability.shape, np.nan))[place] = value


def chosen(region: Region, present: dict[str, float]) -> Place:
    """The safe cell furthest from the edge; where none is safe, the one that comes nearest."""
    steps = np.array([abs_steps(region, place, present) for place in np.ndindex(region.safe.shape)])
    away = steps.reshape(region.safe.shape)
    if not region.safe.any():
        score = np.where(region.samples > 0, -region.distance - 1e-9 * away, -np.inf)
    else:
        depth = distance_transform_edt(np.pad(region.safe, 1))[(slice(1, -1),) * region.safe.ndim]
        score = np.where(region.safe, depth - 1e-6 * away, -np.inf)
    return tuple(int(k) for k in np.unravel_index(np.argmax(score), score.shape))


def abs_steps(region: Region, place: Place, present: dict[str, float]) -> float:
    """How many factors of e a cell is from the present setting, over all knobs."""
    setting = region.setting(place)
    return sum(abs(log(setting[name] / present[name])) for name in present if present[name] > 0)
