"""The curves of a report as one figure: medians over the law's band, and a network's own curve over both."""

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from limitformer.checking.curves import CURVES, LOG, PANELS, layer_numbers, over_heads, typical
from limitformer.checking.network import CheckedNetwork, stack_like
from limitformer.plot import BLUE, ORANGE, RED, panels
from limitformer.reports.figures import SPAN


def draw(network: CheckedNetwork, against: CheckedNetwork | None) -> Figure:
    """Draw six panels by layer for each stack of blocks."""
    stacks = [*network.stacks, network]
    figure, axes = panels(3, height=3.1, rows=2 * len(stacks))
    for part, own in zip(stacks, axes.reshape(len(stacks), -1), strict=True):
        other = stack_like(part, network, against)
        title = part.stack or (part.name if network.stacks else "")
        for panel, name in zip(own, PANELS, strict=True):
            label_axes(panel, name, title)
            if name in part.curves:
                draw_one(panel, part, other, name)
                panel.set_yscale(axis_scale(part.curves[name], name))
            else:
                panel.text(0.5, 0.5, "not measured", ha="center", transform=panel.transAxes)
    verdicts = "; ".join(str(verdict) for verdict in network.verdicts[:2])
    figure.suptitle(f"{network.name}: {verdicts}")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def label_axes(panel: Axes, name: str, stack: str = "") -> None:
    by_block = name in ("logit_std", "effective_tokens")
    panel.set(title=CURVES[name].title, xlabel="block" if by_block else "layer", ylabel=stack)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_one(panel: Axes, network: CheckedNetwork, against: CheckedNetwork | None, name: str) -> None:
    """Draw the law's band, the network's curve or the law's middle, and the other network's curve."""
    at = layer_numbers(network.curves[name])
    if network.band is not None and name in network.band:
        band = over_heads(network.band[name])
        low, middle, high = (band.sel(edge=edge).values for edge in ("low", "middle", "high"))
        places = layer_numbers(band)
        panel.fill_between(places, low, high, color=BLUE, alpha=0.2, linewidth=0, label="nine of ten new networks")
        panel.plot(places, middle, color=BLUE, label="their median")
    if network.exists or network.band is None:
        title = "this network" if network.exists else "a new network"
        panel.plot(at, typical(network.curves[name]), color=RED if network.exists else BLUE, label=title)
    if against is not None and name in against.curves:
        other = against.curves[name]
        panel.plot(layer_numbers(other), typical(other), color=ORANGE, linestyle="--", label=against.name)


def axis_scale(curve: xr.DataArray, name: str) -> str:
    """Return "log" for a curve of positive numbers that span much, else "linear"."""
    known = curve.where(curve.notnull(), curve.max())
    wide = CURVES[name].scale == LOG and bool((known > 0).all()) and bool(known.max() > SPAN * known.min())
    return "log" if wide else "linear"
