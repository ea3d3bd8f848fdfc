r"""[ST, Fig. 7]: density of the covariance V_12 at the last layer, attention network and SDE [ST, Thm 4.2].

Parameters of the caption: n = 200, d = 150, γ = 1/√8, τ₀ = 1, V₀ = 0.2 (unit variances), SDE step 0.01, 2¹² samples.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from numpy.typing import NDArray

from limitformer.models import ShapedAttention, Transformer, equicorrelated
from limitformer.plot import density, draw_densities, legend_below, panels
from limitformer_papers.common.claims import Claim, FigureRun, chain, ks_claim, sde_at_horizon


@dataclass(frozen=True, kw_only=True)
class Config:
    """The caption's parameters."""

    width: int = 200
    depth: int = 150
    gamma: float = 1 / sqrt(8)
    tau0: float = 1.0
    covariance: float = 0.2
    dt: float = 0.01
    samples: int = 2**12


paper = Config


def quick() -> Config:
    return Config(samples=2**9)


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return samples of V_12 and V_11 at the last layer: `network…`, `sde…` (sample,)."""
    start = equicorrelated(tokens=2, correlation=config.covariance)
    model = Transformer(
        width=config.width, depth=config.depth, gamma=config.gamma, attention=ShapedAttention(tau0=config.tau0)
    )
    network = chain(model, start, config.samples, run, [config.depth])["covariance"].values[:, 0]
    sde = sde_at_horizon(model, start, config.samples, config.dt, run)["covariance"].values[:, 0]
    return xr.Dataset(
        {
            "network": ("sample", network[:, 0, 1]),
            "sde": ("sample", sde[:, 0, 1]),
            "network_variance": ("sample", network[:, 0, 0]),
            "sde_variance": ("sample", sde[:, 0, 0]),
        }
    )


def claims(data: xr.Dataset) -> list[Claim]:
    """The SDE approximates the network."""
    low, high = np.quantile(data["network"], [0.05, 0.95])
    return [
        ks_claim("V of two tokens", data["network"].values, data["sde"].values),
        ks_claim("variance of a token", data["network_variance"].values, data["sde_variance"].values),
        Claim("5th percentile of V of two tokens, network", float(low)),
        Claim("95th percentile of V of two tokens, network", float(high)),
        Claim("where the network's density is largest", peak(data)),
        Claim("largest |V| of two tokens, SDE", float(abs(data["sde"]).max())),
    ]


def drawn(data: xr.Dataset) -> NDArray[np.float64]:
    """Return the points at which the density is drawn, between the 0.2 % and 99.8 % quantiles."""
    low, high = np.quantile(np.concatenate([data["network"], data["sde"]]), [0.002, 0.998])
    return np.linspace(low, high, 401)


def peak(data: xr.Dataset) -> float:
    """Return the covariance at which the network's density is largest."""
    return float(drawn(data)[density(data["network"], drawn(data)).argmax()])


def draw(data: xr.Dataset) -> Figure:
    figure, (axes,) = panels(1)
    draw_densities(axes, data["network"].values, data["sde"].values, drawn(data))
    axes.set(xlabel="covariance V of two tokens at the last layer", ylabel="density")
    legend_below(axes, 3)
    return figure
