"""The gallery's page: a card for every figure, written from the records beside the pictures.

python docs/tools/cards.py     # writes docs/gallery.md; tests/test_gallery.py says when that is due
"""

import json
import re
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).resolve().parents[1] / "figures"
PAGE = FIGURES.parent / "gallery.md"
SECTIONS = {
    "The Shaped Transformer": ("st-", "text-fate"),
    "Clustering in Deep Stochastic Transformers": ("ct-", "lifetimes", "transition", "large-beta", "many-tokens"),
    "Stock models": ("stock-models",),
    "Studies": ("foretells",),
}
OPENING = """# Gallery

Every figure of the two papers that can be made here, and a few that they do not have. A card says what the figure
claims, whether the numbers bear it out, the command that makes it, its time and its data; the page behind it has the
caption, all parameters and where it differs from the paper. *Holds* counts the statements of the paper that were
tested; numbers about which the paper says nothing are in the record.

`make gallery` makes all of them again from a clean state, but for figures of trained networks, which are drawn from
runs ([training](training.md)). Stopped, the same command goes on. Each
record keeps version and seed, and what the same figure gives at a small scale: a test computes that again and names
the figures whose numbers have moved since the picture was made.
"""
CARD = """-   **[{title}](figures/{name}.md)**

    [![{shows}](figures/{name}.png)](figures/{name}.md)

    {shows}

    {verdict}

    `{command}`

    {stamp}. {data}
"""


def cards() -> str:
    """The whole page."""
    pages = sorted(FIGURES.glob("*.md"), key=lambda page: in_order(page.stem))
    parts = [OPENING]
    for section, beginnings in SECTIONS.items():
        inside = [card(page) for page in pages if page.stem.startswith(beginnings)]
        parts.append(f'## {section}\n\n<div class="grid cards" markdown>\n\n' + "\n".join(inside) + "\n</div>\n")
    return "\n".join(parts)


def in_order(name: str) -> tuple[bool, str]:
    """Figures first, then tables and what the papers do not have."""
    return "-fig" not in name, name


def card(page: Path) -> str:
    """One card."""
    text = page.read_text(encoding="utf-8")
    record = read(page.with_suffix(".json"))
    (title,) = re.findall(r"^# (.+)$", text, re.MULTILINE)
    return CARD.format(
        title=title,
        name=page.stem,
        shows=shown(text, page.stem),
        verdict=verdict(record),
        command=re.findall(r"^ *(limitformer figure [^#\n]*?) *(?:#.*)?$", text, re.MULTILINE)[0],
        stamp=stamp(record),
        data=data(record, page.stem),
    )


def read(path: Path) -> dict[str, Any]:
    """The record, empty where the picture has none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def shown(text: str, name: str) -> str:
    """What the figure shows, as `limitformer figure list` says it, without the paper's number."""
    from limitformer_papers import FIGURES, RUN_FIGURES

    said = re.sub(r"^\[[^\]]*\] ", "", (FIGURES | RUN_FIGURES)[name])
    return said[0].upper() + said[1:]


def verdict(record: dict[str, Any]) -> str:
    """How many of the paper's statements hold."""
    judged = [claim["holds"] for claim in record.get("claims", []) if claim["holds"] is not None]
    if not record:
        return "Not at the paper's size: what it bears out is on its page."
    held = sum(judged)
    word = "not-held" if held < len(judged) else "holds"
    return f'<span class="{word}">Holds: {held} of {len(judged)}</span>, {len(record["claims"])} numbers'


def stamp(record: dict[str, Any]) -> str:
    """By which version, with which seed, and how long it took."""
    if not record:
        return "A smaller run, version and time not recorded"
    seconds = record.get("seconds")
    time = "time not recorded" if seconds is None else f"{seconds:,.0f} s"
    return f"Version {record['limitformer_version']}, seed {record['seed']}, {record['scale']} scale, {time}"


def data(record: dict[str, Any], name: str) -> str:
    """Where its numbers are."""
    return f"[Record](figures/{name}.json); `{name}.nc` is written with it" if record else "Data: by the command"


if __name__ == "__main__":
    PAGE.write_text(cards(), encoding="utf-8")
