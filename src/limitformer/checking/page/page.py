"""A report as one HTML page that loads nothing: no library, no font, no network.

Curves are SVG; they show without a script and in print. The script draws the coloured cells, moves the slider and
shows the chosen kind of weight. Names of networks and weights, and words, are escaped; the page's policy lets no other
script run and nothing be loaded.

Correlations of the coloured cells are sent in hundredths, a signed byte each, row by row up to the diagonal, in base64:
17 depths of 128 tokens take 0.2 MB.
"""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.checking.curves import ARTANH, BY_HEAD, CURVES, inside, layer_numbers, over_heads, typical
from limitformer.checking.network import CheckedNetwork, stack_like
from limitformer.checking.thresholds import Threshold
from limitformer.reports.figures import Line, Panel, number, plot, rows_as_html, strip
from limitformer.reports.page import as_json, card, document, pairs, paragraph, region, section, swatch
from limitformer.reports.verdict import BROKEN, WATCH
from limitformer.results.datasets import correlation

SCRIPT = files("limitformer.checking.page").joinpath("page.js").read_text(encoding="utf-8")
LAW = (
    "This is about initialisation: the exact law of networks as their own code draws them. Nothing was trained, and "
    "nothing is said about training beyond the sources that are named."
)
EXISTING = "This is the network as it is, measured in one pass; the law is that of a new one as its own code draws it."
ELSEWHERE = ("laws", "description")  # shown in the table of laws and in the heading
# Thresholds of a curve's own value; others are ratios.
LIMITS = {"correlation": "collapse", "largest": "activation", "largest_logit": "logit"}
Thresholds = Mapping[str, Threshold]
Part = dict[str, Any]  # a sublayer or a kind of weight; empty: the whole curve


def page(network: CheckedNetwork, against: CheckedNetwork | None, thresholds: Mapping[str, Threshold]) -> str:
    """Return the page of a network, with another one next to it."""
    networks = [network] if against is None else [network, against]
    parts = [heading(network, against), curves(network, against, thresholds), cells(networks)]
    weights = "".join(findings(each) for each in networks)
    parts += map(recipe_section, networks)
    parts += [section("Initialisation, weight by weight", "initialisation", weights), sources(networks, thresholds)]
    return document(f"{network.name}: limitformer check", "".join(parts), SCRIPT, as_json(grids(networks)))


def heading(network: CheckedNetwork, against: CheckedNetwork | None) -> str:
    """Return what was measured, and the verdicts."""
    about = LAW if not network.exists else EXISTING if network.band is not None else ""
    paragraphs = "".join(map(paragraph, (network.heading, network.proof, about)))
    top = f"<header><h1>{escape(network.name)}</h1>{paragraphs}</header>"
    top += section("Verdict", "verdict", verdicts(network))
    if against is None:
        return top
    other = paragraph(against.heading) + verdicts(against)
    return top + section(f"Verdict on {against.name}, beside it", "verdict-against", other)


def verdicts(network: CheckedNetwork) -> str:
    """Return a card for each verdict, the comparison of a trained network with a new one, and the remarks."""
    comparison = ""
    if network.trained:
        head = ["differs from initialisation", "this network", "a new one, 90 %"]
        rows = [[each.name, each.now, each.new] for each in network.changes()]
        comparison = region(f"What differs from initialisation in {network.name}", rows_as_html(head, rows))
    cards = "".join(card(each, network.exists) for each in network.verdicts)
    return cards + comparison + "".join(paragraph(line) for line in network.remarks())


def curves(network: CheckedNetwork, against: CheckedNetwork | None, thresholds: Mapping[str, Threshold]) -> str:
    """Return the curves by layer, the loss, and the gradient of the chosen kind of weight."""
    every = f'<div class="plots">{"".join(plots(network, against, thresholds))}{loss(network, against)}</div>'
    kinds = gradients(network, against)
    choices = ""
    if kinds:
        options = "".join(f'<option value="{k}">{escape(kind)}</option>' for k, kind in enumerate(kinds))
        views = "".join(f'<div class="choice" data-choice="{k}">{each}</div>' for k, each in enumerate(kinds.values()))
        label = '<label for="kind">Kind of weight</label>'
        choices = f'<p class="control">{label} <select id="kind">{options}</select></p><div class="plots">{views}</div>'
    title = f"By layer: {network.stack}" if network.stack else "By layer"
    by_layer = section(title, "curves", legend(network, against) + every)
    for k, stack in enumerate(network.stacks):
        other = stack_like(stack, network, against)
        inner = legend(stack, other) + f'<div class="plots">{"".join(plots(stack, other, thresholds))}</div>'
        by_layer += section(f"By layer: {stack.name}", f"curves-{k}", paragraph(stack.heading) + inner)
    return by_layer + section("Gradient by kind of weight", "gradients", choices)


def plots(network: CheckedNetwork, against: CheckedNetwork | None, thresholds: Thresholds) -> list[str]:
    """Return the plots of all measured curves, one for each sublayer."""
    result = []
    for name, curve in CURVES.items():
        parts: list[Part] = [{}]
        if name in network.curves and "sublayer" in network.curves[name].dims:
            parts = [{"sublayer": k} for k in range(network.curves.sizes["sublayer"])]
        for part in parts if curve.title else []:
            title = f"{curve.title} {part['sublayer'] + 1} of a block" if part else curve.title
            picture = panel(network, against, name, part, title)
            if (limits := thresholds.get(LIMITS.get(name, ""))) is not None:
                numbers = [(grade, limits.at(grade)) for grade in (WATCH, BROKEN)]
                picture = replace(picture, limits=tuple((grade, each) for grade, each in numbers if each is not None))
            result.append(picture)
    return [plot(each) for each in result if each.lines]


def gradients(network: CheckedNetwork, against: CheckedNetwork | None) -> dict[str, str]:
    """Return a plot for each kind of weight of either network."""
    curves = [each.curves for each in (network, against) if each is not None and "gradient" in each.curves]
    kinds = dict.fromkeys(str(kind) for each in curves for kind in each["kind"].values)
    result = {kind: panel(network, against, "gradient", {"kind": kind}, kind) for kind in kinds}
    return {kind: plot(each) for kind, each in result.items() if each.lines}


def panel(network: CheckedNetwork, against: CheckedNetwork | None, name: str, part: Part, title: str) -> Panel:
    """Return one plot; it has no lines if nothing was measured."""
    own, band = part_of(network.curves, name, part), part_of(network.band, name, part)
    lines, area, note = [], None, CURVES[name].note
    if own is not None and band is not None:
        law = over_heads(band)
        low, middle, high = (law.sel(edge=edge).values for edge in ("low", "middle", "high"))
        if np.isfinite(middle).any():
            at = positions(law)
            area = (at, low, high)
            lines.append(Line("law", "median of new networks", at, middle))
        share = inside(xr.Dataset({"own": own}), xr.Dataset({"own": band}))
        if network.exists and share:
            note = f"{note}; {float(share['own'].mean()):.0%} within the law's band".removeprefix("; ")
    if own is not None and (network.exists or not lines):
        kind, label = ("own", "this network") if network.exists else ("law", "median of the samples")
        lines.append(Line(kind, label, positions(own), typical(own)))
    other = None if against is None else part_of(against.curves, name, part)
    if against is not None and other is not None:
        lines.append(Line("other", against.name, positions(other), typical(other)))
    axis = "layer" if own is not None and "layer" in own.dims else "block"
    return Panel(title, note, axis, tuple(lines), area, CURVES[name].scale == ARTANH)


def positions(curve: xr.DataArray) -> Any:
    return layer_numbers(curve).astype(float)


def part_of(curves: xr.Dataset | None, name: str, part: Part) -> xr.DataArray | None:
    """Return one sublayer or one kind of a curve; None if it was not measured."""
    if curves is None or name not in curves:
        return None
    curve = curves[name]
    if "sublayer" in part:
        return curve.isel(part) if part["sublayer"] < curve.sizes["sublayer"] else None
    if "kind" in part:
        return curve.sel(part) if part["kind"] in curve["kind"].values else None
    return curve


def loss(network: CheckedNetwork, against: CheckedNetwork | None) -> str:
    """Return the plot of the loss and that of a uniform guess; empty without a loss."""
    if "loss" not in network.curves:
        return ""
    kind, label = ("own", "this network") if network.exists else ("law", "a sample of the law")
    marks = [(kind, label, network.curves["loss"].values.astype(float))]
    if against is not None and "loss" in against.curves:
        marks.append(("other", against.name, against.curves["loss"].values.astype(float)))
    note = ""
    if "chance" in network.about:
        note = "upright line: ln(vocabulary), the loss of a uniform guess"
        marks.append(("chance", "ln(vocabulary)", np.array([float(network.about["chance"])])))
    band = None
    if network.band is not None and "loss" in network.band:
        low, high = (float(network.band["loss"].sel(edge=edge)) for edge in ("low", "high"))
        band = (low, high) if np.isfinite([low, high]).all() else None
    return strip("Loss", note, marks, band)


def legend(network: CheckedNetwork, against: CheckedNetwork | None) -> str:
    """Return the legend that all plots share."""
    swatches = []
    if network.band is not None:
        swatches += [("band", "nine of ten new networks"), ("law", "their median")]
    elif not network.exists:
        swatches += [("law", "a new network")]
    if network.exists:
        swatches.append(("own", network.name))
    if against is not None:
        swatches.append(("other", against.name))
    items = "".join(f"<li>{swatch(kind)} {escape(label)}</li>" for kind, label in swatches)
    hint = "Point at a plot for its numbers, or open them below it."
    return f'<ul class="legend">{items}</ul><p class="hint-text">{hint}</p>'


def cells(networks: list[CheckedNetwork]) -> str:
    """Return the places that the script fills with coloured cells."""
    matrices = (
        '<p class="control"><label for="depth">Depth</label> <input type="range" id="depth" min="0" step="1">'
        ' <output id="depth-said" for="depth"></output></p><div class="grids" id="matrices"></div>'
        f"<noscript>{paragraph('These pictures need the script of this page.')}</noscript>"
        '<p class="hint-text">First sequence of the first sample; the slider stops at '
        f"{DEPTHS} depths at most. Arrow keys move the slider, and from cell to cell in a picture that has the focus."
        "</p>"
    )
    note = "One column for each block, one row for each head; medians over samples."
    attention = any("logit_std" in each.curves for each in networks)
    heads = f'<p class="hint-text">{note}</p><div class="grids" id="heads"></div>' if attention else ""
    return section("Correlation of tokens, at a depth", "matrix", matrices) + section(
        "Heads by block", "heads-title", heads
    )


def findings(network: CheckedNetwork) -> str:
    """Return the summary of an existing network's weights, and a row for each finding."""
    report = network.initialisation
    if report is None:
        return ""
    head = ["looks like", "weights", "holds", "its law", "p", "why, and what mends it"]
    rows = [
        [each.bug or each.kind, each.pattern, each.entries, each.law, number(each.p), f"{each.why} {each.mend}"]
        for each in report.findings
    ]
    table = region(f"Findings on the weights of {network.name}", rows_as_html(head, rows)) if rows else ""
    return paragraph(f"{network.name}: {report.summary}.") + table


def recipe_section(network: CheckedNetwork) -> str:
    """Return the comparison with a published recipe, if one was asked for."""
    comparison = network.recipe
    if comparison is None:
        return ""
    head = ["", "kind of weight", "this code", "recipe", "ratio", "what differs", "weights"]
    rows = [
        [row.mark, row.kind, row.code, row.recipe, row.ratio_text, row.remark, f"{', '.join(row.names)} ×{row.count}"]
        for row in comparison.rows
    ]
    inner = paragraph(f"{network.name}: {comparison.summary}.")
    inner += region(f"{network.name} against recipe {comparison.recipe.name}", rows_as_html(head, rows)) if rows else ""
    inner += "".join(paragraph(f"{remark}.") for remark in comparison.remarks)
    missing = [[each.names, str(each.count), each.shape, each.reason] for each in comparison.uncovered]
    if missing:
        table = rows_as_html(["not covered by the recipe", "number", "shape", "why"], missing)
        inner += region(f"Weights of {network.name} that the recipe does not cover", table)
    inner += pairs({"source": comparison.recipe.source, "note": comparison.recipe.notes})
    title = f"{network.name} against a published recipe: {comparison.recipe.title}"
    return section(title, f"recipe-{hashlib.sha256(network.name.encode()).hexdigest()[:8]}", inner)


def sources(networks: list[CheckedNetwork], thresholds: Mapping[str, Threshold]) -> str:
    """Return the laws of the weights, the thresholds, and the provenance."""
    provenance = ""
    for each in networks:
        facts = {name: value for name, value in each.about.items() if name not in ELSEWHERE}
        facts = {name: number(value) if isinstance(value, float) else value for name, value in facts.items()}
        provenance += f"<h3>{escape(each.name)}</h3>{pairs(facts)}"
    parts = {
        "Law of the weights": "".join(map(laws, networks)),
        "Thresholds": threshold_table(thresholds),
        "Provenance": provenance,
    }
    return "".join(section(title, title.split()[0].lower(), inner) for title, inner in parts.items())


def threshold_table(thresholds: Mapping[str, Threshold]) -> str:
    """Return the thresholds with their sources."""
    rows = [
        [name, *("" if (level := each.at(grade)) is None else f"{level:g}" for grade in (WATCH, BROKEN)), each.source]
        for name, each in thresholds.items()
    ]
    return region("Thresholds", rows_as_html(["threshold", WATCH, BROKEN, "source"], rows)) if rows else ""


def laws(network: CheckedNetwork) -> str:
    """Return the law of every weight, like layers in one row."""
    if network.laws is None:
        return ""
    head = ["weights", "number", "shape", "law", "tied to"]
    rows = [[name, str(each[0]), *each[1:]] for name, each in network.laws.alike().items()]
    count = f"{len(network.laws)} parameters, {network.laws.count:,} entries, as the code draws them."
    table = region(f"Law of the weights of {network.name}", rows_as_html(head, rows))
    return paragraph(f"{network.name}: {count}") + table


TOKENS, DEPTHS = 128, 17  # at most
UNKNOWN = -128  # NaN


def grids(networks: list[CheckedNetwork]) -> dict[str, Any]:
    """Return the cells of one or two networks as JSON holds them."""
    return {
        "matrices": [matrices(each) for each in networks],
        "heads": [{**one, "network": each.name} for each in networks for one in heads(each)],
    }


def matrices(network: CheckedNetwork) -> dict[str, Any]:
    """Return the correlations of at most TOKENS tokens of the first sequence in the first sample."""
    first = network.data[["covariance"]].isel(sample=0)
    sequence = first["sequence"].values if "sequence" in first.coords else np.zeros(first.sizes["token"])
    every = np.flatnonzero(sequence == sequence[0])
    tokens = every[evenly(len(every), TOKENS)]
    layers = evenly(first.sizes["layer"], DEPTHS)
    rho = correlation(first.isel(layer=layers, token=tokens, token_=tokens)).values
    words = first["word"].values[tokens].tolist() if "word" in first.coords else []
    return {
        "network": network.name,
        "layers": first["layer"].values[layers].tolist(),
        "tokens": [int(each) + 1 for each in tokens],
        "of": len(every),
        "words": [str(word) for word in words],
        "rows": [packed(each) for each in rho],
    }


def evenly(count: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` of 0 … count − 1, from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def packed(rho: NDArray[Any]) -> str:
    """Return the lower triangle with its diagonal, in hundredths."""
    part = rho[np.tril_indices(len(rho))].astype(float)
    cells = np.where(np.isfinite(part), np.clip(100 * part, -100, 100).round(), UNKNOWN)
    return base64.b64encode(cells.astype(np.int8).tobytes()).decode()


def heads(network: CheckedNetwork) -> list[dict[str, Any]]:
    """Return medians over samples (head, block) of the curves of attention."""
    result = []
    for name in BY_HEAD:
        if name in network.curves:
            curve = network.curves[name]
            values = curve.median("sample").transpose("head", "block").values
            blocks = curve["block"].values if "block" in curve.coords else range(1, values.shape[1] + 1)
            cells = [[float(f"{each:.5g}") if np.isfinite(each) else None for each in row] for row in values]
            result.append({"title": CURVES[name].title, "blocks": [int(each) for each in blocks], "cells": cells})
    return result
