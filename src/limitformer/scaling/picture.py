"""The picture of `limitformer.transfer`: every measure over the size."""

from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from limitformer.scaling.transfer import Transfer

COLUMNS = 4
LEAST_SPAN = 10.0  # of a panel, largest over smallest, so that what does not depend on the size looks flat
TITLE = 34  # characters of a line


def draw(result: "Transfer", path: Path) -> None:
    """Write a PNG with a panel for each measure: all networks, their mean, and the exponent."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    names = list(result.exponents)
    rows = -(-len(names) // COLUMNS)
    figure = Figure(figsize=(3.4 * COLUMNS, 2.7 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for k, name in enumerate(names):
        axes = figure.add_subplot(rows, COLUMNS, k + 1)
        values = result.positive(name)
        axes.loglog(result.sizes, values.T, color="0.7", linewidth=0.8)
        axes.loglog(result.sizes, np.exp(np.log(values).mean(0)), color="C0", marker="o")
        title = "\n".join(wrap(name, TITLE))
        axes.set_title(f"{title}\n{result.over}^({result.exponents[name]})", fontsize=8)
        middle, half = np.sqrt(values.min() * values.max()), np.sqrt(max(LEAST_SPAN, 1.3 * values.max() / values.min()))
        axes.set_ylim(middle / half, middle * half)
        axes.xaxis.set_major_locator(FixedLocator(result.sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([str(size) for size in result.sizes], fontsize=7)
        axes.tick_params(axis="y", which="both", labelsize=7)
        if k >= len(names) - COLUMNS:
            axes.set_xlabel(result.over, fontsize=8)
    figure.savefig(path, dpi=130, format="png")
