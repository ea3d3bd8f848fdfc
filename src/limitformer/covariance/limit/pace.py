r"""How fast the covariance SDE moves at a state V: how short a step must be there.

Attention's part of the SDE is of higher order than V, so no fixed step resolves it everywhere: one that is too long
at a large V invents explosions. With P_αβ and W of `coefficients`, in a time h

* the noise N = √h (γ²/τ₀) B V moves a token, or a difference of two, by a part of itself: its mean square is
  (γ²/τ₀)² P h, and the variance of log|xᵅ − xᵝ|² is 4 (γ²/τ₀)² P h;
* the drift V∘P moves log V by (γ²/τ₀²) P h;
* the drift W V moves token α by a part |Σ_ν W_αν xᵛ| γ²h/(2τ₀²) of its norm √V_αα, at most
  |W_α| √(m_α D_α/V_αα) γ²h/(2τ₀²), where D_α is the mean square deviation of what α sees.

A step is short enough where the pace, the largest of 4 (γ²/τ₀)² P, 2 (γ²/τ₀²) P and twice the last one's rate, times h
is at most the resolution of the step. Without attention the pace is 0.
"""

from limitformer.covariance.limit.coefficients import (
    second_order_row,
    second_order_weights,
    spread_without_mask,
)
from limitformer.covariance.limit.differences import centre, variance_beyond_first
from limitformer.numerics.factor import gram, gram_of_lower
from limitformer.numerics.kernels import kernel
from limitformer.numerics.lanes import everywhere, larger, load, square_root, store, where_positive

FACTOR_RESOLUTION = 0.05
EULER_RESOLUTION = 0.02  # V takes the noise whole: beyond 7 standard deviations it would leave the cone


@kernel
def measure(constants, mask, factor, work):
    """The pace and P at V, whose `factor` is what the factor step carries, into `work.pace`.

    What else the step needs stays in `work`: V₀₀, V_αα − V₀₀ and s, or W with a mask.
    """
    store(work.pace, 0, 0, 0.0)
    store(work.pace, 1, 0, 0.0)
    if constants.mixing > 0.0:
        if mask.full:
            measure_differences(constants, factor, work)
        else:
            measure_rows(constants, mask, factor, work)


@kernel
def store_pace(constants, spread, bending, work):
    """`spread` is P or a bound of it, `bending` the largest |W_α| √(m_α D_α/V_αα)."""
    of_spread = max(4.0 * constants.mixing**2, 2.0 * constants.mixing_drift)
    of_bending = 2.0 * constants.second_order
    store(work.pace, 0, 0, larger(of_spread * spread, of_bending * bending))
    store(work.pace, 1, 0, spread)


@kernel
def measure_differences(constants, factor, work):
    """By way of C R and C V C, which do not cancel. W has the rows V_αα sᵀ/m, and m D is the trace of C V C."""
    m = factor.shape[0]
    first = load(factor, 0, 0) * load(factor, 0, 0)
    largest = first
    store(work.variances, 0, 0, first)
    for i in range(1, m):
        beyond = variance_beyond_first(factor, i)
        largest = larger(largest, first + beyond)
        store(work.variances, i, 0, beyond)
    centre(factor, work.sums, work.turned)
    gram(work.turned, work.normals)
    second_order_row(work.normals, work.column)
    trace, squares = everywhere(0.0), everywhere(0.0)
    for i in range(m):
        s = load(work.column, i, 0)
        trace, squares = trace + load(work.normals, i, i), squares + s * s
    bending = square_root(squares) * square_root(largest * trace) / float(m)  # the product could overflow
    store_pace(constants, spread_without_mask(work.normals), bending, work)


@kernel
def measure_rows(constants, mask, factor, work):
    """P_αα ≤ D_α², for the row α where it is largest."""
    m = factor.shape[0]
    gram_of_lower(factor, work.normals)
    second_order_weights(work.normals, mask, work.drift)
    spread, bending = everywhere(0.0), everywhere(0.0)
    for a in range(m):
        variance = load(work.normals, a, a)
        mean_of_means, mean_variance, squares = everywhere(0.0), everywhere(0.0), everywhere(0.0)
        for k in range(m):
            if mask.seen[a, k]:
                mean_of_means = mean_of_means + load(work.drift.means, a, k)
                mean_variance = mean_variance + load(work.normals, k, k)
                weight = where_positive(variance, load(work.drift.weights, a, k) / variance)
                squares = squares + weight * weight
        deviation = larger((mean_variance - mean_of_means) / mask.counts[a], everywhere(0.0))
        spread = larger(spread, deviation * deviation)
        length = square_root(variance * (deviation * mask.counts[a]))
        bending = larger(bending, square_root(squares) * length)
    store_pace(constants, spread, bending, work)
