"""The page of a figure in the documentation: the table of its claims, which is written from the figure's record."""

from pathlib import Path
from typing import Any

from limitformer.base.files import write_whole

BEGIN, END = "<!-- claims -->", "<!-- end of claims -->"
MARKS = {True: "yes", False: "**no**", None: ""}


def table(record: dict[str, Any]) -> str:
    """The claims of a record, as NAME.json has it, in Markdown."""
    rows = [f"| {escaped(one['name'])} | {short(one['value'])} | {MARKS[one['holds']]} |" for one in record["claims"]]
    return "\n".join(["| claim | value | holds |", "|---|---|---|", *rows])


def escaped(name: str) -> str:
    """A name without what would end a cell."""
    return name.replace("|", r"\|")


def short(value: float | str) -> str:
    """Four digits; what is not finite is a text already."""
    return value if isinstance(value, str) else f"{value:.4g}"


def with_table(text: str, record: dict[str, Any]) -> str:
    """The text of a page with the record's table between the two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(record)}\n\n{END}{after}"


def renew(page: Path, record: dict[str, Any]) -> list[Path]:
    """Write the table into the page, if there is one and it has the marks; what was written."""
    if not page.is_file():
        return []
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        return []
    write_whole(page, lambda path: path.write_text(with_table(text, record), encoding="utf-8"))
    return [page]
