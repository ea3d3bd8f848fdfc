r"""Thresholds of β and ε at which the ends start to attract.

  stochastic:            −1 attracts for cosh 2β > d − 2                                        [CT, Lemma 5];
  hybrid, unnormalized:  for ε² < 2e^{−β} +1 attracts, for ε² > 2e^{−β} −1                      [CT, Prop. 1];
  hybrid, softmax:       +1 attracts for ε² < 2, −1 for ε² > 1 + e^{−2β}                        (beyond the paper).

With softmax, in between both ends attract if β > 0, and neither if β < 0.

In the hybrid model the drift of u is positive for ε² < 1/damping (`motion`). The values of 1/damping at the ends are
both thresholds, for unequal clusters too. With unnormalized attention they may have the opposite order; then neither
end attracts between them.
"""

from math import acosh, inf, log, sqrt

from limitformer.base.errors import InputError
from limitformer.sphere.overlap.drawn_motion import DrawnMotion
from limitformer.sphere.overlap.motion import HybridMotion, Motion, StochasticMotion
from limitformer.sphere.overlap.position import at_overlap


def stochastic_critical_beta(motion: StochasticMotion) -> float:
    """Return the bound of |β|: arccosh(d − 2)/2, 0 for d ≤ 3, ∞ for unequal clusters or drawn queries in d ≥ 4."""
    if motion.minus.growth < 0 or (isinstance(motion, DrawnMotion) and motion.dim > 3):
        return inf
    return acosh(motion.dim - 2) / 2 if motion.dim > 3 else 0.0


def unnormalized_critical_beta(epsilon: float) -> float:
    """Return the β with ε² = 2e^{−β}, negative for ε² > 2, infinite for ε = 0."""
    return log(2 / epsilon**2) if epsilon > 0 else inf


def softmax_critical_beta(epsilon: float) -> float:
    """Return the β with ε² = 1 + e^{−2β}, negative for ε² > 2, infinite for ε ≤ 1."""
    return -log(epsilon**2 - 1) / 2 if epsilon > 1 else inf


def amplitude(motion: HybridMotion, end: float) -> float:
    """Return the ε at which the slope at z = `end` changes its sign, infinite if there is none."""
    damping = float(motion.damping(at_overlap(end)))
    return 1 / sqrt(damping) if damping > 0 else inf


def hybrid_of(motion: Motion, name: str) -> HybridMotion:
    """Return `motion`; raise `InputError` unless it has an ε."""
    if not isinstance(motion, HybridMotion):
        raise InputError(f"{name} belongs to the HybridTransformer, which has an epsilon; use critical_beta here.")
    return motion
