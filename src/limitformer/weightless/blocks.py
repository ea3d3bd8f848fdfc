"""The blocks of a module, and the tokens that enter them: which modules they are, and where sequences lie."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from limitformer.base.errors import InputError

NORMS = ("norm", "ln")


class UnclearAxisError(Exception):
    """The sizes of the stream do not say in which of its dimensions the sequences lie."""


def stream_axis(shape: torch.Size, rows: int, samples: int) -> int | None:
    """The dimension of a stream (·, ·, n) in which the sequences of all samples lie, by its sizes.

    Raises:
        UnclearAxisError: they do not say it.
    """
    first, second, every = *shape[:2], rows * samples
    if every == 1:
        return None  # either order gives the same tokens in the same order
    if first == every != second:
        return 0
    if second == every and first % every:
        return 1
    raise UnclearAxisError


def grown_axis(before: list[torch.Size], after: list[torch.Size]) -> int:
    """The dimension in which streams grow when each sequence is there twice.

    Raises:
        InputError: there is none.
    """
    for axis in (0, 1):
        doubled = [(*a[:axis], 2 * a[axis], *a[axis + 1 :]) for a in before]
        if doubled == [tuple(b) for b in after] and before:
            return axis
    raise InputError(
        f"the sequences lie in no dimension of the stream {tuple(before[0]) if before else ()} alone. "
        "Nearest: one sequence at a time."
    )


@contextmanager
def stream_shapes(blocks: list[nn.Module]) -> Iterator[list[torch.Size]]:
    """The shapes of what enters the blocks inside the block."""
    shapes: list[torch.Size] = []

    def entered(block: nn.Module, args: Any, kwargs: Any) -> None:
        x = tokens_among(args, kwargs)
        if x is not None:
            shapes.append(x.shape)

    hooks = [block.register_forward_pre_hook(entered, with_kwargs=True) for block in blocks]
    try:
        yield shapes
    finally:
        for hook in hooks:
            hook.remove()


def mixed_sequences(name: str, batch_dim: int) -> InputError:
    """The error for sequences that influence each other."""
    return InputError(
        f"sequences lie in dimension {batch_dim} of the inputs, and those of {name} influence each other. "
        f"Nearest: batch_dim={1 - batch_dim} if they lie in dimension {1 - batch_dim}."
    )


def is_norm(name: str, part: nn.Module) -> bool:
    """Whether a module is a norm, by the name of its class or its own."""
    own, kind = name.rpartition(".")[2].lower(), type(part).__name__.lower()
    return any(word in kind or word in own for word in NORMS) and not list(part.children())


def tokens_among(args: Any, kwargs: Any) -> Tensor | None:
    """The first argument of the shape (B, M, n)."""
    every = [*args, *(kwargs[name] for name in ("hidden_states", "x", "src") if name in kwargs)]
    return next((a for a in every if isinstance(a, Tensor) and a.dim() == 3 and a.is_floating_point()), None)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The modules of the outermost lists, in their order."""
    lists: list[tuple[str, nn.Module]] = []
    for name, part in module.named_modules():
        listed = isinstance(part, nn.ModuleList) or (isinstance(part, nn.Sequential) and alike(part))
        if listed and not any(name.startswith(f"{outer}.") for outer, _ in lists):
            lists.append((name, part))
    return [block for _, part in lists for block in part.children() if not isinstance(block, nn.Identity)]


def alike(part: nn.Module) -> bool:
    """Whether a sequence is of modules of one class that have parts of their own."""
    kinds = {type(child) for child in part.children()}
    return len(kinds) == 1 and len(list(part.children())) > 1 and all(list(c.children()) for c in part.children())
