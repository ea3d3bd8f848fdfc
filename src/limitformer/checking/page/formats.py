"""The part of a check's page on number formats: sizes by block, rounding by layer, and a table of kinds."""

import numpy as np
import xarray as xr

from limitformer.formats.table import FORMATS
from limitformer.reports.figures import Line, Panel
from limitformer.reports.page import Figures, Part, TextTable
from limitformer.reports.verdict import number_text

SHARES = {"beyond": "beyond", "zero": "to zero", "zero_scaled": "to zero, scaled", "lost": "lost", "unchanged": "same"}
ONLY = {"lost": "forward", "unchanged": "update"}  # the direction of shares that have one
SIZES = [("law", "largest |x|"), ("other", "median |x| of the tensor where it is smallest, to a factor √2")]


def format_parts(data: xr.Dataset | None, rounding: xr.Dataset | None) -> list[Part]:
    """Return the figures and the table; nothing if no formats were asked for."""
    result: list[Part] = []
    if data is not None:
        names = [str(name) for name in data["format"].values]
        ends = [f"{name}: 2^{FORMATS[name].smallest} to {number_text(FORMATS[name].largest)}" for name in names]
        result += [f"From the smallest to the largest number, {'; '.join(ends)}."]
        result += [
            Figures([panel for each in data["direction"].values if (panel := sizes(data, str(each))).known], SIZES)
        ]
    if rounding is not None:
        kinds = [(f"m{k}", str(name)) for k, name in enumerate(rounding["format"].values)]
        result += [Figures([differences(rounding, key) for key in ("stream", "gradient")], kinds)]
    return [*result, table(data)] if data is not None else result


def sizes(data: xr.Dataset, direction: str) -> Panel:
    """Return the panel of one direction: the largest number of each block, and its smallest median."""
    part = data.sel(direction=direction)
    blocks = np.unique(part["block"].values[part["block"].values > 0])
    inside = [part.isel(tensor=np.flatnonzero(part["block"].values == block)) for block in blocks]
    largest = np.array([float(each["amax"].max()) for each in inside])
    median = np.array([2.0 ** -(float(each["centre"].max()) + 0.5) for each in inside])
    lines = (
        Line("law", SIZES[0][1], blocks.astype(float), largest),
        Line("other", SIZES[1][1], blocks.astype(float), median),
    )
    return Panel(f"Numbers, {direction}", "", "block", lines if len(blocks) else ())


def differences(data: xr.Dataset, key: str) -> Panel:
    """Return the panel of the relative difference from float32."""
    layers = data["layer"].values.astype(float)
    lines = tuple(
        Line(f"m{k}", str(name), layers, data[key].sel(format=name).mean("sample").values)
        for k, name in enumerate(data["format"].values)
    )
    what = {"stream": "Stream", "gradient": "Gradient of the stream"}[key]
    return Panel(f"{what}, rounded against float32", "relative difference", "layer", lines)


def table(data: xr.Dataset) -> TextTable:
    """Return the table of kinds of tensor: the largest number and the largest shares of all blocks."""
    shares = {
        "beyond": "beyond",
        "zero": "to zero",
        "zero_scaled": "to zero, scaled",
        "lost": "lost",
        "unchanged": "same",
    }
    head = ["direction", "tensor", "largest |x|"]
    columns = [(name, key) for name in data["format"].values for key in shares]
    rows = []
    for direction in map(str, data["direction"].values):
        part = data.sel(direction=direction)
        kinds = dict.fromkeys(part["kind"].values[np.isfinite(part["amax"].values)])
        for kind in kinds:
            here = part.isel(tensor=np.flatnonzero(part["kind"].values == kind))
            cells = []
            for name, key in columns:
                own = key not in ("lost", "unchanged") or (key, direction) in (
                    ("lost", "forward"),
                    ("unchanged", "update"),
                )
                value = float(here[key].sel(format=name).max()) if own else np.nan
                cells.append("" if np.isnan(value) else f"{value:.2g}")
            rows.append([direction, str(kind), number_text(float(here["amax"].max())), *cells])
    filled = [k for k in range(len(columns)) if any(row[len(head) + k] for row in rows)]
    head += [f"{columns[k][0]}: {shares[columns[k][1]]}" for k in filled]
    return TextTable(
        "Numbers by kind of tensor", head, [[*row[:3], *(row[3 + k] for k in filled)] for row in rows], True
    )
