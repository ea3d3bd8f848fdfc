"""Compare the weights of a module, one by one, with the law that its code draws.

Every parameter is tested against its law (`weight_tests`); constants, buffers, ties and copies are compared
(`deviations`). All p-values are corrected together (Holm), so that a sound model has any finding with probability at
most `level`. Events that the law excludes, such as NaN or a dead row, have p = 0. Weights without a law, and those of a
trained model, are compared with like layers (`like_layers`). Deviations are matched with known bugs (`bugs`).
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from limitformer.base.errors import require, require_real
from limitformer.initialisation.builds import FITS
from limitformer.initialisation.deviations import (
    ModuleWeights,
    buffer_deviations,
    law_free_deviations,
    like_layer_deviations,
    measure_weights,
    sharing_deviations,
    weight_deviation,
    weight_p_values,
)
from limitformer.initialisation.report import (
    ALWAYS,
    NORM_ZERO,
    SHARED,
    UNINITIALISED,
    CheckedWeight,
    Deviation,
    InitialisationReport,
    findings_of,
)
from limitformer.initialisation.weight_tests import distance, holm
from limitformer.weightless import laws
from limitformer.weightless.building import drawn_module
from limitformer.weightless.law import LawTable, build_without_weights, table_of
from limitformer.weightless.laws import Law
from limitformer.weightless.models import Blueprint, blueprint_of

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
    if factory is None and not hasattr(getattr(module, "config", None), "to_dict"):
        return check_initialisation(module, None, level=level)
    blueprint = blueprint_of(module if factory is None else factory)
    reference, draws = build_without_weights(blueprint, torch.float32)
    table = table_of(blueprint, reference, draws)
    report = check_initialisation(module, table, reference=reference, level=level)
    if factory is None or not report.findings:
        return report
    return check_initialisation(module, confirmed(table, reference, blueprint), reference=reference, level=level)


def confirmed(table: LawTable, reference: nn.Module, blueprint: Blueprint) -> LawTable:
    """Return the table without the laws and ties that modules of the factory itself do not have.

    A constructor that reads a number that it has drawn, or writes to memory in ways that are not watched, has another
    law than the one that was read: an error of that reading is not a finding.
    """
    known, ties = dict(table.laws), dict(table.tied)
    for seed in range(BUILDS):
        fresh = drawn_module(blueprint.factory, torch.get_default_dtype(), seed)
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
