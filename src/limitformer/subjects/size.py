"""The size of a module before it is built: its entries on the meta device, and whether they fit the free memory."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from limitformer.base.errors import InputError, require
from limitformer.base.foreign import one_line
from limitformer.base.memory import SHARE, available_memory, readable


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


def require_room(entries: int, what: str, itemsize: int = 4) -> None:
    """Raise `InputError` unless `entries` numbers fit the free memory."""
    available, needed = available_memory(), entries * itemsize
    if available is not None and needed > SHARE * available:
        raise InputError(f"{what} takes {readable(needed)}; {readable(available)} are free. Nearest: smaller sizes.")
