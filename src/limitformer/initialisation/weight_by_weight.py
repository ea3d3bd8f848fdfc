"""Compare the weights of a module, one by one, with the law that its code draws.

Every parameter is tested against its law (`weight_tests`); constants, buffers, ties and copies are compared.
All p-values are corrected together (Holm), so that a sound model has any finding with probability at
most `level`. Events that the law excludes, such as NaN or a dead row, have p = 0. Weights without a law, and those of a
trained model, are compared with like layers (`like_layers`). Deviations are matched with known bugs (`bugs`).
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from limitformer.base.errors import InputError, require, require_real
from limitformer.initialisation.bugs import evidence_of, recognise
from limitformer.initialisation.builds import FITS, memory_of
from limitformer.initialisation.like_layers import outliers, pattern
from limitformer.initialisation.report import (
    ALWAYS,
    DEAD,
    NORM_ZERO,
    SHARED,
    UNINITIALISED,
    CheckedWeight,
    Deviation,
    InitialisationReport,
    buffer_text,
    entries_text,
    findings_of,
)
from limitformer.initialisation.summary import TensorSummary, summarise
from limitformer.initialisation.weight_tests import LEAST, SMALLEST, dead_lines, distance, holm, p_of_law, same_values
from limitformer.subjects.subject import Subject, resolve, unwrapped
from limitformer.weightless import laws
from limitformer.weightless.building import drawn_module
from limitformer.weightless.law import LawTable, build_without_weights, table_of
from limitformer.weightless.laws import Law

NONE = Law(laws.UNKNOWN, reason="no law")
CLOSE = 1e-5, 1e-12  # relative and absolute difference of computed numbers that is rounding


@dataclass(frozen=True)
class ModuleWeights:
    """A module, its parameters, their summaries, and the laws that they should have.

    Attributes:
        module: the module.
        parameters: under every name.
        summaries: of each distinct parameter, under its first name.
        laws: the law of each distinct parameter.
        table: all laws of the module's code; None if they are not known.
        reference: a module with the right buffers and computed parameters.
    """

    module: nn.Module
    parameters: dict[str, nn.Parameter]
    summaries: dict[str, TensorSummary]
    laws: dict[str, Law]
    table: LawTable | None
    reference: nn.Module | None


def measure_weights(module: nn.Module, table: LawTable | None, reference: nn.Module | None) -> ModuleWeights:
    """Summarise every parameter, a shared one once."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    meta = next((name for name, parameter in parameters.items() if parameter.is_meta), None)
    require(meta is None, f"the module has no numbers: {meta} is on the meta device. Load or draw its weights first.")
    seen: dict[object, str] = {}
    first = {n: p for n, p in parameters.items() if p.is_floating_point() and seen.setdefault(memory_of(p), n) == n}
    each = dict.fromkeys(first, NONE) if table is None else laws_of(first, table)
    summaries = {name: summarise(parameter, each[name].rows) for name, parameter in first.items()}
    return ModuleWeights(module, parameters, summaries, each, table, reference)


def laws_of(parameters: Mapping[str, nn.Parameter], table: LawTable) -> dict[str, Law]:
    """Return the law of each parameter, which the table has under any of its tied names."""
    first = {name: name for name in table.laws} | {other: name for name, names in table.tied.items() for other in names}
    missing = [name for name in parameters if name not in first]
    if len(missing) * 2 > len(parameters):
        raise InputError(
            f"the law is of another module: {table.name} has no {missing[0]}, but {next(iter(first))}. "
            "Nearest: law=False, or the function that builds the module."
        )
    for name, parameter in parameters.items():
        expected = table.shapes[first[name]] if name in first else tuple(parameter.shape)
        require(
            expected == tuple(parameter.shape),
            f"the law is of another module: {name} is {tuple(parameter.shape)}, and its law of {expected}.",
        )
    return {name: table.laws[first[name]] if name in first else NONE for name in parameters}


def weight_p_values(name: str, weights: ModuleWeights) -> dict[str, float]:
    """Return the p-values of one weight, not corrected; 0 is what the law excludes."""
    each, law, parameter = weights.summaries[name], weights.laws[name], weights.parameters[name]
    if law.kind == laws.UNKNOWN and not each.odd:
        return {}
    if law.std > 0 or each.odd or not each.count:
        return p_of_law(parameter.detach(), each, law)
    if law.kind == laws.GIVEN:
        references = {} if weights.reference is None else dict(weights.reference.named_parameters())
        computed = references.get(name)
        differs = computed is not None and not computed.is_meta and not same_values(parameter, computed, *CLOSE)
        return {"values": 0.0} if differs else {}
    off = max(abs(each.low - law.shift), abs(each.high - law.shift))
    rounding = each.spacing * abs(law.shift) + (SMALLEST if each.spacing > 1e-5 and law.shift else 0.0)
    return {} if off <= rounding else {"constant": 0.0}


def weight_deviation(name: str, corrected: dict[str, float], weights: ModuleWeights) -> Deviation:
    """Describe how one weight deviates from its law, and the bug that it looks like."""
    path, _, leaf = name.rpartition(".")
    owner, own = weights.module.get_submodule(path), weights.parameters[name]
    every = weights.table.laws if weights.table is not None else weights.laws
    neighbour = getattr(owner, "weight", None) if leaf == "bias" else own
    shape = neighbour.shape if isinstance(neighbour, Tensor) else ()
    e = evidence_of(name, own.shape, weights.laws[name], weights.summaries[name], owner, every, shape)
    bug, detail = recognise(e)
    excluded = ("NaN", "constant", "values", "fixed rows", "dead rows", "orthogonal")
    certain = [test for test in excluded if test in corrected]
    kind = certain[0] if certain else min(corrected, key=corrected.__getitem__)
    if kind == "constant" and e.summary.dead and e.law.std > 0:
        kind = "dead"
    return Deviation(name, kind, min(corrected.values()), entries_text(e.summary, e.law), str(e.law), bug, detail)


def law_free_deviations(weights: ModuleWeights) -> list[Deviation]:
    """Return dead matrices and rows of weights without a law; NaN is found with the other weights."""
    result = []
    for name, each in weights.summaries.items():
        bias = "bias" in name.rpartition(".")[2]  # zero by custom, even if those of many experts form a matrix
        if weights.laws[name].kind != laws.UNKNOWN or not len(each.rows) or each.odd or bias:
            continue
        rows, columns = dead_lines(each)
        owner = weights.module.get_submodule(name.rpartition(".")[0])
        rows -= getattr(owner, "padding_idx", None) is not None
        if each.dead or rows > 0 or columns > 0:
            kind, bug, detail = ("dead", DEAD, "every entry is 0") if each.dead else ("dead rows", None, "")
            result.append(Deviation(name, kind, 0.0, entries_text(each, NONE), "none known", bug, detail))
    return result


def buffer_deviations(weights: ModuleWeights) -> list[Deviation]:
    """Return buffers that differ from those of the reference; without a reference, those that hold NaN."""
    expected = {} if weights.reference is None else dict(weights.reference.named_buffers())
    result = []
    for name, buffer in weights.module.named_buffers():
        twin = expected.get(name)
        if buffer.is_meta or not buffer.numel() or (twin is not None and twin.is_meta):
            continue
        if same_values(buffer, twin, *CLOSE) if twin is not None else not bool(buffer.isnan().any()):
            continue
        running = isinstance(weights.module.get_submodule(name.rpartition(".")[0]), nn.modules.batchnorm._NormBase)
        kind = "statistics" if running and bool(buffer.isfinite().all()) else "buffer"
        law = "another buffer" if twin is None else buffer_text(twin)
        bug = None if kind == "statistics" else UNINITIALISED
        result.append(Deviation(name, kind, 0.0, buffer_text(buffer), law, bug, "the buffer is not as built"))
    return result


def sharing_deviations(weights: ModuleWeights) -> list[Deviation]:
    """Return ties that are broken or new, and copies."""
    parameters = weights.parameters
    groups = [] if weights.table is None else [(first, *others) for first, others in weights.table.tied.items()]
    result = []
    for group in groups:
        names = [name for name in group if name in parameters]
        if len({memory_of(parameters[name]) for name in names}) > 1:
            equal = all(torch.equal(parameters[names[0]], parameters[name]) for name in names[1:])
            text = f"{len(names)} parameters with {'equal' if equal else 'different'} numbers"
            rest = tuple(names[1:])
            result.append(Deviation(names[0], "broken tie", 0.0, text, "one parameter", DEAD, "a tie is broken", rest))
    apart = [(d.name, *d.others) for d in result]
    source = {name: group[0] for group in groups for name in group}
    shared: dict[tuple[object, ...], list[str]] = {}
    for name, parameter in parameters.items() if weights.table is not None else ():
        if parameter.numel():
            shared.setdefault(memory_of(parameter), []).append(name)
    for names in shared.values():
        if len({source.get(name, name) for name in names}) > 1:
            text, law = "one parameter", "parameters of their own"
            result.append(Deviation(names[0], "new tie", 0.0, text, law, None, "", tuple(names[1:])))
    return [*result, *copies(weights, apart)]


def copies(weights: ModuleWeights, apart: Iterable[tuple[str, ...]]) -> list[Deviation]:
    """Return random tensors with equal entries, except in a group of `apart`.

    One draw of the law may be copied, such as to a network that averages another; not to the next trained layer.
    """
    law = weights.table
    alike: dict[tuple[int, bytes], list[str]] = {}
    for name, each in weights.summaries.items():
        drawn = law is None or (name in law.laws and law.laws[name].random and law.laws[name].source >= 0)
        if each.count >= LEAST and not each.constant and each.std > 0 and drawn:
            alike.setdefault((each.count, hashlib.sha256(each.sample.tobytes()).digest()), []).append(name)
    result = []
    for names in alike.values():
        sources: set[Any] = {law.laws[name].source for name in names} if law is not None else {-1, -2}
        if len(sources) == 1:
            trained = [name for name in names if weights.parameters[name].requires_grad]
            count = Counter(pattern(name) for name in trained)
            names = [name for name in trained if count[pattern(name)] > 1]
            sources = set(range(len(names)))
        if len(names) > 1 and len(sources) > 1 and not any(set(names) <= set(group) for group in apart):
            text = f"{len(names)} times the same numbers"
            result.append(Deviation(names[0], "copies", 0.0, text, "independent draws", None, "", tuple(names[1:])))
    return result


def like_layer_deviations(weights: ModuleWeights, trained: bool, level: float) -> list[Deviation]:
    """Return layers that stand out among their like, if no law applies to them."""
    every = {n: s for n, s in weights.summaries.items() if trained or weights.laws[n].kind == laws.UNKNOWN}
    return [
        Deviation(o.name, "like layers", o.p, f"std {every[o.name].std:.3g}, {o.ratio:.3g} times its like layers'",
                  "none known" if not trained else str(weights.laws[o.name]), None, "")
        for o in outliers(every, level, trained)
    ]  # fmt: skip


MOST = 0.8  # share of the weights that deviate in a trained model; known bugs explain less than half of them
BUILDS = 4  # by the factory, to see whether its modules follow the law that was read
NOT_FOLLOWED = "modules of the factory do not follow what was read of it"
FEWEST = 5  # weights that deviate in a trained model


def initialisation(
    module: nn.Module, factory: Callable[[], nn.Module] | None = None, *, level: float = 0.01
) -> InitialisationReport:
    """Check a module against the law of its own code.

    Args:
        module: a module with its weights.
        factory: a function that makes such a module. A model of transformers needs none, because its configuration
            gives its law. Of another module without a factory, only what needs no law is checked.
        level: probability at which a sound model may have a finding.

    Raises:
        InputError: the module holds no numbers, or the factory makes something else.
    """
    module = unwrapped(module)
    if factory is None and not hasattr(getattr(module, "config", None), "to_dict"):
        return check_initialisation(module, None, level=level)
    subject = resolve(module if factory is None else factory)
    reference, draws = build_without_weights(subject, torch.float32)
    table = table_of(subject, reference, draws)
    report = check_initialisation(module, table, reference=reference, level=level)
    if factory is None or not report.findings:
        return report
    return check_initialisation(module, confirmed(table, reference, subject), reference=reference, level=level)


def confirmed(table: LawTable, reference: nn.Module, subject: Subject) -> LawTable:
    """Return the table without the laws and ties that modules of the factory itself do not have.

    A constructor that reads a number that it has drawn, or writes to memory in ways that are not watched, has another
    law than the one that was read: an error of that reading is not a finding.
    """
    known, ties = dict(table.laws), dict(table.tied)
    for seed in range(BUILDS):
        fresh = drawn_module(subject.factory, torch.get_default_dtype(), seed)
        for each in check_initialisation(fresh, table, reference=reference, level=FITS).findings:
            if each.kind == "new tie":
                ties[each.names[0]] = each.names[1:]
            elif each.kind not in (*ALWAYS, "like layers"):
                known |= {name: Law(laws.UNKNOWN, reason=NOT_FOLLOWED) for name in each.names if name in known}
    tied = {name for names in ties.values() for name in names}
    return replace(table, laws={name: law for name, law in known.items() if name not in tied}, tied=ties)


def check_initialisation(
    module: nn.Module, law: LawTable | None, *, reference: nn.Module | None = None, level: float = 0.01
) -> InitialisationReport:
    """Check the weights of a module against a law.

    Args:
        module: a module with its weights, on any device, of any floating type.
        law: the law of its parameters, as `limitformer.weightless.law` reads it; None checks only what needs no law.
        reference: a module with the right buffers, and with parameters that are computed and not drawn.
        level: probability at which a sound model may have a finding.

    Raises:
        InputError: the module holds no numbers, or the law belongs to another module.
    """
    require(isinstance(module, nn.Module), f"module must be a torch.nn.Module; got {type(module).__name__}.")
    level = require_real("level", level)
    require(0 < level < 1, f"level must be between 0 and 1; got {level:g}.")
    weights = measure_weights(module, law, reference)
    each = {name: weight_p_values(name, weights) for name in weights.summaries}
    corrected = holm({(name, test): p for name, tests in each.items() for test, p in tests.items()})
    least = {name: min((corrected[name, test] for test in tests), default=1.0) for name, tests in each.items()}
    deviations = [
        weight_deviation(name, {t: corrected[name, t] for t in each[name]}, weights)
        for name in each
        if least[name] <= level
    ]
    deviations += law_free_deviations(weights) + buffer_deviations(weights) + sharing_deviations(weights)
    deviations, trained = without_training(one_factor(deviations, weights), weights)
    deviations += like_layer_deviations(weights, trained, level)
    return InitialisationReport(
        name=law.name if law is not None else type(module).__name__,
        level=level,
        weights=tuple(checked_weight(name, weights, least[name], deviations) for name in weights.summaries),
        findings=findings_of(deviations),
        trained=trained,
        lawful=law is not None,
        differing=sum(p <= level for p in least.values()),
        tests=sum(len(tests) for tests in each.values()),
    )


def checked_weight(name: str, weights: ModuleWeights, p: float, deviations: list[Deviation]) -> CheckedWeight:
    each, law = weights.summaries[name], weights.laws[name]
    ks = distance(each, law) if law.std > 0 else math.nan
    kinds = tuple(d.kind for d in deviations if name in (d.name, *d.others))
    shape = tuple(weights.parameters[name].shape)
    return CheckedWeight(name, shape, str(law), each.count, each.mean, each.std, each.kurtosis, ks, p, kinds)


def without_training(deviations: list[Deviation], weights: ModuleWeights) -> tuple[list[Deviation], bool]:
    """Return whether this is a trained model, and the deviations that are faults even then.

    Training moves the constants, biases and norms first, each entry by another amount. From then on a std may pass the
    value of a known bug on its way, so that no bug is named by its size.
    """
    random = mostly(deviations, [name for name, law in weights.laws.items() if law.std > 0])
    constant = [name for name, law in weights.laws.items() if law.kind == laws.CONSTANT]
    equal = {name for name in constant if weights.summaries[name].constant}
    moved = mostly([d for d in deviations if d.name not in equal], constant)
    if not random and not moved:
        return deviations, False
    return [d for d in deviations if d.kind in ALWAYS or d.bug in (NORM_ZERO, UNINITIALISED)], True


def mostly(deviations: list[Deviation], names: list[str]) -> bool:
    """Return whether nearly all of these weights deviate, and known bugs do not explain it."""
    off = [d for d in deviations if d.name in names and d.kind not in SHARED]
    return len(off) >= max(FEWEST, MOST * len(names)) and 2 * sum(d.bug is not None for d in off) < len(off)


def one_factor(deviations: list[Deviation], weights: ModuleWeights) -> list[Deviation]:
    """Join the deviations of all random weights to one if each std is its law's times the same factor."""
    random = [name for name, law in weights.laws.items() if law.std > 0]
    off = {d.name: d for d in deviations if d.name in random and d.kind not in ALWAYS}
    if len(off) < max(FEWEST, MOST * len(random)):
        return deviations
    stds = {name: weights.summaries[name].std for name in off}
    logs = {name: math.log(std / weights.laws[name].std) for name, std in stds.items() if std}
    precision = {name: weights.summaries[name].log_error() ** -2 for name in logs}
    mean = sum(precision[name] * logs[name] for name in logs) / sum(precision.values())
    if len(logs) < len(off) or any(abs(logs[n] - mean) > 4 * precision[n] ** -0.5 + 0.003 for n in logs):
        return deviations
    first = min(off.values(), key=lambda each: each.p)
    bug = first.bug if all(d.bug is first.bug for d in off.values()) else None
    text = f"std {math.exp(mean):.4g} times the law's in each of {len(off)} drawn weights"
    one = Deviation(first.name, "scale", first.p, text, "std as the code draws", bug, first.detail if bug else "")
    return [
        replace(one, others=tuple(n for n in off if n != first.name)),
        *(d for d in deviations if d.name not in off),
    ]
