"""The user's module in plain PyTorch, and what is compared of it.

Tensors are compared by a linear sketch: sums of their entries with random signs, whose difference has about the size of
the tensors' difference. `Values` has them by quantity.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from limitformer.subjects.inputs import call_with
from limitformer.subjects.losses import Loss, real_tensors
from limitformer.weightless.implicit import Implicit

SKETCH, TILE = 64, 2**18
CASTS = {torch.float32: "float", torch.bfloat16: "bfloat16"}  # the methods of tensors
OUTPUT, LOSS, GRADIENT, UPDATE, MODULE = "output", "loss", "gradient", "update", "output of module"


class CastsAsCopies(TorchFunctionMode):
    """A mode in which casts to a number format of fewer digits are copies."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function; in float64, formulas that would compute in the other format do not."""
        kwargs, name, x = kwargs or {}, getattr(func, "__name__", ""), args[0] if args else None
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype.itemsize <= self.dtype.itemsize:
            return func(*args, **kwargs)
        # `in` would compare weights, whose entries would then be drawn.
        asked = any(each is self.dtype for each in (*args[1:], *kwargs.values()))
        if name == CASTS[self.dtype] or (name in ("to", "type") and asked):
            return x if isinstance(x, Implicit) else x.clone()
        if asked:
            kwargs = {key: x.dtype if each is self.dtype else each for key, each in kwargs.items()}
        return func(*args, **kwargs)


class Quantity(NamedTuple):
    """A quantity that is compared: its kind, the name of the module or weight, and the number of the step or call."""

    kind: str
    name: str = ""
    number: int = 0


class Sketch(NamedTuple):
    """A sketch (64,) of a tensor, its norm and its number of entries."""

    sums: Tensor
    size: float
    entries: int

    def away(self, other: "Sketch") -> float:
        """Return about the norm of the difference; infinite for another number of entries."""
        return float((self.sums - other.sums).norm()) if self.entries == other.entries else float("inf")


Values = dict[Quantity, Sketch]


@cache
def signs() -> Tensor:
    return torch.randint(0, 2, (TILE,), generator=torch.Generator().manual_seed(7)).double() * 2 - 1


def sketch(x: Tensor) -> Sketch:
    """Return the sketch of a tensor."""
    x = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    flat, total = x.reshape(-1), torch.zeros(SKETCH, dtype=torch.float64)
    size = float(torch.linalg.vector_norm(flat, dtype=torch.float64)) if flat.numel() else 0.0
    for start in range(0, flat.numel(), TILE):
        part = flat[start : start + TILE].double()
        part = part * signs()[: len(part)]
        total += nn.functional.pad(part, (0, -len(part) % SKETCH)).view(-1, SKETCH).sum(0)
    return Sketch(total, size, flat.numel())


def number(value: Tensor | float) -> Sketch:
    """Return the sketch of a number."""
    sums = torch.zeros(SKETCH, dtype=torch.float64)
    sums[0] = float(value)
    return Sketch(sums, abs(float(value)), 1)


@contextmanager
def outputs_noted(module: nn.Module, values: Values) -> Iterator[None]:
    """Note the output of every module at each of its calls, in the order in which they end."""
    calls: dict[str, int] = {}

    def note(name: str, out: Any) -> None:
        calls[name] = calls.get(name, 0) + 1
        value = next((each for each in real_tensors(out) if not isinstance(each, Implicit)), None)
        if value is not None:
            values[Quantity(MODULE, name, calls[name])] = sketch(value)

    handles = [
        part.register_forward_hook(lambda _, __, out, name=name: note(name, out))
        for name, part in module.named_modules()
        if name
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def note_outputs(out: Any, values: Values) -> None:
    """Note every tensor of real numbers in a module's output."""
    for k, each in enumerate(real_tensors(out)):
        values[Quantity(OUTPUT, f"tensor {k}")] = sketch(each)


def real_pass(module: nn.Module, arguments: Mapping[str, Any], loss: Loss | None, values: Values) -> None:
    """Run the module forward, and backward if there is a loss, and note what it gives."""
    module.zero_grad()
    with torch.set_grad_enabled(loss is not None), torch.compiler.set_stance("force_eager"):
        with outputs_noted(module, values):
            out = call_with(module, arguments)
        note_outputs(out, values)
        if loss is not None:
            value = loss(out, arguments).reshape(1, -1).mean(1).sum()
            values[Quantity(LOSS)] = number(value.detach())
            value.backward()
            note_gradients(module, values)


def note_gradients(module: nn.Module, values: Values, step: int = 0) -> None:
    """Note the norm of each parameter's gradient."""
    for name, each in module.named_parameters():
        if each.grad is not None:
            grad = each.grad.to_dense() if each.grad.is_sparse else each.grad
            norm = torch.linalg.vector_norm(grad.abs() if grad.is_complex() else grad, dtype=torch.float64)
            values[Quantity(GRADIENT, name, step)] = number(norm)


def disturb(module: nn.Module, delta: float) -> None:
    """Multiply each entry of each parameter by 1 + δ or 1 − δ."""
    with torch.no_grad():
        for each in module.parameters():
            flat = each.view(-1) if each.is_contiguous() and each.is_floating_point() else each.new_empty(0)
            for start in range(0, flat.numel(), TILE):
                part = flat[start : start + TILE]
                part.mul_(1 + delta * signs()[: len(part)].to(each.dtype))
