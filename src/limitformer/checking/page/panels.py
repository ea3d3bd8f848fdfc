"""The plots of a page: the law's band and median, a network's own curve over them, and another network's."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from limitformer.checking.band import inside
from limitformer.checking.curves import ARTANH, CURVES, layer_numbers, over_heads, typical
from limitformer.checking.network import CheckedNetwork
from limitformer.checking.page.svg import Line, Panel, plot, strip
from limitformer.checking.thresholds import BROKEN, WATCH, Threshold

# Thresholds of a curve's own value; others are ratios.
LIMITS = {"correlation": "collapse", "largest": "activation", "largest_logit": "logit"}
Thresholds = Mapping[str, Threshold]
Part = dict[str, Any]  # a sublayer or a kind of weight; empty: the whole curve


def plots(network: CheckedNetwork, against: CheckedNetwork | None, thresholds: Thresholds) -> list[str]:
    """Return the plots of all measured curves, one for each sublayer."""
    result = []
    for name, curve in CURVES.items():
        parts: list[Part] = [{}]
        if name in network.curves and "sublayer" in network.curves[name].dims:
            parts = [{"sublayer": k} for k in range(network.curves.sizes["sublayer"])]
        for part in parts if curve.title else []:
            title = f"{curve.title} {part['sublayer'] + 1} of a block" if part else curve.title
            found = panel(network, against, name, part, title)
            limits = thresholds.get(LIMITS.get(name, ""))
            result.append(found if limits is None else replace(found, limits=limits_of(limits)))
    return [plot(each) for each in result if each.lines]


def limits_of(threshold: Threshold) -> tuple[tuple[str, float], ...]:
    grades = [(grade, threshold.at(grade)) for grade in (WATCH, BROKEN)]
    return tuple((grade, number) for grade, number in grades if number is not None)


def gradients(network: CheckedNetwork, against: CheckedNetwork | None) -> dict[str, str]:
    """Return a plot for each kind of weight of either network."""
    curves = [each.curves for each in (network, against) if each is not None and "gradient" in each.curves]
    kinds = dict.fromkeys(str(kind) for each in curves for kind in each["kind"].values)
    result = {kind: panel(network, against, "gradient", {"kind": kind}, kind) for kind in kinds}
    return {kind: plot(each) for kind, each in result.items() if each.lines}


def panel(network: CheckedNetwork, against: CheckedNetwork | None, name: str, part: Part, title: str) -> Panel:
    """Return one plot; it has no lines if nothing was measured."""
    own, band = part_of(network.curves, name, part), part_of(network.band, name, part)
    lines, area, note = [], None, CURVES[name].note
    if own is not None and band is not None:
        law = over_heads(band)
        low, middle, high = (law.sel(edge=edge).values for edge in ("low", "middle", "high"))
        if np.isfinite(middle).any():
            at = positions(law)
            area = (at, low, high)
            lines.append(Line("law", "median of new networks", at, middle))
        share = inside(xr.Dataset({"own": own}), xr.Dataset({"own": band}))
        if network.exists and share:
            note = f"{note}; {float(share['own'].mean()):.0%} within the law's band".removeprefix("; ")
    if own is not None and (network.exists or not lines):
        kind, label = ("own", "this network") if network.exists else ("law", "median of the samples")
        lines.append(Line(kind, label, positions(own), typical(own)))
    other = None if against is None else part_of(against.curves, name, part)
    if against is not None and other is not None:
        lines.append(Line("other", against.name, positions(other), typical(other)))
    axis = "layer" if own is not None and "layer" in own.dims else "block"
    return Panel(title, note, axis, tuple(lines), area, CURVES[name].scale == ARTANH)


def positions(curve: xr.DataArray) -> Any:
    return layer_numbers(curve).astype(float)


def part_of(curves: xr.Dataset | None, name: str, part: Part) -> xr.DataArray | None:
    """Return one sublayer or one kind of a curve; None if it was not measured."""
    if curves is None or name not in curves:
        return None
    curve = curves[name]
    if "sublayer" in part:
        return curve.isel(part) if part["sublayer"] < curve.sizes["sublayer"] else None
    if "kind" in part:
        return curve.sel(part) if part["kind"] in curve["kind"].values else None
    return curve


def loss(network: CheckedNetwork, against: CheckedNetwork | None) -> str:
    """Return the plot of the loss and that of a uniform guess; empty without a loss."""
    if "loss" not in network.curves:
        return ""
    kind, label = ("own", "this network") if network.exists else ("law", "a sample of the law")
    marks = [(kind, label, network.curves["loss"].values.astype(float))]
    if against is not None and "loss" in against.curves:
        marks.append(("other", against.name, against.curves["loss"].values.astype(float)))
    note = ""
    if "chance" in network.about:
        note = "upright line: ln(vocabulary), the loss of a uniform guess"
        marks.append(("chance", "ln(vocabulary)", np.array([float(network.about["chance"])])))
    band = None
    if network.band is not None and "loss" in network.band:
        low, high = (float(network.band["loss"].sel(edge=edge)) for edge in ("low", "high"))
        band = (low, high) if np.isfinite([low, high]).all() else None
    return strip("Loss", note, marks, band)
