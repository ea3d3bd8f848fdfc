"""Hooks for MkDocs: mathematics, pictures that open large, and links to files outside the site.

`$…$` and `$$…$$` become MathML, which browsers set by themselves, without a script or a picture. What cannot be read
ends the build.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FILES = "https://github.com/limitformer/limitformer/blob/main/"
FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<source>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)
ALONE = re.compile(r'<p>(?P<image><img [^>]*src="(?P<source>[^"]+)"[^>]*>)</p>')  # a picture that is no link yet
HEADING = re.compile(r'(?P<heading><h\d id="[^"]*">(?P<name>[^<"]+))(?P<link><a class="headerlink")')
# What is not a sentence: code, formulas, and tags with their attributes.
LITERAL = re.compile(r"(<(?:pre|code|math)\b.*?</(?:pre|code|math)>|<[^>]+>)", re.DOTALL)
INSIDE = r"\{(?:[^{}]|\{[^{}]*\})*\}|\((?:[^()]|\((?:[^()])*\))*\)|ℓ|[−-]?(?:[α-ωΑ-Ω]+|[A-Za-z0-9]+|∞)[′±₀]?|½"
SCRIPT = re.compile(
    r"(?<=[\wα-ωΑ-Ω∫Σ)\]|′₀-₉⁰-⁹⊥}])(?<![a-z]{2})(?P<mark>[_^])"
    rf"(?P<inside>{INSIDE})(?:\^(?P<above>{INSIDE}))?"
)
NOTEBOOK = re.compile(r"\]\(\.\./((?:\.\./)*examples/[\w-]+)\.ipynb\)")  # `notebooks` makes a page of it
OUTSIDE = re.compile(r"\]\((?:\.\./)+(?=examples/|tests/|benchmarks/|CHANGELOG|CONTRIBUTING|README)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Point links to notebooks to their pages, and others out of the documentation folder to the repository."""
    return OUTSIDE.sub(f"]({FILES}", NOTEBOOK.sub(r"](\1.md)", markdown))


def on_page_content(content: str, page: Any, **_: object) -> str:
    """Convert formulas to MathML, link pictures to their files, set indices and exponents in sentences.

    In the API names are Python's, and keep their underscores.
    """
    content = HEADING.sub(r'\g<heading>\g<link> aria-label="Link to \g<name>"', content)
    content = ALONE.sub(r'<p><a class="large" href="\g<source>">\g<image></a></p>', FORMULA.sub(mathml, content))
    return content if page.file.src_uri.startswith("api/") else in_text(content)


def in_text(content: str) -> str:
    """Set subscripts and superscripts such as V_αβ and e^{ru} in sentences; leave code and formulas unchanged."""
    pieces = LITERAL.split(content)
    return "".join(piece if k % 2 else SCRIPT.sub(script, piece) for k, piece in enumerate(pieces))


def script(found: re.Match[str]) -> str:
    first = raised("sub" if found["mark"] == "_" else "sup", found["inside"])
    return first + (raised("sup", found["above"]) if found["above"] else "")


def raised(tag: str, inside: str) -> str:
    """Return the tag with its text, without the braces or parentheses that hold it together in the source."""
    inside = inside[1:-1] if inside[0] in "{(" else inside
    return f"<{tag}>{SCRIPT.sub(script, inside)}</{tag}>"


def mathml(found: re.Match[str]) -> str:
    """Convert one formula. A display that is wider than the page can be scrolled, also by keyboard."""
    source = html.unescape(found["source"]).strip()
    if found["tag"] == "span":
        return read(source, "inline")
    label = html.escape(source, quote=True)
    formula = read(source, "block")
    return (
        f'<div class="formula" tabindex="0" role="group" aria-label="formula: {label}" title="{label}">{formula}</div>'
    )


def read(source: str, display: str) -> str:
    """Convert the formula to MathML. Raise an error for input that the converter would skip."""
    # The converter knows `align*` alone, which readers of the source on other sites do not take inside of `$$`.
    formula = convert(source.replace("{aligned}", "{align*}"), display=display)
    if left := re.findall(r"\\[A-Za-z]+", html.unescape(formula)):
        raise ValueError(f"No such command in a formula: {', '.join(left)}, in {source}")
    return formula
