r"""[ST v1, Fig. 5]: training loss by learning rate, shaped attention (Recover, solid) against Pre-LN (dashed).

Drawn from finished runs of `limitformer train mlm`, at the scale of those runs. Each depth has a panel; curves are
means over seeds of the loss over the last steps. A curve ends where the loss of its first seed stops being finite; a
cross marks the end of a curve of which a seed diverged. Of several γ, the one with the least held-out loss over all
learning rates is drawn.

The paper states that Pre-LN is worse at larger rates, while the shaped one converges alike. Let ℓ_v(η) be the final
loss of variant v at rate η, the mean over seeds, ∞ if one of them diverged. The statement is judged twice, over the
rates R that both have:

    spread  S_v = max_R ℓ_v − min_R ℓ_v,        S_shaped / S_Pre-LN < 1;
    excess  E_v = ℓ_v(max R) − min_R ℓ_v,       E_shaped − E_Pre-LN < 0.

Small rates, at which training is merely slow, enter S and not E. If both E are 0, no rate was large.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from limitformer.plot import legend_below, panels, sequence
from limitformer_papers.common.claims import Claim, FigureRun
from limitformer_papers.shaped_transformer.language_runs import (
    VARIANTS,
    along,
    below,
    best_gamma,
    curves,
    diverged,
    draw_curve,
    final,
    grid_of_runs,
    keys,
    language_runs,
    logs,
    scale_of,
    smoothed,
    variant_label,
    with_all_seeds,
    with_gamma,
)

DRAWN: dict[str, Any] = {"shaped-recover": "-", "pre-ln": "--"}
AXES = ("depth", "variant", "rate", "seed")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Curves are means over 1/`smoothing` of the steps; the final loss is over the last tenth."""

    smoothing: int = 40


paper = quick = Config


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return `loss` (depth, variant, rate, seed, step), `final` and `diverged` (depth, variant, rate, seed),
    `gamma`.
    """
    all_runs = language_runs(run, DRAWN)
    gamma = {
        depth: best_gamma([one for one in all_runs if one.about["depth"] == depth])
        for depth in along(all_runs, "depth")
    }
    runs = with_all_seeds(with_gamma(all_runs, gamma))
    steps, values = curves(logs(runs), "loss")
    window = max(1, runs[0].plan["steps"] // config.smoothing)
    parts = {
        "loss": grid_of_runs(runs, AXES, smoothed(values, window), {"step": steps}),
        "final": grid_of_runs(runs, AXES, [final(one, "train_loss") for one in runs]),
        "diverged": diverged(runs, AXES),
        "gamma": xr.DataArray(list(gamma.values()), dims="depth"),
    }
    return xr.Dataset(parts, attrs={"runs": scale_of(runs, all_runs)})


def claims(data: xr.Dataset) -> list[Claim]:
    """Return the final losses at each rate, and how much they depend on the rate."""
    statements = []
    for depth in data["depth"].values:
        here = data.sel(depth=depth)
        statements += [*losses(int(depth), here), spread_claim(int(depth), here), excess_claim(int(depth), here)]
    return statements


def losses(depth: int, data: xr.Dataset) -> list[Claim]:
    """Return the final loss of each setting; ∞ if a seed diverged."""
    statements, mean = [], data["final"].mean("seed", skipna=False)
    for name in data["variant"].values:
        for rate in data["rate"].values:
            value = float(mean.sel(variant=name, rate=rate))
            if not np.isnan(value):
                label = variant_label(name, data["diverged"].sel(variant=name, rate=rate))
                statements.append(Claim(f"d = {depth}, {label}, rate {rate:g}: final training loss", value))
    return statements


def spread_claim(depth: int, data: xr.Dataset) -> Claim:
    """Return S_shaped / S_Pre-LN."""
    final = shared(data)
    shaped, base = (np.float64(spread(final.sel(variant=name).values)) for name in DRAWN)
    with np.errstate(divide="ignore", invalid="ignore"):  # 0/0 and ∞/∞ are NaN, and judged as that
        ratio = float(shaped / base)
    name = f"d = {depth}: spread of the final loss over learning rates, shaped over Pre-LN (the paper: below 1)"
    return Claim(name + basis(final), ratio, below(ratio, 1))


def excess_claim(depth: int, data: xr.Dataset) -> Claim:
    """Return E_shaped − E_Pre-LN."""
    final = shared(data)
    shaped, base = (excess(final.sel(variant=name).values) for name in DRAWN)
    gap = float("nan") if shaped == base == float("inf") else shaped - base
    name = f"d = {depth}: final loss at the largest rate above the least, shaped minus Pre-LN (the paper: below 0)"
    if shaped == base == 0:  # the rates are too small to distinguish them
        return Claim(f"{name}{basis(final)}; not judged: both are best at the largest", gap)
    return Claim(name + basis(final), gap, below(gap, 0))


def shared(data: xr.Dataset) -> xr.DataArray:
    """Return final losses (variant, rate) of both variants, mean over seeds, at the rates that both have."""
    return data["final"].mean("seed", skipna=False).reindex(variant=list(DRAWN)).dropna("rate")


def spread(final: NDArray[np.float64]) -> float:
    """Return largest minus least of losses (rate,); ∞ if one is, NaN for fewer than two."""
    if len(final) < 2:
        return float("nan")
    return float("inf") if np.isinf(final).any() else float(final.max() - final.min())


def excess(final: NDArray[np.float64]) -> float:
    """Return the loss (rate,) at the largest rate minus the least; ∞ if it is, NaN for fewer than two."""
    if len(final) < 2:
        return float("nan")
    return float("inf") if np.isinf(final[-1]) else float(final[-1] - final.min())


def basis(final: xr.DataArray) -> str:
    """Return the end of a claim's name: the rates it uses, and which variants diverged at which."""
    if final.sizes["rate"] < 2:
        return "; not judged: fewer than two rates that both have"
    parts = []
    for name in DRAWN:
        rates = final["rate"].values[np.isinf(final.sel(variant=name).values)]
        parts += [f"; {VARIANTS[name]} diverged at {listed(rates)}"] if len(rates) else []
    return f"; rates {listed(final['rate'].values)}{''.join(parts)}"


def listed(rates: NDArray[np.float64]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


def draw(data: xr.Dataset) -> Figure:
    """Draw one panel a depth; colours are rates, lines variants."""
    figure, axes = panels(data.sizes["depth"], width=6.4 if data.sizes["depth"] == 1 else None, height=4.4)
    for axis, depth in zip(axes, data["depth"].values, strict=True):
        here = data.sel(depth=depth)
        panel(axis, here)
        gamma = float(here["gamma"])
        axis.set(xlabel="step", title=f"d = {depth}" + ("" if np.isnan(gamma) else f", γ = {gamma:g}"))
    axes[0].set_ylabel("training loss (nats)")
    lines = [Line2D([], [], color="gray", linestyle=DRAWN[n], label=VARIANTS[n]) for n in data["variant"].values]
    legend_below(figure, 3, handles=keys(data, lines))
    figure.suptitle(data.attrs["runs"])
    return figure


def panel(axes: Axes, data: xr.Dataset) -> None:
    mean = data["loss"].mean("seed", skipna=False)
    bottom, top = limits(mean)
    for name in data["variant"].values:
        for colour, rate in zip(sequence(data.sizes["rate"]), data["rate"].values, strict=True):
            place = {"variant": name, "rate": rate}
            draw_curve(axes, mean.sel(place), data["diverged"].sel(place), top, color=colour, linestyle=DRAWN[name])
    axes.set_ylim(bottom, top)


def limits(loss: xr.DataArray) -> tuple[float, float]:
    """Return the limits of y: from the least loss to just above the first, far below the end of diverged runs."""
    if not bool(loss.notnull().any()):  # no run has a first loss
        return 0.0, 1.0
    first = float(loss.isel(step=0).max())
    least = float(loss.min())
    return least - 0.05 * (first - least), first + 0.05 * (first - least or 1.0)
