"""The page and the picture of `limitformer.transfer`: the conclusion, and every measure over the size."""

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np

from limitformer.checking.page.steps import BAND, HIGH, LOW
from limitformer.reports.figures import Line, Panel, number
from limitformer.reports.page import Card, Code, Facts, Figures, Page, Section, TextTable
from limitformer.reports.verdict import BROKEN, FINE, WATCH
from limitformer.scaling.lines import HEAD
from limitformer.scaling.measures import MeasuredSizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAW = (
    "These are the first training steps in law: networks of every size as their own code and the rule of "
    "parametrisation draw them, and steps by the optimiser's own formulas."
)
LIMITS = (
    "These are exponents of the first steps, not of the best rate for training. In a study of sixteen settings (200 "
    "steps, four times the width or depth) the best rate moved in eight of the ten that were said not to transfer, and "
    "in two of the six that were not decided. How far it moved, and which way, was not foretold.",
    "Some measures depend on the size even in correct code: under muP the output at initialisation falls like "
    "width^(−1/2).",
)
VERDICTS = {
    True: (FINE, "transfers, as far as these steps show"),
    False: (BROKEN, "does not transfer, as far as these steps show"),
    None: (WATCH, "not known"),
}
COLUMNS = 4
LEAST_SPAN = 10.0  # of a panel, largest over smallest, so that what does not depend on the size looks flat
TITLE = 34  # characters of a line


def contents(result: MeasuredSizes) -> Page:
    """Return the page of a result."""
    others = [name for name in result.exponents if name not in result.deciding]
    head, *rows = result.cells()
    answer = Card(*VERDICTS[result.transfers], result.conclusion)
    partial = [note for note in result.notes if note.startswith("PARTIAL")]
    sections = [
        Section("Verdict", [answer, *partial]),
        Section("Exponents", [TextTable("Exponents of all measures", head, rows), *result.legend]),
        Section("Measures that decide", [figures(result, result.deciding)]),
        Section("Other measures", [figures(result, others)]),
        Section(f"What the rule {result.rule} assumes and changes", result.notes),
        Section("What this does not tell", [result.about, *LIMITS]),
        Section("Provenance", [Facts(facts(result))]),
    ]
    if result.lines is not None:
        table = TextTable("Settings", HEAD, result.lines.rows)
        sections.insert(2, Section(f"What to set at {result.lines.title}", [table, Code("Code", result.lines.code)]))
    title = f"Does the learning rate transfer over the {result.over}?"
    return Page("transfer", result.over, title, (result.heading, result.proof, LAW), sections)


def figures(result: MeasuredSizes, names: Sequence[str]) -> Figures:
    """Return a panel of each measure over the size."""
    return Figures([panel(result, name) for name in names], [("band", BAND), ("own", "their geometric mean")])


def panel(result: MeasuredSizes, name: str) -> Panel:
    """Return one measure over the size, on axes that are logarithmic and span at least `LEAST_SPAN`."""
    values, each = result.positive(name), result.exponents[name]
    x = np.asarray(result.sizes, float)
    mean = Line("own", "geometric mean", x, np.exp(np.log(values).mean(0)))
    band = (x, *np.quantile(values, [LOW, HIGH], axis=0))
    note = f"{result.word(name)}; exponent {each}: × {number(2**each.value, 3)} at twice the {result.over}"
    ticks = tuple(map(float, result.sizes))
    return Panel(name, note, result.over, (mean,), band, log=True, ticks=ticks, least_span=LEAST_SPAN, band_label=BAND)


def facts(result: MeasuredSizes) -> dict[str, str]:
    """Return the provenance; what the networks of all sizes share is that of the largest."""
    every = [each.attrs for each in result.data.values()]
    names = ("limitformer", "torch", "transformers", "seed", "inputs", "batches", "loss")
    known = {name: str(every[-1][name]) for name in names if every and name in every[-1]}
    seconds = sum(float(each.get("wall_seconds", 0.0)) for each in every)
    return {"optimizer": result.optimizer, "rule": result.rule, **known, "seconds": number(seconds, 3)}


def draw(result: MeasuredSizes) -> "Figure":
    """Draw the panels of the page, with the exponents."""
    from limitformer.plot import panels
    from limitformer.reports.drawing import draw_panel

    names = list(result.exponents)
    rows = max(1, -(-len(names) // COLUMNS))
    figure, axes = panels(COLUMNS, 3.4, 2.7, rows)
    for place in axes.ravel()[len(names) :]:
        place.remove()
    for place, name in zip(axes.ravel(), names, strict=False):
        draw_panel(place, panel(result, name))
        title = "\n".join(wrap(name, TITLE))
        place.set_title(f"{title}\nexponent {result.exponents[name]}")
    return figure
