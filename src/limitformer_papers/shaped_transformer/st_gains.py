r"""[ST, App. D]: two statements on the training of shaped networks that the paper makes without an experiment.

1. "Without either adjustment" (Learn or Recover) "shaped attention is still trainable but at much slower rates".
2. "Training instabilities (loss divergence) for larger values of γ" than 0.2.

Drawn from finished runs of `limitformer train mlm`, at their scale. On the left the training loss minus that of the
fixed variant, at its γ and with the same seed: means over the last steps and over seeds, with a band from the least to
the largest seed. On the right the held-out loss at the end by γ, at the rate that has most γ, a point for each seed; a
cross counts the seeds that diverged.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from limitformer.base.errors import require
from limitformer.plot import BLUE, GREEN, PURPLE, legend_below, panels
from limitformer_papers.common.claims import Claim, FigureRun
from limitformer_papers.shaped_transformer.language_runs import (
    CROSS,
    VARIANTS,
    along,
    curves,
    diverged,
    draw_curve,
    final,
    grid_of_runs,
    interval_of,
    language_runs,
    logs,
    scale_of,
    setting,
    smoothed,
    student,
    with_all_seeds,
)

FIXED = "shaped-fixed"
COLOURS = {"shaped-recover": BLUE, "shaped-learn": GREEN, FIXED: PURPLE}
LINES: Any = ("-", "--", ":", "-.")  # of the rates
SEEDS = 3  # with two, Student's interval is 13 standard errors wide


@dataclass(frozen=True, kw_only=True)
class Config:
    """Curves are means over 1/`smoothing` of the steps."""

    smoothing: int = 20


paper = quick = Config


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return `loss` (variant, rate, seed, step), and `final`, `diverged` (variant, gamma, rate, seed).

    Values are NaN without a run; `final` is the held-out loss at the end, ∞ of a run that diverged.
    """
    found = language_runs(run, tuple(COLOURS))
    runs = with_all_seeds(found)
    fixed = sorted({setting(one, "gamma") for one in runs if setting(one, "variant") == FIXED})
    others, depths = set(along(runs, "variant")) - {FIXED}, along(runs, "depth")
    require(
        len(fixed) == len(depths) == 1 and bool(others),
        f"The figure needs one depth, {FIXED} at one γ, and another shaped variant; the finished runs have depths "
        f"{depths}, γ {fixed} and {len(others)} others. Nearest: limitformer train mlm --variant {FIXED},shaped-learn.",
    )
    (gamma,) = fixed
    rates = along(runs, "rate")
    require(len(rates) <= len(LINES), f"The figure shows {len(LINES)} rates at most; the finished runs have {rates}.")
    alike = [one for one in runs if setting(one, "gamma") == gamma]
    steps, values = curves(logs(alike), "loss")
    window = max(1, alike[0].plan["steps"] // config.smoothing)
    axes = ("variant", "gamma", "rate", "seed")
    parts = {
        "loss": grid_of_runs(alike, ("variant", "rate", "seed"), smoothed(values, window), {"step": steps}),
        "final": grid_of_runs(runs, axes, [final(one, "eval_loss") for one in runs]),
        "diverged": diverged(runs, axes),
    }
    return xr.Dataset(parts, attrs={"runs": scale_of(runs, found), "gamma": gamma})


def claims(data: xr.Dataset) -> list[Claim]:
    """Return the losses of the fixed variant against the others, and the losses and divergences by γ."""
    found, gamma = [], data.attrs["gamma"]
    for rate in data["rate"].values:
        at = data["final"].sel(gamma=gamma, rate=rate)
        fixed = at.sel(variant=FIXED).values
        if np.isnan(fixed).any():
            continue
        found.append(Claim(f"rate {rate:g}, γ = {gamma:g}: held-out loss, {VARIANTS[FIXED]}", float(fixed.mean())))
        for name in (each for each in at["variant"].values if each != FIXED):
            if np.isnan(at.sel(variant=name)).any():
                continue
            gap, half = student(fixed, at.sel(variant=name).values)
            said = f"rate {rate:g}: {VARIANTS[FIXED]} minus {VARIANTS[name]}, held-out loss"
            said += f" ({interval_of(half)}; paper: above 0)"
            decided = len(fixed) >= SEEDS and abs(gap) > half
            found.append(Claim(said, gap, gap > 0 if decided else None))
            if np.isfinite(gap):  # no seed diverged
                found.append(Claim(f"rate {rate:g}: {caught_up(name)}", steps_to(data["loss"].sel(rate=rate), name)))
    for name, part in by_gamma(data):
        for g in part["gamma"].values:
            here = part.sel(gamma=g)
            said = f"γ = {g:g}, {VARIANTS[name]}, rate {float(part['rate']):g}"
            found.append(Claim(f"{said}: held-out loss", float(here["final"].mean())))
            found.append(Claim(f"{said}: seeds that diverged, of {here.sizes['seed']}", float(here["diverged"].sum())))
    return found


def caught_up(name: str) -> str:
    return f"share of the steps after which {VARIANTS[name]} has the fixed variant's last training loss"


def steps_to(loss: xr.DataArray, name: str) -> float:
    """Return that share for losses (variant, seed, step), of means over seeds; NaN if it never has it."""
    mean = loss.mean("seed", skipna=False)
    reached = mean.sel(variant=name).values <= mean.sel(variant=FIXED).values[-1]
    return float(mean["step"][reached.argmax()] / mean["step"][-1]) if reached.any() else float("nan")


def by_gamma(data: xr.Dataset) -> list[tuple[str, xr.Dataset]]:
    """Return the runs (gamma, seed) of the variants other than the fixed one, at the rate that has most γ."""
    others = data.drop_sel(variant=FIXED)
    number = others["final"].notnull().any("seed").sum(["variant", "gamma"])
    at = others[["final", "diverged"]].isel(rate=int(number.argmax("rate")))
    return [(name, at.sel(variant=name).dropna("gamma")) for name in at["variant"].values]


def draw(data: xr.Dataset) -> Figure:
    """Draw the differences of losses by step, and the last losses by γ."""
    figure, (left, right) = panels(2, height=4.4)
    gap = data["loss"] - data["loss"].sel(variant=FIXED)
    bottom, top = np.quantile([0, *gap.values[np.isfinite(gap)]], [0.01, 0.99])  # not the ends of runs that diverge
    for name in (each for each in gap["variant"].values if each != FIXED):
        for line, rate in zip(LINES, gap["rate"].values, strict=False):
            one = gap.sel(variant=name, rate=rate)
            gone = data["diverged"].sel(variant=[name, FIXED], rate=rate, gamma=data.attrs["gamma"]).max("variant")
            draw_curve(left, one.mean("seed", skipna=False), gone, top, color=COLOURS[name], linestyle=line)
            left.fill_between(one["step"], one.min("seed"), one.max("seed"), color=COLOURS[name], alpha=0.15, lw=0)
    left.axhline(0, color=COLOURS[FIXED], zorder=1)
    left.set(xlabel="step", ylabel=f"training loss minus that of\n{VARIANTS[FIXED]} (nats)")
    room = 0.1 * (top - bottom or 1.0)
    left.set(title=f"γ = {data.attrs['gamma']:g}", ylim=(bottom - room, top + room))
    draw_gammas(right, by_gamma(data))
    handles = [Line2D([], [], color=COLOURS[name], label=VARIANTS[name]) for name in gap["variant"].values]
    rates = zip(LINES, gap["rate"].values, strict=False)
    handles += [Line2D([], [], color="gray", linestyle=line, label=f"rate {rate:g}") for line, rate in rates]
    if bool((data["diverged"] == 1).any()):
        handles += [Line2D([], [], color="gray", label="a seed diverged", **CROSS)]
    legend_below(figure, 3, handles=handles)
    figure.suptitle(data.attrs["runs"])
    return figure


def draw_gammas(axes: Axes, parts: list[tuple[str, xr.Dataset]]) -> None:
    """Draw losses by γ, a point for each seed, and above them a cross with the number of seeds that diverged."""
    ended = np.concatenate([part["final"].values.ravel() for _, part in parts])
    ended = ended[np.isfinite(ended)]
    low, high = (ended.min(), ended.max()) if ended.size else (0.0, 1.0)
    for k, (name, part) in enumerate(parts):
        style: Any = {"color": COLOURS[name]}
        shift = 1.03 ** (2 * k - 1)  # so that neither variant hides the other
        finite = part["final"].where(np.isfinite(part["final"]))
        axes.plot(part["gamma"] * shift, finite.mean("seed", skipna=False), "-", **style)
        for seed in range(part.sizes["seed"]):
            axes.plot(part["gamma"] * shift, finite.isel(seed=seed), "o", markersize=4, **style)
        for g, number in zip(part["gamma"].values, part["diverged"].sum("seed").values, strict=True):
            if number:
                height = high + (0.15 + 0.15 * k) * (high - low)
                axes.plot(g * shift, height, **style, **CROSS)
                axes.annotate(f"{number:.0f}", (g * shift, height), (7, -4), textcoords="offset points", **style)
    ticks = np.unique(np.concatenate([part["gamma"].values for _, part in parts]))
    axes.set_xscale("log" if ticks[0] > 0 else "linear")
    axes.set_xticks(ticks, [f"{g:g}" for g in ticks])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="γ at the start", ylabel="held-out loss (nats)", title=f"rate {float(parts[0][1]['rate']):g}")
