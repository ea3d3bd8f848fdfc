r"""Feed-forward layers of one matrix: X ← λX + γ √(c/n) σ(X) W.

This is [ST, eq. 19] at λ = 0, γ = 1, whose limit is [ST, eq. 3]; c = 1/E σ(g)², g ~ N(0, 1).
"""

from dataclasses import dataclass

from limitformer.base.errors import require
from limitformer.models.elementwise import Elementwise
from limitformer.models.feedforward import GELU, Feedforward, ReLU, ShapedReLU
from limitformer.models.kinds import register

ACTIVATIONS = (ShapedReLU, ReLU, GELU, Elementwise)


@register("feedforward")
@dataclass(frozen=True, kw_only=True)
class OneMatrix(Feedforward):
    """One matrix per layer, √(c/n) σ(X) W: the MLP of [ST, eq. 19] with gamma=1, a residual network with lam=1.

    σ acts on the coordinates themselves, so the model has no attention and no norm.

    Attributes:
        activation: the layer that defines σ; `hidden` of both stays None.
    """

    activation: ShapedReLU | ReLU | GELU | Elementwise

    def __post_init__(self) -> None:
        names = ", ".join(kind.__name__ for kind in ACTIVATIONS)
        known = type(self.activation) in ACTIVATIONS
        require(known, f"activation must be one of {names}; got {self.activation!r}.")
        hidden = next((part.hidden for part in (self, self.activation) if part.hidden is not None), None)
        require(hidden is None, f"A layer of one matrix has no hidden units, hidden must be None; got {hidden}.")

    def gain_at(self, width: int) -> float:
        return self.activation.gain_at(width)
