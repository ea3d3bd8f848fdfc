"""The picture of a design: the region of settings, and curves before and after."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from limitformer.checking.curves import band, layer_numbers, over_heads
from limitformer.checking.picture import axis_scale, label_axes
from limitformer.checking.report import Report
from limitformer.designing.objective import Objective
from limitformer.designing.outcome import Outcome
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
    for panel, name in zip(others, CURVES, strict=True):
        label_axes(panel, name)
        for outcome, color, label in ((present, RED, "present"), (chosen, GREEN, "chosen")):
            draw_law(panel, outcome.report, name, color, label)
        if name in present.report.curves:
            panel.set_yscale(axis_scale(present.report.curves[name], name))
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    if "correlation" in objective.bands:
        last = chosen.report.curves.sizes["layer"] - 1
        band = objective.bands["correlation"]
        others[0].plot([last, last], band, color=BLACK, linewidth=4, alpha=0.5, label="asked")
    others[0].legend(loc="best")
    figure.suptitle(title)
    return figure


def draw_map(panel: Axes, region: xr.Dataset, present: Outcome, chosen: Outcome, label: str) -> None:
    """Draw the probability over two knobs; cells with a dot were sampled, lines enclose the safe ones."""
    across, up = (str(dim) for dim in region["probability"].dims)
    data = region.transpose(up, across)
    x_edges, y_edges = edges(data[across].values), edges(data[up].values)
    mesh = panel.pcolormesh(x_edges, y_edges, data["probability"].values, cmap="Blues", vmin=0, vmax=1)
    x, y = np.meshgrid(data[across].values, data[up].values)
    sampled = data["samples"].values > 0
    panel.plot(x[sampled], y[sampled], ".", color="0.55", markersize=2)
    safe = data["safe"].values
    for i, j in zip(*np.nonzero(safe[:, 1:] != safe[:, :-1]), strict=True):
        panel.plot([x_edges[j + 1]] * 2, y_edges[i : i + 2], color=BLACK, linewidth=1.4)
    for i, j in zip(*np.nonzero(safe[1:] != safe[:-1]), strict=True):
        panel.plot(x_edges[j : j + 2], [y_edges[i + 1]] * 2, color=BLACK, linewidth=1.4)
    places = [(outcome.setting[across], outcome.setting[up]) for outcome in (present, chosen)]
    mark(panel, places[0], places[1], label)
    panel.set(xscale="log", yscale="log", xlabel=LABELS.get(across, across), ylabel=LABELS.get(up, up))
    panel.grid(False)
    panel.figure.colorbar(mesh, ax=panel)


def draw_line(panel: Axes, region: xr.Dataset, asked: float, present: Outcome, chosen: Outcome, label: str) -> None:
    """Draw the probability over one knob, and the probability that was asked for."""
    (along,) = (str(dim) for dim in region["probability"].dims)
    values, probability = region[along].values, region["probability"].values
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


def edges(values: Any) -> Any:
    """Return the edges between cells on a logarithmic axis."""
    logs = np.log(values)
    middle = (logs[1:] + logs[:-1]) / 2
    return np.exp(np.concatenate([[2 * logs[0] - middle[0]], middle, [2 * logs[-1] - middle[-1]]]))


def draw_law(panel: Axes, report: Report, name: str, color: str, label: str) -> None:
    """Draw the middle and the band of one report's law."""
    if name not in report.curves:
        panel.text(0.5, 0.5, "not measured", ha="center", transform=panel.transAxes)
        return
    law = over_heads((report.band if report.band is not None else band(report.curves))[name])
    low, middle, high = (law.sel(edge=edge).values for edge in ("low", "middle", "high"))
    at = layer_numbers(report.curves[name])
    panel.fill_between(at, low, high, color=color, alpha=0.2, linewidth=0)
    panel.plot(at, middle, color=color, label=label)
