"""Heat maps as SVG, which need no script: a row for each kind of weight, a column for each block."""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from limitformer.checking.page.svg import WIDTH, number, rows_as_html, toggle

LEAST_COLOUR, MIDDLE_COLOUR, MOST_COLOUR = (247, 251, 255), (107, 174, 214), (8, 48, 107)  # as in page.js
SIGNS = {"still": "still", "awoken": "was zero", "unknown": "not known"}  # classes of page.css
ABSENT = -1.0  # there is no such weight
ROW, LABEL, BAR = 18, 17, 34  # heights of a row of cells, of its label, and of the scale below
SPAN = 10  # ratio of the largest value to the smallest from which colours follow the logarithm


def heat_map(title: str, note: str, rows: Sequence[str], cells: Any) -> str:
    """Return the figure of cells (row, column).

    NaN (unknown) is grey, 0 is an empty frame, infinity (a change of what was zero) has a colour of its own.
    """
    known = cells[np.isfinite(cells) & (cells > 0)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (1.0, 1.0)
    logarithmic = high > SPAN * low
    wide = WIDTH / cells.shape[1]
    parts = []
    for r, name in enumerate(rows):
        top = r * (ROW + LABEL)
        parts.append(f'<text x="0" y="{top + LABEL - 5}">{escape(name)}</text>')
        for c, value in enumerate(cells[r]):
            if value != ABSENT:
                parts.append(cell(c * wide, top + LABEL, wide, float(value), (low, high, logarithmic), f"{name} {c}"))
    height = len(rows) * (ROW + LABEL)
    parts.append(scale(height + 6, low, high))
    columns = cells.shape[1]
    by = f"{columns} blocks from left to right" if columns > 1 else "one column"
    words = f"{title}: {len(rows)} kinds of weight, {by}, from {number(low)} to {number(high)}."
    kind = "colours by the logarithm" if logarithmic else "colours by the value"
    numbers = rows_as_html(
        ["weight", *(str(c) for c in range(columns))],
        [
            [name, *("" if value == ABSENT else number(float(value)) for value in cells[r])]
            for r, name in enumerate(rows)
        ],
    )
    caption = f"<strong>{escape(title)}</strong> <span>{escape(f'{note}; {by}, {kind}')}</span>"
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {height + BAR}" role="img" aria-label="{escape(words)}">{"".join(parts)}</svg>'
    )
    return f"<figure><figcaption>{caption}</figcaption>{drawing}{toggle(title, numbers)}</figure>"


def cell(x: float, y: float, wide: float, value: float, span: tuple[float, float, bool], name: str) -> str:
    low, high, logarithmic = span
    title = f"<title>{escape(name)}: {number(value)}</title>"
    place = f'x="{x + 0.5:.1f}" y="{y}" width="{max(wide - 1, 0.6):.1f}" height="{ROW - 2}"'
    if not np.isfinite(value):
        return f'<rect class="{"unknown" if np.isnan(value) else "awoken"}" {place}>{title}</rect>'
    if value <= 0:
        return f'<rect class="still" {place}>{title}</rect>'
    part = (
        np.log(value / low) / np.log(high / low) if logarithmic else (value - low) / (high - low) if high > low else 0.5
    )
    return f'<rect fill="{colour(float(part))}" {place}>{title}</rect>'


def colour(part: float) -> str:
    """Return the colour of a number in [0, 1]."""
    stops = (LEAST_COLOUR, MIDDLE_COLOUR, MOST_COLOUR)
    k = min(int(2 * part), 1)
    mixed = (round(a + (2 * part - k) * (b - a)) for a, b in zip(stops[k], stops[k + 1], strict=True))
    return f"rgb({','.join(map(str, mixed))})"


def scale(y: float, low: float, high: float) -> str:
    """Return the bar of colours with its ends, and the signs of matrices without a number."""
    steps = 20
    parts = [
        f'<rect fill="{colour((k + 0.5) / steps)}" x="{50 + 3 * k}" y="{y}" width="3.2" height="8"/>'
        for k in range(steps)
    ]
    parts.append(f'<text x="46" y="{y + 9}" text-anchor="end">{number(low, 3)}</text>')
    parts.append(f'<text x="{54 + 3 * steps}" y="{y + 9}">{number(high, 3)}</text>')
    for x, (kind, label) in zip((166, 206, 268), SIGNS.items(), strict=True):
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="9" height="8"/>')
        parts.append(f'<text x="{x + 12}" y="{y + 9}">{label}</text>')
    return "".join(parts)
