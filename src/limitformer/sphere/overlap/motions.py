r"""The choice of the diffusion for a model and its clusters.

**Drawn queries and keys**: the overlap of two clusters of equal size, in u = artanh z.

With C and the bend q̃ = D/(1 + z) of `drawn`, R = 1 + C + q̃ and κ = (1 + z)/2 − (1 − z)C/2 (`motion`):

  dU = σ²·½[ (d − 2)(1 − C) + z(1 + C) − (d − 3) z q̃ ] dt + σ√(1 + C + q̃) dB,
  (log s)′ = −z − (d − 2)(1 − C − z q̃)/(1 + C + q̃).

At +1, C = q̃ = 0: the slope is 1 − d and the rate of U (d − 1)σ²/2, for every b. At −1, C = m and q̃ = q,

  dU = σ²·½[ (d − 3)(1 + q) − (d − 1)m ] dt + …,     slope = [ (d − 1)m − (d − 3)(1 + q) ]/(1 + m + q),

so that **antipodes attract if and only if (d − 1)m > (d − 3)(1 + q): in dimension 2 always, in dimension 3 for every
b > 0, in dimension 4 or more for none.**

*Proof of the last part*: 1 + q > 3m for every b is sufficient because (d − 1)/(d − 3) ≤ 3. Let f(s) = tanh(bs),
c = E s f(s), c′ = E s f(s)³. (i) f is odd: in Hermite polynomials it is c s + terms of order 3 and more, so that
q = E f′² ≥ c² + 3(m − c²), and 1 + q − 3m ≥ 1 − 2c². (ii) Integration by parts gives c = b(1 − m) and
c′ = 3b E f²(1 − f²), so q = b(c − c′/3) > (2/3)bc, for 0 < c′ < c. Since 3m = 3 − 3c/b, 1 + q − 3m > −2 + c(2b/3 + 3/b)
≥ 2√2 c − 2. The first is positive for c < 1/√2, the second for c ≥ 1/√2. For a product of two matrices b is random: the
inequality is linear in m and q, and holds for their means. ∎

**Causal mask**: the overlap of two tokens, in u = artanh z.

The first token attends only to itself, T₁ = 1 (`pair.unlike`); the second has T₂ = tanh(β(1 − z)/2). So

  G = (1 + T₂)/2,   X = (1 − T₂)/2,   D = (1 − T₂)²/2

replace the letters of `weights`. With drawn queries and keys T₂ has mean 0, and T₂² has the mean M = C + D of two
tokens without a mask (`drawn`): G = X = ½, D = (1 + M)/2.

**Antipodes never attract**: D > 0 at −1 for every β and every law of the queries, and the argument of unequal clusters
(`motion.leaving_end`) applies, because the attention of the two tokens differs there by (1 − T₂)X¹. At +1, T₂ = 0 for
every β, G = X = D = ½ (G = X = ½, D = ½ with drawn queries), and the slope is −1 − (3/5)(d − 2): the tokens meet.

**Lifetime** of antipodes at large β with fixed queries: δ = 1 − T₂ → 2e^{−2β} replaces a₊ − a₋ in `hitting`,

  E(−1 → b)  ~  (π/2 + arcsin b) · B(½, (d−1)/2)/(2√2) · e^{2β}/σ².

With drawn queries δ is of order 1 at every b, so tokens leave antipodes at once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import log
from typing import Any

import numpy as np

from limitformer.models.kinds import of_kind
from limitformer.models.sphere import HybridTransformer, SphereModel, StochasticTransformer
from limitformer.sphere.overlap.drawn import Averages, DrawnAttention, at_antipodes
from limitformer.sphere.overlap.motion import (
    End,
    FlowMotion,
    HybridMotion,
    Motion,
    StochasticMotion,
    reach,
    widest_panel,
)
from limitformer.sphere.overlap.position import Array, Position, at_overlap
from limitformer.sphere.overlap.weights import weights_of


@dataclass(frozen=True)
class CausalMotion(StochasticMotion):
    """Two tokens, of which the first attends only to itself."""

    @cached_property
    def plus(self) -> End:
        return End(float(self.slope(at_overlap(1.0))), 0.0, reach(self.beta))


def fixed_averages(beta: float, at: Position) -> Averages:
    """Return the exact values, with 1 − T₂ = 2/(1 + e^{β(1 − z)}) to avoid cancellation."""
    from_other = 1 / (1 + np.exp(np.minimum(beta * at.below, 700.0)))
    return Averages(2 * from_other**2, 1 - from_other, from_other)


def drawn_averages(drawn: DrawnAttention, at: Position) -> Averages:
    """Return the averages with E T₂ = 0 and E T₂² = C + D."""
    product, bend = drawn(at)
    half = np.full(np.shape(at.z), 0.5)
    return Averages((1 + product + bend * at.above) / 2, half, half)


@dataclass(frozen=True)
class DrawnMotion(StochasticMotion):
    """Averages over queries and keys for clusters of equal size, whose D vanishes at −1."""

    drawn: DrawnAttention

    def drift(self, at: Position) -> Array:
        c, bend = self.drawn(at)
        free = (self.dim - 2) * (1 - c) + at.z * (1 + c) - (self.dim - 3) * at.z * bend
        return np.asarray(self.sigma**2 / 2 * free)

    def variance(self, at: Position) -> Array:
        c, bend = self.drawn(at)
        return np.asarray(self.sigma**2 * (1 + c + bend))

    def slope(self, at: Position) -> Array:
        c, bend = self.drawn(at)
        return np.asarray(-at.z - (self.dim - 2) * (1 - c - at.z * bend) / (1 + c + bend))

    @cached_property
    def minus(self) -> End:
        m, q = at_antipodes(self.drawn.b, self.drawn.head_dim)
        slope = ((self.dim - 1) * m - (self.dim - 3) * (1 + q)) / (1 + m + q)
        return End(slope, 0.0, -self.drawn.last)


Clusters = tuple[int, int]


def stochastic_motion(model: StochasticTransformer, clusters: Clusters, beta: float) -> Motion:
    """Return the diffusion of the stochastic model, also with drawn queries or a causal mask."""
    if model.is_fresh:
        drawn = DrawnAttention(model.logit_scale, log(clusters[0] / clusters[1]), model.head_dim)
        if model.is_causal:
            return CausalMotion(partial(drawn_averages, drawn), drawn.near_ends, model.dim, model.sigma, np.inf)
        return drawn_motion(drawn, model.dim, model.sigma)
    if model.is_causal:
        return CausalMotion(partial(fixed_averages, beta), abs(beta), model.dim, model.sigma, widest_panel(beta))
    weights = weights_of(model, clusters, beta)
    return StochasticMotion(weights, abs(beta), model.dim, model.sigma, widest_panel(beta))


def drawn_motion(drawn: DrawnAttention, dim: int, sigma: float) -> Motion:
    """Return the diffusion with drawn queries and no mask; its averages vary slowly for every b."""
    if drawn.odds:
        return StochasticMotion(drawn.averages, drawn.near_ends, dim, sigma, np.inf)
    return DrawnMotion(drawn.averages, drawn.near_ends, dim, sigma, np.inf, drawn)


def hybrid_motion(model: HybridTransformer, clusters: Clusters, beta: float) -> Motion:
    """Return the diffusion of the hybrid model, a flow without noise."""
    weights, size = weights_of(model, clusters, beta), abs(beta)
    return HybridMotion(weights, size, model.epsilon) if model.epsilon > 0 else FlowMotion(weights, size)


MOTIONS: Mapping[type, Callable[[Any, Clusters, float], Motion]] = {
    StochasticTransformer: stochastic_motion,
    HybridTransformer: hybrid_motion,
}


def motion_of(model: SphereModel, clusters: Clusters, beta: float) -> Motion:
    """Return the diffusion of the overlap of two clusters of `model`, with `beta` for its β."""
    return of_kind(model, MOTIONS)(model, clusters, beta)
