"""Figures of a report by Matplotlib: into axes of a picture, and as SVG inside a page.

A panel as SVG takes about 20 ms and 2.5 kB if figure and axes are used again, and 40 ms with a new figure. Colours are
written as variables of page.css, so that the page has a dark mode, and the same figure gives the same bytes.
"""

import io
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, Formatter, LogLocator, MaxNLocator, NullLocator

from limitformer.reports.figures import COLOURS, LINE_STYLES, Drawing, HeatMap, Line, Panel, number, runs

SIZE = 11  # of letters; positions and sizes are in units of a drawing, which the page scales
WIDTH, HEIGHT = 340.0, 210.0
LEFT, RIGHT, TOP, BOTTOM = 48.0, 10.0, 10.0, 34.0
ROW, NAME = 18.0, 17.0  # heights of a row of cells and of its name
MANY = 24  # tokens from which cells have no names
NAMES = 66.0  # room for names of tokens
LEVELS = 101  # of the colours of cells; more of them make the page larger
LOCK = threading.Lock()
LONG = 32  # points of a curve from which it has no dots
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "limitformer",
    "text.parse_math": False,
    "text.color": COLOURS["quiet"],
    "axes.labelcolor": COLOURS["quiet"],
    "xtick.color": COLOURS["quiet"],
    "ytick.color": COLOURS["quiet"],
    "grid.color": COLOURS["rule"],
    "grid.linewidth": 1.0,
    "axes.linewidth": 0.0,
    "path.simplify": False,
    "font.size": SIZE,
    **dict.fromkeys(("axes.labelsize", "xtick.labelsize", "ytick.labelsize"), SIZE),
    **{f"{axis}tick.{grade}.size": 0.0 for axis in "xy" for grade in ("major", "minor")},
}


class TickText(Formatter):
    """Labels with enough digits to differ, and without an exponent that stands apart."""

    def __call__(self, value: float, pos: int | None = None) -> str:
        """Return the label of one tick."""
        return number(value)

    def format_ticks(self, values: Any) -> list[str]:
        """Return the labels of all ticks."""
        labels: list[str] = []
        for digits in range(3, 17):
            labels = [
                f"{each:.0f}" if float(each).is_integer() and abs(each) < 1e5 else number(each, digits)
                for each in values
            ]
            if len(set(labels)) == len(labels):
                break
        return labels


# Into axes


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Draw the limits, the band and the lines, with labels for a legend."""
    places = panel.places
    low, high, log = panel.span()
    few = (1.0,) if high > 200 * low else (1.0, 2.0, 5.0)  # ticks of a decade
    set_scale(axes, "y", low, high, log, LogLocator(subs=few, numticks=6) if log else MaxNLocator(5))
    first, last = float(places[0]), float(places[-1])
    if panel.log:
        room = (last / first) ** 0.015 if last > first else 1.5
        many = not panel.ticks and last >= 100 * first
        marks: Any = LogLocator(numticks=6) if many else FixedLocator(panel.ticks or places.tolist(), nbins=6)
        set_scale(axes, "x", first / room, last * room, True, marks)
    else:
        room = 0.015 * (last - first) or 0.5
        marks = MaxNLocator(6, integer=bool((places == places.round()).all()))
        set_scale(axes, "x", first - room, last + room, False, marks)
    axes.set_xlabel(panel.axis)
    for grade, level in panel.limits:
        if low <= level <= high:
            across = axes.get_yaxis_transform()
            axes.plot((0, 1), (level, level), color=COLOURS[grade], linewidth=1.2, dashes=(5, 3), transform=across)
            axes.text(0.01, level, grade, va="bottom", transform=across, clip_on=False)
    if panel.band is not None:
        draw_band(axes, *panel.band, panel.band_label)
    for line in panel.lines:
        draw_line(axes, line)
    for artist in (*axes.lines, *axes.patches):
        artist.set_clip_on(False)  # everything is inside


def set_scale(axes: Axes, name: str, low: float, high: float, log: bool, locator: Any) -> None:
    """Set the scale, the ends and the ticks of the axis x or y."""
    axes.set(**{f"{name}scale": "log" if log else "linear", f"{name}lim": (low, high)})
    axis: Any = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(TickText())


def draw_band(axes: Axes, x: Any, low: Any, high: Any, label: str) -> None:
    """Fill the band where it has both edges; a single place has an upright line."""
    for k, run in enumerate(runs(np.isfinite(low) & np.isfinite(high))):
        name = label if k == 0 else None
        if len(run) == 1:
            axes.plot(x[run].repeat(2), (low[run[0]], high[run[0]]), color=COLOURS["law"], alpha=0.3, linewidth=6,
                      solid_capstyle="butt", label=name)  # fmt: skip
        else:
            edges = np.concatenate([x[run], x[run][::-1]]), np.concatenate([low[run], high[run][::-1]])
            axes.fill(*edges, color=COLOURS["law"], alpha=0.2, linewidth=0, label=name)


def draw_line(axes: Axes, line: Line) -> None:
    """Draw a curve, broken at unknown values, with dots at single points."""
    style, y = LINE_STYLES[line.kind], np.where(np.isfinite(line.y), line.y, np.nan)
    every = style.dots and (len(y) <= LONG or not style.width)  # dots without a line are all there is
    dots = [int(k) for run in runs(np.isfinite(y)) for k in run if every or len(run) == 1]
    (drawn,) = axes.plot(line.x, y, color=COLOURS[style.colour], linewidth=style.width, label=line.label)
    if style.dashes:
        drawn.set_dashes([each / style.width for each in style.dashes])
    if dots:
        drawn.set(marker="o", markersize=4.5, markevery=dots)


def draw_cells(axes: Axes, cells: HeatMap) -> None:
    """Draw an image with a pixel for each cell, and the signs of cells without a colour."""
    low, high, log = cells.span()
    norm = (LogNorm if log else Normalize)(low, high if high > low else low + 1)
    colours = LinearSegmentedColormap.from_list("cells", cells.colours, LEVELS)
    values = np.ma.masked_array(cells.values.data, ~cells.coloured)
    up = 2 if cells.above else 1  # a row for the name above each row of cells
    image = np.zeros((up * len(cells.rows), len(cells.columns), 4))
    image[up - 1 :: up] = colours(norm(values))
    axes.set(xscale="linear", yscale="linear")
    axes.imshow(image, aspect="auto", interpolation="none", clip_on=False)
    for sign, where in cells.signs().items():
        down, across = np.nonzero(where)
        if len(down):
            axes.plot(across, up * down + up - 1, sign, color=COLOURS["own" if sign == "^" else "quiet"], markersize=5,
                      fillstyle="none", clip_on=False)  # fmt: skip
    axes.set(xlim=(-0.5, len(cells.columns) - 0.5), ylim=(up * len(cells.rows) - 0.5, -0.5), xlabel=cells.axis)
    named = len(cells.rows) <= MANY
    name_cells(axes.xaxis, [short(each) for each in cells.columns], named and cells.correlations)
    name_cells(axes.yaxis, [] if cells.above else [short(each) for each in cells.rows], named)
    for r, name in enumerate(cells.rows if cells.above else ()):
        axes.text(-0.5, 2 * r, name, va="center", clip_on=False)


def name_cells(axis: Any, names: list[str], every: bool) -> None:
    """Label all cells along an axis, or a few."""
    axis.set_major_locator(FixedLocator(range(len(names))) if every else MaxNLocator(6, integer=True))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda at, _: names[int(at)] if 0 <= at < len(names) else "")


def short(name: str) -> str:
    """Return a name of at most ten characters on one line."""
    line = "".join(each if each.isprintable() else "·" for each in name)
    return line if len(line) <= 10 else f"{line[:9]}…"


# As SVG


class Canvas:
    """Axes that are used for one drawing after another."""

    def __init__(self) -> None:
        self.figure = Figure(dpi=72)
        self.canvas = FigureCanvasSVG(self.figure)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.patch.set_visible(False)
        self.figure.patch.set_visible(False)
        self.axes.spines[:].set_visible(False)
        self.drawn = 0

    def svg(self, drawing: Drawing) -> str:
        """Return the drawing as an SVG element with its description in words."""
        axes = self.axes
        for artist in (*axes.lines, *axes.patches, *axes.collections, *axes.images, *axes.texts):
            artist.remove()
        left, right, top, bottom, height = room(drawing)
        self.figure.set_size_inches(WIDTH / 72, height / 72)
        axes.set_position((left / WIDTH, bottom / height, 1 - (left + right) / WIDTH, 1 - (bottom + top) / height))
        axes.xaxis.set_label_coords(0.5, 14 / height, transform=self.figure.transFigure)
        axes.yaxis.set_label_coords(0, 0.5)
        axes.grid(visible=isinstance(drawing, Panel), axis="y")
        named = isinstance(drawing, HeatMap) and drawing.correlations and len(drawing.rows) <= MANY
        axes.tick_params(axis="x", labelrotation=90 if named else 0)
        if isinstance(drawing, Panel):
            draw_panel(axes, drawing)
        else:
            draw_cells(axes, drawing)
        self.drawn += 1
        text = io.StringIO()
        self.canvas.print_svg(text, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        svg = embedded(text.getvalue(), height, drawing.words())
        return re.sub(r'(?<=id=")m(?=[0-9a-f]{10}")|(?<=href="#)m(?=[0-9a-f]{10}")', f"m{self.drawn}-", svg)


def room(drawing: Drawing) -> tuple[float, float, float, float, float]:
    """Return the margins left, right, above and below, and the height."""
    if isinstance(drawing, Panel):
        return LEFT, RIGHT, TOP, BOTTOM, HEIGHT
    if drawing.above:
        return 0.0, 1.0, 0.0, BOTTOM, (ROW + NAME) * len(drawing.rows) + BOTTOM
    if not drawing.correlations:
        return 30.0, 1.0, 1.0, BOTTOM, max(120.0, min(20.0 * len(drawing.rows), 320.0)) + BOTTOM
    margin = NAMES if len(drawing.rows) <= MANY else BOTTOM
    return margin, 8.0, 8.0, margin, WIDTH


def embedded(text: str, height: float, words: str) -> str:
    """Return the SVG of Matplotlib as an element of HTML: short, without a size, with colours of the page's style."""
    inner = text[text.index("</defs>") + len("</defs>") : text.rindex("</svg>")]
    inner = re.sub(r"<clipPath.*?</clipPath>", "", inner, flags=re.DOTALL)
    unused = r' id="(?!m[0-9a-f]{10})[^"]*"| clip-path="[^"]*"|font-family: [^";]*;? ?| transform="rotate\(-0 [^"]*"'
    inner = re.sub(unused, "", inner)
    inner = re.sub(r'(?<= )(d|x|y)="[^"]*"', lambda found: re.sub(r"(\.\d)\d+", r"\1", found[0]), inner)
    inner = re.sub(r">\s+<", "><", re.sub(r"\s*\n\s*", " ", inner))
    inner = re.sub(r"<g ?/>|<defs> ?</defs>|</?g>", "", inner)
    variables = {colour: f"var(--{name})" for name, colour in COLOURS.items()}
    inner = re.sub("|".join(variables), lambda found: variables[found[0]], inner)
    return f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="{escape(words)}">{inner}</svg>'


@contextmanager
def canvas() -> Iterator[Canvas]:
    """Yield a canvas in the style of the page, one at a time: the style is that of the whole process meanwhile."""
    with LOCK, mpl.rc_context(), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.filterwarnings("ignore", message="Glyph")  # of words in a script that Matplotlib's font lacks
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        yield Canvas()
