"""The size of a module before it is built, on the meta device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from limitformer.base.errors import require
from limitformer.base.foreign import one_line


@dataclass(frozen=True)
class Size:
    """Numbers of entries.

    Attributes:
        whole: entries of all parameters and buffers.
        vectors: entries of those with fewer than two dimensions, which have values even in a network without weights.
        names: the shape of each parameter; tied ones have several names.
    """

    whole: int
    vectors: int
    names: dict[str, tuple[int, ...]]


def size_of(make: Callable[[], nn.Module], name: str) -> Size:
    """Return the size of the module that `make` builds, on the meta device.

    Raises:
        InputError: it cannot be built, or has an embedding without entries.
    """
    with one_line(f"{name} cannot be made"), torch.device("meta"):
        module = make()
    every = {id(each): each for each in (*module.parameters(), *module.buffers())}.values()
    shapes = {key: tuple(each.shape) for key, each in module.named_parameters(remove_duplicate=False)}
    empty = [key for key, shape in shapes.items() if 0 in shape]
    tables = [key for key in empty if isinstance(module.get_submodule(key.rpartition(".")[0]), nn.Embedding)]
    refused = tables or (empty if 2 * len(empty) > len(shapes) else [])  # DINOv3 may have no register tokens
    require(not refused, f"{name} cannot be made: {refused[:1]} would have no entries, as one of its sizes is 0.")
    vectors = sum(each.numel() for each in every if each.dim() < 2 or not each.is_floating_point())
    return Size(sum(each.numel() for each in every), vectors, shapes)
