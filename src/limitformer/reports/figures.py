"""Plots of a page as SVG: curves over a band, and single numbers on a line.

Matplotlib's SVG would be three times as large and far slower to make, and its colours are fixed. Here they are classes
of the page's style (`law`, `own`, `other`, `band`) with a light and a dark value. Positions are in units of the
drawing, which the page scales. Every plot also has a description in words and a table of its numbers.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

WIDTH, HEIGHT, STRIP = 340, 210, 78
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 10, 34
TICKS = 5
SPAN = 5  # ratio of the largest value to the smallest from which an axis is logarithmic
LINES = 8  # different lines of a plot
LABEL = 34  # least distance of two labels of x
LEAST, MOST = sys.float_info.min, sys.float_info.max


@dataclass(frozen=True)
class Line:
    """A curve: `kind` is law, own or other."""

    kind: str
    label: str
    x: Array
    y: Array


@dataclass(frozen=True)
class Panel:
    """One plot: `axis` names x, `band` is x, low and high.

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


@dataclass(frozen=True)
class AxisScale:
    """A map from numbers to positions, logarithmic or linear."""

    low: float
    high: float
    log: bool
    start: float
    end: float

    def __call__(self, values: Array) -> Array:
        """Return positions, NaN for values without one."""
        with np.errstate(all="ignore"):
            x, low, high = (np.log(each) if self.log else each for each in (values, self.low, self.high))
            positions = self.start + (x - low) / (high - low) * (self.end - self.start)
        return np.where(np.isfinite(positions), positions, np.nan)

    def ticks(self) -> list[tuple[float, str]]:
        """Return a few round numbers: their positions, and labels with enough digits to differ."""
        ticks = decades(self.low, self.high) if self.log else multiples(self.low, self.high)
        for digits in range(3, 17):
            labels = [
                f"{tick:.0f}" if tick.is_integer() and abs(tick) < 1e5 else number(tick, digits) for tick in ticks
            ]
            if len(set(labels)) == len(labels):
                break
        return list(zip(self(np.array(ticks)).tolist(), labels, strict=True)) if ticks else []


def scale_of(values: Array, start: float, end: float, linear: bool = False, least_span: float = 0.0) -> AxisScale:
    """Return a scale that all finite values fit in, with some room."""
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    if least_span and low > 0:
        middle, half = (math.log(high) + math.log(low)) / 2, (math.log(high) - math.log(low)) / 2
        half = max(1.1 * half, math.log(least_span) / 2)
        bottom, top = max(middle - half, math.log(LEAST)), min(middle + half, math.log(MOST))
        return AxisScale(math.exp(bottom), math.exp(top), True, start, end)
    if not linear and low > 0 and high > SPAN * low:
        room = math.exp(0.04 * (math.log(high) - math.log(low)))
        return AxisScale(max(low / room, LEAST), min(high * room, MOST), True, start, end)
    room = 0.05 * high - 0.05 * low or 0.1 * abs(high) or 1.0
    return AxisScale(max(low - room, -MOST), min(high + room, MOST), False, start, end)


def multiples(low: float, high: float, factors: Sequence[float] = (1, 2, 2.5, 5, 10)) -> list[float]:
    """Return at most a few multiples, between two numbers, of a factor times a power of ten."""
    least = high / TICKS - low / TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in factors if factor * power >= least)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Return powers of ten, and 2 and 5 times those if there are few."""
    first, last = math.floor(math.log10(low)), min(math.ceil(math.log10(high)), 308)
    step = max(1, math.ceil((last - first) / TICKS))
    powers = [10.0**power for power in range(first, last + 1, step)]
    inside = [each for each in powers if low <= each <= high]
    if len(inside) > 2 or (step > 1 and len(inside) == 2):
        return inside
    return [each * factor for each in powers for factor in (1, 2, 5) if low <= each * factor <= high]


def powers(first: float, last: float) -> list[float]:
    """Return at most TICKS + 1 powers of ten between two numbers, or the numbers if there are fewer than two."""
    low, high = math.ceil(math.log10(first) - 1e-6), math.floor(math.log10(last) + 1e-6)
    step = max(1, math.ceil((high - low) / TICKS))
    return [10.0**power for power in range(low, high + 1, step)] if high > low else [first, last]


def plot(panel: Panel) -> str:
    """Return the figure of a panel: its title, drawing and numbers."""
    ranges = [line.y for line in panel.lines] + list(panel.band[1:] if panel.band else ())
    y = scale_of(np.concatenate(ranges), HEIGHT - BOTTOM, TOP, panel.linear, panel.least_span)
    at = np.unique(np.concatenate([line.x for line in panel.lines]))
    low, high = (at[0] * (1 - 1e-9), at[-1] * (1 + 1e-9)) if panel.log else (at[0] - 1e-9, at[-1] + 1e-9)
    x = AxisScale(low, high, panel.log, LEFT + 4, WIDTH - RIGHT - 4)
    head, rows = table(panel, at)
    limits = [limit(grade, float(y(np.array(number)))) for grade, number in panel.limits]
    parts = [*limits, axes(x, y, at[0], at[-1], panel.axis, panel.ticks)]
    if panel.band is not None:
        parts.append(area(x(panel.band[0]), y(panel.band[1]), y(panel.band[2])))
    parts += [curve(line, x, y) for line in panel.lines]
    parts.append(hints(head, rows, x, at))
    return figure(panel.title, panel.note, description(panel), HEIGHT, "".join(parts), rows_as_html(head, rows))


def figure(title: str, note: str, words: str, height: float, drawing: str, numbers: str) -> str:
    return (
        f'<figure class="plot"><figcaption><strong>{escape(title)}</strong> <span>{escape(note)}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(words)}">{drawing}</svg>'
        f"{toggle(title, numbers)}</figure>"
    )


def toggle(title: str, numbers: str) -> str:
    """Return numbers that a click shows; the title, which distinguishes it, is for readers who do not see the plot."""
    return f'<details><summary>numbers<span class="unseen">: {escape(title)}</span></summary>{numbers}</details>'


def limit(grade: str, height: float) -> str:
    """Return the line of a threshold, if its height is within the drawing."""
    if not TOP <= height <= HEIGHT - BOTTOM:
        return ""
    line = f'<line class="limit {grade}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>'
    return line + text(LEFT + 3, height - 3, grade, "start")


def axes(x: AxisScale, y: AxisScale, first: float, last: float, name: str, ticks: Sequence[float] = ()) -> str:
    """Return the lines of the grid, the ticks, and the name of x between its first and last place."""
    marks = []
    for at, label in y.ticks():
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        marks.append(text(LEFT - 5, at + 4, label, "end"))
    whole = [first]
    if ticks:
        whole = apart(ticks, x)
    elif last > first and x.log:
        whole = powers(first, last)
    elif last > first:
        whole = [each for each in multiples(first, last, (1, 2, 5, 10)) if each.is_integer()]
    for tick, position in zip(whole, x(np.array(whole)), strict=True):
        marks.append(text(float(position), HEIGHT - BOTTOM + 14, number(tick, 6) if x.log else f"{tick:g}", "middle"))
    marks.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, name, "middle"))
    return "".join(marks)


def apart(ticks: Sequence[float], x: AxisScale) -> list[float]:
    """Return the ticks whose labels do not overlap; the last one is among them."""
    result: list[float] = []
    for tick, position in sorted(zip(ticks, x(np.array(ticks)).tolist(), strict=True), reverse=True):
        if not result or float(x(np.array(result[-1]))) - position >= LABEL:
            result.append(tick)
    return result[::-1]


def text(x: float, y: float, label: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(label)}</text>'


def area(x: Array, low: Array, high: Array) -> str:
    """Return the band where it has both edges."""
    parts = []
    for run in runs(np.isfinite(low) & np.isfinite(high)):
        there, back = points(x[run], low[run]), points(x[run][::-1], high[run][::-1])
        parts.append(f'<path class="band" d="M{there}L{back}Z"/>')
        if len(run) == 1:  # an area without a width
            parts.append(f'<path class="band-edge" d="M{there}L{back}"/>')
    return "".join(parts)


def curve(line: Line, x: AxisScale, y: AxisScale) -> str:
    """Return a path, broken at unknown values; with dots at single points, and at all points of a short own curve."""
    across, up = x(line.x), y(line.y)
    pieces = runs(np.isfinite(up))
    path = "".join(f"M{points(across[run], up[run])}" for run in pieces)
    dotted = [k for run in pieces for k in run if len(run) == 1 or (line.kind == "own" and len(up) <= 32)]
    dots = "".join(f'<circle class="{line.kind}" cx="{across[k]:.1f}" cy="{up[k]:.1f}" r="2.6"/>' for k in dotted)
    return f'<path class="line {line.kind}" d="{path}"/>{dots}' if path else ""


def runs(known: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """Return the indices of known values, in runs without a gap."""
    at = np.flatnonzero(known)
    return [run for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1) if len(run)]


def points(x: Array, y: Array) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def hints(head: Sequence[str], rows: Sequence[Sequence[str]], x: AxisScale, at: Array) -> str:
    """Return a transparent column at each place, with its numbers for the pointer."""
    width = (WIDTH - LEFT - RIGHT) / max(1, len(at) - 1)
    parts = []
    for position, (place, *row) in zip(x(at), rows, strict=True):
        numbers = "; ".join(f"{name} {value}" for name, value in zip(head[1:], row, strict=True) if value)
        size = f'x="{position - width / 2:.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT - TOP - BOTTOM}"'
        parts.append(f'<rect class="hint" {size}><title>{escape(f"{head[0]} {place}: {numbers}")}</title></rect>')
    return "".join(parts)


def table(panel: Panel, at: Array) -> tuple[list[str], list[list[str]]]:
    """Return names of columns, and a row for each place: every line's value, and the band's edges."""
    columns = [(line.label, line.x, line.y) for line in panel.lines]
    if panel.band is not None:
        x, low, high = panel.band
        columns += [("nine of ten, from", x, low), ("to", x, high)]
    known = [dict(zip(x.tolist(), y.tolist(), strict=True)) for _, x, y in columns]
    rows = [[f"{place:g}", *(number(each[place]) if place in each else "" for each in known)] for place in at.tolist()]
    return [panel.axis, *(label for label, _, _ in columns)], rows


def rows_as_html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in which every cell is text."""
    top = "".join(f'<th scope="col">{escape(each)}</th>' for each in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(each)}</td>' for each in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def description(panel: Panel) -> str:
    """Return the drawing in words: where each line begins and ends."""
    parts = []
    for line in panel.lines:
        known = np.flatnonzero(np.isfinite(line.y))
        if len(known):
            ends = [f"{number(line.y[k])} at {panel.axis} {line.x[k]:g}" for k in (known[0], known[-1])]
            parts.append(f"{line.label} from {ends[0]} to {ends[1]}")
    return f"{panel.title} by {panel.axis}: {'; '.join(parts) or 'nothing was measured'}."


def number(value: float, digits: int = 4) -> str:
    short = "–" if value != value else f"{value:.{digits}g}"
    return short.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def strip(title: str, note: str, marks: Sequence[tuple[str, str, Array]], band: tuple[float, float] | None) -> str:
    """Return numbers on a horizontal line, (kind, label, values), over the law's band."""
    values = np.concatenate([each for _, _, each in marks] + [np.array(band or ())])
    x, middle = scale_of(values, LEFT, WIDTH - LEFT), 26.0
    parts = [f'<line class="grid" x1="{LEFT}" x2="{WIDTH - LEFT}" y1="{middle}" y2="{middle}"/>']
    parts += [text(at, STRIP - 16, label, "middle") for at, label in x.ticks()]
    if band is not None:
        low, high = x(np.array(band))
        size = f'x="{low:.1f}" y="{middle - 12}" width="{max(high - low, 2):.1f}" height="24"'
        parts.append(f'<rect class="band" {size}/>')
    parts += [mark(kind, label, value, x, middle) for kind, label, each in marks for value in each.tolist()]
    words = "; ".join(f"{label} {', '.join(number(value) for value in each.tolist())}" for _, label, each in marks)
    rows = [[label, number(value)] for _, label, each in marks for value in each.tolist()]
    rows += [["law, 90 %", f"{number(band[0])} to {number(band[1])}"]] if band else []
    return figure(title, note, f"{title}: {words}.", STRIP, "".join(parts), rows_as_html(["", "value"], rows))


def mark(kind: str, label: str, value: float, x: AxisScale, y: float) -> str:
    """Return a dot, or an upright line for the loss of a uniform guess."""
    at = float(x(np.array(value)))
    if not math.isfinite(at):
        return ""
    title = f"<title>{escape(label)}: {number(value)}</title>"
    if kind == "chance":
        return f'<path class="line chance" d="M{at:.1f},{y - 16} {at:.1f},{y + 16}">{title}</path>'
    return f'<circle class="{kind}" cx="{at:.1f}" cy="{y}" r="4.5">{title}</circle>'


def kind_of(k: int) -> str:
    """Return the class of the k-th line."""
    return f"m{k % LINES}"
