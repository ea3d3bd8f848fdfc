"""What is checked: a module's parameters, of one memory each, what they hold, and the laws that they should have."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from limitformer.base.errors import InputError, require
from limitformer.initialisation.bugs import Evidence
from limitformer.initialisation.held import Held, held
from limitformer.initialisation.like_layers import pattern
from limitformer.initialisation.sharing import memory
from limitformer.weightless import laws
from limitformer.weightless.law import LawTable
from limitformer.weightless.laws import Law

NONE = Law(laws.UNKNOWN, reason="no law")


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
