"""The page of all types, docs/architectures.md, from the rows of the zoo and of its laws."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.zoo.examine import ABSENT, FAILS, NAMED, REFUSED, WORKS
from benchmarks.zoo.sizes import GIGABYTES, LARGE, SECONDS, SLOW, WITHIN, verdict_of

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
{laws}{sizes}
| type | task | inputs | stacks | verdict | KS, least p | real size |
|---|---|---|---|---|---|---|
{rows}
"""
LAWS = """
The column KS compares {samples} weightless networks with {samples} that transformers draws, on 8 tokens, and has the
least p-value of up to six statistics: size and correlation of the stream after the last block, standard deviation of
the logits, the loss that the model itself computes on its own labels, and the gradient norms of two matrices.
{passed} of {types} types are above {level:.1e}, which is 1 % divided by the number of tests. A wrong twin, whose
weights have a standard deviation that is 5 % larger, is below it for {rejected} of the {twins} types that have such a
field.
"""
BEYOND = (SLOW, LARGE, REFUSED, FAILS)
SIZES = """
The last column has the default configuration of types that read text, at its real size: parameters, CPU time and peak
memory of `simulate(config, 32, samples=1)` without gradients, on one core. Of {runs} types that were measured and that
transformers itself runs at that size, {within} are within {seconds} s and {gigabytes} GB.{others}
"""


def page(
    rows: Mapping[str, dict[str, Any]], laws: Mapping[str, dict[str, Any]], sizes: Mapping[str, dict[str, Any]]
) -> str:
    counts = Counter(row.get("verdict", FAILS) for row in rows.values())
    runs = sum(counts.values()) - counts[ABSENT]
    lines = [line(row, laws.get(kind, {}), sizes.get(kind, {})) for kind, row in sorted(rows.items())]
    return HEAD.format(
        version=next((row["transformers"] for row in rows.values() if "transformers" in row), ""),
        counts="\n".join(f"| {verdict} | {counts[verdict]} | {text} |" for verdict, text in MEANINGS.items()),
        runs=runs,
        works=counts[WORKS],
        share=counts[WORKS] / max(runs, 1),
        laws=about_laws(laws),
        sizes=about_sizes(sizes),
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


def about_sizes(sizes: Mapping[str, dict[str, Any]]) -> str:
    """Return the paragraph about real sizes, which names the types that are beyond the limits or do not run."""
    verdicts = {kind: verdict_of(row) for kind, row in sorted(sizes.items())}
    runs = {kind: verdict for kind, verdict in verdicts.items() if verdict != ABSENT}
    if not runs:
        return ""
    groups = [(each, [kind for kind, verdict in runs.items() if verdict == each]) for each in BEYOND]
    named = [
        (verdict, [name_with_reason(sizes[kind], verdict) for kind in kinds]) for verdict, kinds in groups if kinds
    ]
    lists = [f"{verdict}: {', '.join(names)}" for verdict, names in named]
    others = "".join(f"\n* {each}." for each in lists)
    within = sum(verdict == WITHIN for verdict in runs.values())
    others = f" The others:\n{others}" if others else ""
    return SIZES.format(within=within, runs=len(runs), seconds=SECONDS, gigabytes=GIGABYTES, others=others)


def name_with_reason(row: Mapping[str, Any], verdict: str) -> str:
    reason = str(row.get("reason") or row.get("error")).rstrip(".")
    return cell_text(row["type"]) + (f" ({cell_text(reason)})" if verdict in (REFUSED, FAILS) else "")


def level_of(laws: Mapping[str, dict[str, Any]]) -> float:
    """Return the level of one test, so that all together have the level LEVEL (Bonferroni)."""
    return LEVEL / max(1, sum(row.get("statistics", 0) for row in laws.values()))


def line(row: Mapping[str, Any], law: Mapping[str, Any], size: Mapping[str, Any]) -> str:
    """Return the table's row of a type."""
    verdict = row.get("verdict", FAILS)  # a process that was ended has none
    p = f"{law['p']:.2g}" if "p" in law else ""
    cells = (row["type"], row.get("task", ""), row.get("inputs", ""), row.get("stacks", ""))
    return f"| {' | '.join(map(cell_text, (*cells, verdict + reason_of(row, verdict), p, real_size(size))))} |"


def reason_of(row: Mapping[str, Any], verdict: str) -> str:
    return f": {row.get('reason') or row.get('error')}" if verdict in (REFUSED, FAILS, ABSENT) else ""


def real_size(row: Mapping[str, Any]) -> str:
    """Return the cell about a default configuration; one that did not run has its reason."""
    if not row:
        return ""
    verdict = verdict_of(dict(row))
    if "parameters" not in row:
        return verdict + (reason_of(row, verdict) or f": {row.get('reason') or row.get('error')}")
    billions = f"{row['parameters'] / 1e9:.2g}" if row["parameters"] < 1e11 else f"{row['parameters'] / 1e9:.0f}"
    return f"{billions} B, {row['seconds']:.0f} s, {row['gigabytes']:.1f} GB"


def cell_text(text: str, most: int = 160) -> str:
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
        if len(cells) == 7 and (verdict := cells[4].split(":")[0]) in MEANINGS:
            rows[verdict] += 1
    return head, {verdict: rows[verdict] for verdict in MEANINGS}
