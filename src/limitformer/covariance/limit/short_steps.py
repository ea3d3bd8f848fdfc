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

---
Many short steps in the place of one that is too coarse.

A step of length dt is too coarse for a path whose pace times dt (`pace`) exceeds the resolution. Such a path goes from
the state before the step to the end of the step in short ones, each as long as the pace at its own state allows. Its
random numbers come from a stream of their own, from blocks that belong to (replica, step); so what a path does depends
neither on its neighbours nor on whether they take short steps, and a path that never needs one has the numbers of a
fixed step.

A path that explodes has its pace grow with |V|², and reaches any ball in a bounded number of short steps, about
log |V| over the resolution. One that has used up its short steps before the end of the step is stopped with a cause of
its own, resolution lost: where it would have gone is not known.
"""

from typing import NamedTuple

import numpy as np

from limitformer.covariance.limit.differences import carry, centre, covariance_of, trace_of, variance_beyond_first
from limitformer.covariance.limit.drift import second_order_row, second_order_weights, spread_without_mask
from limitformer.covariance.limit.euler import cholesky, euler_maruyama_step
from limitformer.covariance.limit.factor_step import factor_step
from limitformer.numerics.elementary import U64
from limitformer.numerics.factor import copy, gram, gram_of_lower
from limitformer.numerics.kernels import allocator, kernel
from limitformer.numerics.lanes import (
    LANES,
    all_below,
    choose,
    everywhere,
    lane_matrix,
    larger,
    load,
    smaller,
    square_root,
    store,
    where_positive,
)
from limitformer.numerics.random import Stream, open_stream, seek
from limitformer.paths.exits import LEFT_BALL, LOST, norm_of, record_exit

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


MOST_SHORT_STEPS = 2**21  # in one step: ten times what a path takes at the threshold of explosion to come back or go
BLOCKS_OF_STEP = U64(32)  # a step has 2³² blocks of its own
MOST_STEPS = 2**31
LEAST_TIME = 1e-300  # positive


class ShortSteps(NamedTuple):
    """Scratch of the paths that take short steps; matrices are (m, m, LANES)."""

    stream: Stream
    factor: np.ndarray
    moved: np.ndarray  # the factor after a short step
    covariance: np.ndarray  # V of the Euler-Maruyama step
    trial: np.ndarray  # V after a short step
    lanes: np.ndarray  # (3, 1, LANES): the lanes that take short steps, the time that is left, the short step


TAKING, LEFT, SHORT = 0, 1, 2


@allocator
def open_short_steps(tokens):
    return ShortSteps(
        open_stream(),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, tokens),
        lane_matrix(3, 1),
    )


@kernel
def too_coarse(dt, resolution, work):
    """Whether dt is too long for the measured state of any lane; a pace that is not a number counts."""
    return not all_below(dt * load(work.pace, 0, 0), resolution)


@kernel
def measure_root(constants, mask, root, work):
    """The pace at V, given its lower triangular root."""
    carry(root, mask, work.moved)
    measure(constants, mask, work.moved, work)


@kernel
def begin(step, dt, resolution, work, ledger, short):
    """Note the lanes that need short steps, of the paths that are still inside; whether there are any."""
    found = False
    for lane in range(LANES):
        fine = dt * work.pace[0, 0, lane] < resolution
        taking = ledger.exits[lane] == np.inf and not fine
        found = found or taking
        short.lanes[TAKING, 0, lane] = 1.0 if taking else 0.0
        short.lanes[LEFT, 0, lane] = dt if taking else 0.0
    seek(short.stream, U64(step) << BLOCKS_OF_STEP)
    return found


@kernel
def most_short_steps(tokens):
    """What the blocks of a step are enough for."""
    return min(MOST_SHORT_STEPS, 2**33 // (tokens * (2 * tokens + 1)))


@kernel
def unfinished(short):
    """Whether any lane has time left."""
    return not all_below(load(short.lanes, LEFT, 0), LEAST_TIME)


@kernel
def choose_length(resolution, work, short):
    """The short step of every lane: what its pace allows, or what is left."""
    allowed = resolution / load(work.pace, 0, 0)
    store(short.lanes, SHORT, 0, smaller(allowed, load(short.lanes, LEFT, 0)))


@kernel
def keep_moved(moved, out, short):
    """`out` = `moved` in the lanes that have time left."""
    left = load(short.lanes, LEFT, 0)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            store(out, i, j, choose(left, load(moved, i, j), load(out, i, j)))


@kernel
def pass_time(short):
    """What is left is less by the short step."""
    left = load(short.lanes, LEFT, 0)
    store(short.lanes, LEFT, 0, choose(left, left - load(short.lanes, SHORT, 0), everywhere(0.0)))


@kernel
def stop(lane, step, dt, cause, value, ledger, short):
    """The path leaves at the end of its short step, `value` its covariance from now on."""
    passed = short.lanes[LEFT, 0, lane] - short.lanes[SHORT, 0, lane]
    record_exit(lane, step - min(1.0, max(0.0, passed / dt)), cause, value, ledger)
    short.lanes[LEFT, 0, lane] = 0.0


@kernel
def check_short_ball(step, dt, radius, now, before, ledger, short):
    """Stop the paths whose |V| (`now`) has reached the radius; one that is not a number is lost."""
    for lane in range(LANES):
        norm = norm_of(now, lane)
        if short.lanes[LEFT, 0, lane] > 0.0 and not norm < radius:
            finite = norm < np.inf
            value = now if finite else before
            stop(lane, step, dt, LEFT_BALL if finite else LOST, value, ledger, short)


@kernel
def give_up(step, dt, value, ledger, short):
    """Stop the paths that still have time left."""
    for lane in range(LANES):
        if short.lanes[LEFT, 0, lane] > 0.0:
            stop(lane, step, dt, LOST, value, ledger, short)


@kernel
def shorten_factor_step(step, dt, constants, mask, radius, before, after, work, ledger, short):
    """Put what short steps from `before` make into `after`, in the lanes where `dt` was too coarse."""
    if not begin(step, dt, FACTOR_RESOLUTION, work, ledger, short):
        return
    copy(before, short.factor)
    measure(constants, mask, before, work)
    for _ in range(most_short_steps(before.shape[0])):
        choose_length(FACTOR_RESOLUTION, work, short)
        factor_step(short.stream, load(short.lanes, SHORT, 0), constants, mask, short.factor, short.moved, work)
        if not all_below(trace_of(short.moved, mask), radius):
            covariance_of(short.moved, mask, short.trial, ledger.now)
            covariance_of(short.factor, mask, short.trial, ledger.before)
            check_short_ball(step, dt, radius, ledger.now, ledger.before, ledger, short)
        keep_moved(short.moved, short.factor, short)
        pass_time(short)
        if not unfinished(short):
            break
        measure(constants, mask, short.factor, work)
    covariance_of(short.factor, mask, short.trial, ledger.now)
    give_up(step, dt, ledger.now, ledger, short)
    take(short.factor, after, short)


@kernel
def take(found, out, short):
    """`out` = `found` in the lanes that took short steps."""
    taking = load(short.lanes, TAKING, 0)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            store(out, i, j, choose(taking, load(found, i, j), load(out, i, j)))


@kernel
def shorten_euler_step(step, dt, constants, mask, radius, root, work, ledger, short):
    """The same for Euler-Maruyama: from `ledger.before`, whose root is `root`, into `ledger.now`."""
    if not begin(step, dt, EULER_RESOLUTION, work, ledger, short):
        return
    copy(root, short.factor)
    copy(ledger.before, short.covariance)
    measure_root(constants, mask, root, work)
    for _ in range(most_short_steps(root.shape[0])):
        choose_length(EULER_RESOLUTION, work, short)
        copy(short.covariance, short.trial)
        long = load(short.lanes, SHORT, 0)
        euler_maruyama_step(short.stream, long, constants, mask, short.trial, short.factor, work)
        cholesky(short.trial, short.moved, work.failed)
        check_short_cone(step, dt, work.failed, ledger, short)
        check_short_ball(step, dt, radius, short.trial, short.covariance, ledger, short)
        keep_moved(short.trial, short.covariance, short)
        keep_moved(short.moved, short.factor, short)
        pass_time(short)
        if not unfinished(short):
            break
        measure_root(constants, mask, short.factor, work)
    give_up(step, dt, short.covariance, ledger, short)
    take(short.covariance, ledger.now, short)


@kernel
def check_short_cone(step, dt, failed, ledger, short):
    """Stop the paths whose V has no root; they keep the last one that had.

    Here attention moves V faster than its two tokens' differences can be followed in V itself: that is lost resolution
    and may hide an explosion, unlike an exit from the cone in a step that was short enough.
    """
    for lane in range(LANES):
        if short.lanes[LEFT, 0, lane] > 0.0 and failed[0, 0, lane] > 0.0:
            stop(lane, step, dt, LOST, short.covariance, ledger, short)
