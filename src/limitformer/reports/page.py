"""The frame of the HTML pages of all reports: they load nothing, no library, no font, no network.

Curves are SVG (`figures`), which show without a script and in print. Words are escaped, and the page's policy lets no
script run but the one that it holds.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from limitformer.reports.figures import number
from limitformer.reports.verdict import FINE, TRAINED, Verdict

STYLE = files("limitformer.reports").joinpath("page.css").read_text(encoding="utf-8")


def document(title: str, body: str, script: str = "", data: str = "") -> str:
    """Return a page of the sections in `body`, with one script or none, and the JSON that the script reads."""
    scripts = f'<script type="application/json" id="data">{data}</script>' if data else ""
    scripts += f"<script>{script}</script>" if script else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(script)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{body}</main>\n{scripts}</body></html>\n"
    )


def policy(script: str) -> str:
    """Return a content policy that allows this script only; none if it is empty."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"'sha256-{digest}'" if script else "'none'"
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}"


def as_json(values: Any) -> str:
    """Return JSON that cannot close the script tag around it."""
    return json.dumps(values, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def section(title: str, name: str, inner: str) -> str:
    """Return a section with its heading, or nothing if it would be empty."""
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>{inner}</section>' if inner else ""


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>" if text else ""


def region(label: str, inner: str) -> str:
    """Return a region that scrolls by keyboard where it is wider than the screen."""
    return f'<div role="region" aria-label="{escape(label)}" tabindex="0">{inner}</div>'


def pairs(facts: Mapping[str, Any]) -> str:
    """Return names with their values; empty values are left out."""
    known = {name: str(value) for name, value in facts.items() if str(value)}
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in known.items())}</dl>"


def card(verdict: Verdict, exists: bool) -> str:
    """Return the grade of a verdict in words, sign and colour; then the numbers, the reason and the fix."""
    facts = {
        "value": number(verdict.value),
        "threshold": "" if np.isnan(verdict.threshold) else f"{verdict.threshold:g}: {verdict.source}",
        "layer": "" if verdict.layer is None else str(verdict.layer),
        "rate": "" if np.isnan(verdict.rate) else number(verdict.rate),
        "samples": "" if exists else f"{verdict.share:.0%} of them",
        "why": verdict.why,
        "fix": verdict.mends,
    }
    word = TRAINED if verdict.name == TRAINED else verdict.grade
    sentence = escape(verdict.said.removeprefix(f"{word}: "))
    title = f'<h3><span class="kind"><span aria-hidden="true">{verdict.sign}</span> {word}</span> {sentence}</h3>'
    return f'<article class="card {word}">{title}{"" if verdict.name in (FINE, TRAINED) else pairs(facts)}</article>'


def swatch(kind: str) -> str:
    if kind == "band":
        inner = '<rect class="band" width="28" height="12"/>'
    else:
        inner = f'<path class="line {kind}" d="M0,6 28,6"/>'
        inner += '<circle class="own" cx="14" cy="6" r="2.6"/>' if kind == "own" else ""
    return f'<svg class="swatch" viewBox="0 0 28 12" aria-hidden="true">{inner}</svg>'


def keys(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a legend; lines of one class share an entry."""
    labels: dict[str, list[str]] = {}
    for kind, label in pairs:
        labels.setdefault(kind, []).append(label)
    items = "".join(f"<li>{swatch(kind)} {escape(', '.join(each))}</li>" for kind, each in labels.items())
    return f'<ul class="legend">{items}</ul>'
