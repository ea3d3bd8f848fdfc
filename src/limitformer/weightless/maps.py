r"""Linear maps Z → Z W whose Gaussian W (n × p, entries N(0, s²)) is never drawn, or drawn again when it is needed.

Let W be used once, and let Z = R Q with orthonormal rows of Q (`roots`). Then N = Q W ~ N(0, s²), and the forward pass
is U = Z W = R N. Only N is then known of W: W = QᵀN + (I − QᵀQ) W̃ with W̃ fresh. The gradient D (M × p) of U depends
on W only through N. Let D = S P with orthonormal rows of P. Then P W̃ᵀ ~ N(0, s²) is fresh, and the backward pass is

  D Wᵀ = D Nᵀ Q + F (I − QᵀQ),   F = S G,   G ~ N(0, s²).

The weight's gradient is Zᵀ D, |Zᵀ D|² = |Rᵀ D|² = |Rᵀ S|². The page `weightless` proves this.

A weight that is used more than once has more products that are known (`products`).
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from limitformer.weightless.roots import Root, gram, size_of


class Numbers(Protocol):
    """The random numbers of one map; it also collects the norm of the weight's gradient."""

    @property
    def scale(self) -> float:
        """s, the standard deviation of an entry."""

    def gaussian(self, purpose: str, rows: int, columns: int) -> Tensor:
        """Draw N(0, 1) (S, rows, columns); the same purpose gives the same numbers."""

    def wishart_root(self, purpose: str, rows: int, freedom: int) -> Tensor:
        """Draw T (S, rows, min(rows, freedom)): T Tᵀ is a Wishart matrix with this number of degrees of freedom."""

    def whole(self) -> Tensor:
        """Draw W (S, n, p)."""

    def stored(self) -> Tensor:
        """Draw the weight in the shape that the module has (S, …)."""

    def add_squared_gradient(self, squared: Tensor) -> None:
        """Add |∂W|² (S,)."""

    def note_product(self, backward: bool, factor: Tensor, answer: Tensor) -> None:
        """Note Z W = U, or D Wᵀ = B if `backward`, for a witness (`limitformer.witness`)."""


class NeverDrawnMap(torch.autograd.Function):
    """Z W for a Gaussian W that is used once and never drawn."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, anchor: Tensor, numbers: Numbers, root: Root, columns: int) -> Tensor:
        """Return U = R N (S, M, p)."""
        n = numbers.gaussian("forward", root.factor.shape[-1], columns)
        ctx.numbers, ctx.kind = numbers, type(root)
        ctx.save_for_backward(n, *root)
        out = (numbers.scale * root.factor) @ n
        numbers.note_product(False, z, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        """Return D Wᵀ (S, M, n), and add |∂W|²."""
        n, *tensors = ctx.saved_tensors
        numbers, root = ctx.numbers, ctx.kind(*tensors)
        size = size_of(d)
        numbers.add_squared_gradient((root.factor.double().mT @ size.double()).square().sum((-1, -2)))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        fresh = (numbers.scale * size) @ numbers.gaussian("backward", size.shape[-1], root.width)
        back = root.along(numbers.scale * (d @ n.mT) - root.onto(fresh)).add_(fresh)
        numbers.note_product(True, d, back)
        return back, None, None, None, None


class RedrawnMap(torch.autograd.Function):
    """Z W for a W that each pass draws again from its key, so that it is not stored between them."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, anchor: Tensor, numbers: Numbers) -> Tensor:
        """Return Z W (S, M, p)."""
        ctx.numbers = numbers
        ctx.save_for_backward(z)
        return z @ numbers.whole()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, None, None]:
        """Return D Wᵀ (S, M, n), and add |∂W|² = |Zᵀ D|²."""
        (z,), numbers = ctx.saved_tensors, ctx.numbers
        numbers.add_squared_gradient(squared_product(z, d))
        return (d @ numbers.whole().mT if ctx.needs_input_grad[0] else None), None, None


def squared_product(z: Tensor, d: Tensor) -> Tensor:
    """Return |Zᵀ D|² (S,) of Z (S, M, n) and D (S, M, p).

    Where M is much smaller than n and p it is tr(Z Zᵀ · D Dᵀ). Gram matrices of float32 tokens are summed in float64,
    where no square overflows. Those of float64 tokens would lose half of the digits where gradients cancel.
    """
    m, n, p = *z.shape[-2:], d.shape[-1]
    if z.dtype == torch.float64 or n * p <= 2 * m * (n + p):
        return squared_norm(z.mT @ d)
    return (gram(z) * gram(d)).sum((-1, -2)).clamp(min=0.0)


def squared_norm(x: Tensor) -> Tensor:
    """Return |X|² (S,) of X (S, …) in float64."""
    return torch.linalg.vector_norm(x.reshape(len(x), -1), dim=1, dtype=torch.float64).square()
