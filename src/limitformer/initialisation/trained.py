"""Whether a model deviates as a whole: trained, initialised by another rule, or multiplied by one factor."""

import math
from dataclasses import replace

from limitformer.initialisation import findings as found_as
from limitformer.initialisation.findings import Deviation
from limitformer.initialisation.subject import Subject
from limitformer.weightless import laws

MOST = 0.8  # of the weights deviate, and known bugs explain less than half of them
FEWEST = 5  # weights that deviate, for a model to be called trained


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
