"""The blocks of a module, and the dimension in which the sequences of their input lie."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from limitformer.base.errors import InputError

NORMS = ("norm", "ln")


class UnclearAxisError(Exception):
    """The sizes of the stream do not determine the dimension in which the sequences lie."""


def stream_axis(shape: torch.Size, rows: int, samples: int) -> int | None:
    """Return the dimension of a stream (·, ·, n) in which the sequences of all samples lie, by its sizes.

    Raises:
        UnclearAxisError: its sizes do not determine it.
    """
    first, second, every = *shape[:2], rows * samples
    if every == 1:
        return None  # the dimension does not change the order of the tokens
    if first == every != second:
        return 0
    if second == every and first % every:
        return 1
    raise UnclearAxisError


def grown_axis(before: list[torch.Size], after: list[torch.Size]) -> int:
    """Return the dimension in which streams grow when each sequence is repeated.

    Raises:
        InputError: there is no such dimension.
    """
    for axis in (0, 1):
        doubled = [(*a[:axis], 2 * a[axis], *a[axis + 1 :]) for a in before]
        if doubled == [tuple(b) for b in after] and before:
            return axis
    raise InputError(
        f"the sequences must lie in one dimension of the stream; got {tuple(before[0]) if before else ()}. "
        "Nearest: one sequence at a time."
    )


@contextmanager
def stream_shapes(blocks: list[nn.Module]) -> Iterator[list[torch.Size]]:
    """Yield the shapes of the tokens that enter `blocks` within the with statement."""
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
    """Return the error for sequences that influence each other."""
    return InputError(
        f"sequences lie in dimension {batch_dim} of the inputs, and those of {name} influence each other. "
        f"Nearest: batch_dim={1 - batch_dim} if they lie in dimension {1 - batch_dim}."
    )


def is_norm(name: str, part: nn.Module) -> bool:
    """Whether a module is a norm, by its name or that of its class."""
    own, kind = name.rpartition(".")[2].lower(), type(part).__name__.lower()
    return any(word in kind or word in own for word in NORMS) and not list(part.children())


def tokens_among(args: Any, kwargs: Any) -> Tensor | None:
    """Return the first argument of the shape (B, M, n)."""
    every = [*args, *(kwargs[name] for name in ("hidden_states", "x", "src") if name in kwargs)]
    return next((a for a in every if isinstance(a, Tensor) and a.dim() == 3 and a.is_floating_point()), None)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules of the outermost lists, in their order."""
    lists: list[tuple[str, nn.Module]] = []
    for name, part in module.named_modules():
        listed = isinstance(part, nn.ModuleList) or (isinstance(part, nn.Sequential) and is_uniform(part))
        if listed and not any(name.startswith(f"{outer}.") for outer, _ in lists):
            lists.append((name, part))
    return [block for _, part in lists for block in part.children() if not isinstance(block, nn.Identity)]


def is_uniform(part: nn.Module) -> bool:
    """Whether a sequence has two or more modules of one class, each with submodules."""
    kinds = {type(child) for child in part.children()}
    return len(kinds) == 1 and len(list(part.children())) > 1 and all(list(c.children()) for c in part.children())
