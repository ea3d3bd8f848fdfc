r"""Residuals with trainable strengths: X ← λX + γ f(X) [ST, eq. 1]; λ² + γ² = 1 holds only at the start."""

from math import sqrt
from typing import Annotated

import torch
from torch import Tensor, nn

from limitformer.base.errors import require, require_real
from limitformer.nn.strengths import Strengths

Tokens = Annotated[Tensor, "*shape"]


class Residual(Strengths):
    """The residual λx + γf; `forward` takes the tokens and the branch's output, of one shape.

    The sum is computed in float32 and has the finer dtype of the two: tokens in float32 stay so.

    Args:
        gamma: γ at the start, in [0, 1] unless `lam` is given; [ST, App. D] tries 0.05, 0.1 and 0.2.
        lam: λ at the start; None means √(1 − γ²).
        trained: whether they have gradients.
    """

    def __init__(self, gamma: float, lam: float | None = None, *, trained: bool = True) -> None:
        super().__init__()
        gamma = require_real("gamma", gamma)
        inside = gamma >= 0 and (gamma <= 1 or lam is not None)
        require(inside, f"gamma must lie in [0, 1]; got {gamma}. [ST, App. D] takes 0.05, 0.1 or 0.2.")
        lam = sqrt(1 - gamma**2) if lam is None else require_real("lam", lam)
        require(lam >= 0, f"lam must be at least 0; got {lam}.")
        self.add("lam", lam, 1, trained)
        self.add("gamma", gamma, 1, trained)

    @property
    def lam(self) -> nn.Parameter:
        return self.strength("lam")

    @property
    def gamma(self) -> nn.Parameter:
        return self.strength("gamma")

    def forward(self, x: Tokens, branch: Tokens) -> Tokens:
        """Compute λx + γf."""
        dtype = torch.promote_types(x.dtype, branch.dtype)
        return (self.lam * x + self.gamma * branch).to(dtype)


class Sum(nn.Module):
    """The residual x + f of Pre-LN and Post-LN."""

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch
