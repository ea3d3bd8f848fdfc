r"""Exits from the ball |V| < r within a step of the limit, not only at its end.

A path that is inside at both ends of a step may have been outside between them. The factor step moves √|V| nearly
linearly in its noise. With y = √|V| at the ends, c = √r, and a Brownian bridge between them whose variance is that of
the step, y₀² σ²h/4, the path was outside with probability

  exp(−8 (c − y₀)(c − y₁)/(y₀² σ²h)),   σ² = 4 (a² tr V⁴ + (γ²/τ₀)² tr(V Q V Qᵀ))/|V|⁴ at the beginning of the step.

Q has the centred rows of V², over m_α (`centre_rows`); σ² dt is the variance of ⟨V, N + Nᵀ⟩/|V|², which is that of
d log|V|. The path stops there with this probability, by a uniform number that belongs to (seed, replica, step, short
step).

**Bound.** tr V⁴ ≤ |V|⁴, and the second part of σ² is at most 4(γ²/τ₀)²P (√m times it with a mask). So

  σ²h ≤ s² = 4a²dt + resolution (√m times it with a mask),

and for a path whose |V| is below r exp(−s √LEAST_CHANCE) at both ends the probability is below the least uniform
number. Since |V| ≤ tr V, nothing but tr V is computed for steps so far inside.

**Value.** V is continuous, so |V| = r at the exit: V at the end of the step is scaled to that. The change of
V between the exit and the end of the step has mean O(h), so the stopped V is right to first order. The time of the exit
is that of the step's end.
"""

from typing import NamedTuple

import numpy as np

from limitformer.covariance.limit.factor_step import centre_rows, step_workspace
from limitformer.numerics.elementary import U64
from limitformer.numerics.factor import multiply, put_in_lanes, trace_of_gram
from limitformer.numerics.kernels import allocator, driver, kernel
from limitformer.numerics.lanes import (
    LANES,
    all_below,
    everywhere,
    lane_matrix,
    larger,
    load,
    smaller,
    store,
    where_positive,
)
from limitformer.numerics.random import uniform_of
from limitformer.sampling.exits import norm_of

LEAST_CHANCE = 12.0  # exp(−2 · 12) = 4e-11 is below 2⁻³³, the least uniform number
LEAST_VARIANCE = 1e-300  # positive
BLOCKS_OF_STEP = U64(32)  # a step has 2³² blocks of random numbers
ACTIVE, TIME, FIRST, LAST, VARIANCE = 0, 1, 2, 3, 4  # rows of `Ball.lanes`


class Ball(NamedTuple):
    """The ball's radius, and scratch of one thread."""

    sizes: np.ndarray  # (3,): r, r exp(−s √LEAST_CHANCE), and the part of the pace that bounds σ²
    key_words: np.ndarray  # (2,) of the uniform numbers
    lanes: np.ndarray  # (5, 1, LANES): whether the step is the path's, its length, |V| before and after, σ²
    product: np.ndarray  # (m, m, LANES)


@allocator
def open_ball(tokens, constants, mask, radius, dt, resolution, key_words):
    share = 1.0 if mask.full else np.sqrt(tokens)
    most = 4.0 * constants.linear**2 * dt + (share * resolution if constants.mixing > 0.0 else 0.0)
    near = radius * np.exp(-np.sqrt(LEAST_CHANCE * most))
    return Ball(np.array([radius, near, share]), key_words, lane_matrix(5, 1), lane_matrix(tokens, tokens))


@kernel
def is_near(first, last, ball):
    """Return whether any path may leave the ball in a step that has these tr V at its ends."""
    return not all_below(larger(first, last), ball.sizes[1])


@kernel
def keep_active(first, last, ball):
    """Leave active only the paths that may leave, by tr V at both ends; return whether there are any."""
    store(ball.lanes, FIRST, 0, first)
    store(ball.lanes, LAST, 0, last)
    some = False
    for lane in range(LANES):
        far = ball.lanes[FIRST, 0, lane] < ball.sizes[1] and ball.lanes[LAST, 0, lane] < ball.sizes[1]
        if far:
            ball.lanes[ACTIVE, 0, lane] = 0.0
        some = some or ball.lanes[ACTIVE, 0, lane] > 0.0
    return some


@kernel
def measure_variance(constants, mask, before, work, ball):
    """σ² at V = `before` into `ball.lanes`; `work.pace` is the pace there."""
    m, size = before.shape[0], load(ball.lanes, FIRST, 0)
    inverse = where_positive(size, 1.0 / size)
    for i in range(m):
        for j in range(m):
            store(work.moved, i, j, inverse * load(before, i, j))
    multiply(work.moved, work.moved, work.normals)
    store(ball.lanes, VARIANCE, 0, (4.0 * constants.linear**2) * trace_of_gram(work.normals))
    if constants.mixing > 0.0:
        centre_rows(work.normals, mask)
        multiply(work.moved, work.normals, work.turned)
        multiply(work.normals, work.moved, ball.product)
        mixed = everywhere(0.0)
        for i in range(m):
            for j in range(m):
                mixed = mixed + load(work.turned, i, j) * load(ball.product, i, j)
        scale = (2.0 * constants.mixing) * size
        # The rounding of Q may exceed the variance itself where tokens are nearly parallel, but not the pace.
        mixed = smaller(scale * (scale * mixed), (ball.sizes[2] * 4.0 * constants.mixing**2) * load(work.pace, 1, 0))
        store(ball.lanes, VARIANCE, 0, load(ball.lanes, VARIANCE, 0) + larger(mixed, everywhere(0.0)))


@driver
def variance_at(v, constants, mask):
    """Return σ² at one V (m, m), for checks."""
    m = v.shape[0]
    work, ball = (
        step_workspace(m, constants, mask),
        open_ball(m, constants, mask, 1.0, 1.0, 1.0, np.zeros(2, np.uint64)),
    )
    in_lanes = lane_matrix(m, m)
    put_in_lanes(v, in_lanes)
    store(work.pace, 1, 0, np.inf)
    for lane in range(LANES):
        ball.lanes[FIRST, 0, lane] = norm_of(in_lanes, lane)
    measure_variance(constants, mask, in_lanes, work, ball)
    return ball.lanes[VARIANCE, 0, 0]


@kernel
def trace(v):
    total = everywhere(0.0)
    for i in range(v.shape[0]):
        total = total + load(v, i, i)
    return total


@kernel
def find_leaving(constants, mask, before, now, block, replica, work, ball):
    """Leave active only the paths that leave the ball in the step from V = `before` to `now`, or by its end."""
    for lane in range(LANES):
        ball.lanes[FIRST, 0, lane] = norm_of(before, lane)
        ball.lanes[LAST, 0, lane] = norm_of(now, lane)
    measure_variance(constants, mask, before, work, ball)
    for lane in range(LANES):
        if ball.lanes[ACTIVE, 0, lane] > 0.0 and not leaves(lane, block, replica, ball):
            ball.lanes[ACTIVE, 0, lane] = 0.0


@kernel
def leaves(lane, block, replica, ball):
    first, last = ball.lanes[FIRST, 0, lane], ball.lanes[LAST, 0, lane]
    radius, spread = ball.sizes[0], ball.lanes[VARIANCE, 0, lane] * ball.lanes[TIME, 0, lane]
    if not last < radius:  # NaN is outside
        return True
    if not (first > 0.0 and last > 0.0 and spread > LEAST_VARIANCE):
        return False
    inside = np.sqrt(radius / first)
    chance = np.exp(-8.0 * (inside - 1.0) * (inside - np.sqrt(last / first)) / spread)
    return uniform_of(block, replica + U64(lane), ball.key_words[0], ball.key_words[1]) < chance


@kernel
def is_finite(lane, ball):
    """Return whether |V| at the end of the step is finite."""
    return ball.lanes[LAST, 0, lane] < np.inf


@kernel
def scale_to_radius(lane, ball, ledger):
    """Scale V at the exit, which is V at the end of the step, to |V| = r."""
    scale = ball.sizes[0] / ball.lanes[LAST, 0, lane]
    for i in range(ledger.at_exit.shape[0]):
        for j in range(ledger.at_exit.shape[0]):
            ledger.at_exit[i, j, lane] *= scale
