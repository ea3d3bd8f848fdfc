r"""The metastable antipodal state of two unequal clusters.

For p ≠ q the overlap leaves −1 again. The law of the gap w = 1 + z that is returned is the *speed measure* 2/(g² s) du
on the near side of the barrier, normalised: the stationary law of the overlap that is reflected at the barrier. The
barrier is the overlap at the last maximum of s, as a density in u = artanh z, where a step of u is least likely to
continue. It is not the *quasi-stationary law*, that of the overlap given that it has not reached the barrier for a
long time. That law has the density ψ · 2/(g² s), ψ the first eigenfunction that vanishes at the barrier; ψ is nearly
constant where the mass is if the lifetime is long, so that both agree at large |β|. Medians for (2, 1), d = 4: 0.00421
and 0.00317 at β = 2, 7.20e-5 and 6.83e-5 at β = 3, 1.301e-6 and 1.289e-6 at β = 4. With δ² = 2D(−1), close to −1

  dw = σ²δ²(d − 1)/2 dt + σδ√(2w) dB,      a squared Bessel process of dimension d − 1,

and beyond w ~ δ² the density of w falls like w^{−1−r/2}, r = 1 − (d − 2)/cosh 2β ≤ 1. The median is of the order of
δ², but rare excursions toward the barrier dominate the mean.

A barrier is not enough for a long lifetime. With unnormalized attention the larger cluster moves faster by the factor
p/q at every β, δ² has the order of the other noise, and the gap is not small. Compare the mean lifetime.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from limitformer.base.errors import InputError
from limitformer.sphere.overlap.motion import Motion, log_speed, slope_at
from limitformer.sphere.overlap.panels import WEIGHTS, Panels, panels, separate
from limitformer.sphere.overlap.position import Array, artanh, at_artanh
from limitformer.sphere.overlap.scale import ScaleFunction


@dataclass(frozen=True)
class MetastableGap:
    """The speed measure of the gap 1 + z of two unequal clusters below the barrier, normalised.

    It is the stationary law of the gap if the barrier reflects, and the law while the clusters are antipodal in the
    limit of long lifetimes. For short ones the quasi-stationary law is nearer to −1 (see the module).

    Attributes:
        barrier: overlap beyond which the state ends.
        median: median of the gap.
        mean: mean of the gap, dominated by excursions toward the barrier.
        density: function of gaps in (0, 1 + barrier), any shape; zero beyond.
    """

    barrier: float
    median: float
    mean: float
    density: Callable[[ArrayLike], Array]


def metastable_gap(scale: ScaleFunction) -> MetastableGap:
    """Return the speed measure of the gap below the barrier; raise `InputError` if s has no maximum inside."""
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


def barrier(scale: ScaleFunction) -> float:
    """Return the u of the last maximum of s."""
    u = scale.cells.nodes.ravel()
    rising = np.flatnonzero(slope_at(scale.motion, u) > 0)
    if rising.size == 0:
        raise InputError(
            "No metastable state: the scale density falls all the way from -1 to 1. Nearest: a larger beta or a "
            "smaller dim."
        )
    from scipy.optimize import brentq  # slow to import, and workers of sweeps do not need it

    last = int(rising[-1])
    return float(brentq(lambda x: float(slope_at(scale.motion, np.array(x))), u[last], u[last + 1], xtol=1e-14))


def median(motion: Motion, inner: Panels, log_share: Array) -> float:
    """Return the gap with half of the mass below it; `log_share` (n + 1) is for the tail and each panel."""
    from scipy.optimize import brentq

    below = np.cumsum(np.exp(log_share))
    panel = int(np.searchsorted(below, 0.5)) - 1
    missing, whole = 0.5 - below[panel], below[panel + 1] - below[panel]
    low, high = inner.edges[panel : panel + 1], inner.edges[panel + 1 : panel + 2]
    full = mass_between(motion, low, high)
    u = brentq(lambda x: mass_between(motion, low, np.array([x])) / full - missing / whole, low[0], high[0])
    return float(at_artanh(u).above)


def mass_between(motion: Motion, low: Array, high: Array) -> float:
    """Return the integral of 2/(g² s) over a panel, with s = 1 at its left edge."""
    part = separate(motion, low, high)
    return float(np.exp(part.log_integral(part.log_speed - part.local))[0])
