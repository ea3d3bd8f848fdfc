"""Exits: paths end when they leave a ball, as in local convergence [ST, Def. 4.1].

The stopped process V_{t ∧ T_r}, T_r = inf{t: |V_t| ≥ r} in the Frobenius norm, keeps the value of its exit. Paths run
side by side (`lanes`); a path that has left runs on with the others, but its recorded value no longer changes.
"""

from typing import NamedTuple

import numpy as np

from limitformer.numerics.factor import gram, trace_of_gram
from limitformer.numerics.kernels import allocator, kernel
from limitformer.numerics.lanes import LANES, all_below, everywhere, lane_matrix, load, square_root, store
from limitformer.sampling.arrays import TILE

INSIDE, LEFT_BALL, LEFT_CONE, LOST, NO_NUMBER = 0, 1, 2, 3, 4
CAUSES = (
    "inside",
    "left the ball",
    "left the cone of covariance matrices",
    "lost their resolution in time",
    "met a NaN or infinity from a user function",
)

LARGEST_RADIUS = 1e100  # the default: beyond, a cubic drift overflows within a few steps
OVERFLOW_RADIUS = 1e120  # an exit beyond this is an artefact of the step: the path keeps the value before it


class Ledger(NamedTuple):
    """The state of `LANES` paths: V, norms and exits."""

    now: np.ndarray  # (m, m, LANES): V
    before: np.ndarray  # (m, m, LANES): V one step ago
    at_exit: np.ndarray  # (m, m, LANES): V at the exit
    norm: np.ndarray  # (1, 1, LANES): |V|
    tiles: np.ndarray  # (2, TILE, LANES): entries on their way from lanes to rows
    exits: np.ndarray  # (LANES,): step of the exit, ∞ if none
    causes: np.ndarray  # (LANES,)


@allocator
def open_ledger(tokens):
    return Ledger(
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, tokens),
        lane_matrix(1, 1),
        lane_matrix(2, TILE),
        np.empty(LANES),
        np.empty(LANES, np.int8),
    )


@kernel
def clear_exits(ledger):
    for lane in range(LANES):
        ledger.exits[lane] = np.inf
        ledger.causes[lane] = INSIDE


@kernel
def copy_exits(ledger, begin, exits, causes):
    """Copy steps and causes of the exits of the paths `begin`, `begin` + 1, … to `exits` and `causes` (paths,)."""
    for lane in range(min(LANES, len(exits) - begin)):
        exits[begin + lane] = ledger.exits[lane]
        causes[begin + lane] = ledger.causes[lane]


@kernel
def record_exit(lane, step, cause, value, ledger):
    """Record that a path left; `value` (m, m, LANES) is its covariance from now on."""
    ledger.exits[lane] = step
    ledger.causes[lane] = cause
    for i in range(value.shape[0]):
        for j in range(value.shape[0]):
            ledger.at_exit[i, j, lane] = value[i, j, lane]


@kernel
def check_ball(step, radius, ledger):
    """Record the exits of the paths whose |V| (`now`) has reached the radius."""
    squared = everywhere(0.0)
    for i in range(ledger.now.shape[0]):
        for j in range(ledger.now.shape[0]):
            v = load(ledger.now, i, j)
            squared = squared + v * v
    norm = square_root(squared)
    if all_below(norm, radius):
        return
    store(ledger.norm, 0, 0, norm)
    for lane in range(LANES):
        norm_of_lane = ledger.norm[0, 0, lane]
        if ledger.exits[lane] == np.inf and not norm_of_lane < radius:  # NaN is outside
            good = norm_of_lane < OVERFLOW_RADIUS
            record_exit(lane, step, LEFT_BALL, ledger.now if good else ledger.before, ledger)


@kernel
def norm_of(v, lane):
    squared = 0.0
    for i in range(v.shape[0]):
        for j in range(v.shape[0]):
            squared += v[i, j, lane] * v[i, j, lane]
    return np.sqrt(squared)


@kernel
def check_factor(factor, previous, step, radius, ledger):
    """Do the same as `check_ball` for V = R Rᵀ, formed only if its trace, a bound of |V|, reaches the radius."""
    if not all_below(trace_of_gram(factor), radius):
        gram(factor, ledger.now)
        gram(previous, ledger.before)
        check_ball(step, radius, ledger)


@kernel
def first_at(points, step):
    """Return the position of the first of the ascending `points` that is not before `step`."""
    low, high = 0, len(points)
    while low < high:
        middle = (low + high) // 2
        if points[middle] < step:
            low = middle + 1
        else:
            high = middle
    return low
