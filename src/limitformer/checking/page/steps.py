"""The page of training steps: verdicts, loss by step and by rate, and what moves by layer and by weight.

It is like the page of a check: one file, curves as SVG with their numbers, and a policy that lets nothing be loaded. A
menu chooses the learning rate; without a script all rates are shown.
"""

from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
import xarray as xr

from limitformer.checking.curves import kind_and_block
from limitformer.checking.page.page import evenly, threshold_table
from limitformer.checking.step_verdicts import compared_loss, middle, quantile, stated_rate
from limitformer.checking.thresholds import STEP_THRESHOLDS
from limitformer.checking.trained_networks import TrainedNetworks
from limitformer.reports.figures import LINES, WIDTH, Line, Panel, kind_of, number, plot, rows_as_html, toggle
from limitformer.reports.page import card, document, keys, pairs, paragraph, region, section

LAW = (
    "These are training steps in law: networks as their own code draws them, and steps by the optimiser's own formulas."
)
LOW, HIGH = 0.05, 0.95  # of the bands
BAND = "median of networks, and 5 to 95 %"
ELSEWHERE = ("laws", "kept", "groups")
LEAST_COLOUR, MIDDLE_COLOUR, MOST_COLOUR = (247, 251, 255), (107, 174, 214), (8, 48, 107)  # as in page.js
SIGNS = {"still": "still", "awoken": "was zero", "unknown": "not known"}  # classes of page.css
ABSENT = -1.0  # there is no such weight
ROW, LABEL, BAR = 18, 17, 34  # heights of a row of cells, of its label, and of the scale below
SPAN = 10  # ratio of the largest value to the smallest from which colours follow the logarithm


def page(report: TrainedNetworks) -> str:
    """Return the page of a report."""
    script = files("limitformer.checking.page").joinpath("steps.js").read_text(encoding="utf-8")
    parts = [heading(report), rates(report), losses(report), movements(report), sources(report)]
    return document(f"{report.name}: limitformer steps", "".join(parts), script)


def heading(report: TrainedNetworks) -> str:
    top = paragraph(report.heading) + paragraph(report.proof) + paragraph(LAW) + paragraph(report.caveat)
    cards = "".join(card(each, exists=True) for each in report.verdicts)
    return f"<header><h1>{escape(report.name)}</h1>{top}</header>" + section("Verdict", "verdict", cards)


# By rate


def rates(report: TrainedNetworks) -> str:
    """Return the share of networks whose loss falls, over the rate, and the table by rate."""
    table, count = report.table().sortby("rate"), report.data.sizes["sample"]
    x = table["rate"].values.astype(float)
    falls = Line("law", "loss falls", x, table["share"].values)
    explodes = Line("other", "loss explodes", x, table["explodes"].values / count)
    note = f"{count} network{'' if count == 1 else 's'}; dashed: it explodes; band: Wilson's interval, about 95 %"
    note += " before a rate is selected"
    band = (x, table["low"].values, table["high"].values)
    share = Panel("Share of networks whose loss falls", note, "rate", (falls, explodes), band, True, log=True)
    loss = [
        Line("m0", "batch, before", x, table["loss_first"].values),
        Line("m1", "batch, after the last step", x, table["loss_last"].values),
        Line("m3", "unseen, after the last step", x, table["unseen_last"].values),
    ]
    named = (("m2", "stream at the last layer", "stream_change"), ("m5", "output", "output_change"))
    changes = [Line(kind, label, x, table[name].values) for kind, label, name in named if name in table]
    plots = plot(share) + drawn(
        [
            Panel("Loss before and after", "median of networks", "rate", tuple(loss), log=True),
            Panel("Change after the last step", "stream: over its size; output: root mean square", "rate",
                  tuple(changes), log=True),
        ]
    )  # fmt: skip
    columns = report.columns()
    rows = report.rows()
    names = list(rows[0])
    numbers = rows_as_html(
        [name.replace("_", " ") for name in names], [[number(row[n]) for n in names] for row in rows]
    )
    meaning = rows_as_html(["column", "meaning"], [[n.replace("_", " "), columns[n]] for n in names])
    meaning = f"<details><summary>meaning of the columns</summary>{meaning}</details>"
    legend = keys([(line.kind, line.label) for line in (*loss, *changes)])
    inner = legend + f'<div class="plots">{plots}</div>' + region("Table by rate", numbers) + meaning
    return section("By learning rate", "rates", inner)


def drawn(panels: Sequence[Panel]) -> str:
    """Return the panels that have a finite number."""
    return "".join(plot(each) for each in panels if any(np.isfinite(line.y).any() for line in each.lines))


# By step


def losses(report: TrainedNetworks) -> str:
    """Return the loss by step, a plot for each rate, and the gradient norm of all rates."""
    data = report.data
    kind = compared_loss(data)
    steps = data["step"].values.astype(float)
    unseen = data["loss_unseen"].transpose("rate", "sample", "step").values
    batch = data["loss"].transpose("rate", "sample", "step").values
    panels = []
    for k, rate in enumerate(data["rate"].values):
        own, other = (np.where(np.isnan(each[k]), np.inf, each[k]) for each in (batch, unseen))
        lines = (Line("law", "loss of the batch", steps, middle(own, 0)),
                 Line("other", "loss of an unseen batch", steps, middle(other, 0)))  # fmt: skip
        shaded = own if kind == "loss" else other
        band = steps, quantile(shaded, LOW, 0), quantile(shaded, HIGH, 0)
        diverged = int((~np.isfinite(own[:, -1])).sum())
        note = f"{diverged} of {len(own)} networks diverged" if diverged else ""
        panels.append(Panel(f"Loss at rate {number(float(rate))}", note, "steps done", lines, band))
    several = "the batch" if kind == "loss" else "the unseen batch"
    legend = keys([("band", f"5 to 95 % of networks, {several}"), ("law", "loss of the batch, median"),
                   ("other", "loss of an unseen batch, median")])  # fmt: skip
    few = evenly(data.sizes["rate"], LINES).tolist()
    norms = data["gradient_norm"].transpose("rate", "sample", "step").values
    gradient = Panel(
        "Gradient norm", "of all weights together, median of networks", "steps done",
        tuple(Line(kind_of(j), f"rate {number(float(data['rate'][k]))}", steps, middle(norms[k], 0))
              for j, k in enumerate(few)),
    )  # fmt: skip
    factors = data["clipping"].transpose("rate", "sample", "step").values
    clipping = Panel(
        "Clipping", "factor of all gradients, median of networks", "steps done",
        tuple(Line(kind_of(j), f"rate {number(float(data['rate'][k]))}", steps, middle(factors[k], 0))
              for j, k in enumerate(few)),
    )  # fmt: skip
    clipped = [clipping] if bool((data["clipping"] < 1).any()) else []
    colours = keys([(line.kind, line.label) for line in gradient.lines])
    inner = legend + f'<div class="plots">{drawn(panels)}</div>'
    return section("Loss by step", "loss", inner) + section(
        "Gradients by step", "gradients", colours + f'<div class="plots">{drawn([gradient, *clipped])}</div>'
    )


# By layer and weight


def movements(report: TrainedNetworks) -> str:
    """Return what the steps move at each rate, and a menu of the rates; the stated rate comes first."""
    data = report.data
    first = stated_rate(report.table())
    order = [first, *(k for k in range(data.sizes["rate"]) if k != first)]
    options, choices = "", ""
    for k in order:
        rate = number(float(data["rate"][k]))
        options += f'<option value="{k}">{escape(rate)}</option>'
        choices += (
            f'<div class="rate" data-choice="{k}"><h3>Rate {escape(rate)}</h3>{movement(data.isel(rate=k))}</div>'
        )
    menu = f'<p class="control"><label for="rate">Learning rate</label> <select id="rate">{options}</select></p>'
    count = data.sizes["step"] - 1
    legend = keys(
        [(kind_of(step), f"after step {step}" if step else "before") for step in range(min(count + 1, LINES))]
    )
    return section("What moves, by layer and weight", "movements", menu + legend + choices)


def movement(data: xr.Dataset) -> str:
    """Return the plots by layer, block and weight at one rate."""
    layers, blocks = places(data, "layer"), places(data, "block")
    panels = [
        by_step(title, note, "layer", layers, data[name], start)
        for title, note, name, start in (
            ("Change of the stream", "|X_t − X_0| over |X_0|", "stream_change", False),
            ("Stream", "root mean square of a coordinate", "stream", True),
            ("Largest activation", "largest |x| of the stream", "largest", True),
        )
        if name in data
    ]
    if "branch_change" in data:
        for k in range(data.sizes["sublayer"]):
            for name, title, note, start in (
                ("branch_change", "Change of branch", "over its size at the start; none if it was zero", False),
                ("branch", "Size of branch", "root mean square", True),
            ):
                part = data[name].isel(sublayer=k)
                panels.append(by_step(f"{title} {k + 1} of a block", note, "block", blocks, part, start))
    for name, title, join in (
        ("entropy", "Entropy of attention", np.nanmean), ("largest_logit", "Largest logit", np.nanmax),
        ("logit_std", "Logits' standard deviation", np.nanmean),
    ):  # fmt: skip
        if name in data:
            note = "largest head" if join is np.nanmax else "mean of heads"
            panels.append(by_step(title, note, "block", blocks, over_heads(data[name], join), start=True))
    return f'<div class="plots">{drawn(panels)}</div>' + maps(data)


def over_heads(values: xr.DataArray, join: Callable[..., Any]) -> xr.DataArray:
    """Return one number of all heads, NaN where no head has one."""
    heads = values.transpose(..., "head")
    known = ~np.isnan(heads.values).all(-1)
    joined = np.full(known.shape, np.nan)
    joined[known] = join(heads.values[known], -1)
    return xr.DataArray(joined, dims=heads.dims[:-1])


def places(data: xr.Dataset, dimension: str) -> Any:
    """Return layers from 0 or blocks from 1, counted through all stacks."""
    first = 0 if dimension == "layer" else 1
    return np.arange(data.sizes.get(dimension, 0)) + float(first)


def by_step(title: str, note: str, axis: str, x: Any, values: xr.DataArray, start: bool = False) -> Panel:
    """Return a plot of medians over samples, with a line for each step; `start`: also before the first."""
    rows = values.transpose("sample", "step", ...).values
    steps = range(0 if start else 1, rows.shape[1])
    lines = [
        Line(kind_of(step), f"after step {step}" if step else "before", x, middle(rows[:, step], 0)) for step in steps
    ]
    return Panel(title, note, axis, tuple(lines))


def maps(data: xr.Dataset) -> str:
    """Return heat maps of the change of every matrix, by kind and block, after the first and the last step."""
    is_matrix = data["matrix"].values.astype(bool)
    names = [str(name) for name in data["weight"].values[is_matrix]]
    last = data.sizes["step"] - 1
    parts = []
    for name, title, note in (
        ("weight_change", "Change of the matrices", "over their size at the start"),
        ("update_effect", "Effect of the updates", "root mean square of what they add to the output of the map"),
    ):
        values = middle(data[name].transpose("sample", "step", "weight").values[:, :, is_matrix], 0)
        if name == "weight_change":  # 0/0 of a zero matrix that has not moved, in a network that has not diverged
            finite = np.isfinite(middle(data["output"].transpose("sample", "step").values, 0))
            zero = data["weight_size"].values[is_matrix] == 0
            values = np.where(np.isnan(values) & zero & finite[:, None], 0.0, values)
        for step in dict.fromkeys((1, last)):
            if np.isfinite(values[step]).any():
                kinds, cells = by_kind(names, values[step])
                ending = f"after the {'first step' if step == 1 else f'last step, {step}'}"
                parts.append(heat_map(f"{title}, {ending}", note, kinds, cells))
    return f'<div class="grids">{"".join(parts)}</div>' if parts else ""


def by_kind(names: Sequence[str], values: Any) -> tuple[list[str], Any]:
    """Return the kinds of weight, and their numbers (kind, block); those outside blocks stand in the first column."""
    where = [kind_and_block(name) for name in names]
    kinds = list(dict.fromkeys(kind for kind, _ in where))
    blocks = max(max((block for _, block in where), default=0), 0) + 1
    cells = np.full((len(kinds), blocks), np.nan)
    absent = np.ones_like(cells, bool)
    for (kind, block), value in zip(where, values, strict=True):
        at = kinds.index(kind), max(block, 0)
        cells[at] = value if absent[at] else np.fmax(cells[at], value)  # of several in one place the largest
        absent[at] = False
    return kinds, np.where(absent, ABSENT, cells)


# Heat maps: a row for each kind of weight, a column for each block


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


# Sources


def sources(report: TrainedNetworks) -> str:
    """Return the thresholds and the provenance."""
    facts = {
        name: number(value) if isinstance(value, float) else value
        for name, value in report.about.items()
        if name not in ELSEWHERE
    }
    weights = str(report.about.get("laws", ""))
    law = region("Law of the weights", f"<pre>{escape(weights)}</pre>") if weights else ""
    return (
        section("Thresholds", "thresholds", threshold_table(STEP_THRESHOLDS))
        + section("Law of the weights", "laws", law)
        + section("Provenance", "provenance", pairs(facts))
    )
