r"""The overlap as a diffusion in u = artanh z.

With the letters of `weights`, N± = |A±|², κ = ⟨A₊, A₋⟩ = X + zG and R = (N₊ + N₋ − 2zκ)/(1 − z²) = D/(1 + z) + 2G:

  stochastic:  dU = σ²[ (3 − d) zR/2 + (d − 2) κ ] dt + σ√R dB,                        from [CT, eq. 23],
  hybrid:      dU = [ c − ε²(α₊γ₊ + α₋γ₋ + z(γ₊ − γ₋)²/2) ] dt + εc dB,               from [CT, eq. 8].

For p = q the first gives [CT, eqs. 20 and 21], dU = σ²[2ab(d − 2) + z(a² + b²)] dt + σ√(2(a² + b²)) dB, and the second
[CT, eq. 26], dU = 2b(1 − ε²a) dt + 2εb dB. In z: dZ = (1 − z²)(μ − z g²) dt + (1 − z²) g dB for dU = μ dt + g dB.

The scale density s solves (log s)′ = −2μ/g², the *slope*:

  stochastic:  −z − (d − 2)·(2(1 + z)X − zD)/(D + 2(1 + z)G),   for p = q: −z − (d − 2)/cosh(β(1 − z)); σ drops out;
  hybrid:      [ 2(α₊γ₊ + α₋γ₋ + z(γ₊ − γ₋)²/2)/c − 2/ε² ]/c.

At −1 the slope tends to 1 − (d − 2)/cosh 2β for p = q, to 3 − d for p ≠ q (there g² ~ 1/(1 + z)); at +1 to 1 − d.
"""

from dataclasses import dataclass
from functools import cached_property
from math import exp, expm1, log, log1p
from typing import Literal, NamedTuple, Protocol

import numpy as np

from limitformer.sphere.overlap.position import Array, Position, at_artanh, at_overlap
from limitformer.sphere.overlap.weights import Averaging, Weights

REACH = 19.0  # every double z has |artanh z| < 18.8; corrections to the exponential tails are of order e^{−2·19}


@dataclass(frozen=True)
class End:
    """The asymptotes s ~ e^{slope·u} and g² ~ e^{growth·u} as u → ∓∞; a table of s may stop at u = reach."""

    slope: float
    growth: float
    reach: float


class Motion(Protocol):
    """A diffusion of u = artanh z."""

    @property
    def beta(self) -> float:
        """|β|, the rate at which the coefficients vary; the weights have its sign."""

    @property
    def widest(self) -> float:
        """The widest panel in u on which the coefficients are polynomials to 15 digits."""

    def drift(self, at: Position) -> Array:
        """Return the drift μ of u."""

    def variance(self, at: Position) -> Array:
        """Return the squared diffusion coefficient g² > 0 of u."""

    def slope(self, at: Position) -> Array:
        """Return (log s)′ = −2μ/g² without cancellation."""

    def overlap_drift(self, at: Position) -> Array:
        """Return the drift of z."""

    def overlap_variance(self, at: Position) -> Array:
        """Return the squared diffusion coefficient of z."""

    @property
    def minus(self) -> End:
        """The asymptotes toward z = −1."""

    @property
    def plus(self) -> End:
        """The asymptotes toward z = +1."""


@dataclass(frozen=True)
class StochasticMotion:
    """The stochastic model, whose noise acts in all directions."""

    weights: Averaging
    beta: float
    dim: int
    sigma: float
    widest: float

    def drift(self, at: Position) -> Array:
        mix = self.weights(at)
        return self.sigma**2 * ((3 - self.dim) / 2 * at.z * ratio(mix.spread, at, mix.aligned) + self._pull(at))

    def variance(self, at: Position) -> Array:
        mix = self.weights(at)
        return self.sigma**2 * ratio(mix.spread, at, mix.aligned)

    def slope(self, at: Position) -> Array:
        mix = self.weights(at)
        numerator = 2 * at.above * mix.crossed - at.z * mix.spread
        return -at.z - (self.dim - 2) * numerator / (mix.spread + 2 * at.above * mix.aligned)

    def overlap_drift(self, at: Position) -> Array:
        rotation = (1 - self.dim) / 2 * at.z * self._noise(at)
        return self.sigma**2 * (rotation + at.below * at.above * self._pull(at))

    def overlap_variance(self, at: Position) -> Array:
        return self.sigma**2 * at.below * at.above * self._noise(at)

    def _pull(self, at: Position) -> Array:
        """Return (d − 2)κ."""
        mix = self.weights(at)
        return (self.dim - 2) * (mix.crossed + at.z * mix.aligned)

    def _noise(self, at: Position) -> Array:
        """Return (1 − z²)R, which is finite at −1 too."""
        mix = self.weights(at)
        return at.below * (mix.spread + 2 * at.above * mix.aligned)

    @cached_property
    def minus(self) -> End:
        mix = self.weights(at_overlap(-1.0))
        if float(mix.spread) == 0:
            # 1 − (d − 2)/cosh 2β, where 1 − 1/cosh 2β = (1 − e)²/(1 + e²) has no cancellation at β = 0.
            e = exp(-2 * self.beta)
            slope = (expm1(-2 * self.beta) ** 2 - 2 * (self.dim - 3) * e) / (1 + e * e)
            return End(slope, 0.0, -reach(self.beta))
        # D equals 2G(1 + z) at this gap 1 + z.
        gap = float(mix.spread / (2 * mix.aligned))
        return End(3.0 - self.dim, -2.0, min(0.0, log(gap / 2) / 2) - reach(self.beta))

    @cached_property
    def plus(self) -> End:
        return End(1.0 - self.dim, 0.0, reach(self.beta))


@dataclass(frozen=True)
class HybridMotion:
    """The hybrid model, whose noise multiplies attention."""

    weights: Weights
    beta: float
    epsilon: float

    @property
    def widest(self) -> float:
        return widest_panel(self.beta)

    def drift(self, at: Position) -> Array:
        c = self.weights(at).toward
        return c * (1 - self.epsilon**2 * self.damping(at))

    def variance(self, at: Position) -> Array:
        return (self.epsilon * self.weights(at).toward) ** 2

    def slope(self, at: Position) -> Array:
        return 2 * (self.damping(at) - self.epsilon**-2) / self.weights(at).toward

    def overlap_drift(self, at: Position) -> Array:
        return at.below * at.above * (self.drift(at) - at.z * self.variance(at))

    def overlap_variance(self, at: Position) -> Array:
        return (at.below * at.above) ** 2 * self.variance(at)

    def damping(self, at: Position) -> Array:
        """Return (α₊γ₊ + α₋γ₋ + z(γ₊ − γ₋)²/2)/c, equal to a for p = q; the drift has the sign of 1 − ε²·damping."""
        mix = self.weights(at)
        first, second = mix.other_first / mix.toward, mix.other_second / mix.toward
        bend = at.z * (first - second) * (mix.other_first - mix.other_second) / 2
        return mix.own_first * first + mix.own_second * second + bend

    @cached_property
    def minus(self) -> End:
        return End(float(self.slope(at_overlap(-1.0))), 0.0, -reach(self.beta))

    @cached_property
    def plus(self) -> End:
        return End(float(self.slope(at_overlap(1.0))), 0.0, reach(self.beta))


@dataclass(frozen=True)
class FlowMotion(HybridMotion):
    """The hybrid model without noise, ε = 0: dU = c dt [CT, Lemma 2], so u only rises."""

    epsilon: float = 0.0

    def slope(self, at: Position) -> Array:
        return np.full(np.shape(at.z), -np.inf)


def ratio(spread: Array, at: Position, aligned: Array) -> Array:
    """Return R = D/(1 + z) + 2G; for D = 0 it is 2G at z = −1 too."""
    share = np.zeros(np.broadcast_shapes(spread.shape, at.above.shape))
    np.divide(spread, at.above, out=share, where=spread > 0)
    return share + 2 * aligned


def widest_panel(beta: float) -> float:
    """Return a width over which log g², which changes by at most 2β per unit of u, changes by at most 8."""
    return 4 / max(abs(beta), 1e-9)


def reach(beta: float) -> float:
    """Return the |u| beyond which the slope equals its asymptote, up to O((1 + β) e^{−2|u|})."""
    return REACH + log1p(beta) / 2


def log_speed(motion: Motion, u: Array) -> Array:
    """Return log(2/g²); the speed density of u is 2/(g² s)."""
    return np.asarray(np.log(2.0) - np.log(motion.variance(at_artanh(u))))


def slope_at(motion: Motion, u: Array) -> Array:
    """Return (log s)′ at u."""
    return motion.slope(at_artanh(u))


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


def plus_end(motion: Motion) -> Boundary:
    slope = motion.plus.slope
    if isinstance(motion, FlowMotion):
        return Boundary("attracting", slope, "without noise the overlap rises to 1, which is never reached")
    if slope < 0:
        return Boundary("attracting", slope, f"s ~ exp({slope:.6g} u) is integrable toward 1, which is never reached")
    return Boundary("non-attracting", slope, f"s ~ exp({slope:.6g} u) is not integrable toward 1")


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
