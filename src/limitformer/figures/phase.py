"""The picture of a phase diagram, whatever its axes: curves over the longest one, or a map over two long ones."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from limitformer.models import from_json
from limitformer.phase import cells_of, exact_probability
from limitformer.plot import PALETTE, panels

LABELS = {
    "beta": "inverse temperature β",
    "epsilon": "noise amplitude ε",
    "dim": "dimension d",
    "tokens": "tokens N",
}
SYMBOLS = {"beta": "β", "epsilon": "ε", "dim": "d", "tokens": "N"}
FINE = 101  # points of an exact curve
MOST_CURVES = 7
ANTIPODAL = "antipodal pair"


def draw(data: xr.Dataset) -> Figure:
    """Probability of an antipodal pair, with intervals, and the exact curve where it is known."""
    axes = sorted((str(axis) for axis in data["exact"].dims), key=lambda axis: -data.sizes[axis])
    figure, (panel,) = panels(1, width=6.4, height=4.4)
    others = int(np.prod([data.sizes[axis] for axis in axes[1:]]))
    if others > MOST_CURVES and others == data.sizes[axes[1]]:
        draw_map(panel, data.squeeze(axes[2:]), axes[0], axes[1])
    else:
        draw_curves(panel, data, axes[0], axes[1:])
    panel.set_title(f"T = {data.attrs['horizon']:g}, {data.attrs['samples']} samples a cell", fontsize=10)
    return figure


def draw_curves(panel: Axes, data: xr.Dataset, along: str, others: list[str]) -> None:
    """A curve over `along` for each combination of the other fields."""
    stacked = data.stack(curve=others) if others else data.expand_dims("curve")
    for k in range(stacked.sizes["curve"]):
        one = stacked.isel(curve=k)
        fixed = {axis: one[axis].item() for axis in others}
        varied = [axis for axis in others if data.sizes[axis] > 1]
        label = ", ".join(f"{SYMBOLS.get(axis, axis)} = {fixed[axis]:g}" for axis in varied)
        draw_curve(panel, one, along, fixed, PALETTE[k % len(PALETTE)], label or "simulated")
    if np.isfinite(data["exact"]).any():
        panel.plot([], [], color="gray", label="exact, L → ∞")
    panel.set(xlabel=LABELS.get(along, along), ylabel="probability of an antipodal pair", ylim=(-0.02, None))
    panel.legend(fontsize=8)


def draw_curve(panel: Axes, one: xr.Dataset, along: str, fixed: dict[str, float], colour: str, label: str) -> None:
    """Points with intervals, and the exact curve through a finer grid."""
    x, chosen = one[along].values, one.sel(outcome=ANTIPODAL)
    p = chosen["probability"].values
    bars = np.abs(np.stack([p - chosen["low"].values, chosen["high"].values - p]))
    panel.errorbar(x, p, bars, fmt="o", markersize=4, color=colour, capsize=2, label=label)
    if not np.isfinite(one["exact"]).all():
        panel.plot(x, p, color=colour, linewidth=0.8)
        return
    fine = np.linspace(x.min(), x.max(), FINE) if x.dtype.kind == "f" else x
    base = from_json(one.attrs["base"])
    grid = {name: [value] for name, value in fixed.items()} | {along: fine.tolist()}
    panel.plot(fine, [exact_probability(model) for model in cells_of(base, grid)], color=colour)


def draw_map(panel: Axes, data: xr.Dataset, along: str, up: str) -> None:
    """A map over two fields."""
    chosen = data["probability"].sel(outcome=ANTIPODAL).transpose(up, along)
    panel.grid(False)
    image = panel.pcolormesh(data[along], data[up], chosen, vmin=0, vmax=1, cmap="cividis", shading="nearest")
    panel.figure.colorbar(image, ax=panel, label="probability of an antipodal pair")
    if np.isfinite(data["exact"]).any():
        exact = data["exact"].transpose(up, along)
        lines = panel.contour(data[along], data[up], exact, levels=[0.1, 0.5, 0.9], colors="white", linewidths=0.9)
        panel.clabel(lines, fmt=lambda level: f"exact {level:g}", fontsize=7)
    panel.set(xlabel=LABELS.get(along, along), ylabel=LABELS.get(up, up))
