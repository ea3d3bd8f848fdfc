"""The picture of a design: the region of settings, and curves before and after."""

from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from limitformer.checking.picture import draw_curve
from limitformer.designing.objective import Objective
from limitformer.designing.report import Outcome
from limitformer.plot import BLACK, BLUE, GREEN, RED, panels

CURVES = ("correlation", "size", "effective_tokens")
LABELS = {
    "output": "output projections, × their std",
    "embedding": "embeddings, × their std",
    "logits": "logits, × their std",
    "gamma": "γ",
    "tau0": "τ₀",
}


def draw(
    title: str, region: xr.Dataset, objective: Objective, allowed: float, present: Outcome, chosen: Outcome
) -> Figure:
    """Draw the region, with the present and the chosen setting, and three curves of both."""
    figure, axes = panels(2, height=3.7, rows=2)
    first, *others = axes.ravel()
    label = "chosen" if chosen.risk.interval[1] <= allowed else "nearest, not safe"
    if len(region["probability"].dims) == 1:
        draw_line(first, region, 1 - allowed, present, chosen, label)
    else:
        draw_map(first, region, present, chosen, label)
    first.set_title("probability that the objective is met")
    first.legend(loc="upper right", frameon=True, framealpha=0.9)
    before = replace(present.report, name="present setting")
    for panel, name in zip(others, CURVES, strict=True):
        draw_curve(panel, chosen.report, before, name)
    if "correlation" in objective.bands:
        last = chosen.report.curves.sizes["layer"] - 1
        band = objective.bands["correlation"]
        others[0].plot([last, last], band, color=BLACK, linewidth=4, alpha=0.5, label="asked")
        low, high = others[0].get_ylim()  # which the curves have fixed
        others[0].set_ylim(min(low, *band), max(high, *band))
    others[0].legend(loc="best")
    figure.suptitle(title.rstrip(":"))
    return figure


def draw_map(panel: Axes, region: xr.Dataset, present: Outcome, chosen: Outcome, label: str) -> None:
    """Draw the probability over two knobs, a column and a row for each value; dots mark safe cells."""
    across, up = (str(dim) for dim in region["probability"].dims)
    data = region.transpose(up, across)
    mesh = panel.pcolormesh(data["probability"].values, cmap="Blues", vmin=0, vmax=1)
    y, x = np.nonzero(data["safe"].values)
    panel.plot(x + 0.5, y + 0.5, ".", color=BLACK, markersize=2)
    places = [(index_of(outcome, data[across]), index_of(outcome, data[up])) for outcome in (present, chosen)]
    mark(panel, places[0], places[1], label)
    panel.set(xlabel=LABELS.get(across, across), ylabel=LABELS.get(up, up))
    for axis, dim in ((panel.xaxis, across), (panel.yaxis, up)):
        axis.set_ticks(np.arange(data.sizes[dim]) + 0.5, [f"{value:.3g}" for value in data[dim].values])
    panel.grid(False)
    panel.figure.colorbar(mesh, ax=panel)


def index_of(outcome: Outcome, axis: xr.DataArray) -> float:
    """Return where a setting is on an axis whose values have equal distances."""
    value = outcome.setting[str(axis.name)]
    return float(np.interp(np.log(value), np.log(axis.values), np.arange(axis.size) + 0.5))


def draw_line(panel: Axes, region: xr.Dataset, asked: float, present: Outcome, chosen: Outcome, label: str) -> None:
    """Draw the probability over one knob, and the probability that was asked for."""
    (along,) = (str(dim) for dim in region["probability"].dims)
    values, probability = region[along].values, region["probability"].values
    panel.fill_between(values, region["low"].values, region["high"].values, color=BLUE, alpha=0.2, linewidth=0)
    panel.plot(values, probability, "o-", color=BLUE, markersize=3)
    panel.axhline(asked, color=BLACK, linewidth=0.8, linestyle=":")
    at = [outcome.setting[along] for outcome in (present, chosen)]
    places = [(x, float(np.interp(x, values, probability))) for x in at]
    mark(panel, places[0], places[1], label)
    panel.set(xscale="log", ylim=(-0.05, 1.05), xlabel=LABELS.get(along, along))


def mark(panel: Axes, present: tuple[float, float], chosen: tuple[float, float], label: str) -> None:
    """Mark the present and the chosen setting."""
    style: Any = {"linestyle": "none", "markeredgecolor": BLACK}
    panel.plot(*present, marker="o", color=RED, label="present", markersize=11, zorder=4, **style)
    panel.plot(*chosen, marker="*", color=GREEN, label=label, markersize=16, zorder=5, **style)
