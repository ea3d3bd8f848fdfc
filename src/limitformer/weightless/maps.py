r"""Linear maps Z → Z W whose Gaussian W (n × p, entries N(0, s²)) is never drawn, or drawn anew whenever it is needed.

Convolutions whose kernels are drawn are here too.

A weight that is used once: with Z = R Q and N = Q W ~ N(0, s²) (`roots`), forward is Z W = R N. What is then known of
W is N alone, W = QᵀN + (I − QᵀQ) W̃ with W̃ fresh. The gradient D (M × p) that comes back depends on W through N
alone. With D = S P, P of orthonormal rows, P W̃ᵀ ~ N(0, s²) is fresh and

  D Wᵀ = D Nᵀ Q + F (I − QᵀQ),   F = S G,   G ~ N(0, s²).

The weight's gradient is Zᵀ D, |Zᵀ D|² = |Rᵀ D|² = |Rᵀ S|². The page `weightless` proves this.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from limitformer.weightless.roots import Root, gram, size_of


class Numbers(Protocol):
    """Where a map gets its N(0, 1) numbers from, and leaves its gradient; s multiplies what is small."""

    @property
    def scale(self) -> float:
        """s, the standard deviation of an entry."""

    def gaussian(self, purpose: str, rows: int, columns: int) -> Tensor:
        """N(0, 1) (S, rows, columns); the same numbers for the same purpose."""

    def whole(self) -> Tensor:
        """The weight itself, drawn (S, n, p)."""

    def stored(self) -> Tensor:
        """The weight as the module has it, drawn (S, …)."""

    def leave(self, squared: Tensor) -> None:
        """|∂W|² (S,)."""


class NeverDrawnMap(torch.autograd.Function):
    """Z W of a Gaussian weight that is used once and never drawn."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, anchor: Tensor, numbers: Numbers, root: Root, columns: int) -> Tensor:
        """R N (S, M, p)."""
        n = numbers.gaussian("forward", root.factor.shape[-1], columns)
        ctx.numbers, ctx.kind = numbers, type(root)
        ctx.save_for_backward(n, *root)
        return (numbers.scale * root.factor) @ n

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        """D Wᵀ (S, M, n), and |∂W|²."""
        n, *tensors = ctx.saved_tensors
        numbers, root = ctx.numbers, ctx.kind(*tensors)
        size = size_of(d)
        numbers.leave((root.factor.mT @ size).double().square().sum((-1, -2)))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        fresh = (numbers.scale * size) @ numbers.gaussian("backward", size.shape[-1], root.width)
        back = root.along(numbers.scale * (d @ n.mT) - root.onto(fresh)).add_(fresh)
        return back, None, None, None, None


class RedrawnMap(torch.autograd.Function):
    """Z W of a weight that is drawn when it is needed, from its key, and not kept."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, anchor: Tensor, numbers: Numbers) -> Tensor:
        """Z W (S, M, p)."""
        ctx.numbers = numbers
        ctx.save_for_backward(z)
        return z @ numbers.whole()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, None, None]:
        """D Wᵀ, and |∂W|² = |Zᵀ D|²."""
        (z,), numbers = ctx.saved_tensors, ctx.numbers
        numbers.leave(squared_product(z, d))
        return (d @ numbers.whole().mT if ctx.needs_input_grad[0] else None), None, None


def squared_product(z: Tensor, d: Tensor) -> Tensor:
    """|Zᵀ D|² (S,) of Z (S, M, n) and D (S, M, p): from Zᵀ D, or as tr(Z Zᵀ · D Dᵀ) where M is much smaller.

    In float32 the Gram matrices are summed in float64, where no square is too large or too small. In float64 they would
    lose half of the digits where the tokens' gradients cancel.
    """
    m, n, p = *z.shape[-2:], d.shape[-1]
    if z.dtype == torch.float64 or n * p <= 2 * m * (n + p):
        return squared_norm(z.mT @ d)
    return (gram(z) * gram(d)).sum((-1, -2)).clamp(min=0.0)


def squared_norm(x: Tensor) -> Tensor:
    """|X|² (S,) of X (S, …), in float64."""
    return torch.linalg.vector_norm(x.reshape(len(x), -1), dim=1, dtype=torch.float64).square()
