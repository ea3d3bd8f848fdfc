"""Join the modules that the processes of a tensor-parallel build make: slices to whole matrices, replicas to one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from limitformer.initialisation.sharding import slice_of

Shapes = Mapping[str, tuple[int, ...]]


def in_one_process(factories: Sequence[Callable[[], nn.Module]]) -> list[nn.Module]:
    """Call the function of every rank, each with the global seed that all processes begin with."""
    seed = torch.initial_seed()
    modules = []
    for factory in factories:
        torch.manual_seed(seed)
        modules.append(factory())
    return modules


def joined_module(modules: Sequence[nn.Module], shapes: Shapes) -> nn.Module:
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


def unequal_replicas(modules: Sequence[nn.Module], shapes: Shapes) -> set[str]:
    """Return the names of whole tensors of which the ranks hold different numbers."""
    named = [dict([*each.named_parameters(), *each.named_buffers()]) for each in modules]
    return {
        name
        for name, tensor in named[0].items()
        if tuple(tensor.shape) == shapes.get(name)
        for other in named[1:]
        if name in other and not tensor.is_meta and not torch.equal(tensor, other[name])
    }
