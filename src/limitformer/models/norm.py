r"""Normalisation of each token over its coordinates, before the branch ("pre") or after the sum ("post").

* pre:  X ← λX + γ f(norm(X));   post: X ← norm(λX + γ f(X)).
* RMSNorm: x/√(|x|²/n + ε);   LayerNorm: (x − x̄)/√(|x − x̄|²/n + ε), x̄ the mean of the coordinates of x;
* RadialNorm: s(|x|²/n + ε) x, or s(|x − x̄|²/n + ε) (x − x̄), for any function s.

Gains are 1 and biases 0, as at initialisation.
"""

from dataclasses import dataclass, field
from typing import Literal

from limitformer.base.errors import require, require_real, set_fields
from limitformer.models.functions import Function, freeze_functions, function_of, require_scalar_function
from limitformer.models.kinds import register

Placement = Literal["pre", "post"]
POSITIVE = (1e-5, 0.1, 1.0, 3.0, 1e3)  # arguments at which s is tried


@dataclass(frozen=True, kw_only=True)
class Norm:
    """The base class of norms.

    Attributes:
        placement: "pre", before the branch, or "post", after the sum.
        eps: ε ≥ 0.
    """

    placement: Placement
    eps: float = 1e-5

    def __post_init__(self) -> None:
        known = self.placement in ("pre", "post")
        require(known, f'placement must be "pre" or "post"; got {self.placement!r}.')
        set_fields(self, eps=require_real("eps", self.eps))
        require(self.eps >= 0, f"eps must be at least 0; got {self.eps}.")

    @property
    def subtracts_mean(self) -> bool:
        """Whether the mean over the coordinates is subtracted first."""
        raise TypeError("Norm is abstract: use LayerNorm, RMSNorm or RadialNorm.")


@register("norm")
@dataclass(frozen=True, kw_only=True)
class LayerNorm(Norm):
    """Subtract the mean of the coordinates, divide by their standard deviation."""

    @property
    def subtracts_mean(self) -> bool:
        return True


@register("norm")
@dataclass(frozen=True, kw_only=True)
class RMSNorm(Norm):
    """Divide by the root mean square of the coordinates."""

    @property
    def subtracts_mean(self) -> bool:
        return False


@register("norm")
@dataclass(frozen=True, kw_only=True)
class RadialNorm(Norm):
    """Multiply each token by any function s of its mean square, as s was when the part was made.

    Attributes:
        function: s, from |x|²/n + ε > 0 to a float, as in `Elementwise`. `lambda v: v**-0.5` is RMSNorm.
        centred: whether the mean of the coordinates is subtracted first, as in LayerNorm.
        torch: the same s on tensors, as in `Elementwise`.

    Raises:
        InputError: `function` is not a function, is not finite, or Numba cannot compile it.

    >>> def bounded(square):
    ...     return 1 / max(1.0, square) ** 0.5
    >>> RadialNorm(bounded, placement="pre").subtracts_mean
    False
    """

    function: Function | str = field(kw_only=False)
    centred: bool = False
    torch: Function | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.centred, bool), f"centred must be True or False; got {self.centred!r}.")
        freeze_functions(self)
        require_scalar_function(function_of(self), POSITIVE)

    @property
    def subtracts_mean(self) -> bool:
        return self.centred
