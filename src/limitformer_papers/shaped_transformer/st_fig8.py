r"""[ST, Fig. 8]: median stopping time t* (`stopping`) of an attention network over γ and τ₀.

Parameters of the caption: n = d = 200, 100 samples, |x₀| ≈ 10√n; the grid and the number of tokens are not in it.
Beyond γ ≈ 0.8 a warm network (τ₀ ≈ 10) is stable for longer again: its tokens collapse before they explode.
"""

from dataclasses import dataclass

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from limitformer.plot import panels
from limitformer_papers.common.claims import Claim, FigureRun
from limitformer_papers.shaped_transformer.stopping import Adversarial, stopping_times

WARM = 16.0  # τ₀


@dataclass(frozen=True, kw_only=True)
class Config(Adversarial):
    """The caption's parameters and the grid."""

    gammas: tuple[float, ...] = tuple(np.round(np.linspace(0.05, 1, 20), 2).tolist())
    temperatures: tuple[float, ...] = tuple(np.round(np.geomspace(0.5, 50, 21), 4).tolist())


paper = Config


def quick() -> Config:
    return Config(gammas=(0.05, 0.2, 0.6, 1.0), temperatures=(0.5, 2.0, 8.0, 50.0), samples=40)


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return `median` (tau0, gamma) of the stopping time."""
    over = {"attention.tau0": config.temperatures, "gamma": config.gammas}
    times = stopping_times(config, config.temperatures[0], over, run, "map").rename({"attention.tau0": "tau0"})
    return xr.Dataset({"median": times.median("sample")})


def claims(data: xr.Dataset) -> list[Claim]:
    """A smaller γ and a larger τ₀ both delay the instability, except near γ = 1."""
    median = data["median"]
    usual = median.sel(gamma=slice(None, 0.7))
    rise, fall = usual.diff("gamma").max(), -usual.diff("tau0").min()
    return [
        Claim("share of the map that is stable up to t = 1", float((median == 1).mean())),
        Claim("largest rise of t* from one γ to the next, γ ≤ 0.7", float(rise), bool(rise <= 0.1)),
        Claim("largest fall of t* from one τ₀ to the next, γ ≤ 0.7", float(fall), bool(fall <= 0.1)),
        Claim("largest rise of t* from one γ to the next, whole map", float(median.diff("gamma").max())),
        *warm(median.sel(tau0=WARM, method="nearest")),
    ]


def warm(median: xr.DataArray) -> list[Claim]:
    """Return the medians of a warm network, which is stable for longer again near γ = 1."""
    chosen = [g for g in (0.7, 0.8, 0.9, 1.0) if g in median.gamma]
    return [Claim(f"median t* at γ = {g:g}, τ₀ = {float(median.tau0):.3g}", float(median.sel(gamma=g))) for g in chosen]


def draw(data: xr.Dataset) -> Figure:
    figure, (axes,) = panels(1, width=5.6, height=4.2)
    axes.grid(False)
    image = axes.pcolormesh(data.gamma, data.tau0, data["median"], cmap="viridis", vmin=0, vmax=1, shading="nearest")
    axes.set(xlabel="residual strength γ", ylabel="temperature τ₀", yscale="log")
    axes.set_yticks([0.5, 1, 2, 5, 10, 20, 50], [0.5, 1, 2, 5, 10, 20, 50])
    figure.colorbar(image, label="median stopping time t* (capped at 1)")
    return figure
