"""The HTML page of all reports: a heading and sections, which reports hand over as data.

A page loads nothing, no library, no font, no network, and no script may run in it. All words are escaped.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from limitformer.reports.figures import LINE_STYLES, Drawing, HeatMap, number
from limitformer.reports.verdict import FINE, SIGNS, TRAINED, Verdict

if TYPE_CHECKING:
    from limitformer.reports.drawing import Canvas

STYLE = files("limitformer.reports").joinpath("page.css").read_text(encoding="utf-8")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'none'"
CELLS = 2000  # numbers of a picture from which they are written as text, not as a table


@dataclass(frozen=True)
class TextTable:
    """A table; `folded`: a click shows it."""

    label: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False


@dataclass(frozen=True)
class Card:
    """A grade, in words and with its sign, a sentence, and the facts behind it.

    `shown` are the titles of the section and of the figure that show it, the latter perhaps empty; the card has a link
    there.
    """

    grade: str
    word: str
    sentence: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    sign: str = ""
    shown: tuple[str, str] | None = None


@dataclass(frozen=True)
class Facts:
    """Names with their values; empty values are left out, and numbers have four digits."""

    values: Mapping[str, Any]


@dataclass(frozen=True)
class Code:
    """Text whose lines and spaces stay."""

    label: str
    text: str


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Figures:
    """Figures side by side, without those of which nothing is known, and the legend that they share.

    `legend` has pairs (kind, label), where kind is one of LINE_STYLES or band.
    """

    drawings: Sequence[Drawing]
    legend: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Menu:
    """Parts with their names, of which the reader chooses one to see, at first that of the index `chosen`."""

    label: str
    options: Sequence[tuple[str, "Sequence[Part]"]]
    chosen: int = 0


Part = str | TextTable | Card | Facts | Code | Heading | Figures | Menu  # a text is a paragraph


@dataclass(frozen=True)
class Section:
    """A title and what stands below it; a section without parts is left out."""

    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Page:
    """The contents of a page. `command` and `name` are the title of the window, `title` and `about` begin the page."""

    command: str
    name: str
    title: str
    about: Sequence[str]
    sections: Sequence[Section]


def html_of(page: Page) -> str:
    """Return the page as one HTML file."""
    from limitformer.reports.drawing import canvas  # with Matplotlib, which printing a report does not need

    with canvas() as drawn:
        writer = Writer(drawn)
        sections = "".join(map(writer.section, page.sections))
    top = f"<header><h1>{escape(page.title)}</h1>{''.join(map(paragraph, page.about))}</header>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(page.name)}: limitformer {page.command}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{top}{sections}</main></body></html>\n"
    )


class Writer:
    """Writes the parts of a page. Titles, figures and menus have ids of their text."""

    def __init__(self, drawn: "Canvas") -> None:
        self.canvas = drawn
        self.ids = dict[str, int]()
        self.place = ""  # the title of the section

    def new_id(self, text: str) -> str:
        """Return the letters of a text, with a number if they are taken."""
        name = letters(text)
        self.ids[name] = count = self.ids.get(name, 0) + 1
        return name if count == 1 else f"{name}--{count}"

    def section(self, section: Section) -> str:
        self.place = section.title
        inner = self.parts(section.parts)
        name = self.new_id(section.title) if inner else ""
        title = f'<h2 id="{name}">{escape(section.title)}</h2>'
        return f'<section aria-labelledby="{name}">{title}{inner}</section>' if inner else ""

    def parts(self, parts: Iterable[Part]) -> str:
        return "".join(map(self.part, parts))

    def part(self, part: Part) -> str:
        if isinstance(part, Figures):
            figures = "".join(self.figure(each) for each in part.drawings if each.known)
            large = any(isinstance(each, HeatMap) and each.correlations for each in part.drawings)
            room = "plots large" if large else "plots"
            return f'{keys(part.legend)}<div class="{room}">{figures}</div>' if figures else ""
        if isinstance(part, Menu):
            return self.menu(part)
        if isinstance(part, TextTable):
            return folded(part.label, table(part)) if part.folded else region(part.label, table(part))
        if isinstance(part, Card):
            return card(part)
        if isinstance(part, Facts):
            return pairs(part.values)
        if isinstance(part, Code):
            return region(part.label, f"<pre>{escape(part.text)}</pre>")
        return f"<h3>{escape(part.text)}</h3>" if isinstance(part, Heading) else paragraph(part)

    def menu(self, menu: Menu) -> str:
        """Return radio buttons, each with its parts, of which the style shows those of the chosen one."""
        name, inner = self.new_id(menu.label), ""
        for k, (label, parts) in enumerate(menu.options):
            chosen = " checked" if k == menu.chosen else ""
            inner += f'<input type="radio" name="{name}" id="{name}-{k}"{chosen}><label for="{name}-{k}">'
            inner += f'{escape(label)}</label><div class="view">{self.parts(parts)}</div>'
        return f'<fieldset class="choice"><legend>{escape(menu.label)}</legend>{inner}</fieldset>' if inner else ""

    def figure(self, drawing: Drawing) -> str:
        """Return a figure: its title, the drawing, and its numbers."""
        title, note = escape(drawing.title), escape(drawing.note)
        name = self.new_id(f"{self.place} {drawing.title}")
        scale = colour_scale(drawing) if isinstance(drawing, HeatMap) else ""
        return (
            f'<figure class="plot" id="{name}"><figcaption><strong>{title}</strong> <span>{note}</span></figcaption>'
            f"<div>{self.canvas.svg(drawing)}{scale}</div>{numbers(drawing)}</figure>"
        )


def letters(text: str) -> str:
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")[:80] or "part"


def numbers(drawing: Drawing) -> str:
    """Return the numbers of a figure, which a click shows: a table, or many as text with tabs."""
    head, rows = drawing.table()
    if len(head) * len(rows) <= CELLS:
        return folded("numbers", table(TextTable("", head, rows)), drawing.title)
    lines = "\n".join("\t".join(row).rstrip() for row in [head, *rows])
    return folded("numbers", f'<div class="scroll" tabindex="0"><pre>{escape(lines)}</pre></div>', drawing.title)


def folded(label: str, inner: str, what: str = "") -> str:
    """Return what a click shows; `what` tells it apart for readers who do not see the figure."""
    unseen = f'<span class="unseen">: {escape(what)}</span>' if what else ""
    return f"<details><summary>{escape(label)}{unseen}</summary>{inner}</details>"


def colour_scale(cells: HeatMap) -> str:
    """Return the bar of colours between its ends, and the meaning of the signs."""
    low, high, _ = cells.span()
    bar = f'<i style="background:linear-gradient(to right,{",".join(cells.colours)})"></i>'
    scale = f'<div class="colours"><span>{number(low)}</span>{bar}<span>{number(high)}</span></div>'
    return scale + (f'<p class="hint-text">{escape(cells.legend())}</p>' if cells.legend() else "")


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>" if text else ""


def region(label: str, inner: str) -> str:
    """Return a region that scrolls by keyboard where it is wider than the screen."""
    return f'<div role="region" aria-label="{escape(label)}" tabindex="0">{inner}</div>'


def table(part: TextTable) -> str:
    """Return a table in which every cell is text."""
    top = "".join(f'<th scope="col">{escape(each)}</th>' for each in part.head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(each)}</td>' for each in row)}</tr>" for row in part.rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def pairs(facts: Mapping[str, Any]) -> str:
    texts = {name: number(value) if isinstance(value, float) else str(value) for name, value in facts.items()}
    known = {name: text for name, text in texts.items() if text}
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(text)}</dd>' for name, text in known.items())}</dl>"


def card(part: Card) -> str:
    sign = f'<span aria-hidden="true">{part.sign or SIGNS[part.grade]}</span>'
    title = f'<span class="kind">{sign} {escape(part.word)}</span> {escape(part.sentence)}'
    facts = pairs(part.facts) if part.facts else ""
    link = ""
    if part.shown is not None:
        name = escape(part.shown[1] or part.shown[0])
        link = f'<p>see <a href="#{letters(" ".join(part.shown))}">{name}</a></p>'
    return f'<article class="card {part.grade}"><h3>{title}</h3>{facts}{link}</article>'


def verdict_card(verdict: Verdict, exists: bool) -> Card:
    """Return the grade of a verdict and its sentence; then the numbers, the reason and the fix."""
    facts = {
        "value": number(verdict.value),
        "threshold": "" if np.isnan(verdict.threshold) else f"{verdict.threshold:g}: {verdict.source}",
        "known models, 128 tokens": verdict.known,
        "layer": "" if verdict.layer is None else str(verdict.layer),
        "rate": "" if np.isnan(verdict.rate) else number(verdict.rate),
        "samples": "" if exists else f"{verdict.share:.0%} of them",
        "why": verdict.why,
        "fix": verdict.mends,
    }
    word = TRAINED if verdict.name == TRAINED else verdict.grade
    sentence = verdict.said.removeprefix(f"{word}: ")
    return Card(word, word, sentence, {} if verdict.name in (FINE, TRAINED) else facts, verdict.sign)


def swatch(kind: str) -> str:
    if kind == "band":
        inner = '<rect style="fill:var(--law);fill-opacity:.2" width="28" height="12"/>'
    else:
        style = LINE_STYLES[kind]
        dashes = f";stroke-dasharray:{' '.join(map(str, style.dashes))}" if style.dashes else ""
        inner = f'<path style="stroke:var(--{style.colour});stroke-width:{style.width}{dashes}" d="M0,6 28,6"/>'
        inner += f'<circle style="fill:var(--{style.colour})" cx="14" cy="6" r="2.6"/>' if style.dots else ""
    return f'<svg class="swatch" viewBox="0 0 28 12" aria-hidden="true">{inner}</svg>'


def keys(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a legend; lines of one kind share an entry."""
    labels: dict[str, list[str]] = {}
    for kind, label in pairs:
        labels.setdefault(kind, []).append(label)
    items = "".join(f"<li>{swatch(kind)} {escape(', '.join(each))}</li>" for kind, each in labels.items())
    return f'<ul class="legend">{items}</ul>' if items else ""
