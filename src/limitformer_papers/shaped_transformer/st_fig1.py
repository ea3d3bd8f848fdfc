r"""[ST, Fig. 1]: shaped attention prevents rank collapse.

Left: mean |ρ| (and mean ρ) by layer of Transformers [ST, eq. 11], shaped, unshaped, and unshaped with Pre-LN. The
caption does not say which residual strengths Pre-LN has, so both readings are drawn: λ² + γ² = 1 as in the other two,
and λ = γ = 1, the vanilla block of [ST, Sec. 2].
Right: density of ρ at the last layer, of the attention network [ST, eq. 1, 9] and of its SDE [ST, Thm 4.2].
Parameters of the caption: n = 200, d = 150, γ = 1/√8, τ₀ = 1, ρ₀ = 0.2, SDE step 0.01. The caption's 2¹² samples leave
noise in the densities; here there are 2¹⁶.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from limitformer.base.progress import track
from limitformer.models import ShapedAttention, ShapedReLU, SoftmaxAttention, Transformer, equicorrelated
from limitformer.plot import (
    BLACK,
    BLUE,
    GREEN,
    RED,
    correlation_density,
    correlations,
    draw_densities,
    legend_below,
    panels,
)
from limitformer_papers.common.claims import Claim, FigureRun, chain, ks_claim, pair_correlation, sde_at_horizon

COLLAPSED = 0.99
SHAPED, UNSHAPED, PRE_LN, VANILLA = "shaped", "unshaped", "unshaped + Pre-LN", "unshaped + Pre-LN, λ = γ = 1"
# Pre-LN and unshaped nearly coincide: dashes on a wide line.
LOOKS: dict[str, Any] = {
    SHAPED: {"color": BLUE},
    UNSHAPED: {"color": RED, "linewidth": 4.5, "alpha": 0.6},
    PRE_LN: {"color": BLACK, "linestyle": "--"},
    VANILLA: {"color": GREEN, "linestyle": "-."},
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The caption's parameters, except for the number of samples."""

    width: int = 200
    depth: int = 150
    gamma: float = 1 / sqrt(8)
    tau0: float = 1.0
    correlation: float = 0.2
    c_plus: float = 0.0
    c_minus: float = -1.0
    dt: float = 0.01
    samples: int = 2**16


paper = Config


def quick() -> Config:
    return Config(samples=2**9)


def models(config: Config) -> dict[str, Transformer]:
    feedforward = ShapedReLU(c_plus=config.c_plus, c_minus=config.c_minus)
    common: dict[str, Any] = {
        "width": config.width,
        "depth": config.depth,
        "gamma": config.gamma,
        "feedforward": feedforward,
    }
    return {
        SHAPED: Transformer(**common, attention=ShapedAttention(tau0=config.tau0)),
        UNSHAPED: Transformer(**common, attention=SoftmaxAttention()),
        PRE_LN: Transformer(**common, attention=SoftmaxAttention(), norm="pre"),
        VANILLA: Transformer(**common | {"gamma": 1.0, "lam": 1.0}, attention=SoftmaxAttention(), norm="pre"),
    }


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return means by layer of each model, and samples of ρ at the last layer of the attention network and its SDE."""
    start = equicorrelated(tokens=2, correlation=config.correlation)
    named = list(models(config).items())
    rho = {name: pair_correlation(chain(model, start, config.samples, run)) for name, model in track(named, "models")}
    names = xr.DataArray(list(rho), dims="model")
    attention = Transformer(
        width=config.width, depth=config.depth, gamma=config.gamma, attention=ShapedAttention(tau0=config.tau0)
    )
    network = pair_correlation(chain(attention, start, config.samples, run, record=[config.depth]))
    sde = pair_correlation(sde_at_horizon(attention, start, config.samples, config.dt, run))
    return xr.Dataset(
        {
            "mean_absolute": xr.concat([abs(r).mean("sample") for r in rho.values()], names),
            "mean": xr.concat([r.mean("sample") for r in rho.values()], names),
            "standard_error": xr.concat([r.std("sample") / sqrt(config.samples) for r in rho.values()], names),
            "network": ("sample", network.values[:, 0]),
            "sde": ("sample", sde.values[:, 0]),
        },
        coords={"model": names},
    )


def claims(data: xr.Dataset) -> list[Claim]:
    """Return the caption's statements as numbers."""
    last = {str(name): float(data["mean_absolute"].isel(depth=-1).sel(model=name)) for name in data.model.values}
    unshaped = data["mean_absolute"].sel(model=UNSHAPED)
    passed = unshaped.depth.values[unshaped.values > COLLAPSED]
    first = float(passed[0]) if len(passed) else np.inf
    signs = float((data["mean_absolute"] - data["mean"]).sel(model=[UNSHAPED, PRE_LN, VANILLA]).max())
    return [
        Claim(f"mean |ρ| at the last layer, {SHAPED}", last[SHAPED], last[SHAPED] < 0.7),
        Claim(f"mean |ρ| at the last layer, {UNSHAPED}", last[UNSHAPED], last[UNSHAPED] > COLLAPSED),
        Claim(f"mean |ρ| at the last layer, {PRE_LN}", last[PRE_LN], last[PRE_LN] > 0.9),
        Claim(f"mean |ρ| at the last layer, {VANILLA}", last[VANILLA], last[VANILLA] > 0.9),
        Claim(f"layer at which mean |ρ| passes {COLLAPSED}, {UNSHAPED}", first, bool(np.isfinite(first))),
        Claim(f"1 − mean |ρ| at the last layer, {UNSHAPED}", 1 - last[UNSHAPED]),
        Claim(f"1 − mean |ρ| at the last layer, {PRE_LN}", 1 - last[PRE_LN]),
        Claim(f"mean ρ at the last layer, {SHAPED}", float(data["mean"].isel(depth=-1).sel(model=SHAPED))),
        Claim("largest mean |ρ| − mean ρ of the others, any layer", signs),
        ks_claim("ρ at the last layer", data["network"].values, data["sde"].values),
    ]


def draw(data: xr.Dataset) -> Figure:
    figure, (left, right) = panels(2)
    for name, look in LOOKS.items():
        one = data.sel(model=name)
        left.plot(one.depth, one["mean_absolute"], label=name, **look)
    shaped = data.sel(model=SHAPED)
    left.plot(shaped.depth, shaped["mean"], color=BLUE, linestyle=":", label="shaped: mean ρ, signs kept")
    left.set(xlabel="layer", ylabel="mean |ρ|", ylim=(0, 1.03))
    legend_below(left, 2)
    draw_densities(right, data["network"].values, data["sde"].values, correlations(), correlation_density)
    right.set(xlabel="correlation ρ at the last layer", ylabel="density", xticks=np.linspace(-1, 1, 5))
    legend_below(right, 2)
    return figure
