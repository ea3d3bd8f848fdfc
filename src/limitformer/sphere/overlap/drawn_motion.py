r"""The overlap of two clusters of equal size with queries and keys drawn in each layer, in u = artanh z.

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
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from limitformer.sphere.overlap.drawn import DrawnAttention, at_antipodes
from limitformer.sphere.overlap.motion import End, StochasticMotion
from limitformer.sphere.overlap.position import Array, Position


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
