r"""Normalisation of each token over its coordinates, before the branch ("pre") or after the sum ("post").

* pre:  X ← λX + γ f(norm(X));   post: X ← norm(λX + γ f(X)).
* RMSNorm: x/√(|x|²/n + ε);   LayerNorm: (x − x̄)/√(|x − x̄|²/n + ε), x̄ the mean of the coordinates of x.

Gains are 1 and biases 0, as at initialisation.
"""

from dataclasses import dataclass
from typing import Literal

from limitformer.errors import keep, require, require_real
from limitformer.models.kinds import known

Placement = Literal["pre", "post"]


@dataclass(frozen=True, kw_only=True)
class Norm:
    """What the two share: where it stands, and ε ≥ 0."""

    placement: Placement
    eps: float = 1e-5

    def __post_init__(self) -> None:
        known = self.placement in ("pre", "post")
        require(known, f'placement must be "pre" or "post"; got {self.placement!r}.')
        keep(self, eps=require_real("eps", self.eps))
        require(self.eps >= 0, f"eps must be at least 0; got {self.eps}.")

    @property
    def subtracts_mean(self) -> bool:
        """Whether the mean over the coordinates is taken off first."""
        raise TypeError("Norm is abstract: use LayerNorm or RMSNorm.")


@known("norm")
@dataclass(frozen=True, kw_only=True)
class LayerNorm(Norm):
    """Subtract the mean of the coordinates, divide by their standard deviation."""

    @property
    def subtracts_mean(self) -> bool:
        return True


@known("norm")
@dataclass(frozen=True, kw_only=True)
class RMSNorm(Norm):
    """Divide by the root mean square of the coordinates."""

    @property
    def subtracts_mean(self) -> bool:
        return False
