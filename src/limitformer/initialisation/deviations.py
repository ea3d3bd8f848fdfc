"""What deviates from the law, one weight, buffer or tie after the other; and layers that deviate from their like."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from limitformer.base.errors import InputError, require
from limitformer.initialisation import report as found_as
from limitformer.initialisation.bugs import Evidence, recognised
from limitformer.initialisation.like_layers import outliers, pattern
from limitformer.initialisation.lines import p_of_lines
from limitformer.initialisation.report import DEAD, Deviation
from limitformer.initialisation.summary import LONG, Held, held
from limitformer.initialisation.weight_tests import SMALLEST, p_values
from limitformer.weightless import laws
from limitformer.weightless.law import LawTable
from limitformer.weightless.laws import Law

NONE = Law(laws.UNKNOWN, reason="no law")
LEAST = 16  # entries; fewer may agree by chance where numbers are coarse


@dataclass(frozen=True)
class Subject:
    """A module, its parameters of one memory each, what they hold, and the laws that they should have."""

    module: nn.Module
    parameters: dict[str, nn.Parameter]  # under every name
    held: dict[str, Held]  # under the first
    laws: dict[str, Law]
    table: LawTable | None
    reference: nn.Module | None


def subject_of(module: nn.Module, table: LawTable | None, reference: nn.Module | None) -> Subject:
    """Measure every parameter once."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    meta = next((name for name, parameter in parameters.items() if parameter.is_meta), None)
    require(meta is None, f"the module has no numbers: {meta} is on the meta device. Load or draw its weights first.")
    seen: dict[object, str] = {}
    first = {n: p for n, p in parameters.items() if p.is_floating_point() and seen.setdefault(memory(p), n) == n}
    found = dict.fromkeys(first, NONE) if table is None else laws_of(first, table)
    measured = {name: held(parameter, found[name].rows) for name, parameter in first.items()}
    return Subject(module, parameters, measured, found, table, reference)


def laws_of(parameters: Mapping[str, nn.Parameter], table: LawTable) -> dict[str, Law]:
    """The law of each, under any of its tied names."""
    first = {name: name for name in table.laws} | {other: name for name, names in table.tied.items() for other in names}
    missing = [name for name in parameters if name not in first]
    if len(missing) * 2 > len(parameters):
        raise InputError(f"the law is of another module: {table.name} has no {missing[0]}, but {next(iter(first))}.")
    for name, parameter in parameters.items():
        meant = table.shapes[first[name]] if name in first else tuple(parameter.shape)
        require(
            meant == tuple(parameter.shape),
            f"the law is of another module: {name} is {tuple(parameter.shape)}, and its law of {meant}.",
        )
    return {name: table.laws[first[name]] if name in first else NONE for name in parameters}


def evidence(name: str, subject: Subject, share: bool = False) -> Evidence:
    """What a recogniser looks at."""
    path, _, leaf = name.rpartition(".")
    owner = subject.module.get_submodule(path)
    every = subject.table.laws if subject.table is not None else subject.laws
    alike = [other for other in every if pattern(other) == pattern(name)]
    numbers = {next((part for part in other.split(".") if part.isdecimal()), "") for other in alike}
    weight = getattr(owner, "weight", None) if leaf == "bias" else subject.parameters[name]
    shape = tuple(weight.shape) if isinstance(weight, Tensor) else ()
    fans = (shape[-1], math.prod(shape[:-1]), math.prod(shape[1:])) if len(shape) > 1 else ()
    return Evidence(
        name, tuple(subject.parameters[name].shape), subject.laws[name], subject.held[name], len(numbers),
        embedding=isinstance(owner, nn.Embedding), norm="norm" in type(owner).__name__.lower(),
        stds=frozenset(each.std for each in every.values()), fans=tuple(dict.fromkeys(fans)), share=share,
    )  # fmt: skip


@dataclass(frozen=True)
class Sharing:
    """Names that share, or do not, against what was meant."""

    names: tuple[str, ...]
    kind: str  # broken tie, new tie, copies
    equal: bool  # whether their numbers are the same


def tested(name: str, subject: Subject) -> dict[str, float]:
    """The p-values of one weight, each by itself; 0 is what the law excludes."""
    each, law, parameter = subject.held[name], subject.laws[name], subject.parameters[name]
    if each.odd:
        return {"NaN": 0.0}
    if not each.count or law.kind == laws.UNKNOWN:
        return {}
    if law.kind == laws.GIVEN:
        meant = None if subject.reference is None else dict(subject.reference.named_parameters()).get(name)
        return {} if meant is None or meant.is_meta or same(parameter, meant) else {"values": 0.0}
    if law.std == 0:
        off = max(abs(each.low - law.shift), abs(each.high - law.shift))
        return {} if off <= near_zero(each.spacing, law.shift) else {"constant": 0.0}
    found = p_values(each, law) | {"lines": p_of_lines(parameter, law)}
    if each.constant and each.count >= LONG:
        found["constant"] = 0.0
    if any(lines_dead(each)):
        found["dead rows"] = 0.0
    if any(not bool((parameter.detach()[row] == value).all()) for row, value in law.rows.items()):
        found["fixed rows"] = 0.0
    return found


def near_zero(spacing: float, value: float) -> float:
    """How far from a number rounding may take it."""
    return spacing * abs(value) + (SMALLEST if spacing > 1e-5 and value else 0.0)


def same(mine: Tensor, meant: Tensor) -> bool:
    """Whether two tensors agree up to rounding to the type of the first."""
    if mine.shape != meant.shape:
        return False
    if not mine.is_floating_point():
        return bool(torch.equal(mine.cpu(), meant.to("cpu", mine.dtype)))
    close = max(4 * torch.finfo(mine.dtype).eps, 1e-5)
    a, b = mine.detach().cpu().double(), meant.detach().to("cpu", mine.dtype).double()
    return bool(torch.allclose(a, b, rtol=close, atol=1e-12, equal_nan=True))


def lines_dead(each: Held) -> tuple[int, int]:
    """Rows and columns that are all zero; lines of few entries do not count."""
    if each.dead or not len(each.rows):
        return 0, 0
    long = len(each.columns) >= LONG, len(each.rows) >= LONG
    return int((each.rows == 0).sum()) * long[0], int((each.columns == 0).sum()) * long[1]


def deviation(name: str, corrected: dict[str, float], subject: Subject) -> Deviation:
    """What stands out of one weight against its law, and the bug that it looks like."""
    e = evidence(name, subject)
    bug, detail = recognised(e)
    certain = [test for test in ("NaN", "constant", "values", "fixed rows") if test in corrected]
    kind = (
        certain[0]
        if certain
        else "dead rows"
        if "dead rows" in corrected
        else min(corrected, key=corrected.__getitem__)
    )
    if kind == "constant" and e.held.dead and e.law.std > 0:
        kind = "dead"
    return Deviation(name, kind, min(corrected.values()), found_as.held_text(e.held, e.law), str(e.law), bug, detail)


def law_free(subject: Subject) -> list[Deviation]:
    """Where no law is known: NaN is found with the rest; dead matrices and dead rows."""
    found = []
    for name, each in subject.held.items():
        bias = "bias" in name.rpartition(".")[2]  # zero by custom, also where those of many experts are a matrix
        if subject.laws[name].kind != laws.UNKNOWN or not len(each.rows) or each.odd or bias:
            continue
        rows, columns = lines_dead(each)
        owner = subject.module.get_submodule(name.rpartition(".")[0])
        rows -= getattr(owner, "padding_idx", None) is not None
        if each.dead or rows > 0 or columns > 0:
            kind, text = "dead" if each.dead else "dead rows", found_as.held_text(each, NONE)
            bug, detail = (found_as.DEAD, "every entry is 0") if each.dead else (None, "")
            found.append(Deviation(name, kind, 0.0, text, "none known", bug, detail))
    return found


def of_buffers(subject: Subject) -> list[Deviation]:
    """Buffers that are not those of the reference; without one, those that are NaN."""
    meant = {} if subject.reference is None else dict(subject.reference.named_buffers())
    found = []
    for name, buffer in subject.module.named_buffers():
        twin = meant.get(name)
        if buffer.is_meta or not buffer.numel() or (twin is not None and twin.is_meta):
            continue
        wrong = not same(buffer, twin) if twin is not None else bool(buffer.isnan().any())
        if wrong:
            running = isinstance(subject.module.get_submodule(name.rpartition(".")[0]), nn.modules.batchnorm._NormBase)
            kind = "statistics" if running and bool(buffer.isfinite().all()) else "buffer"
            law = "another buffer" if twin is None else found_as.buffer_text(twin)
            bug = None if kind == "statistics" else found_as.UNINITIALISED
            found.append(
                Deviation(name, kind, 0.0, found_as.buffer_text(buffer), law, bug, "the buffer is not as built")
            )
    return found


def of_sharing(subject: Subject) -> list[Deviation]:
    """Ties that are broken or new, and copies."""
    found = [] if subject.table is None else broken_ties(subject.parameters, subject.table)
    apart = [each.names for each in found]
    found += [] if subject.table is None else new_ties(subject.parameters, subject.table)
    found += copies(subject.held, subject.table, apart)
    return [sharing(each) for each in found]


def of_like_layers(subject: Subject, trained: bool, level: float) -> list[Deviation]:
    """Layers that stand out among their like, where no law says what they should be."""
    asked = {n: h for n, h in subject.held.items() if trained or subject.laws[n].kind == laws.UNKNOWN}
    return [
        Deviation(o.name, "like layers", o.p, f"std {asked[o.name].std:.3g}, {o.ratio:.3g} times its like layers'",
                  "none known" if not trained else str(subject.laws[o.name]), None, "")
        for o in outliers(asked, level, trained)
    ]  # fmt: skip


def sharing(each: Sharing) -> Deviation:
    """In words."""
    numbers = "equal numbers" if each.equal else "different numbers"
    held, law = {
        "broken tie": (f"{len(each.names)} parameters with {numbers}", "one parameter"),
        "new tie": ("one parameter", "parameters of their own"),
        "copies": (f"{len(each.names)} times the same numbers", "independent draws"),
    }[each.kind]
    bug = DEAD if each.kind == "broken tie" else None
    detail = "a tie is broken" if bug else ""
    return Deviation(each.names[0], each.kind, 0.0, held, law, bug, detail, each.names[1:])


def memory(tensor: Tensor) -> tuple[object, ...]:
    """The same for tensors that are one."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape)


def tie_groups(law: LawTable) -> list[tuple[str, ...]]:
    """Names that should be one parameter."""
    return [(first, *others) for first, others in law.tied.items()]


def broken_ties(parameters: Mapping[str, nn.Parameter], law: LawTable) -> list[Sharing]:
    """What the law ties and the module holds twice."""
    found = []
    for group in tie_groups(law):
        present = [name for name in group if name in parameters]
        if len({memory(parameters[name]) for name in present}) > 1:
            first, *others = (parameters[name].detach() for name in present)
            equal = all(first.shape == other.shape and bool(torch.equal(first, other)) for other in others)
            found.append(Sharing(tuple(present), "broken tie", equal))
    return found


def new_ties(parameters: Mapping[str, nn.Parameter], law: LawTable) -> list[Sharing]:
    """What the module ties and the law does not."""
    meant = {name: group[0] for group in tie_groups(law) for name in group}
    shared: dict[tuple[object, ...], list[str]] = {}
    for name, parameter in parameters.items():
        if parameter.numel():
            shared.setdefault(memory(parameter), []).append(name)
    return [
        Sharing(tuple(names), "new tie", True)
        for names in shared.values()
        if len({meant.get(name, name) for name in names}) > 1
    ]


def copies(held: Mapping[str, Held], law: LawTable | None, apart: Iterable[tuple[str, ...]]) -> list[Sharing]:
    """Random tensors with the same entries, unless they come from one draw of the law, or are of a group of `apart`."""
    same: dict[tuple[int, str], list[str]] = {}
    for name, each in held.items():
        if each.count >= LEAST and not each.constant and each.std > 0 and (law is None or drawn_by_itself(name, law)):
            digest = hashlib.sha256(each.sample.tobytes()).hexdigest()
            same.setdefault((each.count, digest), []).append(name)
    known = [set(group) for group in apart]
    found = []
    for names in same.values():
        sources = {law.laws[name].source for name in names} if law is not None else {-1, -2}
        if len(names) > 1 and len(sources) > 1 and not any(set(names) <= group for group in known):
            found.append(Sharing(tuple(names), "copies", True))
    return found


def drawn_by_itself(name: str, law: LawTable) -> bool:
    """Whether the law has a draw for it."""
    return name in law.laws and law.laws[name].random and law.laws[name].source >= 0
