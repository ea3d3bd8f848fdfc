"""The progress of a sweep, and its results as pictures and files."""

import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from limitformer.base.errors import require
from limitformer.base.files import check_writable, file_path, write_whole
from limitformer.models import from_json
from limitformer.plot import MARKERS, PALETTE, SMALL, panels, style
from limitformer.results.storage import check_target, save
from limitformer.sweep.grid import cells, unknown_field
from limitformer.sweep.phase import exact_probability
from limitformer.sweep.store import CELLS, DONE, ENDINGS, FAILED, file_names, load_sweep, open_store

MOST_CURVES = 7
PICTURES = (".png", ".pdf", ".svg")


def progress_of(path: Path) -> list[tuple[str, str]]:
    """Return the rows of `limitformer sweep status`."""
    store = open_store(path)
    status = store.status()
    done, failed = int((status == DONE).sum()), int((status == FAILED).sum())
    rows = [("cells", f"{status.size:,}"), ("done", f"{done:,} ({done / status.size:.1%})"), ("failed", f"{failed:,}")]
    rows.append(("left", f"{status.size - done - failed:,}"))
    finished = [name for name in file_names(store.path) if name.endswith(ENDINGS[DONE])]
    times = np.sort([os.stat(store.path / CELLS / name).st_mtime for name in finished])[-100:]
    if len(times) > 1:
        rate = (len(times) - 1) / max(times[-1] - times[0], 1e-9)
        rows.append(("rate", f"{rate:.3g} cells a second"))
        rows.append(("time left, at this rate", duration((status.size - done - failed) / rate)))
    return rows + [(f"failed {index}", text) for index, text in sorted(store.errors(status).items())[:5]]


def duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours.

    >>> duration(9000)
    '2 h 30 min'
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60:,} h {minutes % 60} min"


def selected(data: xr.Dataset, variable: str | None, at: Sequence[str]) -> xr.DataArray:
    """Return one result at the places `at` (NAME=VALUE).

    Raises:
        InputError: an unknown result, or a place that is not on the grid.
    """
    known = [str(name) for name in data.data_vars]
    name = known[0] if variable is None else variable
    require(name in known, unknown_field("The sweep", name, known))
    chosen = data[name]
    for place in at:
        chosen = chosen.isel(position(chosen, place))
    return chosen.squeeze()


def interval(data: xr.Dataset, variable: str | None, at: Sequence[str]) -> tuple[xr.DataArray, xr.DataArray] | None:
    """Return what lies one standard error below and above a mean, or the 95 % interval of a probability, if known."""
    name = str(next(iter(data.data_vars))) if variable is None else variable
    if name == "probability" and {"low", "high"} <= set(data.data_vars):
        return selected(data, "low", at), selected(data, "high", at)
    error = f"{name.removesuffix('_mean')}_error"
    if error not in data:
        return None
    middle, error_here = selected(data, name, at), selected(data, error, at)
    return middle - error_here, middle + error_here


def position(chosen: xr.DataArray, place: str) -> dict[str, int]:
    """Return NAME=VALUE as the position on the axis."""
    name, equals, value = place.partition("=")
    axes = [str(dim) for dim in chosen.dims]
    require(bool(equals) and name in axes, f"--at must be NAME=VALUE, NAME one of {', '.join(axes)}; got {place!r}.")
    values = chosen[name].values.tolist() if name in chosen.coords else list(range(chosen.sizes[name]))
    matches = [k for k, one in enumerate(values) if str(one) == value or as_number(value) == one]
    require(bool(matches), f"{name} has no value {value}; it has {', '.join(map(str, values[:12]))}.")
    return {name: matches[0]}


def as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def picture(chosen: xr.DataArray, within: tuple[xr.DataArray, xr.DataArray] | None = None) -> Figure:
    """Draw curves over one axis with the band between `within`, or a map over two long ones.

    Raises:
        InputError: more than two axes with several values each.
    """
    long = sorted((str(dim) for dim in chosen.dims), key=lambda dim: -chosen.sizes[dim])
    require(
        0 < len(long) <= 2,
        f"A picture needs one or two axes; there are {', '.join(long) or 'none'}. "
        f"Nearest: {'more' if long else 'fewer'} --at.",
    )
    # A store keeps the order in which values were added.
    ordered = [dim for dim in long if dim in chosen.coords and chosen[dim].dtype.kind in "iuf"]
    chosen = chosen.sortby(ordered)
    low, high = (None, None) if within is None else (each.sortby(ordered) for each in within)
    figure, (panel,) = panels(1, width=6.4, height=4.4)
    if len(long) == 2 and chosen.sizes[long[1]] > MOST_CURVES:
        panel.grid(False)
        image = panel.pcolormesh(
            *(positions(chosen, dim) for dim in long), chosen.transpose(*reversed(long)), shading="nearest"
        )
        figure.colorbar(image, label=str(chosen.name))
        panel.set(xlabel=long[0], ylabel=long[1], title=place_in_words(chosen))
        return figure
    for k in range(chosen.sizes[long[1]] if len(long) == 2 else 1):
        here = {long[1]: k} if len(long) == 2 else {}
        curve, colour, at = chosen.isel(here), PALETTE[k % len(PALETTE)], positions(chosen, long[0])
        if low is not None and high is not None:
            panel.fill_between(at, low.isel(here), high.isel(here), color=colour, alpha=0.2, linewidth=0)
        label = (
            f"{long[1]} = {chosen[long[1]].values[k] if long[1] in chosen.coords else k}" if len(long) == 2 else None
        )
        panel.plot(at, curve, "o-", markersize=3, color=colour, label=label)
    panel.set(xlabel=long[0], ylabel=str(chosen.name), title=place_in_words(chosen))
    if len(long) == 2:
        panel.legend()
    return figure


def place_in_words(chosen: xr.DataArray) -> str:
    """Return where on the other axes the results are, such as "gamma = 0.5, beta = 2"."""
    fixed = {str(name): axis.values.item() for name, axis in chosen.coords.items() if axis.ndim == 0}
    return ", ".join(
        f"{name} = {value:g}" if isinstance(value, float) else f"{name} = {value}" for name, value in fixed.items()
    )


def positions(chosen: xr.DataArray, dim: str) -> Any:
    """Return the values of an axis, or their positions if it has no labels."""
    return chosen[dim].values if dim in chosen.coords else np.arange(chosen.sizes[dim])


def write_picture(figure: Figure, out: Path) -> None:
    """Write the picture to a file, whole or not at all."""
    out = file_path(out)
    require(out.suffix in PICTURES, f"Pictures are written as {', '.join(PICTURES)}; got {out.name!r}.")
    check_writable(out.parent)
    with style():
        write_whole(out, lambda path: figure.savefig(path))


def export_store(path: Path, out: Path) -> None:
    """Write all results to one file.

    Raises:
        InputError: another ending than .nc, .zarr or .csv, or a folder that cannot be written.
    """
    out = file_path(out)
    known = out.suffix in (".nc", ".zarr", ".csv")
    require(known, f"A sweep is exported as .nc (NetCDF), .zarr or .csv (a table); got {out.name!r}.")
    check_writable(out.parent) if out.suffix == ".csv" else check_target(out)
    data = load_sweep(path)
    if out.suffix == ".csv":
        write_whole(out, lambda whole: data.to_dataframe().to_csv(whole))
        return
    save(data, out)


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
