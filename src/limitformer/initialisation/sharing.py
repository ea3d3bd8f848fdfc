"""Which parameters are one memory, beside what the law ties; and which repeat each other's numbers."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from limitformer.initialisation.held import Held
from limitformer.weightless.law import LawTable

LEAST = 16  # entries; fewer may agree by chance where numbers are coarse


@dataclass(frozen=True)
class Sharing:
    """Names that share, or do not, against what was meant."""

    names: tuple[str, ...]
    kind: str  # broken tie, new tie, copies
    equal: bool  # whether their numbers are the same


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
