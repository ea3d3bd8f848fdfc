"""A report as one HTML page that needs nothing from elsewhere: no library, no font, no network.

Curves are drawn here, as SVG; they show without a script and in print. The script draws the coloured cells, moves the
slider and chooses the kind of weight. Whatever a network, a weight or a word is called is escaped; the page's policy
lets no other script run and nothing be loaded.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from limitformer.checking.page.grids import DEPTHS, grids
from limitformer.checking.page.panels import gradients, loss, plots
from limitformer.checking.page.svg import rows_as_html, say
from limitformer.checking.thresholds import BROKEN, WATCH
from limitformer.checking.verdicts import FINE, TRAINED, Verdict
from limitformer.initialisation.report import InitialisationReport

if TYPE_CHECKING:
    from limitformer.checking.report import Report

LAW = (
    "This is about initialisation: the exact law of networks as their own code draws them. Nothing was trained, and "
    "nothing is said about training beyond the sources that are named."
)
HELD = "This is the network as it is, measured in one pass; the law is that of a new one as its own code draws it."
ELSEWHERE = ("laws", "description")  # shown in the law table and the heading


def page(report: "Report") -> str:
    """The whole page."""
    script, style = asset("page.js"), asset("page.css")
    parts = [heading(report), curves(report), cells(report), findings(report), sources(report)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(script)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(report.name)}: limitformer check</title><style>{style}</style></head>\n"
        f"<body><main>{''.join(parts)}</main>\n"
        f'<script type="application/json" id="data">{as_json(grids(report))}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def asset(name: str) -> str:
    """A file of the package."""
    return files("limitformer.checking.page").joinpath(name).read_text(encoding="utf-8")


def policy(script: str) -> str:
    """Of what may run and be loaded: this script alone."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"


def as_json(values: Any) -> str:
    """Inside a script's tag, which no text of it can close."""
    return json.dumps(values, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def section(title: str, name: str, inner: str) -> str:
    """With its heading; nothing if it would be empty."""
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>{inner}</section>' if inner else ""


def heading(report: "Report") -> str:
    """What was measured, and the verdicts."""
    about = paragraph(HELD if report.exists and report.band is not None else "" if report.exists else LAW)
    top = f"<header><h1>{escape(report.name)}</h1>{paragraph(report.heading)}{about}</header>"
    shown = section("Verdict", "verdict", verdicts(report))
    other = report.against
    if other is None:
        return top + shown
    beside = paragraph(other.heading) + verdicts(other)
    return top + shown + section(f"Verdict on {other.name}, beside it", "verdict-against", beside)


def paragraph(text: str) -> str:
    """One, if there is something to say."""
    return f"<p>{escape(text)}</p>" if text else ""


def verdicts(report: "Report") -> str:
    """A card for each."""
    notes = "".join(paragraph(line) for line in report.remarks())
    return "".join(card(each, report.exists) for each in report.verdicts) + changed(report) + notes


def changed(report: "Report") -> str:
    """What differs from initialisation, of a trained network."""
    if not report.trained:
        return ""
    head = ["differs from initialisation", "this network", "a new one, 90 %"]
    rows = [[each.name, each.now, each.new] for each in report.changes()]
    return region(f"What differs from initialisation in {report.name}", rows_as_html(head, rows))


def card(verdict: Verdict, exists: bool) -> str:
    """Its grade in words, sign and colour; then the numbers, the reason and the fix."""
    facts = {
        "value": say(verdict.value),
        "threshold": "" if np.isnan(verdict.threshold) else f"{verdict.threshold:g}: {verdict.source}",
        "layer": "" if verdict.layer is None else str(verdict.layer),
        "samples": "" if exists else f"{verdict.share:.0%} of them",
        "why": verdict.why,
        "fix": verdict.mends,
    }
    plain = verdict.name in (FINE, TRAINED)
    word = TRAINED if verdict.name == TRAINED else verdict.grade
    said = escape(verdict.said.removeprefix(f"{word}: "))
    title = f'<h3><span class="kind"><span aria-hidden="true">{verdict.sign}</span> {word}</span> {said}</h3>'
    return f'<article class="card {word}">{title}{"" if plain else pairs(facts)}</article>'


def pairs(facts: Mapping[str, Any]) -> str:
    """A list of what is known."""
    known = {name: str(value) for name, value in facts.items() if str(value)}
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in known.items())}</dl>"


def curves(report: "Report") -> str:
    """By layer, then the gradient of the chosen kind of weight and the loss."""
    every = f'<div class="plots">{"".join(plots(report))}{loss(report)}</div>'
    return section("By layer", "curves", legend(report) + every) + section(
        "Gradient by kind of weight", "gradients", chosen(gradients(report))
    )


def legend(report: "Report") -> str:
    """Of all plots."""
    swatches = []
    if report.band is not None:
        swatches += [("band", "law: 90 % of new networks"), ("law", "law, middle")]
    elif not report.exists:
        swatches += [("law", "the law's sample")]
    if report.exists:
        swatches.append(("own", report.name))
    if report.against is not None:
        swatches.append(("other", report.against.name))
    drawn = "".join(f"<li>{swatch(kind)} {escape(label)}</li>" for kind, label in swatches)
    hint = "Point at a plot for its numbers, or open them below it."
    return f'<ul class="legend">{drawn}</ul><p class="hint-text">{hint}</p>'


def swatch(kind: str) -> str:
    """As in the plots."""
    if kind == "band":
        inner = '<rect class="band" width="28" height="12"/>'
    else:
        inner = f'<path class="line {kind}" d="M0,6 28,6"/>'
        inner += '<circle class="own" cx="14" cy="6" r="2.6"/>' if kind == "own" else ""
    return f'<svg class="swatch" viewBox="0 0 28 12" aria-hidden="true">{inner}</svg>'


def chosen(found: Mapping[str, str]) -> str:
    """All plots; the script shows the one that is chosen."""
    if not found:
        return ""
    options = "".join(f'<option value="{k}">{escape(kind)}</option>' for k, kind in enumerate(found))
    shown = "".join(f'<div class="choice" data-choice="{k}">{each}</div>' for k, each in enumerate(found.values()))
    label = '<label for="kind">Kind of weight</label>'
    return f'<p class="control">{label} <select id="kind">{options}</select></p><div class="plots">{shown}</div>'


def cells(report: "Report") -> str:
    """Where the script draws."""
    matrices = (
        '<p class="control"><label for="depth">Depth</label> <input type="range" id="depth" min="0" step="1">'
        ' <output id="depth-said" for="depth"></output></p><div class="grids" id="matrices"></div>'
        f"<noscript>{paragraph('These pictures need the script of this page.')}</noscript>"
        '<p class="hint-text">First sequence of the first sample; the slider stops at '
        f"{DEPTHS} depths at most. Arrow keys move the slider, and from cell to cell in a picture that has the focus."
        "</p>"
    )
    found = section("Correlation of tokens, at a depth", "matrix", matrices)
    seen = any("logit_std" in each.curves for each in (report, report.against) if each is not None)
    note = "One column for each block, one row for each head; medians over samples."
    heads = f'<p class="hint-text">{note}</p><div class="grids" id="heads"></div>' if seen else ""
    return found + section("Heads by block", "heads-title", heads)


def findings(report: "Report") -> str:
    """What the weights hold beside their law, of networks that exist."""
    reports = [report, report.against] if report.against is not None else [report]
    parts = [weights(each.name, each.initialisation) for each in reports if each.initialisation is not None]
    return section("Initialisation, weight by weight", "initialisation", "".join(parts))


def weights(name: str, found: InitialisationReport) -> str:
    """The summary, and a row for each finding."""
    head = ["looks like", "weights", "holds", "its law", "p", "why, and what mends it"]
    rows = [
        [each.bug or each.kind, each.pattern, each.held, each.law, say(each.p), f"{each.why} {each.mend}"]
        for each in found.findings
    ]
    findings = region(f"Findings on the weights of {name}", rows_as_html(head, rows)) if rows else ""
    return paragraph(f"{name}: {found.summary}.") + findings


def laws(report: "Report") -> str:
    """Of every weight, like layers in one row."""
    if report.laws is None:
        return ""
    head = ["weights", "number", "shape", "law", "tied to"]
    rows = [[name, str(each[0]), *each[1:]] for name, each in report.laws.alike().items()]
    said = f"{report.name}: {len(report.laws)} parameters, {report.laws.count:,} entries, as the code draws them."
    return paragraph(said) + region(f"Law of the weights of {report.name}", rows_as_html(head, rows))


def region(label: str, inner: str) -> str:
    """Which scrolls by keys where it is wider than the screen."""
    return f'<div role="region" aria-label="{escape(label)}" tabindex="0">{inner}</div>'


def sources(report: "Report") -> str:
    """Laws, thresholds, provenance."""
    reports = [report, report.against] if report.against is not None else [report]
    rows = [
        [name, *("" if (number := each.at(grade)) is None else f"{number:g}" for grade in (WATCH, BROKEN)), each.source]
        for name, each in report.thresholds.items()
    ]
    limits = region("Thresholds", rows_as_html(["threshold", WATCH, BROKEN, "source"], rows)) if rows else ""
    parts = {
        "Law of the weights": "".join(laws(each) for each in reports),
        "Thresholds": limits,
        "Provenance": "".join(f"<h3>{escape(each.name)}</h3>{pairs(provenance(each))}" for each in reports),
    }
    return "".join(section(title, title.split()[0].lower(), inner) for title, inner in parts.items())


def provenance(report: "Report") -> dict[str, Any]:
    """What made the numbers; long fractions shortened."""
    facts = {name: value for name, value in report.about.items() if name not in ELSEWHERE}
    return {name: say(value) if isinstance(value, float) else value for name, value in facts.items()}
