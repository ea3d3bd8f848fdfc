"""Which plots a report has: the law's band and middle, a network's own curve over them, another network beside it."""

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from limitformer.checking.band import inside
from limitformer.checking.curves import over_heads
from limitformer.checking.page.svg import Line, Panel, plot, strip
from limitformer.checking.picture import layer_numbers, typical

if TYPE_CHECKING:
    from limitformer.checking.report import Report

CURVES = {  # title, note
    "correlation": ("Correlation of tokens, mean", "1: all tokens point the same way"),
    "correlation_abs": ("Correlation of tokens, mean absolute", ""),
    "correlation_95": ("Correlation of tokens, 95th percentile", ""),
    "size": ("Stream", "root mean square of a coordinate"),
    "relative_branch": ("Branch", "size over that of the stream it is added to"),
    "step": ("Step", "change in a block over the stream before it"),
    "stable_rank": ("Stable rank of the tokens", "directions that matter, by the largest"),
    "effective_rank": ("Effective rank of the tokens", "directions that matter, by entropy"),
    "largest": ("Largest activation", "largest |x| of the stream"),
    "typical": ("Typical activation", "median |x| of the stream"),
    "logit_std": ("Logits of attention", "standard deviation in a row, mean of heads"),
    "effective_tokens": ("Effective tokens", "that a row of attention takes in, mean of heads"),
    "largest_logit": ("Largest logit", "mean of heads"),
    "stream_gradient": ("Gradient of the stream", "norm of the loss's derivative"),
}
Pick = dict[str, Any]


def plots(report: "Report") -> list[str]:
    """All of them that were measured, by layer or block."""
    panels = [panel(report, name, pick) for name in CURVES for pick in picks(report, name)]
    return [plot(each) for each in panels if each.lines]


def picks(report: "Report", name: str) -> list[Pick]:
    """One plot, or one for each sublayer."""
    if name in report.curves and "sublayer" in report.curves[name].dims:
        return [{"sublayer": k} for k in range(report.curves.sizes["sublayer"])]
    return [{}]


def gradients(report: "Report") -> dict[str, str]:
    """A plot for each kind of weight of either network."""
    reports = [report, report.against] if report.against is not None else [report]
    kinds = [str(kind) for each in reports if "gradient" in each.curves for kind in each.curves["kind"].values]
    found = {kind: panel(report, "gradient", {"kind": kind}) for kind in dict.fromkeys(kinds)}
    return {kind: plot(each) for kind, each in found.items() if each.lines}


def panel(report: "Report", name: str, pick: Pick) -> Panel:
    """Its lines, none of them if nothing was measured."""
    title, note = CURVES.get(name, ("Gradient", "norm by block"))
    own, band = part(report.curves, name, pick), part(report.band, name, pick)
    lines, area = [], None
    if own is not None and band is not None:
        low, middle, high = (over_heads(band).sel(edge=edge).values for edge in ("low", "middle", "high"))
        if np.isfinite(middle).any():
            at = positions(own)[: len(middle)]
            area = (at, low, high)
            lines.append(Line("law", "law, middle", at, middle))
    if own is not None and (report.exists or not lines):
        kind, label = ("own", "this network") if report.exists else ("law", "law, median of samples")
        lines.append(Line(kind, label, positions(own), typical(own)))
    other = None if report.against is None else part(report.against.curves, name, pick)
    if report.against is not None and other is not None:
        lines.append(Line("other", report.against.name, positions(other), typical(other)))
    note = "; ".join(filter(None, [note, lying(own, band) if report.exists else ""]))
    axis = "layer" if own is not None and "layer" in own.dims else "block"
    return Panel(titled(title, pick), note, axis, tuple(lines), area, name.startswith("correlation"))


def titled(title: str, pick: Pick) -> str:
    """With the number of the sublayer, or the name of the kind in its place."""
    if "kind" in pick:
        return str(pick["kind"])
    return f"{title} {pick['sublayer'] + 1} of a block" if "sublayer" in pick else title


def lying(own: xr.DataArray | None, band: xr.DataArray | None) -> str:
    """How much of a network's curve, with all heads, is as in a new network."""
    if own is None or band is None:
        return ""
    known = inside(xr.Dataset({"own": own}), xr.Dataset({"own": band}))
    return f"{float(known['own'].mean()):.0%} within the law's band" if known else ""


def positions(curve: xr.DataArray) -> Any:
    """Layers from 0 or blocks from 1, as floats."""
    return layer_numbers(curve).astype(float)


def part(curves: xr.Dataset | None, name: str, pick: Pick) -> xr.DataArray | None:
    """One sublayer or one kind of a curve; None where it was not measured."""
    if curves is None or name not in curves:
        return None
    found = curves[name]
    if "sublayer" in pick:
        there = pick["sublayer"] < found.sizes["sublayer"]
        return found.isel(sublayer=pick["sublayer"]) if there else None
    if "kind" in pick:
        return found.sel(kind=pick["kind"]) if pick["kind"] in found["kind"].values else None
    return found


def loss(report: "Report") -> str:
    """Beside that of chance; empty if none was taken."""
    if "loss" not in report.curves:
        return ""
    kind, label = ("own", "this network") if report.exists else ("law", "a sample of the law")
    marks = [(kind, label, report.curves["loss"].values.astype(float))]
    if report.against is not None and "loss" in report.against.curves:
        marks.append(("other", report.against.name, report.against.curves["loss"].values.astype(float)))
    note = "upright line: ln(vocabulary), the loss of chance" if "chance" in report.about else ""
    if "chance" in report.about:
        marks.append(("chance", "ln(vocabulary)", np.array([float(report.about["chance"])])))
    band = None
    if report.band is not None and "loss" in report.band:
        low, high = (float(report.band["loss"].sel(edge=edge)) for edge in ("low", "high"))
        band = (low, high) if np.isfinite([low, high]).all() else None
    return strip("Loss", note, marks, band)
