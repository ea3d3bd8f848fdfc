"""The contents of the page of training steps: verdicts, loss by step and by rate, what moves by layer and weight."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xarray as xr

from limitformer.checking.curves import kind_and_block
from limitformer.checking.page.page import threshold_table
from limitformer.checking.step_verdicts import compared_loss, middle, quantile, stated_rate
from limitformer.checking.thresholds import STEP_THRESHOLDS
from limitformer.checking.trained_networks import TrainedNetworks
from limitformer.reports.figures import LINES, HeatMap, Line, Panel, evenly, kind_of, number
from limitformer.reports.page import Code, Facts, Figures, Menu, Page, Part, Section, TextTable, verdict_card

LAW = (
    "These are training steps in law: networks as their own code draws them, and steps by the optimiser's own formulas."
)
LOW, HIGH = 0.05, 0.95  # of the bands
BAND = "5 to 95 % of networks"
NOISE = (
    "The gradient of a sequence has the mean G and the covariance Σ. At a batch of tr Σ/|G|² sequences, the simple "
    "noise scale of SGD, the noise of the batch's gradient is as large as G. Estimates are unbiased, so that |G|² may "
    "be negative; low and high are the ends of the 95 % interval over networks."
)
ELSEWHERE = ("laws", "kept", "groups")


def contents(report: TrainedNetworks) -> Page:
    """Return the page of a report."""
    laws = str(report.about.get("laws", ""))
    facts = {name: value for name, value in report.about.items() if name not in ELSEWHERE}
    sections = [
        Section("Verdict", [verdict_card(each, exists=True) for each in report.verdicts]),
        Section("By learning rate", rates(report)),
        Section("Loss by step", losses(report)),
        Section("Gradients by step", [*norms(report), *noise(report)]),
        Section("What moves, by layer and weight", [movements(report)]),
        Section("Thresholds", [threshold_table(STEP_THRESHOLDS)]),
        Section("Law of the weights", [Code("Law of the weights", laws)] if laws else []),
        Section("Provenance", [Facts(facts)]),
    ]
    watched = report.watched()
    sections.insert(2, Section("What to watch", [f"{watched.label}.", watched]))
    about = (report.heading, report.proof, LAW, report.caveat)
    return Page("steps", report.name, report.name, about, sections)


def rates(report: TrainedNetworks) -> list[Part]:
    """Return the share of networks whose loss falls, over the rate, and the table by rate."""
    table, count = report.table().sortby("rate"), report.data.sizes["sample"]
    x = table["rate"].values.astype(float)
    falls = Line("law", "loss falls", x, table["share"].values)
    explodes = Line("other", "loss explodes", x, table["explodes"].values / count)
    note = f"{count} network{'' if count == 1 else 's'}; dashed: it explodes; band: Wilson's interval, about 95 %"
    note += " before a rate is selected"
    band = (x, table["low"].values, table["high"].values)
    share = Panel("Share of networks whose loss falls", note, "rate", (falls, explodes), band, True, log=True,
                  band_label="Wilson's interval")  # fmt: skip
    loss = [
        Line("m0", "batch, before", x, table["loss_first"].values),
        Line("m1", "batch, after the last step", x, table["loss_last"].values),
        Line("m3", "unseen, after the last step", x, table["unseen_last"].values),
    ]
    named = (("m2", "stream at the last layer", "stream_change"), ("m5", "output", "output_change"))
    changes = [Line(kind, label, x, table[name].values) for kind, label, name in named if name in table]
    size = "stream: over its size; output: root mean square"
    panels = [
        share,
        Panel("Loss before and after", "median of networks", "rate", tuple(loss), log=True),
        Panel("Change after the last step", size, "rate", tuple(changes), log=True),
    ]
    columns, rows = report.columns(), report.rows()
    names = list(rows[0])
    words = [name.replace("_", " ") for name in names]
    meaning = [[word, columns[name]] for word, name in zip(words, names, strict=True)]
    return [
        Figures(panels, [(line.kind, line.label) for line in (*loss, *changes)]),
        TextTable("Table by rate", words, [[number(row[name]) for name in names] for row in rows]),
        TextTable("meaning of the columns", ["column", "meaning"], meaning, folded=True),
    ]


def losses(report: TrainedNetworks) -> list[Part]:
    """Return the loss by step, a panel for each rate."""
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
        title = f"Loss at rate {number(float(rate))}"
        panels.append(Panel(title, note, "steps done", lines, band, band_label=BAND))
    several = "the batch" if kind == "loss" else "the unseen batch"
    legend = [("band", f"{BAND}, {several}"), ("law", "loss of the batch, median"),
              ("other", "loss of an unseen batch, median")]  # fmt: skip
    return [Figures(panels, legend)]


def norms(report: TrainedNetworks) -> list[Part]:
    """Return the norm of the gradient by step, with a line for each rate, and how it is clipped."""
    data = report.data
    steps, few = data["step"].values.astype(float), evenly(data.sizes["rate"], LINES).tolist()
    titles = {"gradient_norm": ("Gradient norm", "of all weights together, median of networks")}
    if bool((data["clipping"] < 1).any()):
        titles["clipping"] = ("Clipping", "factor of all gradients, median of networks")
    panels = []
    for name, (title, note) in titles.items():
        values = data[name].transpose("rate", "sample", "step").values
        lines = tuple(
            Line(kind_of(j), f"rate {number(float(data['rate'][k]))}", steps, middle(values[k], 0))
            for j, k in enumerate(few)
        )
        panels.append(Panel(title, note, "steps done", lines))
    return [Figures(panels, [(line.kind, line.label) for line in panels[0].lines])]


def noise(report: TrainedNetworks) -> list[Part]:
    """Return the noise of gradients by kind of weight and step; nothing if it was not measured."""
    rows = report.noise()
    if not rows:
        return []
    head = ["weights", "step", "|G|²", "tr Σ", "noise scale", "low", "high"]
    cells = [[each if isinstance(each, str) else number(each, 3) for each in row.values()] for row in rows]
    return [NOISE, TextTable("Noise of gradients", head, cells)]


def movements(report: TrainedNetworks) -> Menu:
    """Return what the steps move at each rate; the stated rate is chosen."""
    data, first = report.data, stated_rate(report.table())
    count = data.sizes["step"] - 1
    legend = [(kind_of(step), f"after step {step}" if step else "before") for step in range(min(count + 1, LINES))]
    rates = [number(rate) for rate in data["rate"].values.tolist()]
    options = [(rate, movement(data.isel(rate=k), legend)) for k, rate in enumerate(rates)]
    return Menu("Learning rate", options, first)


def movement(data: xr.Dataset, legend: Sequence[tuple[str, str]]) -> list[Part]:
    """Return the panels by layer, block and weight at one rate."""
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
    return [Figures(panels, legend), Figures(maps(data))]


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
    """Return a panel of medians over samples, with a line for each step; `start`: also before the first."""
    rows = values.transpose("sample", "step", ...).values
    steps = range(0 if start else 1, rows.shape[1])
    lines = [
        Line(kind_of(step), f"after step {step}" if step else "before", x, middle(rows[:, step], 0)) for step in steps
    ]
    return Panel(title, note, axis, tuple(lines))


def maps(data: xr.Dataset) -> list[HeatMap]:
    """Return heat maps of the change of every matrix, by kind and block, after the first and the last step."""
    is_matrix = data["matrix"].values.astype(bool)
    names = [str(name) for name in data["weight"].values[is_matrix]]
    last = data.sizes["step"] - 1
    parts = []
    for name, title, note in (
        ("weight_change", "Change of the matrices", "over their size at the start"),
        (
            "update_effect",
            "Effect of the updates",
            "root mean square of what they add to the output of the map, or to the rows of a table",
        ),
    ):
        values = middle(data[name].transpose("sample", "step", "weight").values[:, :, is_matrix], 0)
        if name == "weight_change":  # 0/0 of a zero matrix that has not moved, in a network that has not diverged
            finite = np.isfinite(middle(data["output"].transpose("sample", "step").values, 0))
            zero = data["weight_size"].values[is_matrix] == 0
            values = np.where(np.isnan(values) & zero & finite[:, None], 0.0, values)
        for step in dict.fromkeys((1, last)):
            kinds, cells = by_kind(names, values[step])
            columns = tuple(map(str, range(cells.shape[1])))
            ending = f"after the {'first step' if step == 1 else f'last step, {step}'}"
            parts.append(HeatMap(f"{title}, {ending}", note, tuple(kinds), columns, cells, above=True))
    return parts


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
    return kinds, np.ma.masked_array(cells, absent)
