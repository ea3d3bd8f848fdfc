"""What MkDocs does beside building pages: mathematics, and links to files that are not part of the site.

`$…$` and `$$…$$` become MathML, which browsers set by themselves: no script, no font, no picture. What cannot be read ends
the build.
"""

import html
import re

from latex2mathml.converter import convert

FILES = "https://github.com/limitformer/limitformer/blob/main/"
FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<source>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)
OUTSIDE = re.compile(r"\]\((?:\.\./)+(?=examples/|tests/|benchmarks/|CHANGELOG|CONTRIBUTING)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links out of the folder of pages lead to the repository."""
    return OUTSIDE.sub(f"]({FILES}", markdown)


def on_page_content(content: str, **_: object) -> str:
    """Formulas as MathML, each with its source for those who copy it."""
    return FORMULA.sub(mathml, content)


def mathml(found: re.Match[str]) -> str:
    """One formula; a display can be scrolled where it is wider than the page, by keys too."""
    source = html.unescape(found["source"]).strip()
    if found["tag"] == "span":
        return read(source, "inline")
    label = html.escape(source, quote=True)
    formula = read(source, "block")
    return f'<div class="formula" tabindex="0" role="group" aria-label="formula" title="{label}">{formula}</div>'


def read(source: str, display: str) -> str:
    """The formula in MathML; what the converter would have passed over is an error."""
    # The converter knows `align*` alone, which readers of the source on other sites do not take inside of `$$`.
    formula = convert(source.replace("{aligned}", "{align*}"), display=display)
    if left := re.findall(r"\\[A-Za-z]+", html.unescape(formula)):
        raise ValueError(f"No such command in a formula: {', '.join(left)}, in {source}")
    return formula
