r"""Feed-forward layers, n_h the number of hidden units:

  X ← λX + γ √(c/n_h) σ(X W_pre/√n) W_post  [ST, eq. 4].

The gain c = 1/E σ(g)², g ~ N(0, 1), keeps the variance of a token whose variance is 1. Other σ are in `elementwise`,
layers of one matrix in `one_matrix`.
"""

from dataclasses import dataclass
from math import pi, sqrt

from limitformer.base.errors import require, require_count, require_real, set_fields
from limitformer.models.kinds import register

# E (g Φ(g))²: Φ(g)² is the chance that two more normals h, h' lie below g, so this is E g² 1{g > h, g > h'}, the
# second moment of the largest of three over 3: (1 + √3/(2π))/3.
GELU_SECOND_MOMENT = (1 + sqrt(3) / (2 * pi)) / 3


@dataclass(frozen=True, kw_only=True)
class Feedforward:
    """The base class of feed-forward layers.

    Attributes:
        hidden: n_h; None means the width, as in [ST].
    """

    hidden: int | None = None

    def __post_init__(self) -> None:
        if self.hidden is not None:
            set_fields(self, hidden=require_count("hidden", self.hidden))

    def hidden_at(self, width: int) -> int:
        """Return n_h at this width."""
        return width if self.hidden is None else self.hidden

    def gain_at(self, width: int) -> float:
        """Return c = 1/E σ(g)² at this width."""
        raise TypeError("Feedforward is abstract: use ShapedReLU, ReLU, GELU, Elementwise, Gated or OneMatrix.")


@register("feedforward")
@dataclass(frozen=True, kw_only=True)
class ShapedReLU(Feedforward):
    """σ(x) = s₊ max(x, 0) + s₋ min(x, 0) with slopes s± = 1 + c±/√n [ST, after eq. 4]."""

    c_plus: float
    c_minus: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("c_plus", "c_minus"):
            set_fields(self, **{name: require_real(name, getattr(self, name))})

    def slopes(self, width: int) -> tuple[float, float]:
        """Return (s₊, s₋) at this width."""
        return 1 + self.c_plus / sqrt(width), 1 + self.c_minus / sqrt(width)

    def gain_at(self, width: int) -> float:
        positive, negative = self.slopes(width)
        second_moment = (positive**2 + negative**2) / 2
        require(second_moment > 0, f"c_plus and c_minus make both slopes zero at width {width}.")
        return 1 / second_moment


@register("feedforward")
@dataclass(frozen=True, kw_only=True)
class ReLU(Feedforward):
    """σ(x) = max(x, 0)."""

    def slopes(self, width: int) -> tuple[float, float]:
        return 1.0, 0.0

    def gain_at(self, width: int) -> float:
        return 2.0


@register("feedforward")
@dataclass(frozen=True, kw_only=True)
class GELU(Feedforward):
    """σ(x) = x Φ(x), Φ the normal distribution function."""

    def gain_at(self, width: int) -> float:
        return 1 / GELU_SECOND_MOMENT
