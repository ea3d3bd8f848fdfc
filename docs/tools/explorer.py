"""The explorer's pages with their numbers, and each as one file that needs neither the site nor a network.

MkDocs calls this when it builds the site, which has the single files next to its pages. Without MkDocs:

    python docs/tools/explorer.py out     # writes out/covariance-alone.html, …
"""

import re
import sys
from pathlib import Path
from typing import Any

import markdown

FOLDER = Path(__file__).resolve().parents[1] / "explorer"
PAGES = ("covariance", "sphere", "stock")
SCRIPT, STYLE = '<script src="explorer.js"></script>', '<link rel="stylesheet" href="explorer.css">'
SITE = "https://github.com/limitformer/limitformer/blob/main/docs/"
SHELL = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>{title}: limitformer</title><style>{style}</style></head>
<body class="alone"><main>{body}</main></body></html>
"""


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Add style and script to a page of the explorer; its source has none, since code hosts show them as text."""
    folder, _slash, _name = page.file.src_uri.rpartition("/")
    return f"{markdown}\n\n{STYLE}\n{SCRIPT}\n" if folder == FOLDER.name else markdown


def on_post_page(output: str, page: Any, **_: object) -> str:
    """Insert its numbers into a page of the explorer."""
    folder, _slash, name = page.file.src_uri.rpartition("/")
    return with_numbers(output, name.removesuffix(".md")) if folder == FOLDER.name else output


def on_post_build(config: Any, **_: object) -> None:
    """Write all pages as single files."""
    write(Path(config.site_dir) / FOLDER.name)


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def with_numbers(text: str, name: str) -> str:
    """Return the HTML of a page with its numbers before its script; a `<` in them would end their element."""
    numbers = read(f"{name}.json").strip().replace("<", "\\u003c")
    return text.replace(SCRIPT, f'<script type="application/json" id="explorer-data">{numbers}</script>\n{SCRIPT}')


def single_file(name: str) -> str:
    """Return a page as one file; its links lead to the repository, since the file may be anywhere."""
    source = re.sub(r"\A---.*?^---$", "", read(f"{name}.md"), flags=re.DOTALL | re.MULTILINE)
    source = re.sub(r"\]\(\.\./", f"]({SITE}", source) + f"\n\n{SCRIPT}\n"
    body = re.sub(r' data-alone="[^"]*"', "", with_numbers(markdown.markdown(source), name))
    body = body.replace(SCRIPT, f"<script>{read('explorer.js')}</script>")
    title = re.findall(r"^# (.+)$", source, re.MULTILINE)[0]
    return SHELL.format(title=title, style=read("explorer.css"), body=body)


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        (folder / f"{name}-alone.html").write_text(single_file(name), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
