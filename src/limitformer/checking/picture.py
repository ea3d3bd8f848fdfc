"""The main curves of a report as one picture: the panels of its page."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from limitformer.checking.curves import PANELS
from limitformer.checking.network import CheckedNetwork, stack_like
from limitformer.checking.page.page import panel
from limitformer.checking.thresholds import Threshold
from limitformer.plot import panels
from limitformer.reports.drawing import draw_panel


def draw(network: CheckedNetwork, against: CheckedNetwork | None, thresholds: Mapping[str, Threshold]) -> Figure:
    """Draw six panels by layer for each stack of blocks."""
    stacks = [*network.stacks, network]
    figure, axes = panels(3, height=3.1, rows=2 * len(stacks))
    for part, own in zip(stacks, axes.reshape(len(stacks), -1), strict=True):
        other = stack_like(part, network, against)
        for place, name in zip(own, PANELS, strict=True):
            draw_curve(place, part, other, name, thresholds)
            place.set_ylabel(part.stack or (part.name if network.stacks else ""))
    verdicts = "; ".join(str(verdict) for verdict in network.verdicts[:2])
    figure.suptitle(f"{network.name}: {verdicts}")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def draw_curve(
    axes: Axes,
    network: CheckedNetwork,
    against: CheckedNetwork | None,
    name: str,
    thresholds: Mapping[str, Threshold] | None = None,
) -> None:
    """Draw the panel of one curve with its title."""
    one = panel(network, against, name, thresholds or {})
    axes.set(title=one.title, xlabel=one.axis)
    if one.lines:
        draw_panel(axes, one)
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
