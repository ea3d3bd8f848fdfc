r"""`compare`: two builds of one model, such as one on the CPU and one on the meta device, `to_empty` and initialised.

The first build is the reference. Laws read from the code are compared exactly, and so are fixed numbers, ties, shapes,
types and flags: two sound builds cannot differ in them. Only tensors that are random, and whose law is not known on
both sides, need tests (`weight_tests`). Their p-values are corrected together (Holm), so that two builds
of one law have *any* finding with probability at most `level`.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from limitformer.base.errors import require, require_count, require_real
from limitformer.initialisation.bugs import FLAT, evidence_of, recognise
from limitformer.initialisation.builds import (
    ATTRIBUTE,
    BUFFER,
    COUNTS,
    FEWEST,
    PARAMETER,
    Build,
    build_of,
    build_of_ranks,
    comparable,
    digest,
)
from limitformer.initialisation.like_layers import listed, pattern
from limitformer.initialisation.report import (
    BuildComparison,
    ComparedTensor,
    Difference,
    buffer_text,
    joined_differences,
)
from limitformer.initialisation.sharding import Estimate, Shards, equal_shards, shards_of, slice_of
from limitformer.initialisation.summary import TensorSummary, summarise
from limitformer.initialisation.weight_tests import LEAST, holm, p_of_builds, p_of_law, p_of_numbers, same_values
from limitformer.weightless import laws
from limitformer.weightless.laws import Law

EQUAL, SAME_LAW, TIED = "equal", "same law", "tied"
CLOSE = 1e-6  # relative difference of two laws that is rounding


def compare(
    build_a: Any, build_b: Any, *, same: bool = False, level: float = 1e-4, shards: int | None = None
) -> BuildComparison:
    """Compare two builds of one model: laws, ties, buffers, uninitialised memory, shapes, types and flags.

    Args:
        build_a: the reference: a function that builds a module, a configuration of transformers, its folder, JSON or
            public name, a module, or a state dict, also as a file of safetensors or a folder with some.
        build_b: the build to compare with it. Only functions and configurations have laws and uninitialised memory;
            of the others the numbers are compared. A list has the functions of all tensor-parallel ranks, whose slices
            are joined.
        same: whether numbers must be equal too, such as after loading one file. Both are built from one seed.
        level: probability at which two sound builds may have a finding.
        shards: how many shards a matrix of A has in B, if B holds one of them.

    Raises:
        InputError: a build is none of these, or cannot be made.

    >>> from torch import nn
    >>> def bare():
    ...     return nn.Linear(64, 8, device="meta").to_empty(device="cpu")
    >>> print(str(compare(lambda: nn.Linear(64, 8), bare)).splitlines()[0])
    A: <lambda>, B: bare: 2 of 2 tensors differ: uninitialised
    """
    level = require_real("level", level)
    require(0 < level < 1, f"level must be between 0 and 1; got {level:g}.")
    number = None if shards is None else require_count("shards", shards, least=2)
    a = build_of(build_a, "build_a")
    if isinstance(build_b, list | tuple) and len(build_b) > 1:
        b, number = build_of_ranks(build_b, a), len(build_b)
    else:
        b = build_of(build_b, "build_b")
    return TwoBuilds(a, b, same, number).report(level)


class TwoBuilds:
    """The comparison of two builds, tensor by tensor."""

    def __init__(self, a: Build, b: Build, same: bool, shards: int | None) -> None:
        self.a, self.b, self.same, self.shards = a, b, same, shards
        every = {**b.tensors, **a.tensors}
        ordered = [*a.tensors, *(name for name in b.tensors if name not in a.tensors)]
        self.names = [n for n in ordered if every[n].role != ATTRIBUTE or (n in a.tensors and n in b.tensors)]
        self.both = [name for name in a.tensors if name in b.tensors]
        self.certain: dict[str, list[Difference]] = {}
        self.p: dict[tuple[str, str], float] = {}
        self.verdicts: dict[str, str] = {}
        self.sampled: list[str] = []  # random in one build at least, without a law on both sides
        self.estimates: dict[tuple[int, str], Estimate] = {}  # of the std of sampled tensors, by build and name

    def report(self, level: float) -> BuildComparison:
        """Compare everything, and correct the p-values."""
        self.compare_presence()
        for name in self.both:
            first = self.a.ties.get(name, name)
            if first != name and first == self.b.ties.get(name, name):  # both have it under an earlier name
                self.verdicts[name] = TIED
            elif self.compare_flags(name) and self.compare_memory(name):
                self.compare_numbers(name)
                self.compare_shards(name)
        self.compare_loading()
        self.compare_samples()
        corrected = holm(self.p)
        least: dict[str, float] = {}
        for (name, _), p in corrected.items():
            least[name] = min(p, least.get(name, 1.0))
        for name, p in least.items():
            self.verdicts.setdefault(name, SAME_LAW)
            if p <= level:
                self.note(name, "law")
        self.name_causes()
        for name, every in self.certain.items():  # that an untied copy has another law follows from the lost tie
            first = self.a.ties.get(name, name)
            if first != name and self.b.ties.get(name) != self.b.ties.get(first):
                self.certain[name] = [each for each in every if each.kind not in ("law", "values", "untouched")]
        differences = [
            replace(each, p=least[name]) if least.get(name, 1.0) <= level else each
            for name, every in self.certain.items()
            for each in every
        ]
        differences += self.lost_ties()
        joint = [each for each in differences if each.kind in ("lost tie", "equal layers")]
        tied = {name: each.kind for each in joint for name in each.names}
        tensors = tuple(self.row(name, least.get(name, 1.0), tied.get(name)) for name in self.names)
        findings = joined_differences(differences)
        return BuildComparison(self.a.name, self.b.name, level, len(self.p), tensors, findings, self.notes())

    def row(self, name: str, p: float, tied: str | None) -> ComparedTensor:
        every = dict.fromkeys([*(each.kind for each in self.certain.get(name, ())), *([tied] if tied else [])])
        role = (self.a if name in self.a.tensors else self.b).tensors[name].role
        verdict = ", ".join(every) or self.verdicts.get(name, EQUAL)
        return ComparedTensor(name, role, text_of(self.a, name), text_of(self.b, name), verdict, p)

    def notes(self) -> tuple[str, ...]:
        """Return lines about what could not be compared exactly."""
        sides = (("A", self.a), ("B", self.b))
        doubts = ((side, build.doubt) for side, build in sides if build.doubt)
        lines = [f"the code of {side} was not read ({doubt}): laws are tested" for side, doubt in doubts]
        numbers = [side for side, build in sides if not build.fixed]
        if self.sampled:
            lines.append(
                f"{len(self.sampled)} random tensors have no law that is known in both: several builds were tested"
            )
        if len(numbers) == 1:
            lines.append(f"{numbers[0]} is known by its numbers only: uninitialised memory cannot be seen in it")
        if len(numbers) == 2:
            lines.append("both are known by their numbers only: uninitialised memory cannot be seen in them")
        return tuple(lines)

    def note(self, name: str, kind: str, detail: str = "", texts: Sequence[str] | None = None) -> None:
        """Note a certain difference; `texts`: what A and B have."""
        in_a, in_b = texts or (text_of(self.a, name), text_of(self.b, name))
        self.certain.setdefault(name, []).append(Difference(name, (name,), kind, in_a, in_b, 0.0, detail))

    def test(self, name: str, tests: Mapping[str, float]) -> None:
        self.p |= {(name, test): p for test, p in tests.items()}

    def compare_presence(self) -> None:
        """Note tensors of one build only; a state dict needs no buffers and no second names."""
        for here, other in ((self.a, self.b), (self.b, self.a)):
            for name, each in here.tensors.items():
                if name in other.tensors or each.role == ATTRIBUTE:
                    continue
                again = any(one in other.tensors for one, first in here.ties.items() if first == here.ties.get(name))
                if other.module or (each.persistent and not again):
                    self.note(name, "missing")

    def compare_flags(self, name: str) -> bool:
        """Compare shape, type and flags; return whether numbers can be compared."""
        a, b = self.a.tensors[name], self.b.tensors[name]
        if a.value.dtype != b.value.dtype:
            self.note(name, "dtype", texts=tuple(str(each.value.dtype).removeprefix("torch.") for each in (a, b)))
        if self.a.module and self.b.module:
            if a.role == b.role == PARAMETER and a.requires_grad != b.requires_grad:
                texts = ("trained", "not trained")[:: 1 if a.requires_grad else -1]
                self.note(name, "requires_grad", texts=texts)
            if a.role == b.role == BUFFER and a.persistent != b.persistent:
                self.note(name, "persistence", texts=("saved", "not saved")[:: 1 if a.persistent else -1])
        if a.shape == b.shape:
            return True
        part = slice_of(b.shape, a.shape)
        if (part is None or part[0] != self.shards) and not self.shards_of(name):
            hint = f"B's is one of {part[0]} slices along dimension {part[1]}" if part else ""
            texts = ("×".join(map(str, a.shape)) or "one number", "×".join(map(str, b.shape)) or "one number")
            self.note(name, "shape", hint, texts)
        return part is not None

    def compare_memory(self, name: str) -> bool:
        """Compare what has memory, and what nothing writes; return whether numbers can be compared."""
        values = [build.tensors[name].value for build in (self.a, self.b)]
        bare = [values[0].is_meta, values[1].is_meta]
        unwritten = [name in self.a.unwritten, name in self.b.unwritten]
        role = self.a.tensors[name].role
        if any(bare):
            if bare[0] != bare[1] or any(unwritten):
                self.note(name, "no memory" if role == PARAMETER or bare[0] else "erased buffer")
            return False
        if all(unwritten) and role == ATTRIBUTE:
            return False  # memory to work in
        if any(unwritten):
            self.note(name, "erased buffer" if role != PARAMETER and unwritten == [False, True] else "uninitialised")
            return False
        odd = [each.is_floating_point() and not bool(comparable(each).isfinite().all()) for each in values]
        if any(odd) and not same_values(values[0], values[1]):
            self.note(name, "not finite")
            return False
        if name in self.b.replicas:
            self.note(name, "unequal replicas")
        unstable = name in self.a.unstable or name in self.b.unstable
        if unstable:
            self.note(name, "no seed")
        return not unstable

    def compare_numbers(self, name: str) -> None:
        """Compare laws or values; collect p-values where neither is certain."""
        a, b = self.a.tensors[name].value, self.b.tensors[name].value
        law_a, law_b = self.a.laws.get(name), self.b.laws.get(name)
        lawful = law_a is not None and law_b is not None
        if lawful and not same_law(law_a, law_b):
            self.note(name, "law")
        elif lawful and not self.same:
            self.verdicts[name] = SAME_LAW
        elif equal_slice(a, b):
            self.verdicts[name] = EQUAL
        elif self.same:
            self.note(name, "values", apart_text(a, b))
        elif not a.is_floating_point() or a.dtype.itemsize == 1:
            self.note(name, "values")
        elif self.fixed(self.a, name) and self.fixed(self.b, name):
            self.compare_values(name)
        elif law_a is not None or law_b is not None:
            law, other = (law_a, self.b) if law_a is not None else (law_b, self.a)
            values = other.tensors[name].value
            if name in other.random or law is None:
                self.sampled.append(name)
            else:
                self.test(name, p_of_law(values, summarise(values, law.rows), law))
        elif name in self.a.random and name in self.b.random:
            self.sampled.append(name)
        elif name in self.a.random or name in self.b.random:  # the numbers of one are compared with builds of the other
            if is_constant(b if name in self.a.random else a):
                self.note(name, "law")
            else:
                self.sampled.append(name)
        else:
            numbers = not self.fixed(self.a, name) and not self.fixed(self.b, name)
            random = numbers and self.a.tensors[name].role == PARAMETER and a.numel() > 1
            if random and not is_constant(a) and not is_constant(b):
                self.test(name, p_of_numbers(summarise(a), summarise(b)))
            else:  # a constant, or few numbers, cannot be random
                self.compare_values(name)

    @staticmethod
    def fixed(build: Build, name: str) -> bool:
        return build.fixed and name not in build.random and name not in build.laws

    def compare_values(self, name: str) -> None:
        """Note that fixed numbers differ; a buffer that one build leaves constant is erased."""
        a, b = self.a.tensors[name], self.b.tensors[name]
        erased = a.role != PARAMETER and is_constant(b.value) and not is_constant(a.value)
        self.note(name, "erased buffer" if erased else "values", "" if erased else apart_text(a.value, b.value))

    def compare_loading(self) -> None:
        """Note what only one build loads, if both load most matrices; the numbers of the other may have the law too."""
        if self.same or not self.mostly_loaded():
            return
        for name in self.both:
            a, b = (self.fixed(build, name) for build in (self.a, self.b))
            loaded = self.a if a else self.b
            if a != b and self.a.fixed and self.b.fixed and not is_constant(loaded.tensors[name].value):
                self.p = {key: p for key, p in self.p.items() if key[0] != name}
                self.sampled = [each for each in self.sampled if each != name]
                self.verdicts.pop(name, None)
                self.certain[name] = []
                self.note(name, "not loaded")

    def compare_samples(self) -> None:
        """Test random tensors without a law, by several builds."""
        entries = max(self.a.entries, self.b.entries) if self.sampled else 0
        count = next((number for most, number in COUNTS if entries <= most), FEWEST)
        summaries = [self.several(build, set(self.sampled), count) for build in (self.a, self.b)]
        for name in self.sampled:
            one, other = (each[name] for each in summaries)
            self.test(name, p_of_builds(one, other))
            self.estimates |= {(id(self.a), name): estimate_of(one), (id(self.b), name): estimate_of(other)}

    def several(self, build: Build, names: set[str], count: int) -> dict[str, list[TensorSummary]]:
        """Return summaries of several builds of random tensors, and one of others."""
        random = names & build.random
        result = {name: [summarise(build.tensors[name].value)] for name in names - random}
        for tensors in build.again(random, count) if random else ():
            for name, value in tensors.items():
                result.setdefault(name, []).append(summarise(value))
        return result

    def compare_shards(self, name: str) -> None:
        """Note a weight of equal slices in one build only."""
        a, b = self.a.tensors[name], self.b.tensors[name]
        if a.role != PARAMETER or not b.value.is_floating_point() or self.fixed(self.b, name):
            return
        shards = equal_shards(b.value)
        if shards is not None and equal_shards(a.value) != shards:
            self.note(name, "equal shards", f"{shards[0]} equal slices along dimension {shards[1]} in B")

    def lost_ties(self) -> list[Difference]:
        """Return what is tied, and trained random weights of like layers that begin equal, in one build only."""
        result = []
        for here, other, order in ((self.a, self.b, 1), (self.b, self.a, -1)):
            groups: dict[str, list[str]] = {}
            for name, first in here.ties.items():
                if name in other.ties:
                    groups.setdefault(first, []).append(name)
            for names in groups.values():
                values = [other.tensors[name].value for name in names]
                apart = len({other.ties[name] for name in names}) > 1
                equal = apart and all(same_values(values[0], each) for each in values[1:])
                if apart and (other.module or not equal):  # a file holds copies
                    texts = "one parameter", f"{len(names)} with {'equal' if equal else 'different'} numbers"
                    in_a, in_b = texts[::order]
                    result.append(Difference(listed(names), tuple(names), "lost tie", in_a, in_b, 0.0, ""))
        for here, other, order in ((self.a, self.b, 1), (self.b, self.a, -1)):
            there = equal_groups(other)
            for alike in equal_groups(here):
                if not any(len(set(alike) & set(each)) > 1 for each in there):
                    in_a, in_b = (f"{len(alike)} times the same numbers", "numbers of their own")[::order]
                    result.append(Difference(listed(alike), alike, "equal layers", in_a, in_b, 0.0, ""))
        return result

    # Causes

    def name_causes(self) -> None:
        """Replace differences of law and values by their cause, where it is known."""
        causes = ("law", "values", "erased buffer")
        unequal = {name: each for name, every in self.certain.items() for each in every if each.kind in causes}
        if not unequal or self.same:
            return
        mine, other = (build.law_histories(set(unequal)) for build in (self.a, self.b))
        slices = {name: self.shards_of(name) for name in unequal}
        number = self.shards or common_number(slices.values())
        for name, each in unequal.items():
            new = self.cause(name, each, mine.get(name, ()), other.get(name, ()))
            likely = [one for one in slices[name] if one.number == number] or slices[name]
            sliced = slice_of(tuple(self.b.tensors[name].value.shape), self.a.tensors[name].shape) is not None
            clear = bool(likely) and (not likely[0].others or likely[0].number == number or sliced)
            if clear and new.kind in ("law", "second initialisation"):  # a constructor may have drawn the same law
                detail = f"the std is √({likely[0].formula}) of one of {likely[0].number} slices"
                new = replace(each, kind="after sharding", detail=detail)
            law, b = self.a.laws.get(name), self.b.tensors[name]
            if new.kind == "law" and law is not None and not b.value.is_meta:
                every = {other_name: self.a.laws.get(other_name, law) for other_name in self.both}
                summary = summarise(b.value, law.rows)
                bug, detail = recognise(evidence_of(name, b.value.shape, law, summary, b.owner, every, b.value.shape))
                new = replace(new, detail=f"{bug.title}: {detail}") if bug is not None else new
            self.certain[name] = [new if one is each else one for one in self.certain[name]]

    def cause(self, name: str, each: Difference, mine: tuple[Law, ...], other: tuple[Law, ...]) -> Difference:
        """Return the difference with the kind that the histories of both builds show."""
        a, b = self.a.tensors[name].value, self.b.tensors[name].value
        law_a, law_b = self.a.laws.get(name), self.b.laws.get(name)
        had = [law for law in other[:-1] if law_a is not None and same_law(law, law_a)]
        if had or (law_a is None and self.fixed(self.a, name) and had_values(a, self.b.values.get(name, ()))):
            detail = f"B wrote {text_of(self.a, name)} first, and {each.in_b} over it"
            erased = each.kind == "erased buffer"
            return replace(each, kind="erased buffer" if erased else "second initialisation", detail=detail)
        early = [law for law in mine[:-1] if law_b is not None and same_law(law, law_b)]
        stays = early or (law_b is None and self.fixed(self.b, name) and had_values(b, self.a.values.get(name, ())))
        if stays and each.kind != "erased buffer":
            return replace(each, kind="untouched", detail=f"A has {each.in_b} too, and writes {each.in_a} over it")
        return each

    def mostly_loaded(self) -> bool:
        """Whether most matrices are fixed numbers that both builds share, as after loading one file."""
        matrices = {name: each.value for name, each in self.a.tensors.items() if each.value.dim() > 1}
        loaded = (name for name in matrices if self.verdicts.get(name) == EQUAL and self.fixed(self.a, name))
        return 2 * sum(not is_constant(matrices[name]) for name in loaded) > len(matrices)

    def shards_of(self, name: str) -> list[Shards]:
        """Return the shards whose initialisation explains the std of B, best ones first."""
        a, b = self.a.tensors[name].value, self.b.tensors[name].value
        if not b.is_floating_point() or not b.numel() or a.is_meta or b.is_meta:
            return []
        if len({build.summary(name).kurtosis < FLAT for build in (self.a, self.b)}) == 2:
            return []  # one is uniform, the other is not
        shards = shards_of(tuple(a.shape), self.std_of(self.a, name), self.std_of(self.b, name))
        part = slice_of(tuple(b.shape), tuple(a.shape))
        return [each for each in shards if part is None or (each.number, each.dimension) == part]

    def std_of(self, build: Build, name: str) -> Estimate:
        """Return the std of a tensor, from its law if it is known."""
        if name in build.laws:
            return Estimate(build.laws[name].std, 0.0)
        return self.estimates.get((id(build), name)) or estimate_of([build.summary(name)])


def equal_groups(build: Build) -> list[tuple[str, ...]]:
    """Return groups of trained random parameters of like layers that are separate and hold the same numbers."""
    groups: dict[tuple[str, bytes], list[str]] = {}
    for name, each in build.tensors.items():
        drawn = each.role == PARAMETER and each.requires_grad and (name in build.random or not build.fixed)
        if not drawn or build.ties.get(name, name) != name or each.value.is_meta or each.value.numel() < LEAST:
            continue
        summary = build.summary(name)
        if summary.std > 0 and not is_constant(each.value):
            groups.setdefault((pattern(name), summary.sample.tobytes()), []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def same_law(a: Law | None, b: Law | None) -> bool:
    """Whether two laws are the same up to rounding; bounds that cut nothing do not count."""
    if a is None or b is None:
        return a is b
    if a.kind == b.kind == laws.CONSTANT:
        return math.isclose(a.shift, b.shift, rel_tol=CLOSE, abs_tol=0.0)
    if not (a.random and b.random) or a.rows != b.rows:
        return False
    one, other = plain_law(a), plain_law(b)
    if one.kind != other.kind:
        return False
    unit = max(one.std, other.std)
    ends = [(each.scale * each.low, each.scale * each.high) for each in (one, other)]
    near = [abs(one.mean - other.mean) <= CLOSE * unit, math.isclose(one.std, other.std, rel_tol=CLOSE)]
    near += [x == y or abs(x - y) <= CLOSE * unit for x, y in zip(*ends, strict=True)]
    return all(near)


def plain_law(law: Law) -> Law:
    """Return an equal law with a positive scale, and a normal one for bounds that cut nothing."""
    if law.scale < 0:
        flipped = law.shift + law.scale if law.kind == laws.UNIFORM else law.shift
        law = replace(law, scale=-law.scale, shift=flipped, low=-law.high, high=-law.low)
    if law.kind == laws.TRUNCATED and -law.low > laws.CUT_NOTHING and law.high > laws.CUT_NOTHING:
        law = replace(law, kind=laws.NORMAL, low=-math.inf, high=math.inf)
    return law


def equal_slice(a: Tensor, b: Tensor) -> bool:
    """Whether b is equal to a, or to one of its slices."""
    part = slice_of(tuple(b.shape), tuple(a.shape))
    if part is None:
        return same_values(a, b)
    size = b.shape[part[1]]
    return any(same_values(a.narrow(part[1], k * size, size), b) for k in range(part[0]))


def is_constant(values: Tensor) -> bool:
    flat = values.reshape(-1)
    return bool(flat.numel()) and bool((flat == flat[0]).all())


def had_values(values: Tensor, history: tuple[bytes, ...]) -> bool:
    """Whether a small tensor had these values before its last write."""
    cpu = values.device.type == "cpu" and values.layout == torch.strided and bool(history)
    return cpu and digest(values) in history[:-1]


def text_of(build: Build, name: str) -> str:
    """Describe a tensor of a build in a few words."""
    if name not in build.tensors:
        return "not there"
    each = build.tensors[name]
    if each.value.is_meta:
        return "no memory"
    if name in build.unwritten:
        number, every = build.unwritten[name], each.value.numel()
        return "nothing writes it" if number == every else f"nothing writes {number:,} of {every:,} entries"
    if name in build.laws:
        return str(build.laws[name])
    if not each.value.numel():
        return "no entries"
    if is_constant(each.value):
        one = each.value.reshape(-1)[0].item()
        text = f"{one:.6g}" if isinstance(one, float) else str(one)
        return text if each.value.numel() == 1 else {"0": "zeros", "1": "ones"}.get(text, f"{text} everywhere")
    if each.role == BUFFER or not each.value.is_floating_point():
        return buffer_text(each.value)
    summary = build.summary(name)
    if summary.odd:
        return f"{summary.odd:,} NaN or infinite"
    return f"{'random, ' * (name in build.random)}std {summary.std:.4g}"


def apart_text(a: Tensor, b: Tensor) -> str:
    """Describe how far two tensors are apart."""
    if a.shape != b.shape or not a.numel():
        return ""
    off = (a.detach().cpu().double() - b.detach().cpu().double()).abs()
    return f"{int((off > 0).sum()):,} of {off.numel():,} entries differ, by up to {float(off.max()):.2g}"


def common_number(candidates: Iterable[list[Shards]]) -> int | None:
    """Return the number of shards of a build: what explains most matrices that nothing else explains.

    If something else explains each of them, it must not be one formula for all.
    """
    every = [each for each in candidates if each]
    numbers = [{one.number for one in each} for each in every]
    votes = Counter(number for each, ways in zip(every, numbers, strict=True) if not each[0].others for number in ways)
    if not votes and every and not frozenset.intersection(*(each[0].others for each in every)):
        votes = Counter(set.intersection(*numbers))
    return max(votes, key=lambda number: (votes[number], -number)) if votes else None


def estimate_of(summaries: Sequence[TensorSummary]) -> Estimate:
    """Return the std of several builds of a tensor."""
    logs = [math.log(each.std) for each in summaries if each.std > 0]
    if len(logs) < len(summaries) or not logs:
        return Estimate(0.0, 0.0)
    error = max(each.log_error() for each in summaries) / math.sqrt(len(logs))
    return Estimate(math.exp(statistics.fmean(logs)), error)
