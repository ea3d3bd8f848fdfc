r"""Where the fate of the overlap changes with β and ε.

  stochastic:            −1 attracts for cosh 2β > d − 2                                        [CT, Lemma 5];
  hybrid, unnormalized:  for ε² < 2e^{−β} +1 attracts, for ε² > 2e^{−β} −1                      [CT, Prop. 1];
  hybrid, softmax:       +1 attracts for ε² < 2, −1 for ε² > 1 + e^{−2β}                        (beyond the paper).

With softmax, in between both ends attract if β > 0, and neither if β < 0.

In the hybrid model the drift of u is positive where ε² < 1/brake (`motion`), whose values at the ends give both
thresholds, for unequal clusters too. With unnormalized attention these may come in the other order: then, in between,
neither end attracts.
"""

from math import acosh, inf, log, sqrt

from limitformer.base.errors import InputError
from limitformer.sphere.overlap.drawn_motion import DrawnMotion
from limitformer.sphere.overlap.motion import HybridMotion, Motion, StochasticMotion
from limitformer.sphere.overlap.position import at_overlap


def stochastic_critical_beta(motion: StochasticMotion) -> float:
    """arccosh(d − 2)/2, 0 for d ≤ 3; infinite for unequal clusters, and with drawn queries for d ≥ 4. It bounds |β|."""
    if motion.minus.growth < 0 or (isinstance(motion, DrawnMotion) and motion.dim > 3):
        return inf
    return acosh(motion.dim - 2) / 2 if motion.dim > 3 else 0.0


def unnormalized_critical_beta(epsilon: float) -> float:
    """The β of ε² = 2e^{−β}, negative for ε² > 2, infinite for ε = 0."""
    return log(2 / epsilon**2) if epsilon > 0 else inf


def softmax_critical_beta(epsilon: float) -> float:
    """The β of ε² = 1 + e^{−2β}, negative for ε² > 2, infinite for ε ≤ 1."""
    return -log(epsilon**2 - 1) / 2 if epsilon > 1 else inf


def amplitude(motion: HybridMotion, end: float) -> float:
    """The ε at which the slope at z = `end` changes its sign; infinite if none does."""
    brake = float(motion.brake(at_overlap(end)))
    return 1 / sqrt(brake) if brake > 0 else inf


def hybrid_of(motion: Motion, name: str) -> HybridMotion:
    """`motion`, or `InputError` unless it has an ε."""
    if not isinstance(motion, HybridMotion):
        raise InputError(f"{name} belongs to the HybridTransformer, which has an epsilon; use critical_beta here.")
    return motion
