"""The contents of the page of a check: verdicts, curves, correlations, heads, weights, thresholds and provenance."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from limitformer.checking.curves import ARTANH, BY_HEAD, CURVES, inside, layer_numbers, over_heads, typical
from limitformer.checking.network import CheckedNetwork, stack_like
from limitformer.checking.page.formats import format_parts
from limitformer.checking.thresholds import Threshold
from limitformer.reports.figures import HeatMap, Line, Panel, evenly, number
from limitformer.reports.page import Facts, Figures, Heading, Menu, Page, Part, Section, TextTable, verdict_card
from limitformer.reports.verdict import BROKEN, WATCH, Verdict
from limitformer.results.datasets import correlation

LAW = (
    "This is about initialisation: the exact law of networks as their own code draws them. Nothing was trained, and "
    "nothing is said about training beyond the sources that are named."
)
EXISTING = "This is the network as it is, measured in one pass; the law is that of a new one as its own code draws it."
FIRST = "First sequence of the first sample; numbers are hundredths, and those above the diagonal are the same."
HEADS = "One column for each block, one row for each head; medians over samples."
ELSEWHERE = ("laws", "description")  # shown in the table of laws and in the heading
# Thresholds of a curve's own value; others are ratios.
LIMITS = {"correlation": "collapse", "largest": "activation", "largest_logit": "logit"}
BY_KIND = "Gradient by kind of weight"
SHOWN = {  # the curve that shows a verdict
    "collapsed": "correlation", "grows": "size", "dies": "size", "not finite": "size", "frozen": "logit_std",
    "uniform": "effective_tokens", "exploding": "stream_gradient", "vanishing": "gradient", "dead": "gradient",
    "router": "effective_experts", "memory": "longest_memory", "faint": "relative_branch", "range": "largest",
    "swamped": "relative_branch", "loss": "loss",
}  # fmt: skip
TITLES = {"loss": "Loss", "relative_branch": "Branch 1 of a block"}  # of panels whose curve has another one
TOKENS, DEPTHS = 128, 7  # of the correlations, at most
Thresholds = Mapping[str, Threshold]
Place = dict[str, Any]  # a sublayer or a kind of weight; empty: the whole curve


def contents(network: CheckedNetwork, against: CheckedNetwork | None, thresholds: Thresholds) -> Page:
    """Return the page of a network, with another one next to it."""
    networks = [network] if against is None else [network, against]
    about = LAW if not network.exists else EXISTING if network.band is not None else ""
    beside: list[Part] = [] if against is None else [against.heading, *verdicts(against)]
    sections = [
        Section("Verdict", verdicts(network)),
        Section(f"Verdict on {against.name}" if against is not None else "", beside),
        Section(layers_title(network.stack), [by_layer(network, against, thresholds)]),
    ]
    for stack in network.stacks:
        figures = by_layer(stack, stack_like(stack, network, against), thresholds)
        sections.append(Section(layers_title(stack.name), [stack.heading, figures]))
    sections += [
        Section(BY_KIND, [gradients(network, against)]),
        Section("Correlation of tokens, at a depth", [matrices(networks), FIRST]),
        Section("Heads by block", heads(networks)),
        Section("Number formats", format_parts(network.formats, network.rounding)),
        *map(recipe_section, networks),
        Section("Initialisation, weight by weight", [part for each in networks for part in findings(each)]),
        Section("Law of the weights", [part for each in networks for part in laws(each)]),
        Section("Thresholds", [threshold_table(thresholds)]),
        Section("Provenance", [part for each in networks for part in provenance(each)]),
    ]
    return Page("check", network.name, network.name, (network.heading, network.proof, about), sections)


def verdicts(network: CheckedNetwork) -> list[Part]:
    """Return a card for each verdict, the comparison of a trained network with a new one, and the remarks."""
    comparison = []
    if network.trained:
        rows = [[each.name, each.now, each.new] for each in network.changes()]
        head = ["differs from initialisation", "this network", "a new one, 90 %"]
        comparison = [TextTable(f"What differs from initialisation in {network.name}", head, rows)]
    cards = [replace(verdict_card(each, network.exists), shown=shown_by(each, network)) for each in network.verdicts]
    return [*cards, *comparison, *network.remarks()]


def shown_by(verdict: Verdict, network: CheckedNetwork) -> tuple[str, str] | None:
    """Return the titles of the section and of the panel whose curve shows a verdict; None if no panel does."""
    stack = next((each for each in network.stacks if verdict.said.startswith(f"{each.name}: ")), None)
    narrow = verdict.name == "frozen" and not verdict.severe
    name = "effective_tokens" if narrow else SHOWN.get(verdict.name, "")
    name = "largest_logit" if verdict.name == "range" and "logit" in verdict.said else name
    if name not in (stack or network).curves or (stack is not None and name in ("gradient", "loss")):
        return None
    title = TITLES.get(name, CURVES[name].title)
    return (layers_title(network.stack if stack is None else stack.name), title) if title else (BY_KIND, "")


def layers_title(stack: str) -> str:
    return f"By layer: {stack}" if stack else "By layer"


def by_layer(network: CheckedNetwork, against: CheckedNetwork | None, thresholds: Thresholds) -> Figures:
    """Return the panels of all measured curves, one for each sublayer, and the loss if it is of these blocks."""
    result: list[Panel] = []
    for name, curve in CURVES.items():
        parts: list[Place] = [{}]
        if name in network.curves and "sublayer" in network.curves[name].dims:
            parts = [{"sublayer": k} for k in range(network.curves.sizes["sublayer"])]
        for part in parts if curve.title else []:
            result.append(panel(network, against, name, thresholds, part))
    return Figures([*result, *loss(network, against)], legend(network, against))


def gradients(network: CheckedNetwork, against: CheckedNetwork | None) -> Menu:
    """Return a panel for each kind of weight of either network."""
    curves = [each.curves for each in (network, against) if each is not None and "gradient" in each.curves]
    kinds = dict.fromkeys(str(kind) for each in curves for kind in each["kind"].values)
    panels = {kind: panel(network, against, "gradient", {}, {"kind": kind}) for kind in kinds}
    options = [(kind, [Figures([each], legend(network, against))]) for kind, each in panels.items() if each.known]
    return Menu("Kind of weight", options)


def panel(
    network: CheckedNetwork,
    against: CheckedNetwork | None,
    name: str,
    thresholds: Thresholds,
    part: Place | None = None,
) -> Panel:
    """Return one panel; it has no lines if nothing was measured."""
    part = part or {}
    own, band = part_of(network.curves, name, part), part_of(network.band, name, part)
    lines, area, note = [], None, CURVES[name].note
    if own is not None and band is not None:
        law = over_heads(band)
        low, middle, high = (law.sel(edge=edge).values for edge in ("low", "middle", "high"))
        if np.isfinite(middle).any():
            at = positions(law)
            area = (at, low, high)
            lines.append(Line("law", "median of new networks", at, middle))
        if network.exists and (share := inside(xr.Dataset({"own": own}), xr.Dataset({"own": band}))):
            note = f"{note}; {float(share['own'].mean()):.0%} within the law's band".removeprefix("; ")
    if own is not None and (network.exists or not lines):
        kind, label = ("own", "this network") if network.exists else ("law", "median of the samples")
        lines.append(Line(kind, label, positions(own), typical(own)))
    other = None if against is None else part_of(against.curves, name, part)
    if against is not None and other is not None:
        lines.append(Line("other", against.name, positions(other), typical(other)))
    title = part.get("kind", CURVES[name].title)
    title += f" {part['sublayer'] + 1} of a block" if "sublayer" in part else ""
    limit = thresholds.get(LIMITS.get(name, ""))
    levels = (
        () if limit is None else tuple((grade, at) for grade in (WATCH, BROKEN) if (at := limit.at(grade)) is not None)
    )
    axis = "layer" if own is not None and "layer" in own.dims else "block"
    return Panel(title, note, axis, tuple(lines), area, CURVES[name].scale == ARTANH, limits=levels)


def positions(curve: xr.DataArray) -> Any:
    return layer_numbers(curve).astype(float)


def part_of(curves: xr.Dataset | None, name: str, part: Place) -> xr.DataArray | None:
    """Return one sublayer or one kind of a curve; None if it was not measured."""
    if curves is None or name not in curves:
        return None
    curve = curves[name]
    if "sublayer" in part:
        return curve.isel(part) if part["sublayer"] < curve.sizes["sublayer"] else None
    if "kind" in part:
        return curve.sel(part) if part["kind"] in curve["kind"].values else None
    return curve


def loss(network: CheckedNetwork, against: CheckedNetwork | None) -> list[Panel]:
    """Return the loss of each sample and that of a uniform guess; nothing without a loss."""
    networks = [each for each in (network, against) if each is not None and "loss" in each.curves]
    if "loss" not in network.curves:
        return []
    losses = [each.curves["loss"].values.astype(float) for each in networks]
    count = max(map(len, losses))
    at, note, band = np.arange(1.0, count + 1), "", None
    own = ("own", "this network") if network.exists else ("samples", "a sample of the law")
    names = [own, *(("others", each.name) for each in networks[1:])]
    lines = [Line(*name, at[: len(each)], each) for name, each in zip(names, losses, strict=True)]
    if "chance" in network.about:
        note = "grey line: ln(vocabulary), the loss of a uniform guess"
        lines.append(Line("guess", "ln(vocabulary)", at, np.full(count, float(network.about["chance"]))))
    if network.band is not None and "loss" in network.band:
        low, high = (np.full(count, float(network.band["loss"].sel(edge=edge))) for edge in ("low", "high"))
        band = (at, low, high)
    return [Panel(TITLES["loss"], note, "sample", tuple(lines), band)]


def legend(network: CheckedNetwork, against: CheckedNetwork | None) -> list[tuple[str, str]]:
    """Return the legend that all panels share."""
    pairs = []
    if network.band is not None:
        pairs += [("band", "nine of ten new networks"), ("law", "their median")]
    elif not network.exists:
        pairs += [("law", "a new network")]
    pairs += [("own", network.name)] if network.exists else []
    return pairs + ([("other", against.name)] if against is not None else [])


def matrices(networks: Sequence[CheckedNetwork]) -> Menu:
    """Return the correlations of every network at a few depths, from the first to the last layer."""
    deepest = max(networks, key=lambda each: each.data.sizes["layer"])
    count = min(DEPTHS, deepest.data.sizes["layer"])
    every = [matrices_of(each, count) for each in networks]
    layers = deepest.data["layer"].values[depths(deepest, count)].tolist()
    options = [(str(layer), [Figures(maps)]) for layer, *maps in zip(layers, *every, strict=True)]
    return Menu(f"Layer of {deepest.name}", options, chosen=count - 1)


def depths(network: CheckedNetwork, count: int) -> Any:
    """Return `count` layers at equal distances; a network of fewer layers repeats some."""
    return np.linspace(0, network.data.sizes["layer"] - 1, count).round().astype(int)


def matrices_of(network: CheckedNetwork, count: int) -> list[HeatMap]:
    """Return the correlations of at most TOKENS tokens of the first sequence in the first sample, by depth."""
    first = network.data[["covariance"]].isel(sample=0)
    sequence = first["sequence"].values if "sequence" in first.coords else np.zeros(first.sizes["token"])
    every = np.flatnonzero(sequence == sequence[0])
    tokens, layers = every[evenly(len(every), TOKENS)], depths(network, count)
    rho = correlation(first.isel(layer=layers, token=tokens, token_=tokens)).values.astype(float)
    names = first["word"].values[tokens].tolist() if "word" in first.coords else (tokens + 1).tolist()
    names = tuple(map(str, names))
    some = f"; {len(tokens)} of {len(every)} tokens" if len(tokens) < len(every) else ""
    last, result = int(first["layer"].values[-1]), []
    for layer, values in zip(first["layer"].values[layers].tolist(), rho, strict=True):
        pairs = values[np.tril_indices(len(values), -1)]
        mean = number(float(np.mean(pairs[np.isfinite(pairs)] if np.isfinite(pairs).any() else [np.nan])), 3)
        note = f"layer {layer} of {last}; mean of pairs {mean}{some}"
        result.append(HeatMap(network.name, note, names, names, np.ma.masked_array(values), "", correlations=True))
    return result


def heads(networks: Sequence[CheckedNetwork]) -> list[Part]:
    """Return medians over samples (head, block) of the curves of attention."""
    result = []
    for network in networks:
        for name in BY_HEAD:
            if name in network.curves:
                curve = network.curves[name]
                values = curve.median("sample").transpose("head", "block").values.astype(float)
                blocks = curve["block"].values if "block" in curve.coords else range(1, values.shape[1] + 1)
                rows = tuple(map(str, range(1, len(values) + 1)))
                columns = tuple(str(int(each)) for each in blocks)
                note = f"{network.name}: {len(rows)} heads in {len(columns)} blocks"
                result.append(HeatMap(CURVES[name].title, note, rows, columns, np.ma.masked_array(values)))
    return [HEADS, Figures(result)] if any(each.known for each in result) else []


def findings(network: CheckedNetwork) -> list[Part]:
    """Return the summary of an existing network's weights, and a row for each finding."""
    report = network.initialisation
    if report is None:
        return []
    head = ["looks like", "weights", "holds", "its law", "p", "why, and what mends it"]
    rows = [
        [each.bug or each.kind, each.pattern, each.entries, each.law, number(each.p), f"{each.why} {each.mend}"]
        for each in report.findings
    ]
    table = [TextTable(f"Findings on the weights of {network.name}", head, rows)] if rows else []
    return [f"{network.name}: {report.summary}.", *table]


def recipe_section(network: CheckedNetwork) -> Section:
    """Return the comparison with a published recipe; without parts if none was asked for."""
    comparison = network.recipe
    if comparison is None:
        return Section("", [])
    name = comparison.recipe.name
    head = ["", "kind of weight", "this code", "recipe", "ratio", "what differs", "weights"]
    rows = [
        [row.mark, row.kind, row.code, row.recipe, row.ratio_text, row.remark, f"{', '.join(row.names)} ×{row.count}"]
        for row in comparison.rows
    ]
    parts: list[Part] = [f"{network.name}: {comparison.summary}."]
    parts += [TextTable(f"{network.name} against recipe {name}", head, rows)] if rows else []
    parts += [f"{remark}." for remark in comparison.remarks]
    missing = [[each.names, str(each.count), each.shape, each.reason] for each in comparison.uncovered]
    if missing:
        head = ["not covered by the recipe", "number", "shape", "why"]
        parts.append(TextTable(f"Weights of {network.name} that the recipe does not cover", head, missing))
    parts.append(Facts({"source": comparison.recipe.source, "note": comparison.recipe.notes}))
    return Section(f"{network.name} against a published recipe: {comparison.recipe.title}", parts)


def provenance(network: CheckedNetwork) -> list[Part]:
    """Return what was run."""
    return [Heading(network.name), Facts({name: each for name, each in network.about.items() if name not in ELSEWHERE})]


def threshold_table(thresholds: Thresholds) -> TextTable:
    """Return the thresholds with their sources."""
    rows = [
        [name, *("" if (level := each.at(grade)) is None else f"{level:g}" for grade in (WATCH, BROKEN)), each.source]
        for name, each in thresholds.items()
    ]
    return TextTable("Thresholds", ["threshold", WATCH, BROKEN, "source"], rows)


def laws(network: CheckedNetwork) -> list[Part]:
    """Return the law of every weight, like layers in one row."""
    if network.laws is None:
        return []
    head = ["weights", "number", "shape", "law", "tied to"]
    rows = [[name, str(each[0]), *each[1:]] for name, each in network.laws.alike().items()]
    count = f"{len(network.laws)} parameters, {network.laws.count:,} entries, as the code draws them."
    return [f"{network.name}: {count}", TextTable(f"Law of the weights of {network.name}", head, rows)]
