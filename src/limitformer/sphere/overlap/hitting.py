r"""Mean times until the overlap reaches a level, or leaves an interval.

With f = 2/g² and h = log s in u, the mean time from u = x up to b, if −∞ does not attract, is
[Karlin and Taylor, 1981, ch. 15]

  E = ∫_x^b M(y) dy,   M(y) = ∫_{−∞}^y f(w) e^{h(y) − h(w)} dw,

and down to b < x, if +∞ does not attract, the same with N(y) = ∫_y^∞ f(w) e^{h(y) − h(w)} dw. If the end attracts, the
level is missed with positive probability. If its slope is zero, the level is reached but the mean is infinite. Toward
−1, f ~ e^{−growth·u}, so M = f/(−growth − slope) there. Where s is steep, M and N are f/|h′ − (log f)′ + (log|h′|)′|,
by parts.

The mean time to leave (a, b) from x, with S(x, y) = ∫_x^y s, is a sum of positive terms:

  E = S(x, b)/S(a, b) ∫_a^x S(a, w) f(w)/s(w) dw + S(a, x)/S(a, b) ∫_x^b S(w, b) f(w)/s(w) dw.

The lifetime of antipodal unequal clusters at large |β|: the leading term of the exact integral of `hitting`.

Softmax attention, p ≠ q. As β grows, the attraction between the clusters tends to zero at every fixed overlap, and the
drift to that of two free tokens: s(u) → sech u. The clusters spend their lifetime near −1, where the noise of
δ = a₊ − a₋ exceeds that of two free tokens. With v = 4(1 + z)/δ² there

  g² = 2σ²(1 + v)/v,    s = 2eᵘ ((1 + v)/v)^{(d−2)/2},    eᵘ = δ √(v/8),

  ∫ du/(g² s) = 1/(2√2 σ²δ) ∫₀^∞ v^{(d−3)/2} (1 + v)^{−d/2} dv = B(½, (d−1)/2)/(2√2 σ²δ),

and the way out contributes ∫ s du = ∫_{−1}^b dz/√(1 − z²) = π/2 + arcsin b. Twice the product of the two, with
δ → 2 e^{−2|β|} |p² − q²|/(pq), is

  E(−1 → b)  ~  (π/2 + arcsin b) · B(½, (d−1)/2)/(2√2) · pq/|p² − q²| · e^{2|β|}/σ².

for fixed b in (−1, 1). The omitted factor of s, e^{−(d−2) ∫ (p/q + q/p) e^{−|β|(1−z)} du}, is the attraction at b. As
|β|(1 − b) → ∞ the exact integral is shorter by the relative (d − 2)(p/q + q/p) e^{−|β|(1−b)}/(β² (1 − b²)^{3/2} (π/2 +
arcsin b)); at b = 0.9 that is 1.53 times the true difference at |β|(1 − b) = 4, and 1.22 times at 10.
"""

from math import asin, exp, pi, sqrt

import numpy as np
from scipy.special import beta as euler_beta
from scipy.special import logsumexp

from limitformer.sphere.overlap.motion import FlowMotion, Motion, log_speed, slope_at
from limitformer.sphere.overlap.panels import POINTS, WEIGHTS, Panels, cells, on_edges, panels
from limitformer.sphere.overlap.position import Array, at_artanh
from limitformer.sphere.overlap.scale import ScaleFunction, log_slope_growth


def rising_time(scale: ScaleFunction, start: float, target: float) -> float:
    """Return the mean time from u = `start` up to `target`, infinite unless paths from −1 return in finite time."""
    end = scale.motion.minus
    if not -end.growth - end.slope > 0:
        return np.inf
    first = scale.core_edges[0]
    steep = steep_time(scale.motion, start, min(target, first)) if scale.is_steep and start < first else 0.0
    if target <= first:
        return steep
    inner = panels(scale.motion, np.unique([first, max(start, first), target]))
    with np.errstate(over="ignore"):  # a lifetime of e^{710} is infinite
        return steep + total_between(inner, upward_occupation(scale, inner), start, target)


def falling_time(scale: ScaleFunction, start: float, target: float) -> float:
    """Return the mean time from u = `start` down to `target`, infinite unless paths from +1 return in finite time."""
    end = scale.motion.plus
    if not end.growth + end.slope > 0:
        return np.inf
    first = scale.core_edges[0]
    steep = steep_time(scale.motion, target, min(start, first)) if scale.is_steep and target < first else 0.0
    if start <= first:
        return steep
    inner = panels(scale.motion, np.unique([max(target, first), start, end.reach]))
    with np.errstate(over="ignore"):
        return steep + total_between(inner, downward_occupation(scale, inner), target, start)


def total_between(inner: Panels, values: Array, low: float, high: float) -> float:
    """Integrate `values` (n, NODES) over the panels from `low` to `high`, which are edges or outside all panels."""
    inside = (inner.edges[:-1] >= low) & (inner.edges[1:] <= high)
    return float(((inner.half * values) @ WEIGHTS)[inside].sum())


def upward_occupation(scale: ScaleFunction, inner: Panels) -> Array:
    """Return M at the nodes (n, NODES) of panels that begin at the first edge of the core."""
    motion, first = scale.motion, inner.edges[:1]
    if scale.is_steep:
        below = steep_occupation(motion, first)
    else:  # M in the exponential tail toward −1
        below = np.exp(log_speed(motion, first)) / (-motion.minus.growth - motion.minus.slope)
    parts = inner.log_integral(inner.log_speed - inner.local) - inner.heights[:-1]
    at_edges = np.logaddexp.accumulate(np.append(np.log(below), parts)) + inner.heights
    within = inner.from_left(np.exp(inner.log_speed - inner.local))
    return np.exp(inner.local) * (np.exp(at_edges[:-1, None]) + within)


def downward_occupation(scale: ScaleFunction, inner: Panels) -> Array:
    """Return N at the nodes (n, NODES) of panels that end at the exponential tail toward +1."""
    end = scale.motion.plus
    last = log_speed(scale.motion, inner.edges[-1:]) - np.log(end.growth + end.slope) - inner.heights[-1]
    parts = inner.log_integral(inner.log_speed - inner.local) - inner.heights[:-1]
    at_edges = np.logaddexp.accumulate(np.append(parts, last)[::-1])[::-1] + inner.heights
    # Relative to the right edge: e^{h − h(right)} N(right).
    beyond = np.exp(at_edges[1:, None] + inner.local - inner.rise[:, None])
    return beyond + np.exp(inner.local) * inner.to_right(np.exp(inner.log_speed - inner.local))


def steep_occupation(motion: Motion, u: Array) -> Array:
    """Return M of a falling, N of a rising log s where it is steep."""
    step = 1e-4 / (1 + motion.beta)
    speed_growth = (log_speed(motion, u + step) - log_speed(motion, u - step)) / (2 * step)
    rate = np.abs(slope_at(motion, u) - speed_growth + log_slope_growth(motion, u))
    return np.exp(log_speed(motion, u)) / rate


def steep_time(motion: Motion, low: float, high: float) -> float:
    """Integrate the steep occupation from `low` to `high`."""
    inner = on_edges(motion, cells(motion, np.array([low, high])))
    return float(((inner.half * steep_occupation(motion, inner.nodes)) @ WEIGHTS).sum())


def flow_time(motion: FlowMotion, start: float, target: float) -> float:
    """Return the time of the deterministic flow from u = `start` to `target`."""
    if target < start:
        return np.inf
    edges = cells(motion, np.array([start, target]))
    half = np.diff(edges)[:, None] / 2
    nodes = edges[:-1, None] + half * (1 + POINTS)
    return float(((half / motion.drift(at_artanh(nodes))) @ WEIGHTS).sum())


def exit_time(motion: Motion, low: float, high: float, start: float) -> float:
    """Return the mean time to leave (low, high) in u."""
    left, right = panels(motion, np.array([low, start])), panels(motion, np.array([start, high]))
    # log s is zero at `start`: h = height + shift on the left, height on the right.
    shift = -left.heights[-1]
    scale_left = left.log_integral(left.local) + left.heights[:-1] + shift
    scale_right = right.log_integral(right.local) + right.heights[:-1]
    log_left, log_right = logsumexp(scale_left), logsumexp(scale_right)
    log_all = np.logaddexp(log_left, log_right)
    before = np.logaddexp.accumulate(np.append(-np.inf, scale_left))[:-1, None]
    after = np.logaddexp.accumulate(np.append(scale_right, -np.inf)[::-1])[::-1][1:, None]
    height_left, height_right = left.heights[:-1, None] + shift, right.heights[:-1, None]
    from_low = np.logaddexp(before, np.log(left.from_left(np.exp(left.local))) + height_left)
    to_high = np.logaddexp(after, np.log(right.to_right(np.exp(right.local))) + height_right)
    spent_left = left.log_integral(from_low + left.log_speed - left.local - height_left)
    spent_right = right.log_integral(to_high + right.log_speed - right.local - height_right)
    terms = log_right - log_all + logsumexp(spent_left), log_left - log_all + logsumexp(spent_right)
    return float(np.exp(np.logaddexp(*terms)))


def inverse_push(p: int, q: int) -> float:
    """Return 2e^{−2|β|}/δ = pq/|p² − q²| for clusters of unequal size."""
    return p * q / abs(p * p - q * q)


def leading_lifetime(inverse: float, dim: int, beta: float, sigma: float, target: float) -> float:
    """Return the right-hand side with `inverse` for pq/|p² − q²| and b = `target` in (−1, 1)."""
    way = pi / 2 + asin(target)
    bottom = float(euler_beta(0.5, (dim - 1) / 2)) / (2 * sqrt(2))
    return way * bottom * inverse * exp(2 * abs(beta)) / sigma**2
