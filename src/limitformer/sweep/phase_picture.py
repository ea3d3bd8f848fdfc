"""The picture of a phase diagram: curves over the longest axis, or a map over two long ones."""

from collections.abc import Hashable
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from limitformer.models import from_json
from limitformer.plot import MARKERS, PALETTE, SMALL, panels
from limitformer.sweep.grid import cells
from limitformer.sweep.phase import exact_probability

LABELS = {
    "beta": "inverse temperature β",
    "epsilon": "noise amplitude ε",
    "dim": "dimension d",
    "tokens": "tokens N",
    "sigma": "deviation σ of the values",
    "layers_per_unit_time": "layers L in a unit of time",
}
SYMBOLS = {"beta": "β", "epsilon": "ε", "dim": "d", "tokens": "N", "sigma": "σ", "layers_per_unit_time": "L"}
CONTINUOUS = ("beta", "epsilon", "sigma")
FINE = 101  # points of an exact curve
MOST_CURVES = 7
ANTIPODAL = "antipodal pair"


def draw(data: xr.Dataset) -> Figure:
    """Draw the probability of an antipodal pair, with intervals, and the exact curve where it is known."""
    axes = sorted((str(axis) for axis in data["exact"].dims), key=lambda axis: -data.sizes[axis])
    data = data.sortby([axis for axis in axes if data[axis].dtype.kind in "iuf"])
    figure, (panel,) = panels(1, width=6.4, height=4.4)
    others = int(np.prod([data.sizes[axis] for axis in axes[1:]]))
    if others > MOST_CURVES and others == data.sizes[axes[1]]:
        draw_map(panel, data.squeeze(axes[2:]), axes[0], axes[1])
    else:
        draw_curves(panel, data, axes[0], axes[1:])
    fixed = [label_of(axis, data[axis].item()) for axis in data["exact"].dims if data.sizes[axis] == 1]
    run = f"T = {data.attrs['horizon']:g}", f"{data.attrs['samples']} samples a cell"
    panel.set_title(", ".join([*fixed, *run]))
    return figure


def label_of(axis: Hashable, value: Any) -> str:
    """Return the letter of a field and its value, such as "β = 2"."""
    return f"{SYMBOLS.get(str(axis), axis)} = {value if isinstance(value, str) else format(value, 'g')}"


def draw_curves(panel: Axes, data: xr.Dataset, along: str, others: list[str]) -> None:
    """Draw a curve over `along` for each combination of the other fields."""
    stacked = data.stack(curve=others) if others else data.expand_dims("curve")
    for k in range(stacked.sizes["curve"]):
        one = stacked.isel(curve=k)
        fixed = {axis: one[axis].item() for axis in others}
        varied = [axis for axis in others if data.sizes[axis] > 1]
        label = ", ".join(label_of(axis, fixed[axis]) for axis in varied)
        looks = {"color": PALETTE[k % len(PALETTE)], "marker": MARKERS[k // len(PALETTE) % len(MARKERS)]}
        draw_curve(panel, one, along, fixed, label=label or "simulated", **looks)
    if bool(data["exact"].notnull().all(along).any()):
        panel.plot([], [], color="gray", label="exact, L → ∞")
    panel.set(xlabel=LABELS.get(along, along), ylabel="probability of an antipodal pair", ylim=(-0.02, None))
    panel.legend()


def draw_curve(
    panel: Axes, one: xr.Dataset, along: str, fixed: dict[str, Any], *, color: str, marker: str, label: str
) -> None:
    """Draw points with intervals, and the exact curve on a finer grid."""
    x, chosen = one[along].values, one.sel(outcome=ANTIPODAL)
    p = chosen["probability"].values
    bars = np.abs(np.stack([p - chosen["low"].values, chosen["high"].values - p]))
    panel.errorbar(x, p, bars, fmt=marker, markersize=4, color=color, capsize=2, label=label)
    if not np.isfinite(one["exact"]).all():
        panel.plot(x, p, color=color, linewidth=0.8)
        return
    fine = np.linspace(x.min(), x.max(), FINE) if along in CONTINUOUS and x.size > 1 else x
    base = from_json(one.attrs["base"])
    grid = {name: [value] for name, value in fixed.items()} | {along: fine.tolist()}
    panel.plot(fine, [exact_probability(cell.model) for cell in cells(base, grid)], color=color)


def draw_map(panel: Axes, data: xr.Dataset, along: str, up: str) -> None:
    chosen = data["probability"].sel(outcome=ANTIPODAL).transpose(up, along)
    panel.grid(False)
    image = panel.pcolormesh(data[along], data[up], chosen, vmin=0, vmax=1, cmap="cividis", shading="nearest")
    panel.figure.colorbar(image, ax=panel, label="probability of an antipodal pair")
    exact = data["exact"].transpose(up, along)
    levels = [level for level in (0.1, 0.5, 0.9) if float(exact.min()) < level < float(exact.max())]
    if levels:
        lines = panel.contour(data[along], data[up], exact, levels=levels, colors="white", linewidths=0.9)
        panel.clabel(lines, fmt=lambda level: f"exact {level:g}", fontsize=SMALL)
    panel.set(xlabel=LABELS.get(along, along), ylabel=LABELS.get(up, up))
