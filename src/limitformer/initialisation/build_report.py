"""The report on two builds of one model: a table of tensors, findings, and a screen of text."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from limitformer.base.errors import InputError, nearest
from limitformer.initialisation.like_layers import pattern
from limitformer.initialisation.report import aligned, screen, with_reason

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
SHOWN = 8  # findings in the text
NAMED = 3  # patterns in the title of a finding


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
        lines = screen(f"A: {self.a}, B: {self.b}: {self.summary}", self.findings, SHOWN)
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
    title = ", ".join(parts[:NAMED]) + f" and {len(parts) - NAMED} more" * (len(parts) > NAMED)
    one = len({(each.in_a, each.in_b) for each in group}) == 1 or len(count) == 1
    in_b = first.in_b if one else f"{first.in_b} (the first of them)"
    return Difference(title, names, first.kind, first.in_a, in_b, first.p, first.detail)
