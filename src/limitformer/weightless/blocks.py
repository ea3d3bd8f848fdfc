"""The stream that enters a block, and the dimension in which its sequences lie."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from limitformer.base.errors import InputError
from limitformer.weightless.interpreter import Observer

Argument = int | str  # the place or the name of an argument

NORMS = ("norm", "ln")
STREAMS = ("hidden_states", "x", "src")  # names of the argument that is the stream


class UnclearAxisError(Exception):
    """The sizes of the stream do not determine the dimension in which the sequences lie."""


def stream_axis(shape: torch.Size, rows: int, samples: int, length: int | None = None) -> int | None:
    """Return the dimension of a stream (·, ·, n) in which the sequences of all samples lie, by its sizes.

    Raises:
        UnclearAxisError: its sizes do not determine it.
    """
    first, second, every = *shape[:2], rows * samples
    if len(shape) == 4 and length == shape[2] and every in (first, second):  # several streams of ids
        if first == second > 1:
            raise UnclearAxisError
        return 0 if first == every else 1
    if len(shape) != 3:
        return 0
    if every == 1:
        return None  # the dimension does not change the order of the tokens
    if first == every != second:
        return 0
    if second == every and first % every:
        return 1
    raise UnclearAxisError


class Entry(NamedTuple):
    """The stream that enters a block: the block's place in the list of blocks, and the stream's shape."""

    block: int
    shape: torch.Size


def grown_axes(before: list[Entry], after: list[Entry]) -> dict[int, int]:
    """Return by block the dimension in which its stream grows when each sequence is repeated.

    A block whose stream does not grow, as it is the same for all sequences, is left out.

    Raises:
        InputError: no stream grows, or a block enters another number of times.
    """
    axes: dict[int, int] = {}
    if [entry.block for entry in before] == [entry.block for entry in after]:
        for (block, a), (_, b) in zip(before, after, strict=True):
            grown = [axis for axis in (0, 1) if tuple(b) == (*a[:axis], 2 * a[axis], *a[axis + 1 :])]
            if grown:
                axes[block] = grown[0]
    if axes:
        return axes
    raise InputError(
        f"the sequences must lie in one dimension of the stream; got {tuple(before[0].shape) if before else ()}. "
        "Nearest: one sequence at a time."
    )


class Entries(Observer):
    """An observer of the shapes of the tokens that enter blocks, given by the name of a module and its argument."""

    def __init__(self, blocks: list[tuple[str, Argument | None]]) -> None:
        self.blocks = {name: (k, argument) for k, (name, argument) in enumerate(blocks)}
        self.watched = self.blocks.keys()
        self.shapes: list[Entry] = []

    def enter(self, name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the shape, if there are tokens."""
        k, argument = self.blocks[name]
        if (x := tokens_among(args, kwargs, argument)) is not None:
            self.shapes.append(Entry(k, x.shape))


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


def tokens_among(args: Any, kwargs: Any, argument: Argument | None = None) -> Tensor | None:
    """Return this argument, or the first that may be the stream: of three dimensions, else four, else two.

    If tensors come in lists, tuples or dictionaries only, as images of several sizes do, it is the first of one.
    """
    arguments = dict(enumerate(args)) | kwargs
    if isinstance(arguments.get(argument), Tensor):
        return arguments[argument]
    named = [kwargs[name] for name in STREAMS if name in kwargs]
    every = [*args, *named, *(each for name, each in kwargs.items() if name not in STREAMS)]
    nested = [next(iter(each.values() if isinstance(each, dict) else each), None)
              for each in every if isinstance(each, list | tuple | dict)]  # fmt: skip
    floats = [each for each in every if is_real(each)] or [each for each in nested if is_real(each)]
    return next((each for size in (3, 4, 2) for each in floats if each.dim() == size), None)


def is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
