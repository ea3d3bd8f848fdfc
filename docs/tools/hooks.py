"""Hooks for MkDocs: displayed formulas, pictures that open large, tables that scroll, and links outside the site.

`$…$` and `$$…$$` become MathML, which browsers set by themselves, without a script or a picture. What cannot be read
ends the build.
"""

import html
import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

FILES = "https://github.com/limitformer/limitformer/blob/main/"
FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<source>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)
ALONE = re.compile(r'<p>(?P<image><img [^>]*src="(?P<source>[^"]+)"[^>]*>)</p>')  # a picture that is no link yet
HEADING = re.compile(r'(?P<heading><h\d id="[^"]*">(?P<name>[^<"]+))(?P<link><a class="headerlink")')
TABLE = re.compile(r"(<table>.*?</table>)", re.DOTALL)
SECTION = re.compile(r"<h\d\b[^>]*>(.*?)(?:<a class=\"headerlink\"|</h\d>)", re.DOTALL)
SEVERAL_PANELS = 1200  # pixels of a picture
SENTENCE = 24  # characters of a cell
NOTEBOOK = re.compile(r"\]\(\.\./((?:\.\./)*examples/[\w-]+)\.ipynb\)")  # `notebooks` makes a page of it
OUTSIDE = re.compile(r"\]\((?:\.\./)+(?=examples/|tests/|benchmarks/|CHANGELOG|CONTRIBUTING|README)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Point links to notebooks to their pages, and others out of the documentation folder to the repository."""
    return OUTSIDE.sub(f"]({FILES}", NOTEBOOK.sub(r"](\1.md)", markdown))


def on_page_content(content: str, page: Any, **_: object) -> str:
    """Convert formulas to MathML, link pictures to their files, and let wide pictures and tables scroll."""
    content = HEADING.sub(r'\g<heading>\g<link> aria-label="Link to \g<name>"', content)
    folder = Path(page.file.abs_src_path or "").parent
    content = ALONE.sub(lambda found: large(found, folder), FORMULA.sub(mathml, content))
    return with_regions(content)


def large(found: re.Match[str], folder: Path) -> str:
    """Link a picture to its file. One with several panels scrolls on a phone, where it would be too small to read."""
    wide = " wide" if width_of(folder / found["source"]) >= SEVERAL_PANELS else ""
    return f'<p><a class="large{wide}" href="{found["source"]}">{found["image"]}</a></p>'


def width_of(picture: Path) -> int:
    """Return the width of a PNG in pixels; 0 of another file, or of one that the build makes."""
    begin = picture.read_bytes()[:24] if picture.is_file() else b""
    return int.from_bytes(begin[16:20], "big") if begin.startswith(b"\x89PNG") else 0


def with_regions(content: str) -> str:
    """Put each table into a region that scrolls by keyboard, named by the section and the table's head."""
    names: Counter[str] = Counter()
    section = "Table"
    result = []
    for piece in TABLE.split(content):
        if not piece.startswith("<table>"):
            section = next(reversed(SECTION.findall(piece)), section)
            result.append(piece)
            continue
        heads = [text_of(each) for each in re.findall(r"<th\b[^>]*>(.*?)</th>", piece, re.DOTALL)]
        name = f"{text_of(section)}: {', '.join(filter(None, heads))}"
        names[name] += 1
        name += f" ({names[name]})" if names[name] > 1 else ""
        label = html.escape(html.unescape(name), quote=True)
        region = f'<div class="table" tabindex="0" role="region" aria-label="{label}">'
        result.append(f"{region}{with_prose(piece)}</div>")
    return "".join(result)


def with_prose(table: str) -> str:
    """Mark the heads of columns that hold sentences: they keep some width next to columns that cannot be narrower."""
    rows = [re.findall(r"<td\b[^>]*>(.*?)</td>", row, re.DOTALL) for row in table.split("<tr>")]
    columns = itertools.zip_longest(*filter(None, rows), fillvalue="")
    prose = [max(len(text_of(cell)) for cell in column) >= SENTENCE for column in columns]
    marked = iter(prose)
    return re.sub(r"<th\b", lambda _: '<th class="prose"' if next(marked, False) else "<th", table)


def text_of(content: str) -> str:
    return re.sub(r"<[^>]+>", "", content).strip()


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
    if unknown := re.findall(r"\\[A-Za-z]+", html.unescape(formula)):
        raise ValueError(f"No such command in a formula: {', '.join(unknown)}, in {source}")
    return formula
