r"""Merged tokens: bounds on whether a replica of N tokens has arrived, or may continue as two points (`two_clusters`).

A token at xᵖ + D, on the same side as its parent xᵖ, has the same attention as xᵖ up to order β|D|², if all tokens are
at one point or at antipodes:

  D′ = (D − ⟨D, u⟩ u)/|xᵖ + c V A|,    u the direction of xᵖ + c V A,    c = σ/√L.

So log |D| is a random walk with negative drift, whose clock runs with |A|². E (|D′|/|D|)^r ≤ 1 for an r near dim − 1,
the same for all |A|. As in `stopping.bound`, |D| ever returns to D_tol with probability at most (|D|/D_tol)^r.

* **One cluster**: all tokens are within `together`, where this probability is small enough for all. The replica has
  arrived.
* **Two clusters**, at any overlap: all tokens are within `close` of one of two. On the way from antipodes to one point
  attention distinguishes tokens of a cluster in first order of D, and distances may grow. No bound is known for that.
  Simulations show a factor of a hundred, and `close` allows for 1/`TRANSIT`. The relative error |D|/|X¹ ± X²| is less
  than the requested level.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from limitformer.numerics.kernels import allocator, kernel
from limitformer.numerics.lanes import LANES
from limitformer.sphere.near.near_tree import SIGN, gaps
from limitformer.sphere.pair.chain import PairConstants
from limitformer.sphere.stopping.bound import (
    LONGEST_STEP,
    MARGIN,
    ORDERS,
    SHORTEST_STEP,
    agree,
    exponent,
    log_ratios,
    stops,
)

NOT_YET = -1
SHARES = (0.1, 0.5, 1.0)  # values of |A| at which the exponent is computed
TURN = 0.01  # largest β|D|: relative difference in attention within one cluster
TRANSIT = 1e-20  # inverse of the allowed growth of |D|
LEAST_SQUARE = 1e-280  # |D|² clear of the least length of `near.differences`


class Merging(NamedTuple):
    """Distances at which tokens count as one, and at which two clusters may stop."""

    together: float  # largest |D|² in one cluster of all tokens; 0 for never
    close: float  # largest |D|² in each of two clusters
    relative: float  # largest |D|²/|X¹ ± X²|² in each of two clusters
    stop_plus: float  # w below which two clusters are one
    stop_minus: float  # w below which two clusters of equal size stay antipodes


class Merged(NamedTuple):
    """The replicas of one group that have arrived or continue as two points; (LANES,) each."""

    since: np.ndarray  # the layer, or NOT_YET
    size: np.ndarray  # p, tokens in the cluster of the first
    w: np.ndarray  # of the overlap of the two points (`pair.chain`)
    sign: np.ndarray
    head: np.ndarray  # (N,), scratch: the first token of the cluster of each token


NEVER = Merging(0.0, 0.0, 0.0, 0.0, 0.0)


@cache
def merging_bounds(constants: PairConstants, tokens: int, tolerance: float, level: float) -> Merging:
    """Return bounds for outcomes that change with probability at most `level`, or `NEVER` if there are none."""
    edge = min(tolerance / (2 - tolerance), (TURN / max(2 * abs(constants.beta), 1.0)) ** 2)
    coarse, fine = (walk_exponent(constants, edge, order) for order in ORDERS)
    if not (SHORTEST_STEP <= constants.step <= LONGEST_STEP and agree(coarse, fine)):
        return NEVER
    w = edge * (level / tokens) ** (2 / (MARGIN * fine))
    together = 4 * w / tokens**2  # a token may be at the end of a chain of parents
    close = together * TRANSIT**2
    minus = stops(constants, tolerance, level)[1] if tokens % 2 == 0 else 0.0  # only equal clusters stay antipodes
    return Merging(together, close, level**2, w, minus) if close > LEAST_SQUARE else NEVER


def walk_exponent(constants: PairConstants, edge: float, order: int) -> float:
    """Return the largest r with E (|D′|/|D|)^r ≤ 1 for all |A|, computed at the edge, where it is least."""
    w, turn = np.array([[edge]]), np.array([[constants.step * TURN]])
    laws = (log_ratios(constants.dim, order, w, np.array([[constants.step * a]]), turn) for a in SHARES)
    return min(exponent(law) for law in laws)


@allocator
def open_merged(tokens):
    since, size = np.zeros(LANES, np.int64), np.zeros(LANES, np.int64)
    return Merged(since, size, np.zeros(LANES), np.zeros(LANES), np.zeros(tokens, np.int64))


@kernel
def all_merged(layer, replicas, x, tree, bounds, merged):
    """Note the lanes below `replicas` that merge at this layer; return whether all have merged."""
    done = True
    for lane in range(replicas):
        if merged.since[lane] == NOT_YET:
            note_merged(layer, lane, x, tree, bounds, merged)
            done &= merged.since[lane] != NOT_YET
    return done


@kernel
def note_merged(layer, lane, x, tree, bounds, merged):
    """Note the clusters of one replica if it has one or two."""
    heads, other, square = find_heads(lane, tree, merged.head)
    if heads == 1 and square <= bounds.together:
        merged.since[lane], merged.size[lane] = layer, x.shape[0]
        merged.w[lane], merged.sign[lane] = 0.0, 1.0
    elif heads == 2 and square <= bounds.close:
        minus, plus = gaps(x, 0, other, lane, tree)
        if square <= bounds.relative * min(minus, plus):
            merged.since[lane], merged.size[lane] = layer, with_first(merged.head)
            merged.w[lane] = min(minus, plus) / max(minus, plus)
            merged.sign[lane] = 1.0 if minus <= plus else -1.0


@kernel
def with_first(head):
    """Return the number of tokens in the cluster of the first."""
    count = 0
    for i in range(len(head)):
        count += head[i] == 0
    return count


@kernel
def find_heads(lane, tree, head):
    """Return the number of tokens without a parent on the same side, the last one, and the largest other |D|²."""
    heads, other, largest = 0, 0, 0.0
    for i in range(len(head)):
        parent = tree.parent[i, lane]
        if parent < 0 or tree.numbers[i, SIGN, lane] < 0.0:
            heads, other, head[i] = heads + 1, i, i
            continue
        head[i], square = head[parent], 0.0
        for k in range(tree.apart.shape[1]):
            square += tree.apart[i, k, lane] * tree.apart[i, k, lane]
        largest = max(largest, square)
    return heads, other, largest
