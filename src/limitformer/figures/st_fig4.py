r"""[ST, Fig. 4] (Fig. 3 of the first version): every part of shaped attention is needed.

Mean |ρ| (left) and mean |V| (right) by layer of attention networks [ST, eq. 1] with parts of shaped attention [ST,
eq. 9] removed: the identity ("id"), the centring ("center"), the temperature ("τ² = n n_k"; else τ² = n_k).
Parameters of the caption: n = 300, d = 150, ρ₀ = 0.2, γ = 1/√2, 2¹³ samples; τ₀ = 1 and n_k = n are not in it.
As in the paper, "id, τ² = n n_k" and "only id" are in the covariance panel alone.

The limit explodes in finite time with a small probability [ST, Sec. 4.4], so the mean of |V| is carried by few samples;
the median is drawn too (dotted).
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from limitformer.figures.claims import Claim, Run, chain, pair_correlation
from limitformer.models import ShapedAttention, Transformer, equicorrelated
from limitformer.models.attention import Temperature
from limitformer.plot import PALETTE, panels
from limitformer.progress import tracked

# Name → (identity, center, temperature); all, one removed, two removed.
CASES: dict[str, tuple[bool, bool, Temperature]] = {
    "shaped": (True, True, "shaped"),
    "τ² = n n_k, center": (False, True, "shaped"),
    "id, center": (True, True, "standard"),
    "id, τ² = n n_k": (True, False, "shaped"),
    "only id": (True, False, "standard"),
    "only center": (False, True, "standard"),
    "only τ² = n n_k": (False, False, "shaped"),
}
COVARIANCE_ONLY = ("id, τ² = n n_k", "only id")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The caption's parameters."""

    width: int = 300
    depth: int = 150
    gamma: float = 1 / sqrt(2)
    tau0: float = 1.0
    correlation: float = 0.2
    samples: int = 2**13


def paper() -> Config:
    """The caption's parameters."""
    return Config()


def quick() -> Config:
    """For tests."""
    return Config(samples=2**9)


def intervened(config: Config, identity: bool, center: bool, temperature: Temperature) -> Transformer:
    """The attention network with some of the three parts."""
    attention = ShapedAttention(tau0=config.tau0, identity=identity, center=center, temperature=temperature)
    return Transformer(width=config.width, depth=config.depth, gamma=config.gamma, attention=attention)


def compute(config: Config, run: Run) -> xr.Dataset:
    """By case and layer: mean |ρ|, mean and median |V_12|."""
    start = equicorrelated(tokens=2, correlation=config.correlation)
    parts = []
    for case in tracked(list(CASES.values()), "cases"):
        simulated = chain(intervened(config, *case), start, config.samples, run)
        covariance = abs(simulated["covariance"][..., 0, 1]).drop_vars("label", errors="ignore")
        parts.append(
            xr.Dataset(
                {
                    "correlation": abs(pair_correlation(simulated)).mean("sample"),
                    "covariance": covariance.mean("sample"),
                    "median_covariance": covariance.median("sample"),
                    "left_ball": np.isfinite(simulated["exit"]).sum(),
                }
            )
        )
    return xr.concat(parts, xr.DataArray(list(CASES), dims="case", name="case"))


def claims(data: xr.Dataset) -> list[Claim]:
    """Shaped attention is stable: ρ away from 1 and V away from 0 and ∞; each removal spoils one of them."""
    correlation, median = data["correlation"].isel(depth=-1), data["median_covariance"].isel(depth=-1)
    found = []
    for case in CASES:
        rho, v = float(correlation.sel(case=case)), float(median.sel(case=case))
        stable = rho < 0.8 and 0.01 < v < 10
        found.append(Claim(f"mean |ρ| at the last layer, {case}", rho))
        verdict = "stable" if case == "shaped" else "not stable"
        found.append(Claim(f"median |V| at the last layer, {case}: {verdict}", v, stable == (case == "shaped")))
    mean = float(data["covariance"].isel(depth=-1).sel(case="shaped"))
    return [*found, Claim("mean |V| at the last layer, shaped: a few samples carry it", mean)]


def draw(data: xr.Dataset) -> Figure:
    """Both panels; cases with two parts removed are dashed, since some of them coincide with one part removed."""
    figure, (left, right) = panels(2, width=5.2)
    for case, colour in zip(CASES, PALETTE, strict=True):
        one, look = (
            data.sel(case=case),
            {"color": colour, "linestyle": "--" if case.startswith("only") else "-"},
        )
        if case not in COVARIANCE_ONLY:
            left.plot(one.depth, one["correlation"], **look)
        right.plot(one.depth, one["covariance"], **look, label=case.replace("n n_k", r"$n\,n_k$"))
        right.plot(one.depth, one["median_covariance"], color=colour, linestyle=":")
    right.plot([], [], color="gray", linestyle=":", label="dotted: median |V|")
    left.set(xlabel="layer", ylabel="mean |ρ|", ylim=(0, 1.02))
    right.set(xlabel="layer", ylabel="mean |V|", yscale="log", ylim=(1e-4, 1e8))
    figure.legend(*right.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return figure
