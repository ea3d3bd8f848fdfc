"""A statement about a network: its grade, its sentence and the numbers behind it."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FINE, NOTE, WATCH, BROKEN = "fine", "note", "watch", "broken"
GRADES = (FINE, NOTE, WATCH, BROKEN)  # a note describes, and neither praises nor warns
ANY = "any"
TRAINED = "trained"
WAITS = "waits for zeros"  # a verdict that is no alarm
SIGNS = {FINE: "✓", NOTE: "·", WATCH: "!", BROKEN: "✗"}
COLUMNS = 80  # characters of a line of the text


@dataclass(frozen=True)
class Verdict:
    """One statement about a network.

    Attributes:
        name: fine, or what is wrong: loss, dead, collapsed, grows, dies, frozen, uniform, swamped, vanishing,
            exploding, range, not finite, …; waits for zeros, which is not a fault; or trained, for a network whose
            weights have moved from its initialisation. On training steps: rate, unseen, fastest, still, logits, muon.
        grade: fine, note (it describes only), watch (outside what `design` calls safe) or broken.
        said: the sentence.
        value: the median over samples of what was measured.
        threshold: where the verdict begins; NaN if it has no number.
        source: the source of the threshold.
        layer: the first layer or block concerned; None if there is none.
        share: the part of the samples that show it.
        why: why it matters, in one sentence.
        mends: what usually mends it.
        severe: whether it is past the threshold for broken.
        rate: the learning rate that it refers to; NaN for a verdict without one.
        known: the values of well-known models at 128 tokens.
    """

    name: str
    grade: str
    said: str
    value: float = math.nan
    threshold: float = math.nan
    source: str = ""
    layer: int | None = None
    share: float = 1.0
    why: str = ""
    mends: str = ""
    severe: bool = False
    rate: float = math.nan
    known: str = ""

    @property
    def sign(self) -> str:
        """✓ for fine, ! for watch, ✗ for broken, · for a note, a trained network and weights that wait."""
        return "·" if self.name in (TRAINED, WAITS) else SIGNS[self.grade]

    def __str__(self) -> str:
        return self.said


def grade_of(verdicts: list[Verdict]) -> str:
    """Return the worst grade of the verdicts."""
    return max((one.grade for one in verdicts), key=GRADES.index)


def number_text(value: float) -> str:
    """Return three digits, or thousands with commas."""
    if math.isinf(value):
        return "∞"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def wrapped(line: str, indent: str) -> list[str]:
    return textwrap.wrap(line, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return a line for each row of cells, of which the first `left` columns are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if k < left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def verdict_lines(verdicts: list[Verdict], exists: bool, full: bool = True) -> list[str]:
    """Return the verdicts, what mends them and why they matter.

    Without `full` it leaves out reasons, repairs after the first two verdicts, and notes if a verdict is graver.
    Without `exists` it adds the share of samples that show a verdict.
    """
    lines, grave = [], grade_of(verdicts) in (WATCH, BROKEN)
    for k, one in enumerate(each for each in verdicts if full or each.grade != NOTE or not grave):
        share = "" if exists or one.share == 1 else f" ({one.share:.0%} of samples)"
        title = one.said if one.name in (FINE, TRAINED) else f"{one.grade}: {one.said}"
        lines += wrapped(f"  {one.sign} {title}{share}", "    ")
        lines += wrapped(f"    why: {one.why}", "      ") if one.why and full else []
        lines += wrapped(f"    fix: {one.mends}", "      ") if one.mends and (full or k < 2) else []
    return lines


def titled(name: str, settings: Mapping[str, Any] | None) -> str:
    """Return the name of a network with the settings that were changed."""
    changes = ", ".join(f"{key}={value}" for key, value in (settings or {}).items())
    return f"{name} with {changes}" if changes else name
