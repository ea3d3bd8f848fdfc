"""The curves of a report as one figure: medians over the law's band, and a network's own curve over both."""

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from limitformer.checking.curves import over_heads
from limitformer.plot import BLUE, ORANGE, RED, panels

if TYPE_CHECKING:
    from limitformer.checking.report import Report

PANELS = {
    "correlation": ("mean correlation of tokens", "linear"),
    "size": ("root mean square of the stream", "log"),
    "effective_rank": ("effective rank of the tokens", "log"),
    "logit_std": ("standard deviation of logits, mean of heads", "log"),
    "effective_tokens": ("effective tokens, mean of heads", "log"),
    "stream_gradient": ("gradient of the stream", "log"),
}


SPAN = 5  # largest over smallest, from which on an axis is logarithmic


def draw(report: "Report") -> Figure:
    """Six panels by layer."""
    figure, axes = panels(3, height=3.1, rows=2)
    for panel, (name, (title, scale)) in zip(axes.ravel(), PANELS.items(), strict=True):
        panel.set(title=title, xlabel="block" if name in ("logit_std", "effective_tokens") else "layer")
        if name in report.curves:
            draw_one(panel, report, name)
            panel.set_yscale(scale if wide(report.curves[name]) else "linear")
        else:
            panel.text(0.5, 0.5, "not measured", ha="center", transform=panel.transAxes)
    said = "; ".join(str(verdict) for verdict in report.verdicts[:2])
    figure.suptitle(f"{report.name}: {said}")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def draw_one(axes: Axes, report: "Report", name: str) -> None:
    """The law's band, the network's curve or the law's middle, and the other network's."""
    at = layer_numbers(report.curves[name])
    if report.band is not None and name in report.band:
        band = over_heads(report.band[name])
        low, middle, high = (band.sel(edge=edge).values for edge in ("low", "middle", "high"))
        axes.fill_between(at[: len(low)], low, high, color=BLUE, alpha=0.2, linewidth=0, label="law, 90 %")
        axes.plot(at[: len(low)], middle, color=BLUE, label="law, middle")
    if report.exists or report.band is None:
        label = "this network" if report.exists else "law, one sample"
        axes.plot(at, typical(report.curves[name]), color=RED if report.exists else BLUE, label=label)
    if report.against is not None and name in report.against.curves:
        other = report.against.curves[name]
        axes.plot(layer_numbers(other), typical(other), color=ORANGE, linestyle="--", label=report.against.name)


def layer_numbers(curve: xr.DataArray) -> Any:
    """Layers from 0, or blocks from 1."""
    name = "layer" if "layer" in curve.dims else "block"
    return curve[name].values if name in curve.coords else np.arange(curve.sizes[name])


def typical(curve: xr.DataArray) -> Any:
    """The median over samples of the mean over heads."""
    return over_heads(curve).median("sample").values


def wide(curve: xr.DataArray) -> bool:
    """Whether it is positive and spans enough for a logarithm."""
    known = curve.where(curve.notnull(), curve.max())
    return bool((known > 0).all()) and bool(known.max() > SPAN * known.min())
