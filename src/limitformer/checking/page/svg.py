"""Plots of a page as SVG, which needs no library: curves over a band, and single numbers on a line.

A position is in units of the drawing, which the page scales; colours are classes of the page's style: `law`, `own`,
`other` and `band`. Every plot says what it shows in words too, and holds its numbers as a table.
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
SPAN = 5  # largest over smallest, from which on an axis is logarithmic
TICKS = 5
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
    """One plot: `axis` is what x counts, `band` is x, low and high."""

    title: str
    note: str
    axis: str
    lines: tuple[Line, ...]
    band: tuple[Array, Array, Array] | None = None
    linear: bool = False  # even where values span much


@dataclass(frozen=True)
class Scale:
    """From numbers to positions, logarithmic or not."""

    low: float
    high: float
    log: bool
    start: float
    end: float

    def __call__(self, values: Array) -> Array:
        """NaN for what has no place."""
        with np.errstate(all="ignore"):
            x, low, high = (np.log(each) if self.log else each for each in (values, self.low, self.high))
            found = self.start + (x - low) / (high - low) * (self.end - self.start)
        return np.where(np.isfinite(found), found, np.nan)

    def ticks(self) -> list[float]:
        """A few round numbers."""
        if self.log:
            return decades(self.low, self.high)
        return multiples(self.low, self.high)


def scale_of(values: Array, start: float, end: float, linear: bool = False) -> Scale:
    """That all finite values fit in, with some room."""
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    if not linear and low > 0 and high > SPAN * low:
        room = math.exp(0.04 * (math.log(high) - math.log(low)))
        return Scale(max(low / room, LEAST), min(high * room, MOST), True, start, end)
    room = 0.05 * high - 0.05 * low or 0.1 * abs(high) or 1.0
    return Scale(max(low - room, -MOST), min(high + room, MOST), False, start, end)


def multiples(low: float, high: float, factors: Sequence[float] = (1, 2, 2.5, 5, 10)) -> list[float]:
    """Of a factor times a power of ten: at most a few between two numbers."""
    least = high / TICKS - low / TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in factors if factor * power >= least)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 times those where there are few."""
    first, last = math.floor(math.log10(low)), min(math.ceil(math.log10(high)), 308)
    step = max(1, math.ceil((last - first) / TICKS))
    powers = [10.0**power for power in range(first, last + 1, step)]
    found = [each for each in powers if low <= each <= high]
    if len(found) > 2:
        return found
    return [each * factor for each in powers for factor in (1, 2, 5) if low <= each * factor <= high]


def plot(panel: Panel) -> str:
    """The figure: its title, drawing and numbers."""
    everything = [line.y for line in panel.lines] + list(panel.band[1:] if panel.band else ())
    values = np.concatenate([np.asarray(each, float) for each in everything])
    y = scale_of(values, HEIGHT - BOTTOM, TOP, panel.linear)
    at = np.unique(np.concatenate([line.x for line in panel.lines]))
    x = Scale(at[0] - 1e-9, at[-1] + 1e-9, False, LEFT + 4, WIDTH - RIGHT - 4)
    parts = [axes(x, y, at[0], at[-1], panel.axis)]
    if panel.band is not None:
        parts.append(area(x(panel.band[0]), y(panel.band[1]), y(panel.band[2])))
    parts += [curve(line, x, y) for line in panel.lines]
    parts.append(hints(panel, x, at))
    return figure(panel.title, panel.note, in_words(panel), HEIGHT, "".join(parts), table(panel, at))


def figure(title: str, note: str, words: str, height: float, drawing: str, numbers: str) -> str:
    """As HTML."""
    return (
        f'<figure class="plot"><figcaption><strong>{escape(title)}</strong> <span>{escape(note)}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(words)}">{drawing}</svg>'
        f"<details><summary>numbers</summary>{numbers}</details></figure>"
    )


def axes(x: Scale, y: Scale, first: float, last: float, name: str) -> str:
    """Grid, ticks and what x counts, from the first place to the last."""
    whole = [each for each in multiples(first, last, (1, 2, 5, 10)) if each.is_integer()] if last > first else [first]
    marks = [across(at, label) for at, label in labelled(y)]
    for tick, position in zip(whole, x(np.array(whole)), strict=True):
        marks.append(text(float(position), HEIGHT - BOTTOM + 14, f"{tick:g}", "middle"))
    marks.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, name, "middle"))
    return "".join(marks)


def labelled(scale: Scale) -> list[tuple[float, str]]:
    """Positions of ticks and their numbers, with as many digits as tell them apart."""
    ticks = scale.ticks()
    for digits in range(3, 17):
        labels = [say(tick, digits) for tick in ticks]
        if len(set(labels)) == len(labels):
            break
    return list(zip(scale(np.array(ticks)).tolist(), labels, strict=True)) if ticks else []


def across(y: float, label: str) -> str:
    """A line of the grid, with its number."""
    line = f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + text(LEFT - 5, y + 4, label, "end")


def text(x: float, y: float, label: str, anchor: str) -> str:
    """Of an axis."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(label)}</text>'


def area(x: Array, low: Array, high: Array) -> str:
    """The band, where it has both edges."""
    parts = []
    for run in runs(np.isfinite(low) & np.isfinite(high)):
        there, back = points(x[run], low[run]), points(x[run][::-1], high[run][::-1])
        parts.append(f'<path class="band" d="M{there}L{back}Z"/>')
        if len(run) == 1:  # an area without a width
            parts.append(f'<path class="band-edge" d="M{there}L{back}"/>')
    return "".join(parts)


def curve(line: Line, x: Scale, y: Scale) -> str:
    """A path, broken where a value is unknown; a dot where one stands alone, and at all of a network's few."""
    across, up = x(line.x), y(line.y)
    pieces = runs(np.isfinite(up))
    path = "".join(f"M{points(across[run], up[run])}" for run in pieces)
    dotted = [k for run in pieces for k in run if len(run) == 1 or (line.kind == "own" and len(up) <= 32)]
    dots = "".join(f'<circle class="{line.kind}" cx="{across[k]:.1f}" cy="{up[k]:.1f}" r="2.6"/>' for k in dotted)
    return f'<path class="line {line.kind}" d="{path}"/>{dots}' if path else ""


def runs(known: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """Indices of what is known, in runs without a gap."""
    at = np.flatnonzero(known)
    return [run for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1) if len(run)]


def points(x: Array, y: Array) -> str:
    """Of a path."""
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def hints(panel: Panel, x: Scale, at: Array) -> str:
    """What the pointer is told at each place."""
    wide = (WIDTH - LEFT - RIGHT) / max(1, len(at) - 1)
    rows = {place: row for place, *row in rows_of(panel, at)}
    names = heads_of(panel)[1:]
    parts = []
    for place, row in rows.items():
        said = "; ".join(f"{name} {value}" for name, value in zip(names, row, strict=True) if value)
        left = float(x(np.array(float(place)))) - wide / 2
        title = escape(f"{panel.axis} {place}: {said}")
        size = f'x="{left:.1f}" y="{TOP}" width="{wide:.1f}" height="{HEIGHT - TOP - BOTTOM}"'
        parts.append(f'<rect class="hint" {size}><title>{title}</title></rect>')
    return "".join(parts)


def heads_of(panel: Panel) -> list[str]:
    """Of the columns of its numbers."""
    band = ["law, low", "law, high"] if panel.band is not None else []
    return [panel.axis, *(line.label for line in panel.lines), *band]


def rows_of(panel: Panel, at: Array) -> list[list[str]]:
    """Place, every line's value, the band's edges."""
    columns = [(line.x, line.y) for line in panel.lines]
    if panel.band is not None:
        columns += [(panel.band[0], panel.band[1]), (panel.band[0], panel.band[2])]
    known = [dict(zip(x.tolist(), y.tolist(), strict=True)) for x, y in columns]
    return [[f"{place:g}", *(say(each[place]) if place in each else "" for each in known)] for place in at.tolist()]


def table(panel: Panel, at: Array) -> str:
    """The numbers, for who cannot see the drawing or wants them."""
    return rows_as_html(heads_of(panel), rows_of(panel, at))


def rows_as_html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; every cell is text."""
    top = "".join(f'<th scope="col">{escape(each)}</th>' for each in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(each)}</td>' for each in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def in_words(panel: Panel) -> str:
    """What a drawing shows."""
    said = []
    for line in panel.lines:
        known = np.flatnonzero(np.isfinite(line.y))
        if len(known):
            ends = [f"{say(line.y[k])} at {panel.axis} {line.x[k]:g}" for k in (known[0], known[-1])]
            said.append(f"{line.label} from {ends[0]} to {ends[1]}")
    return f"{panel.title} by {panel.axis}: {'; '.join(said) or 'nothing was measured'}."


def say(value: float, digits: int = 4) -> str:
    """In short."""
    found = "–" if value != value else f"{value:.{digits}g}"
    return found.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def strip(title: str, note: str, marks: Sequence[tuple[str, str, Array]], band: tuple[float, float] | None) -> str:
    """Numbers on a horizontal line: (kind, label, values), the law's band behind them."""
    values = np.concatenate([np.asarray(each, float) for _, _, each in marks] + [np.array(band or ())])
    x, middle = scale_of(values, LEFT, WIDTH - LEFT), 26.0
    parts = [f'<line class="grid" x1="{LEFT}" x2="{WIDTH - LEFT}" y1="{middle}" y2="{middle}"/>']
    parts += [text(at, STRIP - 16, label, "middle") for at, label in labelled(x)]
    if band is not None:
        low, high = x(np.array(band))
        wide = max(high - low, 2)
        parts.append(f'<rect class="band" x="{low:.1f}" y="{middle - 12}" width="{wide:.1f}" height="24"/>')
    parts += [mark(kind, label, value, x, middle) for kind, label, each in marks for value in each.tolist()]
    said = "; ".join(f"{label} {', '.join(say(value) for value in each.tolist())}" for _, label, each in marks)
    rows = [[label, say(value)] for _, label, each in marks for value in each.tolist()]
    rows += [["law, 90 %", f"{say(band[0])} to {say(band[1])}"]] if band else []
    return figure(title, note, f"{title}: {said}.", STRIP, "".join(parts), rows_as_html(["", "value"], rows))


def mark(kind: str, label: str, value: float, x: Scale, y: float) -> str:
    """Chance is an upright line, a network a dot."""
    at = float(x(np.array(value)))
    if not math.isfinite(at):
        return ""
    title = f"<title>{escape(label)}: {say(value)}</title>"
    if kind == "chance":
        return f'<path class="line chance" d="M{at:.1f},{y - 16} {at:.1f},{y + 16}">{title}</path>'
    return f'<circle class="{kind}" cx="{at:.1f}" cy="{y}" r="4.5">{title}</circle>'
