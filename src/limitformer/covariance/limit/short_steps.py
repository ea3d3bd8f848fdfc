r"""The longest step that a state allows, and short steps instead of one that is too coarse.

**Pace.** Attention's part of the SDE is of higher order than V, so no fixed step resolves it everywhere: one that is
too long at a large V invents explosions. With P_αβ and W of `drift`, in a time h

* the noise N = √h (γ²/τ₀) B V moves a token, or a difference of two, by a part of itself: its mean square is
  (γ²/τ₀)² P h, and the variance of log|xᵅ − xᵝ|² is 4 (γ²/τ₀)² P h;
* the drift V∘P moves log V by (γ²/τ₀²) P h;
* the drift W V moves token α by a part |Σ_ν W_αν xᵛ| γ²h/(2τ₀²) of its norm √V_αα, at most
  |W_α| √(m_α D_α/V_αα) γ²h/(2τ₀²), where D_α is the mean square deviation of what α sees.

* a smooth activation moves log V_αα by up to (3γ²c₁ + 2γ²|c₂|) V_αα h.

The pace is the largest of 4 (γ²/τ₀)² P, 2 (γ²/τ₀²) P and twice the rates of the last two; it is 0 without them. A
step is short enough if the pace times h is at most the resolution.

**Short steps.** A path whose step dt is too coarse reaches the end of the step in short ones, each as long as the pace
at its own state allows. Their random numbers come from another stream, from blocks that belong to (replica, step). So
a path depends neither on its neighbours nor on their short steps, and a path without short steps has the numbers of a
fixed step.

**Near a ball** (`quicken_near_ball`) the pace is raised, so that the probability of an exit has a small error that
shrinks with dt: above tr V = r e^−NEAR it is four times the measured one, and more in proportion to 1/dt for
dt < 0.01; above r e^−NEXT no step is longer than dt/4.

The pace of an exploding path grows with |V|², and the path reaches any ball in a bounded number of short steps, about
log |V| over the resolution. A path that has used up its short steps before the end of the step is stopped with the
cause "resolution lost", because its further way is not known.
"""

from typing import NamedTuple

import numpy as np

from limitformer.covariance.limit.ball import (
    ACTIVE,
    BLOCKS_OF_STEP,
    TIME,
    find_leaving,
    is_finite,
    is_near,
    keep_active,
    scale_to_radius,
    trace,
)
from limitformer.covariance.limit.drift import is_smooth, second_order_row, second_order_weights, spread_without_mask
from limitformer.covariance.limit.euler import cholesky, euler_maruyama_step
from limitformer.covariance.limit.factor_step import (
    centre,
    covariance_of,
    factor_step,
    to_step_factor,
    trace_of,
    variance_beyond_first,
    variance_of,
)
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
from limitformer.sampling.exits import LEFT_BALL, LOST, record_exit

FACTOR_RESOLUTION = 0.05
EULER_RESOLUTION = 0.02  # V takes the noise whole: beyond 7 standard deviations it would leave the cone
RESOLVED_DT = 0.01  # for a shorter dt the resolution near the ball shrinks in proportion
NEAR, NEXT = 4.0, 2.0  # log(r/tr V) from which a path is near the ball, or next to it
MORE_STEPS = 4.0 * (1.0 - 1e-9)  # times as many steps there; just below 4, so that the fourth of dt is the last
MOST_SHORT_STEPS = 2**21  # in one step: ten times as many as a path at the threshold of explosion needs
MOST_STEPS = 2**31
LEAST_TIME = 1e-300  # positive
SHORTENED, REMAINING, SHORT = 0, 1, 2  # rows of `ShortSteps.lanes`


@kernel
def measure_pace(constants, mask, factor, work):
    """The pace and P at the V of a step's `factor` into `work.pace`.

    `work` then also has V₀₀, V_αα − V₀₀ and s, or W with a mask, for the step.
    """
    store(work.pace, 0, 0, 0.0)
    store(work.pace, 1, 0, 0.0)
    if constants.mixing > 0.0:
        if mask.full:
            measure_differences(constants, factor, work)
        else:
            measure_tokens(constants, mask, factor, work)
    if is_smooth(constants):
        rate = 6.0 * constants.square + 4.0 * abs(constants.cube)
        store(work.pace, 0, 0, larger(load(work.pace, 0, 0), rate * largest_variance(factor, mask)))


@kernel
def largest_variance(factor, mask):
    """Return the largest V_αα at a step's factor."""
    largest = everywhere(0.0)
    for i in range(factor.shape[0]):
        largest = larger(largest, variance_of(factor, mask, i))
    return largest


@kernel
def store_pace(constants, spread, second_order, work):
    """Store the pace; `spread` is P or a bound of it, `second_order` the largest |W_α| √(m_α D_α/V_αα)."""
    spread_rate = max(4.0 * constants.mixing**2, 2.0 * constants.mixing_drift)
    second_order_rate = 2.0 * constants.second_order
    store(work.pace, 0, 0, larger(spread_rate * spread, second_order_rate * second_order))
    store(work.pace, 1, 0, spread)


@kernel
def measure_differences(constants, factor, work):
    """Use C R and C V C, which do not cancel; W has the rows V_αα sᵀ/m, and m D is the trace of C V C."""
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
    second_order = square_root(squares) * square_root(largest * trace) / float(m)  # the product could overflow
    store_pace(constants, spread_without_mask(work.normals), second_order, work)


@kernel
def measure_tokens(constants, mask, factor, work):
    """Use the bound P_αα ≤ D_α², at the row α where it is largest."""
    m = factor.shape[0]
    gram_of_lower(factor, work.normals)
    second_order_weights(work.normals, mask, work.drift)
    spread, second_order = everywhere(0.0), everywhere(0.0)
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
        second_order = larger(second_order, square_root(squares) * length)
    store_pace(constants, spread, second_order, work)


class ShortSteps(NamedTuple):
    """Scratch of the paths that take short steps; matrices are (m, m, LANES)."""

    stream: Stream
    factor: np.ndarray
    moved: np.ndarray  # the factor after a short step
    covariance: np.ndarray  # V of the Euler-Maruyama step
    trial: np.ndarray  # V after a short step
    lanes: np.ndarray  # (3, 1, LANES): whether a lane takes short steps, its remaining time, its short step
    rules: (
        np.ndarray
    )  # (5,): the resolution; least tr V and multiple of the pace near the ball; least tr V and pace next to it


@allocator
def rules_of_ball(dt, resolution, radius):
    more = MORE_STEPS * max(1.0, RESOLVED_DT / dt)
    return np.array([resolution, radius * np.exp(-NEAR), more, radius * np.exp(-NEXT), MORE_STEPS * resolution / dt])


@allocator
def open_short_steps(tokens, dt, resolution, radius):
    return ShortSteps(
        open_stream(),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, tokens),
        lane_matrix(3, 1),
        rules_of_ball(dt, resolution, radius),
    )


@kernel
def quicken_near_ball(size, work, short):
    """Raise the measured pace of the paths whose `size` = tr V is near the ball."""
    rules, pace = short.rules, load(work.pace, 0, 0)
    pace = choose(size - rules[1], rules[2] * pace, pace)
    pace = choose(size - rules[3], larger(pace, everywhere(rules[4])), pace)
    store(work.pace, 0, 0, pace)


@kernel
def too_coarse(dt, work, short):
    """Return whether dt is too long for the measured state of any lane; NaN counts as too fast."""
    return not all_below(dt * load(work.pace, 0, 0), short.rules[0])


@kernel
def measure_root(constants, mask, root, work):
    """Measure the pace at V, given its lower triangular root."""
    to_step_factor(root, mask, work.moved)
    measure_pace(constants, mask, work.moved, work)


@kernel
def clear_short_steps(short):
    """Mark that no lane takes short steps."""
    store(short.lanes, SHORTENED, 0, 0.0)


@kernel
def begin_short_steps(step, dt, work, ledger, short):
    """Mark the lanes that need short steps, among the paths that are still inside; return whether there are any."""
    needed = False
    for lane in range(LANES):
        fine = dt * work.pace[0, 0, lane] < short.rules[0]
        shortened = ledger.exits[lane] == np.inf and not fine
        needed = needed or shortened
        short.lanes[SHORTENED, 0, lane] = 1.0 if shortened else 0.0
        short.lanes[REMAINING, 0, lane] = dt if shortened else 0.0
    seek(short.stream, U64(step) << BLOCKS_OF_STEP)
    return needed


@kernel
def most_short_steps(tokens):
    """Return the number of short steps for which the blocks of a step suffice."""
    return min(MOST_SHORT_STEPS, 2**33 // (tokens * (2 * tokens + 1)))


@kernel
def unfinished(short):
    """Return whether any lane has time remaining."""
    return not all_below(load(short.lanes, REMAINING, 0), LEAST_TIME)


@kernel
def choose_length(work, short):
    """Set the short step of every lane: the length that its pace allows, at most the remaining time."""
    allowed = short.rules[0] / load(work.pace, 0, 0)
    store(short.lanes, SHORT, 0, smaller(allowed, load(short.lanes, REMAINING, 0)))


@kernel
def accept_moved(moved, out, short):
    """`out` = `moved` in the lanes that have time remaining."""
    remaining = load(short.lanes, REMAINING, 0)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            store(out, i, j, choose(remaining, load(moved, i, j), load(out, i, j)))


@kernel
def count_time(short):
    """Subtract the short step from the remaining time."""
    remaining = load(short.lanes, REMAINING, 0)
    store(short.lanes, REMAINING, 0, choose(remaining, remaining - load(short.lanes, SHORT, 0), everywhere(0.0)))


@kernel
def stop_path(lane, step, dt, cause, value, ledger, short):
    """Stop a path at the end of its short step; its covariance stays `value`."""
    passed = short.lanes[REMAINING, 0, lane] - short.lanes[SHORT, 0, lane]
    record_exit(lane, step - min(1.0, max(0.0, passed / dt)), cause, value, ledger)
    short.lanes[REMAINING, 0, lane] = 0.0


@kernel
def check_short_ball(step, number, dt, constants, mask, before, now, work, ledger, ball, short):
    """Stop the paths that leave the ball in short step `number` from V = `before` to `now`.

    If |V| is not finite, resolution is lost. `keep_active` must have found paths that may leave.
    """
    store(ball.lanes, TIME, 0, load(short.lanes, SHORT, 0))
    block = (U64(step) << BLOCKS_OF_STEP) + U64(number + 1)
    find_leaving(constants, mask, before, now, block, short.stream.words[2], work, ball)
    for lane in range(LANES):
        if ball.lanes[ACTIVE, 0, lane] > 0.0:
            finite = is_finite(lane, ball)
            stop_path(lane, step, dt, LEFT_BALL if finite else LOST, now if finite else before, ledger, short)
            if finite:
                scale_to_radius(lane, ball, ledger)


@kernel
def activate_unfinished(ball, short):
    """Make the paths that have time remaining active."""
    store(ball.lanes, ACTIVE, 0, load(short.lanes, REMAINING, 0))


@kernel
def stop_unfinished(step, dt, value, ledger, short):
    """Stop the paths that still have time remaining."""
    for lane in range(LANES):
        if short.lanes[REMAINING, 0, lane] > 0.0:
            stop_path(lane, step, dt, LOST, value, ledger, short)


@kernel
def shorten_factor_step(step, dt, constants, mask, before, after, work, ledger, ball, short):
    """Move `before` by short steps into `after`, in the lanes where `dt` is too coarse."""
    if not begin_short_steps(step, dt, work, ledger, short):
        return
    copy(before, short.factor)
    first = trace_of(before, mask)
    measure_pace(constants, mask, before, work)
    quicken_near_ball(first, work, short)
    for number in range(most_short_steps(before.shape[0])):
        choose_length(work, short)
        factor_step(short.stream, load(short.lanes, SHORT, 0), constants, mask, short.factor, short.moved, work)
        last = trace_of(short.moved, mask)
        if is_near(first, last, ball):
            activate_unfinished(ball, short)
            if keep_active(first, last, ball):
                covariance_of(short.moved, mask, short.trial, ledger.now)
                covariance_of(short.factor, mask, short.trial, ledger.before)
                check_short_ball(
                    step, number, dt, constants, mask, ledger.before, ledger.now, work, ledger, ball, short
                )
        accept_moved(short.moved, short.factor, short)
        count_time(short)
        if not unfinished(short):
            break
        measure_pace(constants, mask, short.factor, work)
        quicken_near_ball(last, work, short)
        first = last
    covariance_of(short.factor, mask, short.trial, ledger.now)
    stop_unfinished(step, dt, ledger.now, ledger, short)
    take_short_steps(short.factor, after, short)


@kernel
def take_short_steps(moved, out, short):
    """`out` = `moved` in the lanes that took short steps."""
    shortened = load(short.lanes, SHORTENED, 0)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            store(out, i, j, choose(shortened, load(moved, i, j), load(out, i, j)))


@kernel
def shorten_euler_step(step, dt, constants, mask, root, work, ledger, ball, short):
    """Move `ledger.before`, whose root is `root`, by short Euler-Maruyama steps into `ledger.now`."""
    if not begin_short_steps(step, dt, work, ledger, short):
        return
    copy(root, short.factor)
    copy(ledger.before, short.covariance)
    measure_root(constants, mask, root, work)
    quicken_near_ball(trace(short.covariance), work, short)
    for number in range(most_short_steps(root.shape[0])):
        choose_length(work, short)
        copy(short.covariance, short.trial)
        long = load(short.lanes, SHORT, 0)
        euler_maruyama_step(short.stream, long, constants, mask, short.trial, short.factor, work)
        cholesky(short.trial, short.moved, work.failed)
        check_short_cone(step, dt, work.failed, ledger, short)
        activate_unfinished(ball, short)
        if keep_active(trace(short.covariance), trace(short.trial), ball):
            check_short_ball(
                step, number, dt, constants, mask, short.covariance, short.trial, work, ledger, ball, short
            )
        accept_moved(short.trial, short.covariance, short)
        accept_moved(short.moved, short.factor, short)
        count_time(short)
        if not unfinished(short):
            break
        measure_root(constants, mask, short.factor, work)
        quicken_near_ball(trace(short.covariance), work, short)
    stop_unfinished(step, dt, short.covariance, ledger, short)
    take_short_steps(short.covariance, ledger.now, short)


@kernel
def check_short_cone(step, dt, failed, ledger, short):
    """Stop the paths whose V has no root; they keep the last V that has one.

    Attention here moves V faster than the entries of V can resolve differences of tokens. The cause is lost resolution,
    which may hide an explosion, and not the exit from the cone of a step that is short enough.
    """
    for lane in range(LANES):
        if short.lanes[REMAINING, 0, lane] > 0.0 and failed[0, 0, lane] > 0.0:
            stop_path(lane, step, dt, LOST, short.covariance, ledger, short)
