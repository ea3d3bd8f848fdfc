"""The reports on a module's initialisation and on two builds: a table of tensors, findings, and a screen of text.

There is one deviation for each weight, buffer or tie; findings join those of like layers.
"""

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from limitformer.base.errors import InputError, nearest
from limitformer.initialisation.bugs import BUGS, Bug
from limitformer.initialisation.like_layers import listed, pattern
from limitformer.initialisation.summary import TensorSummary
from limitformer.weightless.laws import Law

BY_KEY = {bug.key: bug for bug in BUGS}
DEAD, UNINITIALISED, NORM_ZERO = BY_KEY["dead"], BY_KEY["uninitialised"], BY_KEY["norm-zero"]
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
SHOWN, SHOWN_OF_BUILDS = 5, 8  # findings in the text
PATTERNS = 3  # in the title of a difference


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
    every, wrong = list(deviations), BY_KEY["residual-wrong"]
    elsewhere = any(d.bug is wrong for d in every)  # a projection lacks its scaling because another matrix has it
    for d in every:
        d = replace(d, bug=wrong) if elsewhere and d.bug is BY_KEY["residual-missing"] else d
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


KINDS = {  # why it matters, and the usual fix
    "uninitialised": "It holds whatever was in that memory. Write it in the initialisation that runs after to_empty.",
    "erased buffer": "The constructor's table does not outlive to_empty, and the network runs without an error. "
    "Compute the buffer again in the initialisation that runs after to_empty.",
    "no memory": "It is still on the meta device. Call to_empty, then initialise or load it.",
    "lost tie": "One parameter is trained once; copies, equal or not, are trained apart. "
    "If sharing is meant, tie them after to_empty, loading or sharding (tie_weights); else build each by itself.",
    "equal layers": "Layers that should be independent begin with the same numbers. "
    "Draw each layer; do not deepcopy one, as nn.TransformerEncoder does.",
    "untouched": "The initialisation of the model passes it by, and an earlier one stays. "
    "Name its module in the initialisation.",
    "second initialisation": "A later initialisation overwrites the intended one. "
    "Run the general initialisation first, or mark what is initialised already.",
    "after sharding": "The fan is that of a shard, so the std is too large. "
    "Initialise before sharding, or pass the std of the whole matrix.",
    "equal shards": "Every rank draws the same numbers, so the heads or units of all ranks begin equal. "
    "Give each rank its own seed for sharded weights.",
    "unequal replicas": "Every rank should hold the same numbers of it, and they differ. "
    "Draw unsharded weights from one seed, or broadcast them.",
    "not loaded": "It keeps the numbers of its initialisation. Compare the names in the file with the module's.",
    "law": "The two builds draw it from different laws. See which initialisation runs last in each.",
    "values": "It is not random, and the two builds have other numbers. See what writes it last in each.",
    "not finite": "NaN or infinity spreads to everything behind it. See what computes it.",
    "no seed": "Two builds from one seed differ. Draw from torch's global generator.",
    "missing": "Only one of the builds has it. See what removes, renames or adds it.",
    "shape": "Its shapes differ. If it is one of several shards, say so: shards=…",
    "dtype": "Its types differ. Convert both, or pass the dtype to to_empty's module.",
    "requires_grad": "Only one of the builds trains it. Set requires_grad after to_empty or loading.",
    "persistence": "Only one of the builds saves it. Register it with the same persistent=… in both.",
}


@dataclass(frozen=True)
class Difference:
    """A difference between two builds, in one tensor or in like layers.

    Attributes:
        pattern: the names, with * for the number of a layer.
        names: the tensors.
        kind: one of `limitformer.initialisation.KINDS`.
        in_a: what the first build has.
        in_b: what the second build has.
        p: the p-value, corrected for the number of tests; 0 is certain.
        detail: what the kind rests on, or empty.
    """

    pattern: str
    names: tuple[str, ...]
    kind: str
    in_a: str
    in_b: str
    p: float
    detail: str

    def __str__(self) -> str:
        """Return one line of facts, then the reason and the fix."""
        detail = f"{self.detail[0].upper()}{self.detail[1:]}. " if self.detail else ""
        line = f"{self.kind}: {self.pattern}  A: {self.in_a}; B: {self.in_b}"
        return with_reason(line, self.p, f"{detail}{KINDS[self.kind]}")


@dataclass(frozen=True)
class ComparedTensor:
    """One parameter, buffer or tensor in an attribute, in both builds.

    Attributes:
        name: its name, without those of wrappers.
        role: parameter, buffer or tensor attribute.
        in_a: what the first build has.
        in_b: what the second build has.
        verdict: equal, same law, tied, or the kinds of its findings.
        p: its smallest corrected p-value; 1 if nothing about it is random.
    """

    name: str
    role: str
    in_a: str
    in_b: str
    verdict: str
    p: float


@dataclass(frozen=True)
class BuildComparison:
    """Two builds of one model, tensor by tensor.

    Attributes:
        a: the name of the first build.
        b: the name of the second build.
        level: the probability at which two builds of one law have any finding.
        tests: the number of tests that p-values are corrected for; the other comparisons are certain.
        tensors: the table.
        findings: what differs.
        notes: what could not be compared.
    """

    a: str
    b: str
    level: float
    tests: int
    tensors: tuple[ComparedTensor, ...]
    findings: tuple[Difference, ...]
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The result in one line of text."""
        number = f"{len(self.tensors)} tensors"
        if not self.findings:
            return f"all {number} agree"
        count = len({name for each in self.findings for name in each.names})
        return f"{count} of {number} differ: {', '.join(dict.fromkeys(each.kind for each in self.findings))}"

    def failed(self, names: str | None) -> bool:
        """Return whether there is a finding of these kinds, separated by commas; `any`: of any kind.

        Raises:
            InputError: a name is not that of a kind.
        """
        wanted = failing_kinds(names)
        return any(each.kind in wanted for each in self.findings)

    def table(self) -> str:
        """Return the table as text; like layers with equal rows share a line."""
        rows: dict[tuple[str, ...], list[str]] = {}
        for each in self.tensors:
            key = pattern(each.name), each.role, each.in_a, each.in_b, each.verdict
            rows.setdefault(key, []).append(each.name)
        lines = [("tensor", "role", "A", "B", "verdict")]
        for (short, *rest), names in rows.items():
            lines.append((f"{short} ×{len(names)}" if len(names) > 1 else names[0], *rest))  # type: ignore[arg-type]
        widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
        return "\n".join(aligned(line, widths) for line in lines)

    def record(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        whole = {key: getattr(self, key) for key in ("a", "b", "summary", "level", "tests")}
        whole["findings"] = [vars(each) | {"names": list(each.names)} for each in self.findings]
        whole["tensors"] = [dict(vars(each)) for each in self.tensors]
        return whole | {"notes": list(self.notes)}

    def __str__(self) -> str:
        """Return the summary, and at most a screen of findings."""
        lines = screen(f"A: {self.a}, B: {self.b}: {self.summary}", self.findings, SHOWN_OF_BUILDS)
        return "\n".join([*lines, *(f"  {each}" for each in self.notes)])


def failing_kinds(names: str | None) -> tuple[str, ...]:
    """Return the kinds that `names` lists; raise `InputError` for a word that is not a kind."""
    words = [word.strip() for word in (names or "").split(",") if word.strip()]
    for word in words:
        if word not in (*KINDS, "any"):
            raise InputError(f"{word!r} is not a kind; there are {', '.join(KINDS)}, any.{nearest(word, KINDS)}")
    return tuple(KINDS) if "any" in words else tuple(words)


def joined_differences(differences: Iterable[Difference]) -> tuple[Difference, ...]:
    """Join differences of one kind: certain ones of equal descriptions, others of like layers. Certain ones come first.

    Tensors that nothing writes, and those of one sharding, are joined whatever they hold.
    """
    groups: dict[tuple[str, ...], list[Difference]] = {}
    for each in differences:
        key: tuple[str, ...] = (each.in_a, each.in_b)
        if each.p or each.kind in ("lost tie", "equal layers"):
            key = (pattern(each.pattern),)
        if each.kind in ("uninitialised", "erased buffer", "after sharding", "equal shards"):
            key = ()
        groups.setdefault((each.kind, each.detail, *key), []).append(each)
    order = list(KINDS)
    return tuple(sorted(map(joined, groups.values()), key=lambda each: (each.p > 0, order.index(each.kind))))


def joined(group: list[Difference]) -> Difference:
    """Return one difference for several; its title has a pattern for like layers."""
    first = min(group, key=lambda each: each.p)
    names = tuple(dict.fromkeys(name for each in group for name in each.names))
    count = Counter(pattern(each.pattern) for each in group)
    titles = {pattern(each.pattern): each.pattern for each in group}
    parts = [f"{short} ×{number}" if number > 1 else titles[short] for short, number in count.items()]
    title = ", ".join(parts[:PATTERNS]) + f" and {len(parts) - PATTERNS} more" * (len(parts) > PATTERNS)
    one = len({(each.in_a, each.in_b) for each in group}) == 1 or len(count) == 1
    in_b = first.in_b if one else f"{first.in_b} (the first of them)"
    return Difference(title, names, first.kind, first.in_a, in_b, first.p, first.detail)
