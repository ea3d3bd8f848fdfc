r"""[ST, Fig. 4] (Fig. 3 of the first version): every part of shaped attention is needed.

Mean |ρ| (left) and |V| (right) by layer of attention networks [ST, eq. 1] with parts of shaped attention [ST, eq. 9]
removed: the identity ("id"), the centring ("center"), the temperature ("τ² = n n_k"; else τ² = n_k).
Parameters of the caption: n = 300, d = 150, ρ₀ = 0.2, γ = 1/√2, 2¹³ samples; τ₀ = 1 and n_k = n are not in it.
As in the paper, "id, τ² = n n_k" and "only id" are only in the covariance panel.

The paper draws the mean of |V|. Few samples carry it: γ = 1/√2 is the critical case of two tokens. Below it the limit
explodes in finite time with positive probability; at it, V₁₁ + V₂₂ − 2V₁₂ = d₀ reaches every level R with probability
asinh(d₀/K)/asinh(R/K), K² = 8τ₀²(2 − γ²)/γ², which falls only like 1/log R. So the median is the thick line and the
mean a thin one.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from limitformer.base.progress import track
from limitformer.models import ShapedAttention, Transformer, equicorrelated
from limitformer.models.attention import Temperature
from limitformer.plot import PALETTE, legend_below, panels
from limitformer_papers.common.claims import Claim, FigureRun, chain, pair_correlation

# Name → (identity, center, temperature): first all three, then one removed, then two removed.
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
LARGE = 10.0  # |V| of a sample that explodes
LINES = ("-", "-", "-", "-", "--", "--", "--")  # dashed: two parts removed, which may coincide with one part removed
SHAPES = "os^DvPX"


@dataclass(frozen=True, kw_only=True)
class Config:
    """The caption's parameters."""

    width: int = 300
    depth: int = 150
    gamma: float = 1 / sqrt(2)
    tau0: float = 1.0
    correlation: float = 0.2
    samples: int = 2**13


paper = Config


def quick() -> Config:
    return Config(samples=2**9)


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return, by case and layer, mean |ρ| and mean and median |V_12|; by case the shares `large` and `ten`."""
    start = equicorrelated(tokens=2, correlation=config.correlation)
    parts = []
    for identity, center, temperature in track(list(CASES.values()), "cases"):
        attention = ShapedAttention(tau0=config.tau0, identity=identity, center=center, temperature=temperature)
        model = Transformer(width=config.width, depth=config.depth, gamma=config.gamma, attention=attention)
        simulated = chain(model, start, config.samples, run)
        covariance = abs(simulated["covariance"][..., 0, 1]).drop_vars("label", errors="ignore")
        parts.append(
            xr.Dataset(
                {
                    "correlation": abs(pair_correlation(simulated)).mean("sample"),
                    "covariance": covariance.mean("sample"),
                    "median_covariance": covariance.median("sample"),
                    "left_ball": np.isfinite(simulated["exit"]).sum(),
                    "large": (covariance.isel(depth=-1) > LARGE).mean(),
                    "ten": share_of_largest(covariance.isel(depth=-1), 10),
                }
            )
        )
    return xr.concat(parts, xr.DataArray(list(CASES), dims="case", name="case"))


def share_of_largest(values: xr.DataArray, number: int) -> float:
    """Return the share of the sum of `values` (sample,) that its `number` largest carry."""
    ordered = np.sort(values.values)
    return float(ordered[-number:].sum() / ordered.sum())


def claims(data: xr.Dataset) -> list[Claim]:
    """Shaped attention is stable, with ρ away from 1 and V away from 0 and ∞; each removal spoils one of them."""
    correlation, median = data["correlation"].isel(depth=-1), data["median_covariance"].isel(depth=-1)
    statements = []
    for case in CASES:
        rho, v = float(correlation.sel(case=case)), float(median.sel(case=case))
        stable = rho < 0.8 and 0.01 < v < 10
        statements.append(Claim(f"mean |ρ| at the last layer, {case}", rho))
        verdict = "stable" if case == "shaped" else "not stable"
        statements.append(Claim(f"median |V| at the last layer, {case}: {verdict}", v, stable == (case == "shaped")))
    last = data[["covariance", "large", "ten"]].isel(depth=-1)
    return [
        *statements,
        Claim("mean |V| at the last layer, shaped", float(last["covariance"].sel(case="shaped"))),
        *(
            Claim(
                f"share of samples whose |V| is above {LARGE:g} at the last layer, {case}", share(last, "large", case)
            )
            for case in ("shaped", "id, center")
        ),
        Claim("share of the sum of |V| that the ten largest samples carry, shaped", share(last, "ten", "shaped")),
    ]


def share(data: xr.Dataset, name: str, case: str) -> float:
    return float(data[name].sel(case=case))


def draw(data: xr.Dataset) -> Figure:
    figure, (left, right) = panels(2, height=4.2)
    every = data.sizes["depth"] // 6
    for k, (case, colour, line, shape) in enumerate(zip(CASES, PALETTE, LINES, SHAPES, strict=True)):
        one = data.sel(case=case)
        marks: Any = {"marker": shape, "markersize": 5, "markevery": (k * every // 7, every)}
        look: Any = {"color": colour, "linestyle": line}
        if case not in COVARIANCE_ONLY:
            left.plot(one.depth, one["correlation"], **look, **marks)
        right.plot(one.depth, one["median_covariance"], **look, **marks, label=case.replace("n n_k", r"$n\,n_k$"))
        right.plot(one.depth, one["covariance"], **look, linewidth=0.8, alpha=0.7)
    right.plot([], [], color="gray", linewidth=0.8, label="thin: mean |V|")
    left.set(xlabel="layer", ylabel="mean |ρ|", ylim=(0, 1.03))
    right.set(xlabel="layer", ylabel="median |V|", yscale="log", ylim=(1e-4, 1e8))
    legend_below(figure, 4, handles=right.get_legend_handles_labels()[0], handlelength=3.2)
    return figure
