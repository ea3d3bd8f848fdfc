"""The inputs of a figure, and its claims: numbers, and whether the paper's statement holds for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike
from scipy.stats import ks_2samp

from limitformer.models import Start, Transformer
from limitformer.results.datasets import correlation
from limitformer.simulation.processes import limit
from limitformer.simulation.simulate import simulate


class FigureRun(NamedTuple):
    """The inputs of a figure other than its configuration.

    Attributes:
        seed: seed of all simulations.
        threads: number of threads; None means all cores.
        stores: folder of interrupted grids; None means that none are stored.
        runs: folder of finished runs, for the figures that are drawn from them.
    """

    seed: int
    threads: int | None
    stores: Path | None = None
    runs: Path | None = None


@dataclass(frozen=True)
class NoConfig:
    """The configuration of figures of finished training runs: empty, as the runs have their own."""


@dataclass(frozen=True)
class Claim:
    """A number, its name, and whether the paper's statement about it holds (None: the paper has no statement)."""

    name: str
    value: float
    holds: bool | None = None


def chain(
    model: Transformer, start: Start, samples: int, run: FigureRun, record: list[int] | None = None
) -> xr.Dataset:
    """Simulate the exact chain of the finite network."""
    return simulate(model, start, samples=samples, seed=run.seed, threads=run.threads, record=record, progress=False)


def sde_at_horizon(model: Transformer, start: Start, samples: int, dt: float, run: FigureRun) -> xr.Dataset:
    """Simulate the limit, recorded at T = depth/width only."""
    sde = limit(model)
    return simulate(
        sde, start, samples=samples, seed=run.seed, threads=run.threads, record=[sde.horizon], dt=dt, progress=False
    )


def pair_correlation(dataset: xr.Dataset) -> xr.DataArray:
    """Return ρ of tokens 0 and 1: (sample, depth or time)."""
    return correlation(dataset)[..., 0, 1].drop_vars("label", errors="ignore")


def ks_distance(x: ArrayLike, y: ArrayLike) -> float:
    return float(ks_2samp(x, y, method="asymp").statistic)


def ks_noise(x: ArrayLike, y: ArrayLike) -> float:
    """Return the distance that samples of one law exceed once in a thousand times (Smirnov's asymptotic law)."""
    n, k = np.size(x), np.size(y)
    return float(np.sqrt(-np.log(0.001 / 2) / 2 * (n + k) / (n * k)))


def ks_claim(what: str, network: ArrayLike, sde: ArrayLike) -> Claim:
    """Return the distance of network and SDE; it holds where a density plot cannot distinguish them (0.05)."""
    distance, noise = ks_distance(network, sde), ks_noise(network, sde)
    name = f"KS distance of network and SDE, {what} (sampling noise: {noise:.3f})"
    return Claim(name, distance, distance < max(0.05, noise))
