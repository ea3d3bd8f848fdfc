"""Initialisation, weight by weight: what a module holds beside the law that its code draws.

Every parameter is tested against its law (`weight_tests`), constants and buffers are compared, ties and copies looked
at (`sharing`). All p-values are corrected together (Holm), so that a sound model has any finding with probability at
most `level`. What cannot happen under the law, such as a NaN or a dead row, has p = 0. Where no law is known, and for a
trained model, like layers are compared among themselves (`like_layers`). What deviates is matched against the bugs that
have happened (`initialisation_bugs`).
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from limitformer.base.errors import require, require_real
from limitformer.initialisation import report as found_as
from limitformer.initialisation.deviations import (
    Subject,
    deviation,
    law_free,
    of_buffers,
    of_like_layers,
    of_sharing,
    subject_of,
    tested,
)
from limitformer.initialisation.report import Deviation, InitialisationReport, Weight, folded
from limitformer.initialisation.weight_tests import distance, holm
from limitformer.weightless import laws
from limitformer.weightless.law import LawTable, build_without_weights, table_of
from limitformer.weightless.models import blueprint_of

MOST = 0.8  # of the weights deviate, and known bugs explain less than half of them
FEWEST = 5  # weights that deviate, for a model to be called trained


def initialisation(
    module: nn.Module, factory: Callable[[], nn.Module] | None = None, *, level: float = 0.01
) -> InitialisationReport:
    """Check a module against the law of its own code.

    Args:
        module: with its weights.
        factory: makes such a module. Of a model of transformers it is known from its configuration; of another module
            without it, only what needs no law is checked.
        level: probability at which a sound model may have a finding.

    Raises:
        InputError: the module holds no numbers, or the factory makes something else.
    """
    if factory is None and not hasattr(getattr(module, "config", None), "to_dict"):
        return check_initialisation(module, None, level=level)
    blueprint = blueprint_of(module if factory is None else factory)
    reference, found = build_without_weights(blueprint, torch.float32)
    return check_initialisation(module, table_of(blueprint, reference, found), reference=reference, level=level)


def check_initialisation(
    module: nn.Module, law: LawTable | None, *, reference: nn.Module | None = None, level: float = 0.01
) -> InitialisationReport:
    """Check what a module holds against a law.

    Args:
        module: with its weights, on any device, of any floating type.
        law: of its parameters, as `limitformer.weightless.law` reads it; None: what needs no law is checked.
        reference: a module whose buffers, and parameters that are computed and not drawn, are as they should be.
        level: probability at which a sound model may have a finding.

    Raises:
        InputError: the module holds no numbers, or is not the one that the law is of.
    """
    require(isinstance(module, nn.Module), f"module must be a torch.nn.Module; got {type(module).__name__}.")
    level = require_real("level", level)
    require(0 < level < 1, f"level must be between 0 and 1; got {level:g}.")
    subject = subject_of(module, law, reference)
    each = {name: tested(name, subject) for name in subject.held}
    corrected = holm({(name, test): p for name, tests in each.items() for test, p in tests.items()})
    least = {name: min((corrected[name, test] for test in tests), default=1.0) for name, tests in each.items()}
    deviations = [
        deviation(name, {t: corrected[name, t] for t in each[name]}, subject) for name in each if least[name] <= level
    ]
    deviations += law_free(subject) + of_buffers(subject) + of_sharing(subject)
    deviations, trained = without_training(in_one_line(deviations, subject), subject)
    deviations += of_like_layers(subject, trained, level)
    weights = tuple(record(name, subject, least[name], deviations) for name in subject.held)
    return InitialisationReport(
        law.name if law is not None else type(module).__name__, level, weights, folded(deviations), trained,
        law is not None, sum(p <= level for p in least.values()), sum(len(tests) for tests in each.values()),
    )  # fmt: skip


def record(name: str, subject: Subject, p: float, deviations: list[Deviation]) -> Weight:
    """The numbers of one weight."""
    each, law = subject.held[name], subject.laws[name]
    ks = distance(each, law) if law.std > 0 else math.nan
    mine = tuple(d.kind for d in deviations if name in (d.name, *d.others))
    shape = tuple(subject.parameters[name].shape)
    return Weight(name, shape, str(law), each.count, each.mean, each.std, each.kurtosis, ks, p, mine)


def without_training(deviations: list[Deviation], subject: Subject) -> tuple[list[Deviation], bool]:
    """What is wrong of a trained model too, if this is one; and whether it is.

    Training moves the constants, biases and norms, first; the random weights deviate clearly only later. Until then
    known bugs can be told in them.
    """
    random = mostly(deviations, [name for name, law in subject.laws.items() if law.std > 0])
    moved = mostly(deviations, [name for name, law in subject.laws.items() if law.kind == laws.CONSTANT])
    if not random and not moved:
        return deviations, False
    faults = [d for d in deviations if d.kind in found_as.ALWAYS or d.bug is found_as.NORM_ZERO]
    return (faults if random else [d for d in deviations if d in faults or d.bug is not None]), True


def mostly(deviations: list[Deviation], names: list[str]) -> bool:
    """Whether nearly all of these deviate, and known bugs do not explain it."""
    off = [d for d in deviations if d.name in names and d.kind not in found_as.SHARED]
    return len(off) >= max(FEWEST, MOST * len(names)) and 2 * sum(d.bug is not None for d in off) < len(off)


def in_one_line(deviations: list[Deviation], subject: Subject) -> list[Deviation]:
    """If every random weight has its law's std times one factor, that is one deviation."""
    random = [name for name, law in subject.laws.items() if law.std > 0]
    off = {d.name: d for d in deviations if d.name in random and d.kind not in found_as.SHARED}
    if len(off) < max(FEWEST, MOST * len(random)):
        return deviations
    logs = {name: math.log(subject.held[name].std / subject.laws[name].std) for name in off if subject.held[name].std}
    sure = {name: subject.held[name].log_error() ** -2 for name in logs}
    mean = sum(sure[name] * logs[name] for name in logs) / sum(sure.values())
    if len(logs) < len(off) or any(abs(logs[n] - mean) > 4 * sure[n] ** -0.5 + 0.003 for n in logs):
        return deviations
    first = min(off.values(), key=lambda each: each.p)
    bug = first.bug if all(d.bug is first.bug for d in off.values()) else None
    text = f"std {math.exp(mean):.4g} times the law's in each of {len(off)} drawn weights"
    one = Deviation(first.name, "scale", first.p, text, "std as the code draws", bug, first.detail if bug else "")
    return [
        replace(one, others=tuple(n for n in off if n != first.name)),
        *(d for d in deviations if d.name not in off),
    ]
