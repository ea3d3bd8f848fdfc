"""House style and the few drawing helpers that figures share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

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
# In grey some of them are alike: with these beside the colour, curves are told apart there too.
MARKERS = "os^Dv"

WIDTH = 9.6  # inches, of a figure of several panels: all of them have the same width, and so the same type on a page
ALONE = 5.6  # of one panel
SMALL = 9  # points, of numbers at axes and of legends
STYLE: Any = {
    "figure.dpi": 110,
    "savefig.dpi": 160,
    # One size for all panels and figures: figures name none of their own.
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "figure.titlesize": 10,
    "figure.labelsize": 10,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "legend.title_fontsize": SMALL,
    "figure.constrained_layout.w_pad": 0.07,
    "figure.constrained_layout.h_pad": 0.07,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.handlelength": 1.9,
    "legend.handletextpad": 0.6,
    "legend.columnspacing": 1.4,
    "lines.linewidth": 1.8,
    "axes.prop_cycle": cycler(color=PALETTE),
}


@contextmanager
def style() -> Iterator[None]:
    """The house style, inside the block only."""
    with mpl.rc_context(STYLE):
        yield


def panels(columns: int, width: float | None = None, height: float = 3.6, rows: int = 1) -> tuple[Figure, Any]:
    """A figure without a window, of panels of so many inches, and its axes (columns,) or (rows, columns).

    Without `width` several columns share `WIDTH`, and one has `ALONE`.
    """
    wide = width or (WIDTH / columns if columns > 1 else ALONE)
    figure = Figure(figsize=(wide * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)[0] if rows == 1 else figure.subplots(rows, columns)


def legend_below(part: Axes | Figure, columns: int, **options: Any) -> Legend:
    """A legend under the panel, or under all panels of the figure, where no data are."""
    if isinstance(part, Figure):
        return part.legend(loc="outside lower center", ncols=columns, **options)
    return part.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=columns, **options)


def sequence(count: int) -> list[str]:
    """Colours of curves that are in order, dark to light."""
    return [to_hex(colour) for colour in mpl.colormaps["viridis"](np.linspace(0.0, 0.88, count))]


def density(samples: ArrayLike, grid: ArrayLike) -> Array:
    """Gaussian kernel density estimate of `samples` (n,) on `grid` (k,).

    The bandwidth is 1.06 n^{-1/5} min(standard deviation, interquartile range/1.34) [Silverman, *Density Estimation*,
    1986, Sec. 3.4.2]: covariances can explode, and one such sample makes the deviation alone useless.
    """
    x, at = np.sort(np.asarray(samples, np.float64)), np.asarray(grid, np.float64)
    quarters = np.quantile(x, [0.25, 0.75])
    bandwidth = 1.06 * x.size**-0.2 * min(x.std(), (quarters[1] - quarters[0]) / 1.34)
    return np.array([kernels_at(point, x, bandwidth) for point in at.ravel()]).reshape(at.shape) / x.size


def kernels_at(point: float, x: Array, bandwidth: float) -> float:
    """Sum of the kernels of the sorted samples `x` at a point; those farther away than nine bandwidths are zero."""
    first, last = np.searchsorted(x, [point - 9 * bandwidth, point + 9 * bandwidth])
    distances = (x[first:last] - point) / bandwidth
    return float(np.exp(-(distances**2) / 2).sum() / (bandwidth * np.sqrt(2 * np.pi)))


def correlation_density(samples: ArrayLike, grid: ArrayLike) -> Array:
    """Kernel density estimate of correlations (n,) on `grid` (k,), within (−1, 1).

    It is taken in u = artanh ρ, where there is no boundary, and carried back: p(ρ) = p(u)/(1 − ρ²). In ρ itself kernels
    spill over ±1, and the density looks cut there; in u the law of a network is close to a normal one, since the noise
    of ρ is proportional to 1 − ρ² [ST, Thm 3.2]. Samples that have collapsed, |ρ| = 1, have no density: their share is
    missing.
    """
    rho, x = np.asarray(grid, np.float64), np.asarray(samples, np.float64)
    inside = x[np.abs(x) < 1]
    if not inside.size:
        return np.zeros(rho.shape)
    return np.asarray(inside.size / x.size * density(np.arctanh(inside), np.arctanh(rho)) / (1 - rho**2))


def correlations() -> Array:
    """Points of (−1, 1) at which a density of correlations is drawn: closer together near ±1, and up to there."""
    return np.tanh(np.linspace(-8, 8, 1601))


def draw_densities(
    axes: Axes, network: Array, sde: Array, grid: ArrayLike, estimate: Callable[..., Array] = density
) -> None:
    """Histogram and density of the network's samples, and density of the SDE's, as in [ST, Figs. 1, 7]."""
    edges = np.linspace(np.min(grid), np.max(grid), 61)
    heights = np.histogram(network, edges)[0] / (network.size * np.diff(edges))
    axes.stairs(heights, edges, fill=True, color=BLUE, alpha=0.25, label="network, histogram")
    axes.plot(grid, estimate(network, grid), color=BLUE, label="network (exact chain)")
    axes.plot(grid, estimate(sde, grid), color=RED, linestyle="--", label="SDE")


def heatmap(axes: Axes, values: ArrayLike, **options: Any) -> Any:
    """An image without a grid, first row on top."""
    axes.grid(False)
    return axes.imshow(np.asarray(values), **options)
