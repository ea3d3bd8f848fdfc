"""House style and the few drawing helpers that figures share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#000000",
)
PALETTE = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY, BLACK)

STYLE: Any = {
    "figure.dpi": 110,
    "savefig.dpi": 160,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "axes.prop_cycle": cycler(color=PALETTE),
}


@contextmanager
def style() -> Iterator[None]:
    """The house style, inside the block only."""
    with mpl.rc_context(STYLE):
        yield


def panels(columns: int, width: float = 4.6, height: float = 3.6, rows: int = 1) -> tuple[Figure, Any]:
    """A figure without a window, and its axes (columns,) or (rows, columns)."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)[0] if rows == 1 else figure.subplots(rows, columns)


def density(samples: ArrayLike, grid: ArrayLike) -> NDArray[np.float64]:
    """Gaussian kernel density estimate of `samples` (n,) on `grid` (k,).

    The bandwidth is 1.06 n^{-1/5} min(standard deviation, interquartile range/1.34) [Silverman, *Density Estimation*,
    1986, Sec. 3.4.2]: covariances can explode, and one such sample makes the deviation alone useless.
    """
    x, at = np.asarray(samples, np.float64), np.asarray(grid, np.float64)
    quarters = np.quantile(x, [0.25, 0.75])
    bandwidth = 1.06 * x.size**-0.2 * min(x.std(), (quarters[1] - quarters[0]) / 1.34)
    distances = (at[:, None] - x) / bandwidth
    return np.asarray(np.exp(-(distances**2) / 2).mean(1) / (bandwidth * np.sqrt(2 * np.pi)))


def draw_densities(axes: Axes, network: NDArray[np.float64], sde: NDArray[np.float64], grid: ArrayLike) -> None:
    """Histogram and density of the network's samples, and density of the SDE's, as in [ST, Figs. 1, 7]."""
    edges = np.linspace(np.min(grid), np.max(grid), 61)
    heights = np.histogram(network, edges)[0] / (network.size * np.diff(edges))
    axes.stairs(heights, edges, fill=True, color=BLUE, alpha=0.25, label="network, histogram")
    axes.plot(grid, density(network, grid), color=BLUE, label="network (exact chain), KDE")
    axes.plot(grid, density(sde, grid), color=RED, linestyle="--", label="SDE, KDE")


def heatmap(axes: Axes, values: ArrayLike, **options: Any) -> Any:
    """An image without a grid, first row on top."""
    axes.grid(False)
    return axes.imshow(np.asarray(values), **options)
