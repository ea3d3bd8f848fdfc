"""House style, the drawing helpers that figures share, and plots of results by depth."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from numpy.typing import ArrayLike, NDArray

from limitformer.base.errors import require
from limitformer.results.by_depth import Curve, Measure, Results, correlations_of, curves_of, sizes_of

Array = NDArray[np.float64]

# Okabe and Ito's colours, which colour-blind readers can distinguish.
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
# Some colours are alike in grey; markers and dashes distinguish curves there.
MARKERS = "os^Dv"
DASHES = ("-", "--", "-.", ":")
LARGE = 30  # a span that needs a logarithm

WIDTH = 9.6  # inches, of a figure of several panels: all of them have the same width, and so the same type on a page
ALONE = 5.6  # inches, of one panel
SMALL = 9  # points, of numbers at axes and of legends
STYLE: Any = {
    "figure.dpi": 110,
    "savefig.dpi": 160,
    # One font size for all panels and figures.
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
    """Apply the house style within the block."""
    with mpl.rc_context(STYLE):
        yield


def panels(columns: int, width: float | None = None, height: float = 3.6, rows: int = 1) -> tuple[Figure, Any]:
    """Return a figure without a window, with panels of `width` × `height` inches, and its axes.

    The axes are (columns,) or (rows, columns). Without `width` several columns share `WIDTH`; one has `ALONE`.
    """
    wide = width or (WIDTH / columns if columns > 1 else ALONE)
    figure = Figure(figsize=(wide * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)[0] if rows == 1 else figure.subplots(rows, columns)


def legend_below(part: Axes | Figure, columns: int, **options: Any) -> Legend:
    """Place a legend under the panel, or under all panels of the figure, off the data."""
    if isinstance(part, Figure):
        return part.legend(loc="outside lower center", ncols=columns, **options)
    return part.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=columns, **options)


def sequence(count: int) -> list[str]:
    """Return colours for an ordered sequence of curves, dark to light."""
    return [to_hex(colour) for colour in mpl.colormaps["viridis"](np.linspace(0.0, 0.88, count))]


def density(samples: ArrayLike, grid: ArrayLike) -> Array:
    """Estimate the density of `samples` (n,) on `grid` (k,) by Gaussian kernels.

    The bandwidth is 1.06 n^{-1/5} min(standard deviation, interquartile range/1.34) [Silverman, *Density Estimation*,
    1986, Sec. 3.4.2]: covariances can explode, and one such sample makes the standard deviation useless.
    """
    x, at = np.sort(np.asarray(samples, np.float64)), np.asarray(grid, np.float64)
    quarters = np.quantile(x, [0.25, 0.75])
    bandwidth = 1.06 * x.size**-0.2 * min(x.std(), (quarters[1] - quarters[0]) / 1.34)
    return np.array([kernels_at(point, x, bandwidth) for point in at.ravel()]).reshape(at.shape) / x.size


def kernels_at(point: float, x: Array, bandwidth: float) -> float:
    """Sum the kernels of the sorted samples `x` at a point; beyond nine bandwidths they count as zero."""
    first, last = np.searchsorted(x, [point - 9 * bandwidth, point + 9 * bandwidth])
    distances = (x[first:last] - point) / bandwidth
    return float(np.exp(-(distances**2) / 2).sum() / (bandwidth * np.sqrt(2 * np.pi)))


def correlation_density(samples: ArrayLike, grid: ArrayLike) -> Array:
    """Estimate the density of correlations (n,) on `grid` (k,) within (−1, 1).

    The estimate is made in u = artanh ρ, which has no boundary, and transformed: p(ρ) = p(u)/(1 − ρ²). In ρ itself
    kernels extend beyond ±1, and the density looks cut there. In u the law of a network is nearly normal, since the
    noise of ρ is proportional to 1 − ρ² [ST, Thm 3.2]. Collapsed samples, |ρ| = 1, have no density: their share is
    missing from the integral.
    """
    rho, x = np.asarray(grid, np.float64), np.asarray(samples, np.float64)
    inside = x[np.abs(x) < 1]
    if not inside.size:
        return np.zeros(rho.shape)
    return np.asarray(inside.size / x.size * density(np.arctanh(inside), np.arctanh(rho)) / (1 - rho**2))


def correlations() -> Array:
    """Return points of (−1, 1) at which a density of correlations is drawn; they are denser near ±1."""
    return np.tanh(np.linspace(-8, 8, 1601))


def draw_densities(
    axes: Axes, network: Array, sde: Array, grid: ArrayLike, estimate: Callable[..., Array] = density
) -> None:
    """Draw histogram and density of the network's samples, and the density of the SDE's, as in [ST, Figs. 1, 7]."""
    edges = np.linspace(np.min(grid), np.max(grid), 61)
    heights = np.histogram(network, edges)[0] / (network.size * np.diff(edges))
    axes.stairs(heights, edges, fill=True, color=BLUE, alpha=0.25, label="network, histogram")
    axes.plot(grid, estimate(network, grid), color=BLUE, label="network (exact chain)")
    axes.plot(grid, estimate(sde, grid), color=RED, linestyle="--", label="SDE")


def heatmap(axes: Axes, values: ArrayLike, **options: Any) -> Any:
    """Draw an image without a grid, first row on top."""
    axes.grid(False)
    return axes.imshow(np.asarray(values), **options)


def correlation(paths: Results, ax: Axes | None = None) -> Axes:
    """Draw correlations of the tokens by depth: the mean over samples and pairs, and their band from 5 to 95 %.

    Args:
        paths: a result of `lf.simulate`, or several: a dict by label, or a list. On the sphere overlaps are drawn.
            Chains together with a limit are drawn over the limit's time.
        ax: the Axes to draw into; None makes a figure in the house style with pyplot, which notebooks show.

    Returns:
        The axes.

    Raises:
        InputError: not a result of a simulation, one without correlations, or results that share no axis.
    """
    axes, _ = draw_bands(paths, correlations_of, ax)
    axes.set(ylabel="correlation of two tokens", ylim=(axes.get_ylim()[0], 1.03))
    return axes


def spread(paths: Results, ax: Axes | None = None) -> Axes:
    """Draw the spread of sizes by depth: mean and 5 to 95 % band over samples of q, the tokens' mean |x|²/width.

    The axis is logarithmic if they span more than a factor of 30: covariances can explode, and a few samples then
    dominate the mean. Arguments, result and errors are those of `correlation`; tokens on the sphere, which have one
    size, raise `InputError`.
    """
    axes, curves = draw_bands(paths, sizes_of, ax)
    low, high = min(each.low.min() for each in curves), max(each.high.max() for each in curves)
    axes.set(ylabel="size of the tokens, |x|²/width")
    if 0 < low * LARGE < high:
        axes.set_yscale("log")
    return axes


def draw_bands(paths: Results, measure: Measure, ax: Axes | None) -> tuple[Axes, list[Curve]]:
    """Draw every result as a line over its band, with its own colour and dashes."""
    require(ax is None or hasattr(ax, "fill_between"), f"ax must be Axes of matplotlib, or None; got {ax!r}.")
    unit, curves = curves_of(paths, measure)
    with style() if ax is None else nullcontext():
        if ax is None:
            from matplotlib import pyplot

            ax = pyplot.subplots(figsize=(ALONE, 3.6), layout="constrained")[1]
        for k, each in enumerate(curves):
            # The edges have the dashes of the mean, as colours are alike in grey.
            line: Any = {"color": PALETTE[k % len(PALETTE)], "linestyle": DASHES[k % len(DASHES)]}
            ax.fill_between(each.at, each.low, each.high, color=line["color"], alpha=0.15, linewidth=0)
            for edge in (each.low, each.high):
                ax.plot(each.at, edge, **line, linewidth=0.7, alpha=0.6)
            ax.plot(each.at, each.mean, label=each.label, **line)
        ax.set(xlabel="layer" if unit == "layer" else f"time, {unit}")
        if len(curves) > 1:
            ax.legend()
    return ax, curves
