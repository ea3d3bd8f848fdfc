r"""Is a change better? Two networks, before and after, pair by pair: the difference of each number behind a verdict.

Both have one seed, and the random numbers of a weight follow from seed, network and name. So where name, shape and kind
of law stay, network k of one and network k of the other have the same numbers. With the differences d₁ … d_n of pairs,

  d̄ ± t_{n−1}(0.975) s/√n

holds the mean difference with probability 0.95 if they are nearly normal, whatever the pairs share. If they share
nothing, it is about as wide as the interval of unpaired networks, t_{2n−2}(0.975) √((s₁² + s₂²)/n).

A change is *worse* if a verdict is new or has a worse grade (`waits for zeros` aside), or if a number is past the
milder threshold of its verdict and its interval lies wholly on the worse side of 0.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special  # scipy.stats takes a second to import

from limitformer.base.errors import require
from limitformer.checking.comparison import Comparison
from limitformer.checking.measures import TOO_SMALL, measures
from limitformer.checking.report import Report
from limitformer.checking.verdicts import RULES
from limitformer.reports.page import Page, Section, TextTable
from limitformer.reports.report import finite_values
from limitformer.reports.verdict import BROKEN, FINE, GRADES, SIGNS, WAITS, WATCH, aligned, number_text, wrapped

Array = NDArray[np.float64]
LEVEL = 0.95
ROUNDING = 1e-4  # of a number: more than another order of sums changes in float32
GAIN = 1.5  # times narrower, from which pairing is said to help
MOST_NAMED, MOST_ROWS = 4, 12  # in the terminal
NAMES = {rule.find.__name__: rule.name for rule in RULES}  # of verdicts
HEAD = ("medians of networks", "base", "head", "difference, 95 %")


@dataclass(frozen=True)
class PairedDifference:
    """The difference of one number: medians of base and head, the mean of head minus base, and half its interval.

    `unpaired` is half the interval of unpaired networks; `worse`: the head is past a threshold, and has moved beyond.
    """

    measure: str
    base: float
    head: float
    mean: float
    half: float
    unpaired: float
    worse: bool

    @property
    def moved(self) -> bool:
        """Whether 0 lies outside of the interval, by more than rounding."""
        return abs(self.mean) - self.half > ROUNDING * max(abs(self.base), abs(self.head))

    @property
    def row(self) -> list[str]:
        """The cells of its line."""
        sign = SIGNS[BROKEN if self.worse else WATCH if self.moved else FINE]
        numbers = number_text(self.base), number_text(self.head), f"{self.mean:+.3g} ± {self.half:.2g}"
        return [f"{sign} {self.measure}", *numbers]


@dataclass(frozen=True)
class PairedComparison(Comparison):
    """The result of `limitformer compare`: a comparison of a network with the one before it, both by their law.

    >>> import limitformer as lf
    >>> small = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99}
    >>> lf.checking.PairedComparison(lf.compare([small, small], tokens=8, progress=False).reports).worse()
    []
    """

    FILES = "paired"

    def __post_init__(self) -> None:
        require(len(self.reports) == 2, f"a change is between two networks; got {len(self.reports)}.")
        for name, report in self.reports.items():
            nearest = "Nearest: its configuration, or the function that builds it"
            require(not report.exists, f"{name} has its weights; a change compares laws at initialisation. {nearest}.")
            samples = report.curves.sizes["sample"]
            require(samples > 1, f"samples must be at least 2, because a change has an interval; got {samples}.")

    def verdicts(self) -> dict[str, tuple[str, str]]:
        """Return the grades in base and head of verdicts that warn, fine where one is not given."""

        def grade(report: Report, name: str) -> str:
            return max((each.grade for each in report.verdicts if each.name == name), key=GRADES.index, default=FINE)

        base, head = self.reports.values()
        every = [each for each in (*base.verdicts, *head.verdicts) if each.grade in (WATCH, BROKEN)]
        names = dict.fromkeys(each.name for each in every if each.name != WAITS)
        return {name: (grade(base, name), grade(head, name)) for name in names}

    def differences(self) -> list[PairedDifference]:
        """Return the difference of each number that base and head have in every sample, by stack; worse ones first."""
        old, new = ({"": r.curves} | {each.name: each.curves for each in r.stacks} for r in self.reports.values())
        head = list(self.reports.values())[1]
        given, result = {each.name for each in head.verdicts}, []
        for stack in (name for name in new if name in old):
            before, after = (measures(curves[stack], head.thresholds) for curves in (old, new))
            for words in (words for words in after if words in before):
                x, y = (next(iter(each[words].values())).value for each in (before, after))
                if len(x) == len(y) == new[stack].sizes["sample"]:
                    severe = [name for name, rule in after[words].items() if np.median(rule.severity) >= 1]
                    past = [name in TOO_SMALL for name in severe if NAMES[name] in given]  # shaped: never uniform
                    result.append(difference(f"{stack} {words}".strip(), x, y, past))
        return sorted(result, key=lambda each: (not each.worse, not each.moved))

    def worse(self) -> list[str]:
        """Return what is worse: verdicts that are new or have a worse grade, and numbers past their threshold."""
        grades = [f"{n}: {a} → {b}" for n, (a, b) in self.verdicts().items() if GRADES.index(b) > GRADES.index(a)]
        past = [each for each in self.differences() if each.worse]
        return grades + [f"{each.measure}: {each.row[1]} → {each.row[2]}, past its threshold" for each in past]

    @property
    def answer(self) -> str:
        """One sentence: worse, better, or neither, and what."""
        if worse := self.worse():
            return f"worse: {'; '.join(worse[:MOST_NAMED])}{f'; {len(worse)} in all' * (len(worse) > MOST_NAMED)}"
        changes = [f"{name}: {a} → {b}" for name, (a, b) in self.verdicts().items() if a != b]
        same = ", ".join(f"{name} ({grade})" for name, (grade, _) in self.verdicts().items())
        return f"better: {'; '.join(changes)}" if changes else f"no verdict changes: {same or FINE}"

    @property
    def pairing(self) -> str:
        """One sentence on the numbers that pairs share, and how much narrower intervals are for it, in the median."""
        base, head = self.reports.values()
        tables = [report.laws for report in (base, head) if report.laws is not None]
        old, new = ({name: (shape, each.laws[name].kind) for name, shape in each.shapes.items()} for each in tables)
        alike, every = len(old.items() & new.items()), len(old | new)
        gains = [each.unpaired / each.half for each in self.differences() if each.half > 0]
        gain = float(np.median(gains)) if gains else 1.0
        why = "" if alike == every else ", because names, shapes or laws differ"
        effect = f"makes intervals {number_text(gain)} times narrower" if gain >= GAIN else f"gains nothing{why}"
        pairs = f"{base.curves.sizes['sample']} pairs, seed {base.about['seed']}"
        return f"{pairs}, share the numbers of {alike} of {every} weights" + (f"; pairing {effect}" if gains else "")

    def record(self) -> dict[str, Any]:
        """Return the comparison as JSON holds it."""
        rows = [finite_values(asdict(each) | {"moved": each.moved}) for each in self.differences()]
        answer = {"answer": self.answer, "worse": self.worse(), "pairing": self.pairing, "grades": self.verdicts()}
        return {**answer, "differences": rows, **super().record()}

    def __str__(self) -> str:
        """Return the answer and a table of what moved, on at most 24 lines."""
        rows = [each.row for each in self.differences() if each.moved]
        sign, every = SIGNS[BROKEN if self.worse() else FINE], len(self.differences())
        lines = [*wrapped(f"{sign} {self.answer}", "  "), *wrapped(f"  {self.pairing}", "  "), ""]
        lines += aligned([(f"  {HEAD[0]}", *HEAD[1:]), *rows[:MOST_ROWS]]) if rows else []
        return "\n".join(
            [*lines, f"  {len(rows)} of {every} numbers move{', all by --json' * (len(rows) > MOST_ROWS)}"]
        )

    def contents(self) -> Page:
        """Return what the page shows."""
        table = TextTable("Table of differences", HEAD, [each.row for each in self.differences()])
        page, title = super().contents(), "Is the change better?"
        return replace(page, sections=[Section(title, [self.answer, self.pairing, table]), *page.sections])


def difference(measure: str, x: Array, y: Array, past: list[bool]) -> PairedDifference:
    """Return the paired difference y − x; `past`: for each threshold that y is past, whether y is too small for it."""
    n = len(x)
    with np.errstate(invalid="ignore"):  # ∞ − ∞, of gradients that are 0 in a block
        d = y - x
        spread, both = d.std(ddof=1), np.hypot(x.std(ddof=1), y.std(ddof=1))
    half = special.stdtrit(n - 1, (1 + LEVEL) / 2) * spread / np.sqrt(n)
    unpaired = special.stdtrit(2 * n - 2, (1 + LEVEL) / 2) * both / np.sqrt(n)
    medians = float(np.median(x)), float(np.median(y))
    result = PairedDifference(measure, *medians, float(d.mean()), float(half), float(unpaired), worse=False)
    return replace(result, worse=result.moved and (result.mean < 0) in past)
