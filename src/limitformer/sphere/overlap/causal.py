r"""The overlap of two tokens behind a causal mask, in u = artanh z.

The first token attends only to itself, T₁ = 1 (`pair.unlike`); the second has T₂ = tanh(β(1 − z)/2). So

  G = (1 + T₂)/2,   X = (1 − T₂)/2,   D = (1 − T₂)²/2

replace the letters of `weights`. With drawn queries and keys T₂ has mean 0, and T₂² has the mean M = C + D of two
tokens without a mask (`drawn`): G = X = ½, D = (1 + M)/2.

**Antipodes never attract**: D > 0 at −1 for every β and every law of the queries, and the argument of unequal clusters
(`ends.leaving_end`) applies, because the attention of the two tokens differs there by (1 − T₂)X¹. At +1, T₂ = 0 for
every β, G = X = D = ½ (G = X = ½, D = ½ with drawn queries), and the slope is −1 − (3/5)(d − 2): the tokens meet.

**Lifetime** of antipodes at large β with fixed queries: δ = 1 − T₂ → 2e^{−2β} replaces a₊ − a₋ in `lifetime`,

  E(−1 → b)  ~  (π/2 + arcsin b) · B(½, (d−1)/2)/(2√2) · e^{2β}/σ².

With drawn queries δ is of order 1 at every b, so tokens leave antipodes at once.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from limitformer.sphere.overlap.drawn import Averages, DrawnAttention
from limitformer.sphere.overlap.motion import End, StochasticMotion, reach
from limitformer.sphere.overlap.position import Position, at_overlap


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
