"""Figures of a report as data: curves over a band, and coloured cells.

Each has a description in words and a table of its numbers. `drawing` draws them, for the page and for the picture.
"""

import math
import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Rows = list[list[str]]

SPAN = 5  # ratio of the largest value to the smallest from which an axis is logarithmic
WIDE = 10  # and the colours of cells
LEAST, MOST = sys.float_info.min, 1e300  # ends of an axis whose span Matplotlib can compute
COLOURS = {  # of page.css, which has other values for dark screens
    "quiet": "#57606a", "rule": "#d0d7de", "law": "#0072b2", "own": "#c04a00", "other": "#8a6100",
    "broken": "#a40e26", "watch": "#7a4b00", "fine": "#0a6b4b",
}  # fmt: skip
UPWARDS = ("#f7fbff", "#6baed6", "#08306b")  # colours of cells, from the least to the most
SIGNED = ("#0072b2", "#ffffff", "#d55e00")  # of −1, 0 and 1


@dataclass(frozen=True)
class LineStyle:
    """A colour of the page, dashes, a width, and whether each point has a dot; single points always have one."""

    colour: str
    dashes: tuple[float, ...] = ()
    width: float = 2.0
    dots: bool = False


LINE_STYLES = {
    "law": LineStyle("law"),
    "own": LineStyle("own", width=2.5, dots=True),
    "other": LineStyle("other", (6, 4)),
    "guess": LineStyle("quiet"),
    "samples": LineStyle("law", width=0.0, dots=True),
    "others": LineStyle("other", width=0.0, dots=True),
    **{f"m{k}": LineStyle(colour) for k, colour in enumerate(("law", "own", "fine", "other"))},
    **{f"m{k + 4}": LineStyle(colour, (2, 3)) for k, colour in enumerate(("law", "own", "fine", "other"))},
}
LINES = 8  # different lines of a panel


@dataclass(frozen=True)
class Line:
    """A curve: `kind` is one of LINE_STYLES."""

    kind: str
    label: str
    x: Array
    y: Array


@dataclass(frozen=True)
class Panel:
    """Curves: `axis` names x, `band` is x, low and high, and `band_label` says what it is.

    The axis of y is logarithmic if the values span much, but never if it is `linear`; that of x only if it is `log`.
    `limits` are grades and the numbers at which they begin; those within the drawing have a line. `ticks` are the
    places of x with a label, by default round numbers. `least_span` above 0 makes the axis of y logarithmic, with at
    least this ratio of its ends, so that small changes look flat.
    """

    title: str
    note: str
    axis: str
    lines: tuple[Line, ...]
    band: tuple[Array, Array, Array] | None = None
    linear: bool = False
    log: bool = False
    limits: tuple[tuple[str, float], ...] = ()
    ticks: tuple[float, ...] = ()
    least_span: float = 0.0
    band_label: str = "nine of ten new networks"

    @property
    def known(self) -> bool:
        """Whether a line has a finite number."""
        return any(np.isfinite(line.y).any() for line in self.lines)

    @property
    def places(self) -> Array:
        """The values of x that any line has."""
        return np.unique(np.concatenate([line.x for line in self.lines]))

    def span(self) -> tuple[float, float, bool]:
        """Return the ends of the axis of y, and whether it is logarithmic."""
        ranges = [line.y for line in self.lines] + list(self.band[1:] if self.band else ())
        return span_of(np.concatenate(ranges), self.linear, self.least_span)

    def table(self) -> tuple[list[str], Rows]:
        """Return names of columns, and a row for each place: every line's value, and the band's edges."""
        columns = [(line.label, line.x, line.y) for line in self.lines]
        if self.band is not None:
            x, low, high = self.band
            columns += [(f"{self.band_label}, from", x, low), ("to", x, high)]
        known = [dict(zip(x.tolist(), y.tolist(), strict=True)) for _, x, y in columns]
        rows = [
            [f"{place:g}", *(number(each[place]) if place in each else "" for each in known)]
            for place in self.places.tolist()
        ]
        return [self.axis, *(label for label, _, _ in columns)], rows

    def words(self) -> str:
        """Return the drawing in words: where each line begins and ends."""
        parts = []
        for line in self.lines:
            known = np.flatnonzero(np.isfinite(line.y))
            if len(known):
                ends = [f"{number(line.y[k])} at {self.axis} {line.x[k]:g}" for k in (known[0], known[-1])]
                parts.append(f"{line.label} from {ends[0]} to {ends[1]}")
        return f"{self.title} by {self.axis}: {'; '.join(parts) or 'nothing was measured'}."


@dataclass(frozen=True)
class HeatMap:
    """Coloured cells (row, column) with the names of rows and columns; a masked cell does not exist.

    NaN is unknown, and infinity the ratio to what was zero: they have signs instead of a colour, as 0 has. `above`: the
    names of rows are long, and stand above them. `correlations`: the cells are correlations of the rows, with colours
    from −1 to 1; the table has the lower triangle in hundredths.
    """

    title: str
    note: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: "np.ma.MaskedArray[tuple[int, ...], np.dtype[np.float64]]"
    axis: str = "block"
    above: bool = False
    correlations: bool = False

    @property
    def known(self) -> bool:
        """Whether a cell has a finite number, or is a correlation."""
        return self.correlations or bool(np.isfinite(self.values.compressed()).any())

    @property
    def colours(self) -> tuple[str, ...]:
        """The colours from the least number to the largest."""
        return SIGNED if self.correlations else UPWARDS

    @property
    def coloured(self) -> NDArray[np.bool_]:
        """Whether a cell has a colour."""
        every, there = self.values.data, ~np.ma.getmaskarray(self.values)
        return there & np.isfinite(every) & ((every != 0) | self.correlations)

    def span(self) -> tuple[float, float, bool]:
        """Return the ends of the colours, and whether they follow the logarithm."""
        if self.correlations:
            return -1.0, 1.0, False
        known = self.values.data[self.coloured]
        low, high = (float(known.min()), float(known.max())) if len(known) else (1.0, 1.0)
        return low, high, low > 0 and high > WIDE * low

    def signs(self) -> dict[str, NDArray[np.bool_]]:
        """Return the cells that have a sign: of Matplotlib's markers o, ^ and x."""
        every, there = self.values.data, ~np.ma.getmaskarray(self.values) & ~self.coloured
        return {"o": there & (every == 0), "^": there & np.isinf(every), "x": there & np.isnan(every)}

    def legend(self) -> str:
        """Return what the signs mean, and whether the colours follow the logarithm."""
        names = {"o": "○ zero", "^": "△ it was zero", "x": "× not known"}
        parts = ["colours by the logarithm"] if self.span()[2] else []
        return ", ".join([*parts, *(names[sign] for sign, cells in self.signs().items() if cells.any())])

    def table(self) -> tuple[list[str], Rows]:
        """Return the numbers of all cells."""
        absent = np.ma.getmaskarray(self.values)
        if self.correlations:
            hundredths = [
                ["–" if each != each else f"{each:.0f}" for each in row]
                for row in np.rint(100 * self.values.data) + 0.0
            ]
            return ["", *self.columns], [[name, *hundredths[r][: r + 1]] for r, name in enumerate(self.rows)]
        rows = [
            [name, *("" if absent[r, c] else number(value) for c, value in enumerate(self.values.data[r].tolist()))]
            for r, name in enumerate(self.rows)
        ]
        return [self.axis, *self.columns], rows

    def words(self) -> str:
        """Return the picture in words."""
        low, high, _ = self.span()
        size = f"{len(self.rows)} rows, {len(self.columns)} column{'s' * (len(self.columns) > 1)}"
        return f"{self.title}, {self.note}: {size}, from {number(low)} to {number(high)}."


Drawing = Panel | HeatMap


def span_of(values: Array, linear: bool = False, least_span: float = 0.0) -> tuple[float, float, bool]:
    """Return the ends of an axis that all finite values fit in, with some room, and whether it is logarithmic."""
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    if least_span and low > 0:
        middle, half = (math.log(high) + math.log(low)) / 2, (math.log(high) - math.log(low)) / 2
        half = max(1.1 * half, math.log(least_span) / 2)
        bottom, top = max(middle - half, math.log(LEAST)), min(middle + half, math.log(MOST))
        return math.exp(bottom), math.exp(top), True
    if not linear and low > 0 and high > SPAN * low:
        room = math.exp(0.04 * (math.log(high) - math.log(low)))
        return max(low / room, LEAST), min(high * room, MOST), True
    room = 0.05 * high - 0.05 * low or 0.1 * abs(high) or 1.0
    return max(low - room, -MOST), min(high + room, MOST), False


def runs(known: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """Return the indices of known values, in runs without a gap."""
    at = np.flatnonzero(known)
    return [run for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1) if len(run)]


def number(value: float, digits: int = 4) -> str:
    short = "–" if value != value else f"{value:.{digits}g}"
    return short.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def kind_of(k: int) -> str:
    """Return the style of the k-th line."""
    return f"m{k % LINES}"


def evenly(count: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` of 0 … count − 1, from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))
