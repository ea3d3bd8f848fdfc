r"""The metastable antipodal state of two unequal clusters.

For p ≠ q the overlap leaves −1 again. While it stays, the gap w = 1 + z has nearly the law of the *speed density*
2/(g² s) on the near side of the barrier, normalised; the barrier is the overlap at which s, as a density in
u = artanh z, has its last maximum: there a step of u is least likely to lead on. With δ² = 2D(−1), close to −1

  dw = σ²δ²(d − 1)/2 dt + σδ√(2w) dB,      a squared Bessel process of dimension d − 1,

and beyond w ~ δ² the density of w falls like w^{−1−r/2}, r = 1 − (d − 2)/cosh 2β ≤ 1: the median is of the order of
δ², but the mean is carried by the rare excursions toward the barrier.

A barrier alone does not make the state last: with unnormalized attention the larger cluster moves faster by the factor
p/q at every β, δ² stays of the order of the other noise, and the gap is not small. Compare the mean lifetime.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from limitformer.base.errors import InputError
from limitformer.sphere.overlap.motion import Motion, log_speed, slope_at
from limitformer.sphere.overlap.panels import WEIGHTS, Panels, panels, separate
from limitformer.sphere.overlap.position import Array, artanh, at_artanh
from limitformer.sphere.overlap.scale import Scale


@dataclass(frozen=True)
class MetastableGap:
    """Law of the gap 1 + z of two unequal clusters while they are antipodal.

    Attributes:
        barrier: overlap beyond which the state is over.
        median: of the gap.
        mean: of the gap; carried by excursions toward the barrier.
        density: function of gaps in (0, 1 + barrier), any shape; zero beyond.
    """

    barrier: float
    median: float
    mean: float
    density: Callable[[ArrayLike], Array]


def metastable_gap(scale: Scale) -> MetastableGap:
    """The law of the gap; `InputError` if s has no maximum between −1 and 1 to stay behind."""
    top = barrier(scale)
    inner = panels(scale.motion, np.array([scale.motion.minus.reach, top]))
    log_density = inner.log_speed - inner.local - inner.heights[:-1, None]
    # The tail toward −1 counts as one more, first piece.
    end = scale.motion.minus
    tail = log_density[0, 0] - np.log(-end.growth - end.slope)
    log_mass = np.append(tail, inner.log_integral(log_density))
    log_total = float(np.logaddexp.reduce(log_mass))
    mean = float(((inner.half * np.exp(log_density - log_total) * at_artanh(inner.nodes).above) @ WEIGHTS).sum())
    shift = float(scale.log_scale(inner.edges[:1])[0]) - log_total

    def density(gap: ArrayLike) -> Array:
        u = artanh(np.minimum(np.asarray(gap, float) - 1, np.tanh(top)))
        at = at_artanh(u)
        value = np.exp(log_speed(scale.motion, u) - scale.log_scale(u) + shift) / (at.below * at.above)
        return np.where(u < top, value, 0.0)

    return MetastableGap(float(np.tanh(top)), median(scale.motion, inner, log_mass - log_total), mean, density)


def barrier(scale: Scale) -> float:
    """The u of the last maximum of s."""
    u = scale.cells.nodes.ravel()
    rising = np.flatnonzero(slope_at(scale.motion, u) > 0)
    if rising.size == 0:
        raise InputError(
            "No metastable state: nothing keeps the clusters antipodal, the scale density falls all the way from -1 "
            "to 1. Nearest: a larger beta or a smaller dim."
        )
    from scipy.optimize import brentq  # it takes a while, and workers of sweeps do without

    last = int(rising[-1])
    return float(brentq(lambda x: float(slope_at(scale.motion, np.array(x))), u[last], u[last + 1], xtol=1e-14))


def median(motion: Motion, inner: Panels, log_share: Array) -> float:
    """Gap with half of the mass below it; `log_share` (n + 1): of what lies before all panels, and of each panel."""
    from scipy.optimize import brentq

    below = np.cumsum(np.exp(log_share))
    panel = int(np.searchsorted(below, 0.5)) - 1
    missing, whole = 0.5 - below[panel], below[panel + 1] - below[panel]
    left, right = inner.edges[panel : panel + 1], inner.edges[panel + 1 : panel + 2]
    full = mass_between(motion, left, right)
    u = brentq(lambda x: mass_between(motion, left, np.array([x])) / full - missing / whole, left[0], right[0])
    return float(at_artanh(u).above)


def mass_between(motion: Motion, left: Array, right: Array) -> float:
    """Integral of 2/(g² s) over a panel, s = 1 at its left."""
    part = separate(motion, left, right)
    return float(np.exp(part.log_integral(part.log_speed - part.local))[0])
