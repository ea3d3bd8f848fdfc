"""The gallery's page: a card for every figure that has a picture, written from the records of the pictures.

python docs/tools/cards.py     # writes docs/gallery.md; tests/papers/figures/test_gallery.py fails when that is due
"""

import json
import re
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).resolve().parents[1] / "figures"
PAGE = FIGURES.parent / "gallery.md"
SECTIONS = {
    "The Shaped Transformer": ("st-", "text-fate", "gradient-limit"),
    "Clustering in Deep Stochastic Transformers": (
        *("ct-", "lifetimes", "transition", "feedforward-branch", "large-beta", "many-tokens"),
    ),
    "Stock models": ("stock-models",),
    "Studies": ("foretells",),
}
OPENING = """# Gallery

**Which figures of the two papers can be made here, and which statements hold?** Each figure's page has its
settings, command, data and differences from the paper. *Holds: 6 of 6* means that all six tested statements hold.

[ST, Table 2] has no picture: it needs data and pretraining that we do not have. Nor has a statement of [ST] that we
have not yet trained: [rates where width and depth grow](figures/st-sizes.md). Each page, as that of
[Table 2](figures/st-table2.md), shows how to draw it from your own runs.

`make gallery` makes all figures again, except those of [trained networks](training.md); it resumes after an
interruption. For your paper, `limitformer figure st-fig1 --format pdf --width 6.75 --letters --serif` writes a picture
6.75 inches wide with fonts embedded; other formats are `svg` and, with TeX, `pgf`.
"""
CARD = """-   **[{title}](figures/{name}.md)**

    [![Picture: {short}](figures/{name}.png)](figures/{name}.md)

    {shows}. {verdict}
"""


def cards() -> str:
    drawn = [page for page in FIGURES.glob("*.md") if page.with_suffix(".png").is_file()]
    pages = sorted(drawn, key=lambda page: in_order(page.stem))
    parts = [OPENING]
    for section, beginnings in SECTIONS.items():
        inside = [card(page) for page in pages if page.stem.startswith(beginnings)]
        parts.append(f'## {section}\n\n<div class="grid cards" markdown>\n\n' + "\n".join(inside) + "\n</div>\n")
    return "\n".join(parts)


def in_order(name: str) -> tuple[bool, str]:
    """Sort figures first, then tables and figures beyond the papers."""
    return "-fig" not in name, name


def card(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    record = read(page.with_suffix(".json"))
    (title,) = re.findall(r"^# (.+)$", text, re.MULTILINE)
    return CARD.format(
        title=title,
        short=title.partition(":")[0],
        name=page.stem,
        shows=description_of(page.stem),
        verdict=verdict(record),
    )


def read(path: Path) -> dict[str, Any]:
    """Return the record; empty without a file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def description_of(name: str) -> str:
    """Return the figure's line in `limitformer figure list`, without the paper's number."""
    from limitformer_papers import FIGURES, RUN_FIGURES

    text = re.sub(r"^\[[^\]]*\] ", "", (FIGURES | RUN_FIGURES)[name])
    return text[0].upper() + text[1:]


def verdict(record: dict[str, Any]) -> str:
    """Return how many of the paper's statements hold."""
    verdicts = [claim["holds"] for claim in record.get("claims", []) if claim["holds"] is not None]
    if not record:
        return "Not at the paper's size."
    holding = sum(verdicts)
    word = "not-held" if holding < len(verdicts) else "holds"
    return f'<span class="{word}">Holds: {holding} of {len(verdicts)}</span>'


if __name__ == "__main__":
    PAGE.write_text(cards(), encoding="utf-8")
