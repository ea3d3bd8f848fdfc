"""What a figure is made with, and what it says: numbers, and whether the paper's statement holds for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike
from scipy.stats import ks_2samp

from limitformer.models import Start, Transformer
from limitformer.results.correlation import correlation
from limitformer.simulation.limit import limit
from limitformer.simulation.simulate import simulate


class Run(NamedTuple):
    """What a figure is made with.

    Attributes:
        seed: of all simulations.
        threads: None means all cores.
        stores: a folder in which interrupted grids wait; None means none.
        runs: a folder of finished runs, for the figures that are drawn from them.
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
    """One number, what it is, and whether what the paper says of it holds (None: it says nothing)."""

    name: str
    value: float
    holds: bool | None = None


def chain(model: Transformer, start: Start, samples: int, run: Run, record: list[int] | None = None) -> xr.Dataset:
    """The exact chain of the finite network."""
    return simulate(model, start, samples=samples, seed=run.seed, threads=run.threads, record=record, progress=False)


def sde_at_horizon(model: Transformer, start: Start, samples: int, dt: float, run: Run) -> xr.Dataset:
    """The limit, at T = depth/width alone."""
    sde = limit(model)
    return simulate(
        sde, start, samples=samples, seed=run.seed, threads=run.threads, record=[sde.horizon], dt=dt, progress=False
    )


def pair_correlation(dataset: xr.Dataset) -> xr.DataArray:
    """ρ of tokens 0 and 1: (sample, depth or time)."""
    return correlation(dataset)[..., 0, 1].drop_vars("label", errors="ignore")


def ks_distance(x: ArrayLike, y: ArrayLike) -> float:
    """The largest difference of the two samples' distribution functions."""
    return float(ks_2samp(x, y, method="asymp").statistic)


def ks_noise(x: ArrayLike, y: ArrayLike) -> float:
    """The distance that samples of one law exceed once in a thousand times (Smirnov's asymptotic law)."""
    n, k = np.size(x), np.size(y)
    return float(np.sqrt(-np.log(0.001 / 2) / 2 * (n + k) / (n * k)))


def ks_claim(what: str, network: ArrayLike, sde: ArrayLike) -> Claim:
    """The distance of network and SDE; it holds where a density plot cannot tell them apart (0.05)."""
    distance, noise = ks_distance(network, sde), ks_noise(network, sde)
    name = f"KS distance of network and SDE, {what} (sampling noise: {noise:.3f})"
    return Claim(name, distance, distance < max(0.05, noise))
