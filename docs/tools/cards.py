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
    "Clustering in Deep Stochastic Transformers": ("ct-", "lifetimes", "transition", "large-beta", "many-tokens"),
    "Stock models": ("stock-models",),
    "Studies": ("foretells",),
}
OPENING = """# Gallery

Every figure of the two papers that can be made here, and a few beyond them. A card shows what the figure claims,
whether the numbers support it, its command, its time and its data; its page has all parameters and
differences from the paper. *Holds* counts the statements of the paper that were tested; the record has other numbers.

[ST, Table 2] has no card: it needs data and pretraining that this project does not have. Its
[page](figures/st-table2.md) says how to draw it from your own runs.

`make gallery` makes all of them again, except for figures of trained networks, which are drawn from runs
([training](training.md)). After an interruption, the same command resumes. Each record has version and seed, and the
figure's claims at a small scale: a test computes them again and names the figures whose numbers have moved.

For a paper: `limitformer figure st-fig1 --format pdf --width 6.75 --letters --serif` writes a picture of that width in
inches, with type in proportion and fonts embedded. `svg` and, with TeX, `pgf` are formats too.
"""
CARD = """-   **[{title}](figures/{name}.md)**

    [![{shows}](figures/{name}.png)](figures/{name}.md)

    {shows}

    {verdict}

    `{command}`

    {stamp}. {data}
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
        name=page.stem,
        shows=description_of(page.stem),
        verdict=verdict(record),
        command=re.findall(r"^ *(limitformer figure [^#\n]*?) *(?:#.*)?$", text, re.MULTILINE)[0],
        stamp=stamp(record),
        data=data(record, page.stem),
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
        return "Not at the paper's size: its page has the results."
    holding = sum(verdicts)
    word = "not-held" if holding < len(verdicts) else "holds"
    return f'<span class="{word}">Holds: {holding} of {len(verdicts)}</span>, {len(record["claims"])} numbers'


def stamp(record: dict[str, Any]) -> str:
    """Return version, seed, scale and duration of the record."""
    if not record:
        return "A smaller run, version and time not recorded"
    seconds = record.get("seconds")
    time = "time not recorded" if seconds is None else f"{seconds:,.0f} s"
    return f"Version {record['limitformer_version']}, seed {record['seed']}, {record['scale']} scale, {time}"


def data(record: dict[str, Any], name: str) -> str:
    return f"[Record](figures/{name}.json); `{name}.nc` is written with it" if record else "Data: by the command"


if __name__ == "__main__":
    PAGE.write_text(cards(), encoding="utf-8")
