"""The picture of a design: the region of settings, and curves before and after."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from limitformer.checking.band import band
from limitformer.checking.curves import over_heads
from limitformer.checking.picture import layer_numbers
from limitformer.checking.report import Report
from limitformer.designing.designed import Design
from limitformer.plot import BLACK, BLUE, GREEN, RED, panels

CURVES = {
    "correlation": ("mean correlation of tokens", "linear"),
    "size": ("root mean square of the stream", "log"),
    "effective_tokens": ("effective tokens, by head", "linear"),
}
LABELS = {
    "output": "output projections, × their std",
    "embedding": "embeddings, × their std",
    "logits": "logits, × their std",
    "gamma": "γ",
    "tau0": "τ₀",
}


def draw(design: Design) -> Figure:
    """The region, and three curves."""
    figure, axes = panels(2, height=3.7, rows=2)
    first, *others = axes.ravel()
    (draw_line if len(design.region["probability"].dims) == 1 else draw_map)(first, design)
    for panel, (name, (title, scale)) in zip(others, CURVES.items(), strict=True):
        panel.set(title=title, xlabel="block" if name == "effective_tokens" else "layer")
        draw_curves(panel, design, name)
        panel.set_yscale(scale)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    marks(others[0], design, "correlation")
    others[0].legend(loc="best")
    figure.suptitle(f"{design.name}: {design.verdict}")
    return figure


def draw_map(panel: Axes, design: Design) -> None:
    """Probability over two knobs; cells with a dot were looked at."""
    across, up = (str(dim) for dim in design.region["probability"].dims)
    data = design.region.transpose(up, across)
    mesh = panel.pcolormesh(
        edges(data[across].values), edges(data[up].values), data["probability"].values, cmap="Blues", vmin=0, vmax=1
    )
    x, y = np.meshgrid(data[across].values, data[up].values)
    looked = data["samples"].values > 0
    panel.plot(x[looked], y[looked], ".", color="0.55", markersize=2)
    outline(panel, edges(data[across].values), edges(data[up].values), data["safe"].values)
    mark(panel, design, lambda setting: (setting[across], setting[up]))
    panel.set(xscale="log", yscale="log", xlabel=LABELS.get(across, across), ylabel=LABELS.get(up, up))
    panel.set_title("probability that the objective is met")
    panel.grid(False)
    panel.figure.colorbar(mesh, ax=panel)


def outline(panel: Axes, x: Any, y: Any, safe: Any) -> None:
    """Lines between cells that are safe and cells that are not."""
    for i, j in zip(*np.nonzero(safe[:, 1:] != safe[:, :-1]), strict=True):
        panel.plot([x[j + 1]] * 2, y[i : i + 2], color=BLACK, linewidth=1.4)
    for i, j in zip(*np.nonzero(safe[1:] != safe[:-1]), strict=True):
        panel.plot(x[j : j + 2], [y[i + 1]] * 2, color=BLACK, linewidth=1.4)


def draw_line(panel: Axes, design: Design) -> None:
    """Probability over one knob."""
    (along,) = (str(dim) for dim in design.region["probability"].dims)
    values, probability = design.region[along].values, design.region["probability"].values
    panel.plot(values, probability, "o-", color=BLUE, markersize=3)
    panel.axhline(1 - design.allowed, color=BLACK, linewidth=0.8, linestyle=":")
    mark(panel, design, lambda setting: (setting[along], float(np.interp(setting[along], values, probability))))
    panel.set(xscale="log", ylim=(-0.05, 1.05), xlabel=LABELS.get(along, along))
    panel.set_title("probability that the objective is met")


def mark(panel: Axes, design: Design, at: Any) -> None:
    """Where the present setting is and the chosen one, if they are on the grid."""
    looks: Any = {"linestyle": "none", "markeredgecolor": BLACK, "markersize": 11, "zorder": 4}
    panel.plot(*at(design.present.setting), marker="o", color=RED, label="present", **looks)
    label = "chosen" if design.found else "nearest, not safe"
    panel.plot(*at(design.best), marker="*", color=GREEN, label=label, **{**looks, "markersize": 16, "zorder": 5})
    panel.legend(loc="upper right", frameon=True, framealpha=0.9)


def edges(values: Any) -> Any:
    """Between cells, on a logarithmic axis."""
    logs = np.log(values)
    middle = (logs[1:] + logs[:-1]) / 2
    return np.exp(np.concatenate([[2 * logs[0] - middle[0]], middle, [2 * logs[-1] - middle[-1]]]))


def draw_curves(panel: Axes, design: Design, name: str) -> None:
    """Law's middle and band, present and chosen."""
    for report, color, label in ((design.before, RED, "present"), (design.after, GREEN, "chosen")):
        draw_law(panel, report, name, color, label)


def draw_law(panel: Axes, report: Report, name: str, color: str, label: str) -> None:
    """Of one report."""
    if name not in report.curves:
        panel.text(0.5, 0.5, "not measured", ha="center", transform=panel.transAxes)
        return
    law = over_heads((report.band if report.band is not None else band(report.curves))[name])
    low, middle, high = (law.sel(edge=edge).values for edge in ("low", "middle", "high"))
    at = layer_numbers(report.curves[name])
    panel.fill_between(at, low, high, color=color, alpha=0.2, linewidth=0)
    panel.plot(at, middle, color=color, label=label)


def marks(panel: Axes, design: Design, name: str) -> None:
    """The band that was asked, at the last layer."""
    if name in design.objective.bands:
        last = design.after.curves.sizes["layer"] - 1
        panel.plot([last, last], design.objective.bands[name], color=BLACK, linewidth=4, alpha=0.5, label="asked")
