"""The page of `limitformer.transfer`: the conclusion, every measure over the size, and what this does not tell.

It is made of the parts of the pages of `check` and `steps`, and needs no script.
"""

from collections.abc import Sequence
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np

from limitformer.checking.page.steps import HIGH, LOW
from limitformer.reports.figures import Line, Panel, number, plot, rows_as_html
from limitformer.reports.page import document, keys, pairs, paragraph, region, section
from limitformer.reports.verdict import BROKEN, FINE, SIGNS, WATCH
from limitformer.scaling.measures import MeasuredSizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAW = (
    "These are the first training steps in law: networks of every size as their own code and the rule of "
    "parametrisation draw them, and steps by the optimiser's own formulas."
)
LIMITS = (
    "An exponent of 0 in these steps does not prove that the best rate transfers. An exponent of 0.5 in the effect of "
    "an update shows that it does not.",
    "Some measures depend on the size even in correct code: under muP the output at initialisation falls like "
    "width^(−1/2).",
)
VERDICTS = {True: (FINE, "transfers, as far as these steps show"), False: (BROKEN, "does not transfer"),
            None: (WATCH, "not known")}  # fmt: skip


def page(result: MeasuredSizes) -> str:
    """Return the page of a result."""
    deciding = [name for name in result.exponents if name in result.deciding]
    others = [name for name in result.exponents if name not in result.deciding]
    parts = [
        heading(result),
        section("Exponents", "exponents", table(result)),
        section("Measures that decide", "deciding", plots(result, deciding)),
        section("Other measures", "others", plots(result, others)),
        section(f"What the rule {result.rule} assumes and changes", "rule", "".join(map(paragraph, result.notes))),
        section("What this does not tell", "limits", "".join(map(paragraph, (result.about, *LIMITS)))),
        section("Provenance", "provenance", pairs(facts(result))),
    ]
    return document(f"{result.over}: limitformer transfer", "".join(parts))


def heading(result: MeasuredSizes) -> str:
    """Return the question and the card of the answer."""
    grade, words = VERDICTS[result.transfers]
    sign = f'<span class="kind"><span aria-hidden="true">{SIGNS[grade]}</span> {words}</span>'
    card = f'<article class="card {grade}"><h3>{sign} {escape(result.conclusion)}</h3></article>'
    top = paragraph(result.heading) + paragraph(result.proof) + paragraph(LAW)
    title = f"Does the learning rate transfer over the {escape(result.over)}?"
    partial = "".join(paragraph(note) for note in result.notes if note.startswith("PARTIAL"))
    return f"<header><h1>{title}</h1>{top}</header>" + section("Verdict", "verdict", card + partial)


def table(result: MeasuredSizes) -> str:
    """Return the medians by size, the exponents, and the meaning of the words."""
    head, *rows = result.cells()
    return region("Exponents of all measures", rows_as_html(head, rows)) + "".join(map(paragraph, result.legend))


def plots(result: MeasuredSizes, names: Sequence[str]) -> str:
    """Return a plot of each measure over the size, on axes that are logarithmic and span at least `LEAST_SPAN`."""
    if not names:
        return ""
    legend = keys([("band", "5 to 95 % of networks"), ("own", "their geometric mean")])
    return legend + f'<div class="plots">{"".join(plot(panel(result, name)) for name in names)}</div>'


def panel(result: MeasuredSizes, name: str) -> Panel:
    values, each = result.positive(name), result.exponents[name]
    x = np.asarray(result.sizes, float)
    mean = Line("own", "geometric mean", x, np.exp(np.log(values).mean(0)))
    band = (x, *np.quantile(values, [LOW, HIGH], axis=0))
    note = f"{result.over}^({each}), {result.word(name)}; × {number(2**each.value, 3)} at twice the {result.over}"
    return Panel(
        name, note, result.over, (mean,), band, log=True, ticks=tuple(map(float, result.sizes)), least_span=LEAST_SPAN
    )


def facts(result: MeasuredSizes) -> dict[str, str]:
    """Return the provenance; what the networks of all sizes share is that of the largest."""
    every = [each.attrs for each in result.data.values()]
    names = ("limitformer", "torch", "transformers", "seed", "inputs", "batches", "loss")
    known = {name: str(every[-1][name]) for name in names if every and name in every[-1]}
    seconds = sum(float(each.get("wall_seconds", 0.0)) for each in every)
    return {"optimizer": result.optimizer, "rule": result.rule, **known, "seconds": number(seconds, 3)}


COLUMNS = 4
LEAST_SPAN = 10.0  # of a panel, largest over smallest, so that what does not depend on the size looks flat
TITLE = 34  # characters of a line


def draw(result: MeasuredSizes) -> "Figure":
    """Draw a panel for each measure: all networks, their mean, and the exponent."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    names = list(result.exponents)
    rows = -(-len(names) // COLUMNS)
    figure = Figure(figsize=(3.4 * COLUMNS, 2.7 * rows), layout="constrained")
    for k, name in enumerate(names):
        axes = figure.add_subplot(rows, COLUMNS, k + 1)
        values = result.positive(name)
        axes.loglog(result.sizes, values.T, color="0.7", linewidth=0.8)
        axes.loglog(result.sizes, np.exp(np.log(values).mean(0)), color="C0", marker="o")
        title = "\n".join(wrap(name, TITLE))
        axes.set_title(f"{title}\n{result.over}^({result.exponents[name]})", fontsize=8)
        middle, half = np.sqrt(values.min() * values.max()), np.sqrt(max(LEAST_SPAN, 1.3 * values.max() / values.min()))
        axes.set_ylim(middle / half, middle * half)
        axes.xaxis.set_major_locator(FixedLocator(result.sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([str(size) for size in result.sizes], fontsize=7)
        axes.tick_params(axis="y", which="both", labelsize=7)
        if k >= len(names) - COLUMNS:
            axes.set_xlabel(result.over, fontsize=8)
    return figure
