r"""[ST, Fig. 3] (Fig. 2 of the first version): residual strength γ slows a ResNet's correlations down.

Left: density of ρ at the last layer for several γ, of the ResNet [ST, eq. 4] and of its SDE [ST, Thm 3.2]; γ = 1 is an
MLP, γ = 1/√d the regime of Hayou and Yang (2023). Right: 95th percentile of |ρ| over γ.
Parameters of the caption: n = 300, d = 100, ρ₀ = 0.2, c₊ = 0, c₋ = −1, 2¹³ samples. The caption gives no list of γ.

In the regime of Hayou and Yang λ = 1. The activation is piecewise linear, so the correlations are those of the network
with λ and γ divided by √(λ² + γ²), which has a limit; that network is drawn with γ = 1/√d, and λ = 1 is a claim.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from limitformer.base.progress import track
from limitformer.models import ShapedReLU, Transformer, equicorrelated
from limitformer.plot import correlation_density, correlations, legend_below, panels, sequence
from limitformer_papers.common.claims import (
    Claim,
    FigureRun,
    chain,
    ks_claim,
    ks_distance,
    pair_correlation,
    sde_at_horizon,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The caption's parameters; `shown` has the γ of the densities, `gammas` those of the curve."""

    width: int = 300
    depth: int = 100
    correlation: float = 0.2
    c_plus: float = 0.0
    c_minus: float = -1.0
    shown: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75, 1.0)
    gammas: tuple[float, ...] = tuple(np.round(np.linspace(0.05, 1, 20), 2).tolist())
    dt: float = 0.01
    samples: int = 2**13


paper = Config


def quick() -> Config:
    return Config(gammas=(0.1, 0.25, 0.5, 0.75, 1.0), samples=2**10)


def resnet(config: Config, gamma: float, lam: float | None = None) -> Transformer:
    feedforward = ShapedReLU(c_plus=config.c_plus, c_minus=config.c_minus)
    return Transformer(width=config.width, depth=config.depth, gamma=gamma, lam=lam, feedforward=feedforward)


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return samples of ρ at the last layer for every γ: `network`, `sde` (gamma, sample), and `unit_skip` for λ =
    1.
    """
    start = equicorrelated(tokens=2, correlation=config.correlation)
    last = [config.depth]
    gammas = sorted({*config.shown, *config.gammas})
    models = [resnet(config, gamma) for gamma in gammas]
    network = [
        pair_correlation(chain(model, start, config.samples, run, last)).values[:, 0]
        for model in track(models, "networks")
    ]
    sde = [
        pair_correlation(sde_at_horizon(m, start, config.samples, config.dt, run)).values[:, 0]
        for m in track(models, "limits")
    ]
    unit = chain(resnet(config, 1 / sqrt(config.depth), lam=1.0), start, config.samples, run, last)
    return xr.Dataset(
        {
            "network": (("gamma", "sample"), np.stack(network)),
            "sde": (("gamma", "sample"), np.stack(sde)),
            "unit_skip": ("sample", pair_correlation(unit).values[:, 0]),
        },
        coords={"gamma": gammas, "shown": ("shown", list(config.shown))},
        attrs={"hayou_yang_gamma": 1 / sqrt(config.depth)},
    )


def percentile(samples: xr.DataArray) -> xr.DataArray:
    """Return the 95th percentile of |ρ| for each γ."""
    return abs(samples).quantile(0.95, dim="sample")


def claims(data: xr.Dataset) -> list[Claim]:
    """The SDE approximates the network for every γ, and the 95th percentile rises with γ."""
    distances = [
        ks_claim(f"γ = {g:g}", data["network"].sel(gamma=g), data["sde"].sel(gamma=g)) for g in data.shown.values
    ]
    curve = percentile(data["network"])
    rises = bool((np.diff(curve.values) > -0.01).all())
    apart = abs(curve - percentile(data["sde"]))
    scaled = 1 / sqrt(1 + 1 / data.attrs["hayou_yang_gamma"] ** 2)
    nearest = data["network"].sel(gamma=scaled, method="nearest")
    return [
        *distances,
        Claim("95th percentile of |ρ| at the smallest γ", float(curve[0])),
        Claim("95th percentile of |ρ| at γ = 1; it rises with γ", float(curve[-1]), rises),
        Claim("largest difference of network and SDE in it, any γ", float(apart.max()), bool(apart.max() < 0.05)),
        Claim(
            "KS distance of λ = 1, γ = 1/√d and λ = √(1 − γ²), γ = 1/√d",
            ks_distance(data["unit_skip"].values, nearest.values),
        ),
    ]


def draw(data: xr.Dataset) -> Figure:
    figure, (left, right) = panels(2)
    grid = correlations()
    for gamma, colour in zip(data.shown.values, sequence(data.sizes["shown"]), strict=True):
        one = data.sel(gamma=gamma)
        name = f"γ = {gamma:g}" + (" = 1/√d" if np.isclose(gamma, data.attrs["hayou_yang_gamma"]) else "")
        left.plot(grid, correlation_density(one["network"], grid), color=colour, label=name)
        left.plot(grid, correlation_density(one["sde"], grid), color=colour, linestyle="--")
    left.plot([], [], color="gray", linestyle="--", label="dashed: SDE")
    left.set(xlabel="correlation ρ at the last layer", ylabel="density", ylim=(0, None), xticks=np.linspace(-1, 1, 5))
    legend_below(left, 3)
    right.plot(data.gamma, percentile(data["network"]), "o-", markersize=4, label="network (exact chain)")
    right.plot(data.gamma, percentile(data["sde"]), linestyle="--", label="SDE")
    right.set(xlabel="residual strength γ", ylabel="95th percentile of |ρ|", ylim=(0, 1.02))
    legend_below(right, 2)
    return figure
