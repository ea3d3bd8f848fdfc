r"""Signs of an initialisation that ran on the shards of a matrix instead of on the whole matrix.

An initialisation with fans draws with variance g/fan. On one of k slices along a dimension the fan is smaller, and the
standard deviation is up to √k too large. Shards that are drawn from one seed are equal.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MOST = 64  # shards
EXACT = 1e-3  # relative difference of a std from a formula that is rounding
NARROWEST = 4  # rows or columns of a shard
LEAST = 16  # entries of a shard; fewer may agree by chance where numbers are coarse


class Estimate(NamedTuple):
    """A standard deviation and its relative error."""

    value: float
    error: float

    def off(self, variance: float) -> float:
        """Return the distance from a law of this variance, relative."""
        return abs(math.log(self.value / math.sqrt(variance)))

    def holds(self, variance: float) -> bool:
        """Whether a law of this variance is possible."""
        return self.off(variance) <= 4 * self.error + EXACT


class Shards(NamedTuple):
    """A matrix whose std is that of an initialisation of its shards."""

    number: int
    dimension: int
    formula: str
    others: frozenset[str]  # formulas for the whole matrix, of either side, that give this std too


def variances(out: float, into: float) -> dict[str, float]:
    """Return the variances of the usual initialisations with fans."""
    return {
        "1/(3·fan_in)": 1 / (3 * into),  # torch.nn.Linear's default
        "1/fan_in": 1 / into,
        "2/fan_in": 2 / into,
        "1/fan_out": 1 / out,
        "2/fan_out": 2 / out,
        "2/(fan_in + fan_out)": 2 / (into + out),
    }


def shards_of(shape: tuple[int, ...], std: Estimate, other: Estimate) -> list[Shards]:
    """Return the shards that explain why a matrix of `shape` has std `other` in place of `std`, best ones first."""
    if len(shape) < 2 or not std.value > 0 or not other.value > 0 or other.value < std.value:
        return []
    sides = (shape[0] * math.prod(shape[2:]), math.prod(shape[1:]))
    numbers = [(n, d) for d in (1, 0) for n in range(2, min(MOST, shape[d] // NARROWEST) + 1)]
    slicings = [(number, dimension) for number, dimension in numbers if shape[dimension] % number == 0]
    formulas = []
    whole = variances(*sides) | {f"{text}, exchanged": each for text, each in variances(*sides[::-1]).items()}
    others = frozenset(text for text, variance in whole.items() if other.holds(variance))
    for formula, variance in variances(*sides).items():
        if not std.holds(variance) or other.holds(variance):
            continue
        for number, dimension in slicings:
            parts = [side / (number if dimension == k else 1) for k, side in enumerate(sides)]
            here = variances(*parts)[formula]
            if here > variance and other.holds(here):
                formulas.append((other.off(here), Shards(number, dimension, formula, others)))
    return [each for _, each in sorted(formulas, key=lambda pair: pair[0])]


def slice_of(part: tuple[int, ...], full: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the number of slices and the dimension if `part` is the shape of one slice of `full`."""
    apart = [k for k, (a, b) in enumerate(zip(part, full, strict=False)) if a != b]
    if len(part) != len(full) or len(apart) != 1 or not part[apart[0]] or full[apart[0]] % part[apart[0]]:
        return None
    return (full[apart[0]] // part[apart[0]], apart[0]) if full[apart[0]] > part[apart[0]] else None


def equal_shards(values: Tensor) -> tuple[int, int] | None:
    """Return the largest number of equal slices of a tensor, and their dimension; None if there are none."""
    if values.is_meta or values.dim() < 1 or values.layout != torch.strided or values.numel() < 2 * LEAST:
        return None
    if bool((values == values.reshape(-1)[0]).all()):
        return None
    for dimension in range(min(values.dim(), 2)):
        size = values.shape[dimension]
        for number in range(min(MOST, size), 1, -1):
            if size % number or values.numel() // number < LEAST:
                continue
            part = size // number
            starts = range(part, size, part)
            if not torch.equal(values.select(dimension, 0), values.select(dimension, part)):
                continue
            first = values.narrow(dimension, 0, part)
            constant = bool((first == first.reshape(-1)[0]).all())
            if not constant and all(torch.equal(first, values.narrow(dimension, start, part)) for start in starts):
                return number, dimension
    return None


# Ranks of a tensor-parallel build: slices are joined to whole matrices, replicas to one


def in_one_process(factories: Sequence[Callable[[], nn.Module]]) -> list[nn.Module]:
    """Call the function of every rank, each with the global seed that all processes begin with."""
    seed = torch.initial_seed()
    modules = []
    for factory in factories:
        torch.manual_seed(seed)
        modules.append(factory())
    return modules


def joined_module(modules: Sequence[nn.Module], shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Return the first module, with slices replaced by the whole tensors of these shapes."""
    named = [dict([*each.named_parameters(), *each.named_buffers()]) for each in modules]
    whole: dict[int, Tensor] = {}
    for name, tensor in named[0].items():
        parts = [each[name] for each in named if name in each]
        part = slice_of(tuple(tensor.shape), shapes.get(name, ()))
        if part is not None and part[0] == len(parts):
            with torch.no_grad():
                value = torch.cat(parts, part[1])
            is_parameter = isinstance(tensor, nn.Parameter)
            whole[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    for owner in modules[0].modules():
        registers: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for register in registers:
            for key, each in register.items():
                if each is not None and id(each) in whole:
                    register[key] = whole[id(each)]
    return modules[0]


def unequal_replicas(modules: Sequence[nn.Module], shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Return the names of whole tensors of which the ranks hold different numbers."""
    named = [dict([*each.named_parameters(), *each.named_buffers()]) for each in modules]
    return {
        name
        for name, tensor in named[0].items()
        if tuple(tensor.shape) == shapes.get(name)
        for other in named[1:]
        if name in other and not tensor.is_meta and not torch.equal(tensor, other[name])
    }
