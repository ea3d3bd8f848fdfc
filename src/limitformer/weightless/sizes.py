"""How large a network of transformers is, from building it on no memory: refused before it is built if too large.

Modules are counted while they are made, so that a configuration of a billion layers ends soon.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from limitformer.base.errors import InputError, require
from limitformer.base.foreign import one_line
from limitformer.base.memory import SHARE, available_memory, readable

MOST_MODULES = 60_000  # four thousand layers of GPT-2; each module costs some kilobytes and some milliseconds
KEPT_VECTORS = 6  # times that a design keeps every vector: one network for each value of a field, and one that runs


@dataclass(frozen=True)
class Size:
    """Numbers of entries.

    Attributes:
        whole: of all parameters and buffers.
        vectors: of those with fewer than two dimensions, which have values even in a network without weights.
        names: the shape of each parameter, tied ones under each name.
    """

    whole: int
    vectors: int
    names: dict[str, tuple[int, ...]]


def size_of(make: Callable[[], nn.Module], name: str) -> Size:
    """The size of the module that `make` builds, on no memory.

    Raises:
        InputError: it cannot be made, has more than `MOST_MODULES` modules, or a weight without entries.
    """
    with one_line(f"{name} cannot be made"), counted(name), torch.device("meta"):
        module = make()
    every = {id(each): each for each in (*module.parameters(), *module.buffers())}.values()
    shapes = {key: tuple(each.shape) for key, each in module.named_parameters(remove_duplicate=False)}
    empty = [key for key, shape in shapes.items() if 0 in shape]
    require(not empty, f"{name} cannot be made: {empty[:1]} would have no entries, of a size that is 0.")
    vectors = sum(each.numel() for each in every if each.dim() < 2 or not each.is_floating_point())
    return Size(sum(each.numel() for each in every), vectors, shapes)


@contextmanager
def counted(name: str) -> Iterator[None]:
    """Raise `InputError` as soon as more than `MOST_MODULES` modules are made within the block."""
    made = 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1
        if made > MOST_MODULES:
            raise InputError(f"{name} has more than {MOST_MODULES:,} modules, which do not fit. Nearest: fewer layers.")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def require_room(entries: int, what: str, itemsize: int = 4) -> None:
    """Raise `InputError` unless so many numbers fit the memory that is free."""
    available, needed = available_memory(), entries * itemsize
    if available is not None and needed > SHARE * available:
        raise InputError(f"{what} takes {readable(needed)}; {readable(available)} are free. Nearest: smaller sizes.")
