"""The behaviour of the diffusion at the two ends of (−1, 1) [CT, Lemmas 5 and 6, Prop. 1]."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from limitformer.sphere.overlap.motion import FlowMotion, Motion, StochasticMotion

Kind = Literal["attracting", "non-attracting", "entrance", "reflecting"]


@dataclass(frozen=True)
class Boundary:
    """The behaviour at one end.

    Attributes:
        kind: "attracting": approached as t → ∞ with positive probability, never reached; "non-attracting": neither;
            "entrance": left at once and never reached again; "reflecting": reached and left at once.
        exponent: exponent of the scale density, s ~ e^{exponent·u} in u = artanh z; minus infinity without noise.
        explanation: the condition in words.
    """

    kind: Kind
    exponent: float
    explanation: str


class Boundaries(NamedTuple):
    """The ends z = −1 and z = +1."""

    minus: Boundary
    plus: Boundary


class Rates(NamedTuple):
    """−log(1 ± z)/t as t → ∞ on the paths that converge to z = ∓1; nan at an end that does not attract."""

    minus: float
    plus: float


def boundaries_of(motion: Motion) -> Boundaries:
    return Boundaries(minus_end(motion), plus_end(motion))


def minus_end(motion: Motion) -> Boundary:
    slope = motion.minus.slope
    if motion.minus.growth < 0:
        assert isinstance(motion, StochasticMotion)
        return leaving_end(motion.dim, slope)
    if slope > 0:
        return Boundary("attracting", slope, f"s ~ exp({slope:.6g} u) is integrable toward -1, which is never reached")
    if isinstance(motion, FlowMotion):
        return Boundary("non-attracting", slope, "without noise the overlap only rises")
    return Boundary("non-attracting", slope, f"s ~ exp({slope:.6g} u) is not integrable toward -1")


def leaving_end(dim: int, slope: float) -> Boundary:
    """Return the end z = −1 of unequal clusters of the stochastic model."""
    near = f"near -1 the gap 1 + z is a squared Bessel process of dimension dim - 1 = {dim - 1}"
    if dim == 2:
        return Boundary("reflecting", slope, f"{near}: -1 is reached and left at once")
    return Boundary("entrance", slope, f"{near}: -1 is left at once and never reached again")


def plus_end(motion: Motion) -> Boundary:
    slope = motion.plus.slope
    if isinstance(motion, FlowMotion):
        return Boundary("attracting", slope, "without noise the overlap rises to 1, which is never reached")
    if slope < 0:
        return Boundary("attracting", slope, f"s ~ exp({slope:.6g} u) is integrable toward 1, which is never reached")
    return Boundary("non-attracting", slope, f"s ~ exp({slope:.6g} u) is not integrable toward 1")
