"""The page of all types, docs/architectures.md, from the rows of the zoo and of its laws."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.zoo.examine import ABSENT, FAILS, NAMED, REFUSED, WORKS

LEVEL = 0.01  # of all tests of laws together
MEANINGS = {
    WORKS: "as called: `simulate(config, 16, …)` and `check(config)`",
    NAMED: "with tensors that the user names",
    REFUSED: "an `InputError` gives the reason",
    FAILS: "another error, which is a defect",
    ABSENT: "transformers itself does not run the small model",
}
HEAD = """# Architectures

A small configuration of every model type of transformers {version} that has a class for a language model, a classifier
of images or sequences, or hidden states, forward and backward. `make zoo` writes this page.

| verdict | types | |
|---|---|---|
{counts}

Of {runs} types that transformers itself builds and runs, {works} ({share:.0%}) work as called.
{laws}
| type | task | inputs | stacks | verdict | KS, least p |
|---|---|---|---|---|---|
{rows}
"""
LAWS = """
The last column compares {samples} weightless networks with {samples} that transformers draws, on 8 tokens, and has the
least p-value of up to six statistics: size and correlation of the stream after the last block, standard deviation of
the logits, the loss that the model itself computes on its own labels, and the gradient norms of two matrices.
{passed} of {types} types are above {level:.1e}, which is 1 % divided by the number of tests. A wrong twin, whose
weights have a standard deviation that is 5 % larger, is below it for {rejected} of the {twins} types that have such a
field.
"""


def page(rows: Mapping[str, dict[str, Any]], laws: Mapping[str, dict[str, Any]]) -> str:
    """Return the page."""
    counts = Counter(row.get("verdict", FAILS) for row in rows.values())
    runs = sum(counts.values()) - counts[ABSENT]
    lines = [line(row, laws.get(kind, {})) for kind, row in sorted(rows.items())]
    return HEAD.format(
        version=next((row["transformers"] for row in rows.values() if "transformers" in row), ""),
        counts="\n".join(f"| {verdict} | {counts[verdict]} | {text} |" for verdict, text in MEANINGS.items()),
        runs=runs,
        works=counts[WORKS],
        share=counts[WORKS] / max(runs, 1),
        laws=about_laws(laws),
        rows="\n".join(lines),
    )


def about_laws(laws: Mapping[str, dict[str, Any]]) -> str:
    tested = [row for row in laws.values() if "p" in row]
    if not tested:
        return ""
    level, twins = level_of(laws), [row["twin"] for row in tested if "twin" in row]
    return LAWS.format(
        samples=tested[0]["samples"],
        types=len(tested),
        passed=sum(row["p"] > level for row in tested),
        rejected=sum(p < level for p in twins),
        twins=len(twins),
        level=level,
    )


def level_of(laws: Mapping[str, dict[str, Any]]) -> float:
    """Return the level of one test, so that all together have the level LEVEL (Bonferroni)."""
    return LEVEL / max(1, sum(row.get("statistics", 0) for row in laws.values()))


def line(row: Mapping[str, Any], law: Mapping[str, Any]) -> str:
    """Return the table's row of a type."""
    verdict = row.get("verdict", FAILS)  # a process that was ended has none
    reason = f": {row.get('reason') or row.get('error')}" if verdict in (REFUSED, FAILS, ABSENT) else ""
    p = f"{law['p']:.2g}" if "p" in law else ""
    cells = (row["type"], row.get("task", ""), row.get("inputs", ""), row.get("stacks", ""), verdict + reason, p)
    return f"| {' | '.join(map(plain, cells))} |"


def plain(text: str, most: int = 160) -> str:
    """Return a text as a table's cell, shortened."""
    text = " ".join(str(text).split())
    text = text if len(text) <= most else text[: most - 1] + "…"
    for sign in "\\|_*<>[]`$":
        text = text.replace(sign, f"\\{sign}" if sign not in "<>" else {"<": "&lt;", ">": "&gt;"}[sign])
    return text


def counts_of(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the number of types by verdict, as a page's first table has it and as its rows have it."""
    head, rows = {}, Counter[str]()
    for each in text.splitlines():
        cells = [cell.strip() for cell in each.replace("\\|", "").strip("|").split("|")]
        if len(cells) == 3 and cells[0] in MEANINGS:
            head[cells[0]] = int(cells[1])
        if len(cells) == 6 and (verdict := cells[4].split(":")[0]) in MEANINGS:
            rows[verdict] += 1
    return head, {verdict: rows[verdict] for verdict in MEANINGS}
