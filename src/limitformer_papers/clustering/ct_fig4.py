r"""[CT, Fig. 4]: noise on the strength of attention makes two tokens antipodal.

The hybrid model [CT, eq. 7] with unnormalised attention, d = 3, L = 100, T = 50, 1,000 trajectories for each (β, ε),
uniform noise. Colours, on one scale, show the larger of two shares: trajectories in a single cluster (towards magenta)
and antipodal ones (towards violet); white is neither. Black lines: the thresholds as L → ∞, ε = √(2e^{−β}) [CT, Prop.
1]. The grid is not in the paper; the tolerance 10⁻³ is that of its other experiments.

To its right is the exact probability in the limit. Below is the same for softmax attention, which [CT, Prop. 1] leaves
out: both ends attract for 1 + e^{−2β} < ε² < 2, and the two outcomes share the trajectories. Softmax is slow at large β
(the weight of the other token is e^{−2β}), so its chain has ten times the horizon.

Coloured lines: where an end begins or ceases to attract the *chain*. With w = 1/L + εv/√L and the tokens' sum S and
difference D, a layer with unnormalised attention multiplies, to first order in the gap,

  near −1  |S|/|D| by |1 + w cosh β| / |1 + w sinh β|,      near +1  |D|/|S| by 1 / |1 + w e^β|;

with softmax attention cosh β, sinh β, e^β become 1, tanh β, 1. An end attracts where the mean of the logarithm is
negative. As L → ∞ this is Prop. 1; but once ε e^β is of the order of √L a layer overshoots, and −1 ceases to attract.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from limitformer.models import HybridTransformer
from limitformer.plot import legend_below, panels
from limitformer.results.outcomes import OUTCOMES
from limitformer.sweep.phase import phase_diagram
from limitformer_papers.clustering.sphere import OUTCOME_COLOURS, standard_error
from limitformer_papers.common.claims import Claim, FigureRun
from limitformer_papers.common.grids import resumable

SINGLE, ANTIPODAL, UNRESOLVED = OUTCOMES
ATTENTIONS: tuple[Literal["unnormalized", "softmax"], ...] = ("unnormalized", "softmax")
NAMES = {"unnormalized": "unnormalised", "softmax": "softmax"}
SETTLED = 0.02  # largest unresolved share of a cell that is compared with the limit
ENDS = {"−1": ("#F5D000", "-", 3.4), "+1": ("#00E0E0", "--", 1.6)}  # of the chain: dashes on a wide line
CLEAR = 10.0  # least mean change of the logarithm of the gap until T for which the outcome is predicted


@dataclass(frozen=True, kw_only=True)
class Config:
    """The caption's parameters and the grid."""

    dim: int = 3
    layers_per_unit_time: int = 100
    horizon: float = 50.0
    softmax_horizon: float = 500.0
    tolerance: float = 1e-3
    betas: tuple[float, ...] = tuple(np.round(np.linspace(0.1, 4, 40), 4).tolist())
    epsilons: tuple[float, ...] = tuple(np.round(np.linspace(0.05, 2, 40), 4).tolist())
    samples: int = 1000


paper = Config


def quick() -> Config:
    return Config(
        betas=tuple(np.round(np.linspace(0.2, 4, 6), 4).tolist()),
        epsilons=tuple(np.round(np.linspace(0.1, 2, 7), 4).tolist()),
        softmax_horizon=100.0,
        samples=100,
    )


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return the phase diagrams (attention, epsilon, beta); `minus` and `plus` are the chain's exponents at both
    ends.
    """
    horizons = {"unnormalized": config.horizon, "softmax": config.softmax_horizon}
    parts = []
    for attention, horizon in horizons.items():
        base = HybridTransformer(
            tokens=2,
            dim=config.dim,
            beta=1.0,
            epsilon=1.0,
            layers_per_unit_time=config.layers_per_unit_time,
            attention=attention,  # type: ignore[arg-type]
        )
        part = diagram(base, horizon, config, run)
        minus, plus = exponents(attention, part["beta"], part["epsilon"], config.layers_per_unit_time)
        parts.append(part.assign(minus=minus, plus=plus))
    data = xr.concat(
        parts, xr.DataArray(list(horizons), dims="attention", name="attention"), combine_attrs="drop_conflicts"
    )
    return data.assign_attrs(layers=config.layers_per_unit_time, horizons=list(horizons.values()))


def diagram(base: HybridTransformer, horizon: float, config: Config, run: FigureRun) -> xr.Dataset:
    def compute_in(store: Path | None) -> xr.Dataset:
        return phase_diagram(
            base,
            {"epsilon": config.epsilons, "beta": config.betas},
            horizon=horizon,
            samples=config.samples,
            seed=run.seed,
            tolerance=config.tolerance,
            threads=run.threads,
            store=store,
        )

    return resumable(compute_in, run, base.attention)


def exponents(attention: str, beta: Any, epsilon: Any, layers: int) -> tuple[Any, Any]:
    """Return the mean growth per layer of the logarithm of the gap at −1 and at +1, for uniform noise."""
    if attention == "softmax":
        total, difference, together = 1.0, np.tanh(beta), 1.0
    else:
        total, difference, together = np.cosh(beta), np.sinh(beta), np.exp(beta)
    low, high = (1 / layers + side * np.sqrt(3 / layers) * epsilon for side in (-1, 1))

    def mean_log(c: Any) -> Any:
        """Return E log|1 + wc|, w uniform between `low` and `high`."""
        ends = [1 + c * low, 1 + c * high]
        first, last = (y * np.log(abs(y)) - y for y in ends)
        return (last - first) / (ends[1] - ends[0])

    return mean_log(total) - mean_log(difference), -mean_log(together)


def threshold(beta: Any) -> Any:
    """Return ε of [CT, Prop. 1]."""
    return np.sqrt(2 * np.exp(-beta))


def coexistence(beta: Any) -> Any:
    """Return the ε above which −1 attracts with softmax attention; +1 attracts up to √2."""
    return np.sqrt(1 + np.exp(-2 * beta))


def claims(data: xr.Dataset) -> list[Claim]:
    """The dominant outcome changes at the threshold; the chain departs from it at large β; softmax allows both
    outcomes.
    """
    samples = int(data.attrs["samples"])
    cells = data["probability"].sel(attention="unnormalized")
    single, antipodal = cells.sel(outcome=SINGLE), cells.sel(outcome=ANTIPODAL)
    far: Any = abs(data["epsilon"] / threshold(data["beta"]) - 1) > 0.1
    wrong: Any = (antipodal > single) != (data["exact"].sel(attention="unnormalized") > 0.5)
    mild: Any = data["beta"] <= 2
    rate, mild_rate = (float(wrong.where(far & where).mean()) for where in (data["beta"] >= 0, mild))
    failing = data["beta"].values[(wrong & far).any("epsilon").values]
    slow = cells.sel(outcome=UNRESOLVED)
    soft = data.sel(attention="softmax")
    both = (data["epsilon"] > coexistence(data["beta"])) & (data["epsilon"] < np.sqrt(2))
    minority = (0.5 - abs(soft["exact"] - 0.5)).where(both)
    own, checked = own_thresholds(data)
    return [
        Claim(
            "unnormalised, β ≤ 2, ε 10 % or more off the threshold: share of cells with the wrong dominant outcome",
            mild_rate,
            mild_rate < 0.02,
        ),
        Claim("the same for all β", rate),
        Claim("least β with such a cell (inf: none)", float(failing.min(initial=np.inf))),
        Claim(
            f"unnormalised, all β: share of cells with another dominant outcome than the exponents at L = "
            f"{data.attrs['layers']} say ({checked} cells where one end attracts and T is long enough)",
            own,
            own < 0.02,
        ),
        Claim("unnormalised: largest unresolved share of a cell", float(slow.max())),
        Claim(
            "softmax: largest exact probability of the rarer outcome, where both ends attract",
            float(minority.max()),
            bool(minority.max() > 0.2),
        ),
        *softmax_bias(soft, both, samples),
    ]


def softmax_bias(soft: xr.Dataset, both: xr.DataArray, samples: int) -> list[Claim]:
    """Return |simulated − exact| in settled cells where both ends attract, if there are any."""
    settled = both & (soft["probability"].sel(outcome=UNRESOLVED) < SETTLED)
    if not settled.any():
        return []
    difference = abs(soft["probability"].sel(outcome=ANTIPODAL) - soft["exact"]).where(settled)
    noise = standard_error(soft["exact"], samples).max(where=settled.values, initial=0.0)
    what = f"softmax: {{}} |simulated − exact| there, in {int(settled.sum())} settled cells"
    median = float(difference.median())
    return [
        Claim(f"{what.format('median')} (standard error up to {noise:.3f})", median, bool(median < 2 * noise)),
        Claim(f"{what.format('largest')}: close to a threshold, where some return", float(difference.max())),
    ]


def own_thresholds(data: xr.Dataset) -> tuple[float, int]:
    """Return the share of cells whose outcome is not the end that attracts the chain, and the number of cells."""
    one = data.sel(attention="unnormalized")
    single, antipodal = (one["probability"].sel(outcome=kind) for kind in (SINGLE, ANTIPODAL))
    layers = float(data.attrs["horizons"][0]) * data.attrs["layers"]
    clear = (one["minus"] * one["plus"] < 0) & (np.minimum(abs(one["minus"]), abs(one["plus"])) * layers > CLEAR)
    wrong = (antipodal > single) != (one["minus"] < 0)
    return float(wrong.where(clear).mean()), int(clear.sum())


def draw(data: xr.Dataset) -> Figure:
    """Draw simulated and exact, one row for each form of attention, with one scale of colour and one legend."""
    figure, axes = panels(2, height=3.4, rows=2)
    for row, attention in enumerate(ATTENTIONS):
        one = data.sel(attention=attention)
        simulated = [one["probability"].sel(outcome=kind) for kind in (SINGLE, ANTIPODAL)]
        dominant(axes[row, 0], data, *simulated)
        image = dominant(axes[row, 1], data, 1 - one["exact"], one["exact"])
        name, horizon = NAMES[attention], data.attrs["horizons"][row]
        axes[row, 0].set_title(f"{name}: chain, L = {data.attrs['layers']}, T = {horizon:g}")
        axes[row, 1].set_title(f"{name}: exact, L → ∞")
        chain_lines(axes[row, 0], attention, data)
        for panel in axes[row]:
            limit_lines(panel, attention, data["beta"].values)
    ticks = [-1, -0.5, 0, 0.5, 1]
    bar = figure.colorbar(image, ax=axes, shrink=0.8, ticks=ticks, label="share of the more frequent outcome")
    bar.set_ticklabels(["1: single cluster", "0.5", "0: neither", "0.5", "1: antipodal"])
    handles = axes[0, 0].get_legend_handles_labels()[0] + axes[1, 1].get_legend_handles_labels()[0]
    legend_below(figure, 3, handles=handles, handlelength=3)
    return figure


def dominant(axes: Axes, data: xr.Dataset, single: xr.DataArray, antipodal: xr.DataArray) -> Any:
    """Colour the larger share of each cell: antipodal pairs count upwards from 0, single clusters downwards."""
    axes.grid(False)
    signed = xr.where(single >= antipodal, -single, antipodal)
    axes.set(xlabel="inverse temperature β", ylabel="noise amplitude ε")
    place = data["beta"], data["epsilon"]
    return axes.pcolormesh(*place, signed, cmap=OUTCOME_COLOURS, vmin=-1, vmax=1, shading="nearest", rasterized=True)


def limit_lines(axes: Axes, attention: str, betas: NDArray[np.float64]) -> None:
    fine = np.linspace(betas.min(), betas.max(), 200)
    look: Any = {"color": "black", "linewidth": 1.4, "path_effects": [withStroke(linewidth=3, foreground="white")]}
    if attention == "softmax":
        axes.plot(
            fine, coexistence(fine), **look, linestyle="--", label=r"limit, −1 attracts above: $ε^2 = 1 + e^{-2β}$"
        )
        axes.plot(
            fine, np.full_like(fine, np.sqrt(2)), **look, linestyle=":", label=r"limit, +1 attracts below: $ε^2 = 2$"
        )
    else:
        axes.plot(fine, threshold(fine), **look, linestyle="-.", label=r"limit, both ends: $ε^2 = 2e^{-β}$")


def chain_lines(axes: Axes, attention: str, data: xr.Dataset) -> None:
    spans = (np.linspace(data[name].values.min(), data[name].values.max(), 300) for name in ("beta", "epsilon"))
    beta, epsilon = np.meshgrid(*spans)
    grids = exponents(attention, beta, epsilon, data.attrs["layers"])
    for exponent, (end, (colour, line, width)) in zip(grids, ENDS.items(), strict=True):
        axes.contour(beta, epsilon, exponent, levels=[0.0], colors=colour, linestyles=line, linewidths=width)
        label = f"L = {data.attrs['layers']}: edge of attraction of {end}"
        axes.plot([], [], color=colour, linestyle=line, linewidth=width, label=label)
