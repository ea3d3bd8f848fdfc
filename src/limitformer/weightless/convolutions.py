"""Convolutions of samples side by side, each with its own kernel.

A kernel is drawn when it is needed (`RedrawnConvolution`), or never drawn, as the linear map of the patches of its
input (`patches_of`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from limitformer.weightless.maps import Numbers, squared_norm


@dataclass(frozen=True)
class Convolution:
    """The options of a convolution as torch names them, one number for each side."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups

    def convolve(self, x: Tensor, kernels: Tensor) -> Tensor:
        """Convolve each sample of x (S, B, channels, …) with its own kernel."""
        return torch.stack(
            [torch.convolution(each, w, None, *self.arguments) for each, w in zip(x, kernels, strict=True)]
        )


class RedrawnConvolution(torch.autograd.Function):
    """A convolution whose kernel each pass draws again from its key, so that it is not stored between them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, numbers: Numbers, how: Convolution) -> Tensor:
        """Return the outputs (S, B, channels, …)."""
        ctx.numbers, ctx.how = numbers, how
        ctx.save_for_backward(x)
        return how.convolve(x, numbers.stored())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, None, None, None]:
        """Return the gradient of the input, and add |∂W|²."""
        (x,), numbers, wanted = ctx.saved_tensors, ctx.numbers, ctx.needs_input_grad[0]
        back, squared = [], []
        for each, w, out in zip(x, numbers.stored(), d, strict=True):
            of_input, of_kernel, _ = torch.ops.aten.convolution_backward(
                out, each, w, None, *ctx.how.arguments, [wanted, True, False]
            )
            back.append(of_input)
            squared.append(squared_norm(of_kernel[None]))
        numbers.add_squared_gradient(torch.cat(squared))
        return (torch.stack(back) if wanted else None), None, None, None


def patches_of(x: Tensor, kernel: Sequence[int], how: Convolution) -> Tensor:
    """Return the patches of x (B, channels, …) under the kernel (B, *positions, channels · kernel)."""
    sides = len(kernel)
    if any(how.padding):
        x = functional.pad(x, [width for width in reversed(how.padding) for _ in range(2)])
    for side, (size, stride, dilation) in enumerate(zip(kernel, how.stride, how.dilation, strict=True)):
        x = x.unfold(2 + side, dilation * (size - 1) + 1, stride)[..., ::dilation]
    return x.movedim(1, sides + 1).flatten(sides + 1)


def positions(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Return the number of positions of a kernel along one side."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def each_side(value: Any, sides: int) -> tuple[int, ...]:
    """Return one number for each side; a single number holds for all sides."""
    values = (value,) if isinstance(value, int) else tuple(int(each) for each in value)
    return values * sides if len(values) == 1 else values


def margins(kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Return the padding that preserves sizes, before and after each side, the last side first."""
    whole = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
    return [margin for each in reversed(whole) for margin in (each // 2, each - each // 2)]
