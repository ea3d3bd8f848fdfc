r"""Feed-forward layers, n_h the number of hidden units:

* two matrices: X ← λX + γ √(c/n_h) σ(X W_pre/√n) W_post  [ST, eq. 4];
* one matrix:   X ← λX + γ √(c/n) σ(X) W                  [ST, eq. 19 at λ = 0, γ = 1, whose limit is ST, eq. 3].

The gain c = 1/E σ(g)², g ~ N(0, 1), keeps the variance of a token whose variance is 1.
"""

from dataclasses import dataclass
from math import pi, sqrt

from limitformer.errors import keep, require, require_count, require_real
from limitformer.models.kinds import known

# E (g Φ(g))²: Φ(g)² is the chance that two more normals h, h' lie below g, so this is E g² 1{g > h, g > h'}, the
# second moment of the largest of three over 3: (1 + √3/(2π))/3.
GELU_SECOND_MOMENT = (1 + sqrt(3) / (2 * pi)) / 3


@dataclass(frozen=True, kw_only=True)
class Feedforward:
    """What the feed-forward layers share: `hidden` n_h; None means the width, as in [ST]."""

    hidden: int | None = None

    def __post_init__(self) -> None:
        if self.hidden is not None:
            keep(self, hidden=require_count("hidden", self.hidden))

    def hidden_at(self, width: int) -> int:
        """n_h at this width."""
        return width if self.hidden is None else self.hidden

    def gain(self, width: int) -> float:
        """c = 1/E σ(g)² at this width."""
        raise TypeError("Feedforward is abstract: use ShapedReLU, ReLU, GELU or OneMatrix.")


@known("feedforward")
@dataclass(frozen=True, kw_only=True)
class ShapedReLU(Feedforward):
    """σ(x) = s₊ max(x, 0) + s₋ min(x, 0) with slopes s± = 1 + c±/√n [ST, after eq. 4]."""

    c_plus: float
    c_minus: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("c_plus", "c_minus"):
            keep(self, **{name: require_real(name, getattr(self, name))})

    def slopes(self, width: int) -> tuple[float, float]:
        """(s₊, s₋) at this width."""
        return 1 + self.c_plus / sqrt(width), 1 + self.c_minus / sqrt(width)

    def gain(self, width: int) -> float:
        positive, negative = self.slopes(width)
        second_moment = (positive**2 + negative**2) / 2
        require(second_moment > 0, f"c_plus and c_minus make both slopes zero at width {width}.")
        return 1 / second_moment


@known("feedforward")
@dataclass(frozen=True, kw_only=True)
class ReLU(Feedforward):
    """σ(x) = max(x, 0)."""

    def slopes(self, width: int) -> tuple[float, float]:
        """(1, 0), whatever the width."""
        return 1.0, 0.0

    def gain(self, width: int) -> float:
        return 2.0


@known("feedforward")
@dataclass(frozen=True, kw_only=True)
class GELU(Feedforward):
    """σ(x) = x Φ(x), Φ the normal distribution function."""

    def gain(self, width: int) -> float:
        return 1 / GELU_SECOND_MOMENT


ACTIVATIONS = (ShapedReLU, ReLU, GELU)


@known("feedforward")
@dataclass(frozen=True, kw_only=True)
class OneMatrix(Feedforward):
    """One matrix a layer, √(c/n) σ(X) W: with gamma=1 the MLP of [ST, eq. 19], with lam=1 a residual network.

    σ acts on the coordinates themselves, so it stands alone: no attention, no norm.

    Attributes:
        activation: the layer whose σ it is; `hidden` of both stays None.
    """

    activation: ShapedReLU | ReLU | GELU

    def __post_init__(self) -> None:
        names = ", ".join(kind.__name__ for kind in ACTIVATIONS)
        plain = type(self.activation) in ACTIVATIONS
        require(plain, f"activation must be one of {names}; got {self.activation!r}.")
        given = next((part.hidden for part in (self, self.activation) if part.hidden is not None), None)
        require(given is None, f"A layer of one matrix has no hidden units, hidden must be None; got {given}.")

    def gain(self, width: int) -> float:
        return self.activation.gain(width)
