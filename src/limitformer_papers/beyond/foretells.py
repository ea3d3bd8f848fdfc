"""Does what limitformer says before training foretell training? The four studies of `docs/studies/protocol.md`.

Drawn from the runs that the package has, in `limitformer_papers/data/studies`. `study_runs` and `study_transfer` train
them again, and `runs` (`--runs`) is the folder of other ones, with the same three names of files.
"""

from functools import partial
from itertools import zip_longest
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from limitformer.plot import BLACK, BLUE, GREEN, MARKERS, ORANGE, PALETTE, RED, panels, sequence
from limitformer_papers.beyond import study_analysis as analysis
from limitformer_papers.beyond.study_runs import TEST
from limitformer_papers.beyond.study_transfer import AXES, FACTOR, RATES, SETTINGS
from limitformer_papers.common.claims import FigureRun, NoConfig

STORED = Path(__file__).parents[1] / "data" / "studies"
SWEEPS = {SETTINGS[0].name: "standard", SETTINGS[3].name: "muP"}
paper = quick = NoConfig
claims = analysis.claims


def compute(config: NoConfig, run: FigureRun) -> xr.Dataset:
    """Return what is foretold and what came (`study_analysis.collected`)."""
    return analysis.load(run.runs or STORED)


def draw(data: xr.Dataset) -> Figure:
    """Draw a panel for each part that is trained."""
    sweeps = [
        (data["losses"].sel(setting=name).notnull().any(), partial(draw_sweep, data=data.sel(setting=name), rule=rule))
        for name, rule in SWEEPS.items()
    ]
    parts = [
        *sweeps,
        (data["place"].notnull().any(), partial(draw_shifts, data=data)),
        (data.sizes["network"], partial(draw_predictors, data=data)),
        (data.sizes["pair"] > 1, partial(draw_fixes, data=data)),
        (data.sizes["case"], partial(draw_ranges, data=data)),
    ]
    drawn = [part for known, part in parts if known]
    columns = min(3, len(drawn))
    figure, axes = panels(columns, height=3.4, rows=ceil(len(drawn) / columns))
    for part, panel in zip_longest(drawn, np.ravel(axes)):
        panel.set_axis_off() if part is None else part(panel)
    return figure


def draw_sweep(axes: Axes, data: xr.Dataset, rule: str) -> None:
    """Draw the loss over the rate, a curve for each width; bars below are the ranges of `rate`."""
    rates = RATES["adamw"] * FACTOR ** data["rate"].values.astype(float)
    for k, (width, colour) in enumerate(zip(AXES["width"], sequence(3), strict=True)):
        losses = data["losses"][k].values
        known = np.isfinite(losses)
        axes.plot(rates[known], losses[known], f"{MARKERS[k]}-", color=colour, markersize=4, label=f"width {width}")
        ends = data["range_low"][k], data["range_high"][k]
        axes.plot(ends, 2 * [0.04 + 0.045 * k], color=colour, linewidth=4, transform=axes.get_xaxis_transform())
    low, high = axes.dataLim.intervaly
    axes.set_ylim(low - 0.25 * (high - low), high + 0.05 * (high - low))  # room for the bars
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss after training (nats)", title=f"AdamW, {rule}")
    axes.legend()


def draw_shifts(axes: Axes, data: xr.Dataset) -> None:
    """Draw the change of the best rate from the first size to the last over the foretold one."""
    foretold, found = -2 * data["exponent"].values, (data["place"][:, -1] - data["place"][:, 0]).values
    ends = np.array([min(foretold.min(), -4), max(foretold.max(), 1)])
    axes.plot(ends, ends, ":", color=BLACK, linewidth=1)
    for k, optimizer in enumerate(RATES):
        mine = np.array([f", {optimizer}," in str(name) for name in data["setting"].values])
        axes.plot(foretold[mine], found[mine], MARKERS[k], color=PALETTE[k], label=optimizer, alpha=0.8)
    axes.set(xlabel="foretold", ylabel="found", title="best rate: change, powers of 2")
    axes.legend()


def draw_predictors(axes: Axes, data: xr.Dataset) -> None:
    """Draw ρ of each predictor and the loss, with its interval."""
    half = TEST if (data["half"] == TEST).sum() == 24 else analysis.CHOOSE
    rows = analysis.table(data, half).sortby("ρ")
    for k, name in enumerate(rows["predictor"].values):
        one, colour = rows.sel(predictor=name), BLUE if name in analysis.OURS else ORANGE
        axes.plot([one["ρ_low"], one["ρ_high"]], [k, k], color=colour, linewidth=1.4)
        axes.plot(one["ρ"], k, "o" if name in analysis.OURS else "s", color=colour, markersize=5)
    axes.axvline(0, color=BLACK, linewidth=0.8)
    axes.set_yticks(range(len(rows["predictor"])), rows["predictor"].values)
    axes.set(xlabel="ρ with the loss", xlim=(-1, 1), title=f"what orders the losses ({half})")


def draw_fixes(axes: Axes, data: xr.Dataset) -> None:
    """Draw each network's loss after the fix and after the placebo over its loss without either."""
    before = data["after"].sel(kind="unchanged")
    looks: dict[str, Any] = {"fix": {"color": GREEN, "marker": "o"}, "placebo": {"color": RED, "marker": "^"}}
    for kind, look in looks.items():
        axes.plot(before, data["after"].sel(kind=kind), linestyle="none", label=kind, alpha=0.8, **look)
    ends = [float(data["after"].min()), float(data["after"].max())]
    axes.plot(ends, ends, ":", color=BLACK, linewidth=1)
    axes.set(xlabel="loss without it (nats)", ylabel="loss with it (nats)", title="fixes, at the best rate")
    axes.legend()


def draw_ranges(axes: Axes, data: xr.Dataset) -> None:
    """Draw the foretold ranges without warm-up and the best rates, without and with it."""
    cases = data.isel(case=np.flatnonzero(data["warmup"] == 0)).sortby("best")
    for k in range(len(cases["case"])):
        axes.plot([cases["low"][k], cases["high"][k]], [k, k], color=BLUE, linewidth=3, alpha=0.5)
    axes.plot(cases["best"], range(len(cases["case"])), "o", color=BLACK, markersize=4)
    axes.set(
        xscale="log",
        xlabel="learning rate",
        yticks=[],
        ylabel="networks",
        title="foretold ranges, and best rates",
    )
