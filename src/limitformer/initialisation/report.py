"""The report on a module's initialisation: a table of weights, findings, and a screen of text.

There is one deviation for each weight, buffer or tie; findings join those of like layers.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from limitformer.initialisation.bugs import BUGS, Bug
from limitformer.initialisation.like_layers import listed, pattern
from limitformer.initialisation.summary import TensorSummary
from limitformer.weightless.laws import Law

NAMED = {bug.key: bug for bug in BUGS}
DEAD, UNINITIALISED, NORM_ZERO = NAMED["dead"], NAMED["uninitialised"], NAMED["norm-zero"]
SHARED = ("broken tie", "new tie", "copies")
ALWAYS = ("NaN", "dead", "dead rows", "buffer", *SHARED)  # faults of a trained model too
UNNAMED = {  # why it matters, and the usual fix
    "mean": ("Its entries are centred elsewhere.", "See what shifts it after its initialisation."),
    "scale": ("One factor is in all of them.", "See whether initializer_range is the configuration's."),
    "spread": ("Its std is not the law's.", "Draw it again by the module's own code."),
    "shape": ("Its entries have another distribution.", "See which initialisation runs last."),
    "range": ("Some entries are farther out than the law allows.", "See what writes to a part of it."),
    "NaN": ("NaN spreads to everything behind it.", "Initialise or load it again."),
    "constant": ("Its entries are not the constant that the code writes.", "See which initialisation runs last."),
    "values": ("Its computed values are not those of the code.", "Compute them again after loading."),
    "fixed rows": ("A row that the code fixes (the padding's) was overwritten.", "Write it after the last draw."),
    "dead rows": ("Outputs or inputs that are zero carry nothing.", "Draw them, unless they pad a vocabulary."),
    "lines": (
        "Its rows or columns repeat each other or span too little: heads that begin equal stay equal.",
        "Draw every row by itself; see what copies or multiplies within it.",
    ),
    "orthogonal": ("Its rows or columns are not orthogonal.", "See what writes to it after orthogonal_."),
    "statistics": ("Running statistics have seen data, or another network's.", "Reset them, if training is to begin."),
    "new tie": ("Two weights are one memory that the code keeps apart.", "Copy instead of assigning."),
    "copies": ("Weights that should be independent begin equal.", "Draw each layer; do not deepcopy one."),
    "like layers": ("One of many equal layers differs from the others.", "See what treats this layer differently."),
}  # fmt: skip
SHOWN = 5  # findings in the text


@dataclass(frozen=True)
class Deviation:
    """A deviation of one weight, buffer or tie from its law; `others` are the names that share it."""

    name: str
    kind: str
    p: float
    entries: str
    law: str
    bug: Bug | None
    detail: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A deviation of one weight, or of like layers together.

    `entries` describes them, and `law` what they should be. `p` is corrected for the number of tests. `bug` is the
    title of the known bug that it looks like, or empty.
    """

    pattern: str
    names: tuple[str, ...]
    kind: str
    entries: str
    law: str
    p: float
    bug: str
    why: str
    mend: str

    def __str__(self) -> str:
        """Return one line of numbers, then the reason and the fix."""
        times = f" ×{len(self.names)}" if len(self.names) > 1 else ""
        title = f"{self.bug}: " if self.bug else ""
        line = f"{title}{self.pattern}{times} holds {self.entries}; its law: {self.law}"
        return with_reason(line, self.p, f"{self.why} {self.mend}")


@dataclass(frozen=True)
class CheckedWeight:
    """The numbers of one parameter. `ks` is its distance from the law, `p` the smallest corrected p-value."""

    name: str
    shape: tuple[int, ...]
    law: str
    count: int
    mean: float
    std: float
    kurtosis: float
    ks: float
    p: float
    findings: tuple[str, ...]


@dataclass(frozen=True)
class InitialisationReport:
    """The weights of a module compared, one by one, with the law that its code draws.

    `trained`: nearly all weights differ from the law in ways that no known bug explains, so that they are not reported
    one by one. `tests` is the number of tests that the p-values are corrected for.
    """

    name: str
    level: float
    weights: tuple[CheckedWeight, ...]
    findings: tuple[Finding, ...]
    trained: bool
    lawful: bool
    differing: int
    tests: int

    @property
    def summary(self) -> str:
        """The result in one line of text."""
        number = f"{len(self.weights)} weights"
        if self.trained:
            most = "all" if self.differing == len(self.weights) else self.differing
            return f"{most} of {number} differ from the law: a trained model, or another initialisation"
        if self.findings:
            bugs = list(dict.fromkeys(each.bug for each in self.findings if each.bug))
            count = max(self.differing, len({name for each in self.findings for name in each.names}))
            where = f"{count} of {number} differ from the law" if self.lawful else f"findings in {number}"
            return ": ".join([where, ", ".join(bugs)]) if bugs else where
        unknown = sum(each.law.startswith("unknown") for each in self.weights) if self.lawful else 0
        but = f", but for {unknown} whose law is not known" if unknown else ""
        return f"all {number} as the law says{but}" if self.lawful else f"nothing found in {number}, without a law"

    def __str__(self) -> str:
        """Return the summary, and at most a screen of findings."""
        return "\n".join(screen(f"{self.name}: {self.summary}", self.findings, SHOWN))


def with_reason(line: str, p: float, reason: str) -> str:
    """Return the line of a finding with its p-value, and the reason below it."""
    below = textwrap.fill(reason, 110, initial_indent="    ", subsequent_indent="    ")
    return f"{line}{'' if p == 0 else f' (p {p:.0e})'}\n{below}"


def screen(head: str, findings: Sequence[object], shown: int) -> list[str]:
    """Return the lines of a report with at most `shown` findings."""
    rest = len(findings) - shown
    return [head, *(f"  {each}" for each in findings[:shown]), *([f"  and {rest} more"] if rest > 0 else [])]


def aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return one row of a table."""
    return "  ".join(text.ljust(width) for text, width in zip(cells, widths, strict=True)).rstrip()


def findings_of(deviations: Iterable[Deviation]) -> tuple[Finding, ...]:
    """Join deviations of like layers with one kind and bug to one finding; those with a known bug come first."""
    groups: dict[tuple[str, ...], list[Deviation]] = {}
    every, wrong = list(deviations), NAMED["residual-wrong"]
    elsewhere = any(d.bug is wrong for d in every)  # a projection lacks its scaling because another matrix has it
    for d in every:
        d = replace(d, bug=wrong) if elsewhere and d.bug is NAMED["residual-missing"] else d
        key = pattern(d.name), d.bug.key if d.bug else d.kind, d.law
        groups.setdefault(key, []).append(d)
    findings = [finding(group) for group in groups.values()]
    return tuple(sorted(findings, key=lambda each: (not each.bug, each.p)))


def finding(group: list[Deviation]) -> Finding:
    """Return the finding of deviations that are alike."""
    d = min(group, key=lambda each: each.p)
    why, mend = (d.bug.why, d.bug.mend) if d.bug else UNNAMED[d.kind]
    why = f"{d.detail[0].upper()}{d.detail[1:]}. {why}" if d.detail else why
    names = tuple(name for each in group for name in (each.name, *each.others))
    short = pattern(d.name) if len(group) > 1 else listed(names)
    return Finding(short, names, d.kind, d.entries, d.law, d.p, d.bug.title if d.bug else "", why, mend)


def entries_text(summary: TensorSummary, law: Law) -> str:
    """Describe entries by std, kurtosis, and the mean if it is off."""
    if summary.odd:
        return f"{summary.odd:,} NaN or infinite"
    if summary.constant:
        return {0.0: "zeros", 1.0: "ones"}.get(summary.low, f"{summary.low:g} everywhere")
    ratio = f", {summary.std / law.std:.3g} times" if law.std > 0 else ""
    off = abs(summary.mean - law.mean) > 4 * summary.std / max(summary.count, 1) ** 0.5
    mean = f"mean {summary.mean:.3g}, " if off else ""
    return f"{mean}std {summary.std:.4g}{ratio}, kurtosis {summary.kurtosis:.3g}"


def buffer_text(buffer: Tensor) -> str:
    """Describe a buffer by its range."""
    values = buffer.detach().cpu().double()
    if bool(values.isnan().any()):
        return "NaN"
    return f"{float(values.min()):.3g} to {float(values.max()):.3g}"
