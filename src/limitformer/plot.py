"""House style, the few drawing helpers that figures share, and the two curves by depth for results of one's own."""

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
DASHES = ("-", "--", "-.", ":")
LARGE = 30  # a span that needs a logarithm

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


def correlation(paths: Results, ax: Axes | None = None) -> Axes:
    """Draw correlations of the tokens by depth: the mean over samples and pairs, and the band from 5 to 95 % of them.

    Args:
        paths: what `lf.simulate` returns, or several of them: a dict by label, or a list. On the sphere overlaps are
            drawn. Chains beside a limit are drawn over its time.
        ax: where to draw; None makes a figure in the house style with pyplot, which notebooks show.

    Returns:
        The axes.

    Raises:
        InputError: no result of a simulation, none with correlations, or results that share no axis.
    """
    axes, _ = draw_bands(paths, correlations_of, ax)
    axes.set(ylabel="correlation of two tokens", ylim=(axes.get_ylim()[0], 1.03))
    return axes


def spread(paths: Results, ax: Axes | None = None) -> Axes:
    """Draw how sizes of networks spread by depth: q, the mean over tokens of |x|²/width, its mean and 5 to 95 % band.

    Both are over samples, on a logarithmic axis if they span more than a factor of 30: covariances can explode, and
    then a few samples are the mean. Arguments, result and errors are those of `correlation`; tokens on the sphere,
    which have one size, are refused.
    """
    axes, curves = draw_bands(paths, sizes_of, ax)
    low, high = min(each.low.min() for each in curves), max(each.high.max() for each in curves)
    axes.set(ylabel="size of the tokens, |x|²/width")
    if 0 < low * LARGE < high:
        axes.set_yscale("log")
    return axes


def draw_bands(paths: Results, measure: Measure, ax: Axes | None) -> tuple[Axes, list[Curve]]:
    """Every result as a line over its band; colours and dashes tell them apart."""
    require(ax is None or hasattr(ax, "fill_between"), f"ax must be Axes of matplotlib, or None; got {ax!r}.")
    unit, curves = curves_of(paths, measure)
    with style() if ax is None else nullcontext():
        axes = new_axes() if ax is None else ax
        for k, each in enumerate(curves):
            draw_band(axes, each, {"color": PALETTE[k % len(PALETTE)], "linestyle": DASHES[k % len(DASHES)]})
        axes.set(xlabel="layer" if unit == "layer" else f"time, {unit}")
        if len(curves) > 1:
            axes.legend()
    return axes, curves


def draw_band(axes: Axes, one: Curve, look: dict[str, Any]) -> None:
    """The mean over its band, whose edges are dashed as the mean is: in grey, colours are alike."""
    axes.fill_between(one.at, one.low, one.high, color=look["color"], alpha=0.15, linewidth=0)
    for edge in (one.low, one.high):
        axes.plot(one.at, edge, **look, linewidth=0.7, alpha=0.6)
    axes.plot(one.at, one.mean, label=one.label, **look)


def new_axes() -> Axes:
    """Of a new figure, of pyplot."""
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(ALONE, 3.6), layout="constrained")[1]
