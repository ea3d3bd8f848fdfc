"""Multipliers in the forward pass of a module that is built: of its residual branches, inputs of matrices, attention.

In a block, a sum x + f of its stream x and a branch f becomes x + λf. The stream is the block's input, a sum with it, a
norm of such a sum, and a multiple of it, as in `weightless.measure`.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from limitformer.base.errors import InputError
from limitformer.weightless.blocks import is_norm, tokens_among
from limitformer.weightless.measure import ADDITIONS, SCALINGS
from limitformer.weightless.tensors import same_memory

IN_PLACE = {Tensor.add_}


class BranchScaling(TorchFunctionMode):
    """A mode that multiplies the branches of one call of a block by `factor`."""

    def __init__(self, factor: float, x: Tensor) -> None:
        super().__init__()
        self.factor, self.stream, self.sums = factor, [x], 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`; a sum with the stream has a smaller other term."""
        kwargs = kwargs or {}
        if func in ADDITIONS and (place := self.place_of_stream(args)) is not None:
            branch = args[1 - place]
            scaled = branch.mul_(self.factor) if func in IN_PLACE and place == 1 else branch * self.factor
            args = (args[0], scaled, *args[2:]) if place == 0 else (scaled, *args[1:])
            out = func(*args, **kwargs)
            self.stream, self.sums = [out], self.sums + 1
            return out
        out = func(*args, **kwargs)
        by_number = any(isinstance(a, int | float) or (isinstance(a, Tensor) and a.dim() < 2) for a in args)
        if func in SCALINGS and by_number and any(a is x for a in args for x in self.stream):
            self.stream.append(out)
        return out

    def place_of_stream(self, args: Any) -> int | None:
        """Return which term of a sum of two tensors of one shape is the stream."""
        if len(args) < 2 or not all(isinstance(a, Tensor) for a in args[:2]) or args[0].shape != args[1].shape:
            return None
        if args[0].numel() != self.stream[0].numel() or args[0].shape[-1] != self.stream[0].shape[-1]:
            return None
        exact = next((k for k in (0, 1) if any(args[k] is x for x in self.stream)), None)
        if exact is not None or args[0].shape == self.stream[0].shape:
            return exact
        return next((k for k in (0, 1) if any(same_memory(args[k], x) for x in self.stream)), None)  # flattened

    def after_norm(self, x: Any, out: Any) -> None:
        """Count a norm of a sum with the stream as the stream."""
        if self.sums and any(x is each for each in self.stream) and isinstance(out, Tensor):
            self.stream.append(out)


def scale_branches(name: str, block: nn.Module, factor: float) -> None:
    """Multiply the residual branches in a block by `factor`.

    Raises:
        InputError: the block is called, and has no sum with its stream.
    """
    running: list[BranchScaling] = []
    forward = block.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        x = tokens_among(args, kwargs)
        if x is None:
            return forward(*args, **kwargs)
        with BranchScaling(factor, x) as mode:
            running.append(mode)
            try:
                out = forward(*args, **kwargs)
            finally:
                running.pop()
        if not mode.sums:
            raise InputError(
                f"{name} has no sum of its input and a branch, so that the branch has no multiplier. "
                "Nearest: a block that returns x + f(x)."
            )
        return out

    def after(part: nn.Module, args: Any, out: Any) -> None:
        if running and args:
            running[-1].after_norm(args[0], out)

    block.forward = scaled
    for inner_name, inner in block.named_modules():
        if is_norm(inner_name, inner):
            inner.register_forward_hook(after)


def scale_input(part: nn.Module, factor: float) -> None:
    """Multiply the input of a matrix by `factor`, which leaves its bias alone."""

    def before(_: nn.Module, args: Any) -> Any:
        return (args[0] * factor, *args[1:])

    part.register_forward_pre_hook(before)


def scale_output(part: nn.Module, factor: float) -> None:
    """Multiply the output of a module, one tensor, by `factor`."""

    def after(_: nn.Module, args: Any, out: Any) -> Any:
        return out * factor

    part.register_forward_hook(after)


Change = Callable[[nn.Module], None]
