"""Deviations from the law: of one weight, buffer or tie at a time, and of layers from their like."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from limitformer.base.errors import InputError, require
from limitformer.initialisation.bugs import evidence_of, recognise
from limitformer.initialisation.builds import memory_of
from limitformer.initialisation.like_layers import outliers, pattern
from limitformer.initialisation.report import DEAD, UNINITIALISED, Deviation, buffer_text, entries_text
from limitformer.initialisation.summary import TensorSummary, summarise
from limitformer.initialisation.two_builds import LEAST, dead_lines, p_of_law, same_values
from limitformer.initialisation.weight_tests import SMALLEST
from limitformer.weightless import laws
from limitformer.weightless.law import LawTable
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
    """Summarise every parameter once."""
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
    beside = getattr(owner, "weight", None) if leaf == "bias" else own
    shape = beside.shape if isinstance(beside, Tensor) else ()
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
