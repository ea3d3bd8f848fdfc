r"""The strengths of the shaping as parameters: γ₁, γ₂, s₋ (`Gain`), λ, γ (`Residual`). Each is a few numbers near 1.

* **At least float32**, even after `.to(bfloat16)`, `.half()` or loading in 16 bits: near 1 bfloat16 has steps of 1/256
  and float16 of 1/2048, so an optimiser's step of 1e-3 would always be rounded away.
* **At least one dimension**: FSDP2 shards the first dimension and refuses scalars.
* **A name that ends in `_norm`**: the Trainer of Hugging Face applies no weight decay to such a parameter. Its Python
  attribute has no ending.
"""

from collections.abc import Callable
from math import sqrt
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from limitformer.base.errors import require, require_real

ENDING = "_as_norm"


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for 16 bits, otherwise the dtype itself."""
    return torch.promote_types(dtype, torch.float32)


class Strengths(nn.Module):
    """A module whose own parameters are strengths; `add` makes them."""

    def add(self, name: str, start: float, number: int, trained: bool) -> None:
        """Register a parameter of `number` strengths under `name` and the ending."""
        dtype = at_least_float32(torch.get_default_dtype())
        parameter = nn.Parameter(torch.full((number,), start, dtype=dtype), requires_grad=trained)
        self.register_parameter(name + ENDING, parameter)

    def strength(self, name: str) -> nn.Parameter:
        parameter: nn.Parameter = getattr(self, name + ENDING)
        return parameter

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Strengths":
        """Apply `to`, `half`, `bfloat16`, …, which may move the strengths but not round them."""

        def unrounded(before: Tensor) -> Tensor:
            after = fn(before)
            exact = at_least_float32(after.dtype) if after.is_floating_point() else after.dtype
            return after if after.dtype == exact else before.to(after.device, exact)

        super()._apply(unrounded, recurse)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Load states of version 0.1 too, which had names without the ending, scalars, and 16 bits."""
        for name, _ in self.named_parameters(recurse=False):
            old = prefix + name.removesuffix(ENDING)
            if old in state_dict:
                state_dict[prefix + name] = state_dict.pop(old)
            value = state_dict.get(prefix + name)
            if value is not None:
                state_dict[prefix + name] = torch.atleast_1d(value).to(at_least_float32(value.dtype))
        super()._load_from_state_dict(state_dict, prefix, *others)


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
