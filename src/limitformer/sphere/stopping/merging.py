r"""Tokens that have become one: when a replica of N tokens has arrived, or may go on as two points (`two_clusters`).

A token that is within D of its parent xᵖ, on the same side, receives what xᵖ receives but for something of the order
β|D|² where all tokens are at one point or at antipodes:

  D′ = (D − ⟨D, u⟩ u)/|xᵖ + c V A|,    u the direction of xᵖ + c V A,    c = σ/√L.

So log |D| is a random walk whose clock runs with |A|² and which falls on the whole: E (|D′|/|D|)^r ≤ 1 for an r near
dim − 1, the same for all |A|. As in `stopping`, |D| ever comes back to D_tol with a chance of at most (|D|/D_tol)^r.

* **One cluster**: all tokens within `together`, where that chance is small enough for all: it has arrived.
* **Two clusters**, wherever they are: all tokens within `close` of one of two. On the way from antipodes to one point
  attention tells tokens of a cluster apart in the first order of D, and distances may grow while it lasts. That is not
  bounded here: they were seen to grow a hundredfold, and `close` allows for a growth of 1/`TRANSIT`. What the points
  ignore, |D| beside |X¹ ± X²|, is less than the level asked for.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from limitformer.numerics.kernels import allocator, kernel
from limitformer.numerics.lanes import LANES
from limitformer.sphere.near.gathered import SIGN
from limitformer.sphere.near.near_tree import gaps
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
SHARES = (0.1, 0.5, 1.0)  # of |A|, at which the exponent is looked for
TURN = 0.01  # β|D| at most: by what part of |D| attention tells tokens of one cluster apart
TRANSIT = 1e-20  # of |D|
LEAST_SQUARE = 1e-280  # of a |D| that is not held up (`differences`)


class Merging(NamedTuple):
    """When tokens count as one, and when two clusters may stop."""

    together: float  # |D|² of all tokens beside the first; 0: never
    close: float  # |D|² of those beside their cluster's
    relative: float  # the same over the square of |X¹ ± X²|
    stop_plus: float  # w below which two clusters are one
    stop_minus: float  # w below which two clusters of as many tokens stay antipodes


class Merged(NamedTuple):
    """The replicas of one group that have arrived or go on as two points, (LANES,) each."""

    since: np.ndarray  # the layer, or NOT_YET
    size: np.ndarray  # p, tokens in the cluster of the first
    w: np.ndarray  # of the overlap of the two (`pair`)
    sign: np.ndarray
    head: np.ndarray  # (N,), scratch: the first token of each one's cluster


NEVER = Merging(0.0, 0.0, 0.0, 0.0, 0.0)


@cache
def merging_bounds(constants: PairConstants, tokens: int, tolerance: float, level: float) -> Merging:
    """The bounds for outcomes that change with a chance of at most `level`; `NEVER` where there is none."""
    edge = min(tolerance / (2 - tolerance), (TURN / max(2 * abs(constants.beta), 1.0)) ** 2)
    coarse, fine = (walk_exponent(constants, edge, order) for order in ORDERS)
    if not (SHORTEST_STEP <= constants.step <= LONGEST_STEP and agree(coarse, fine)):
        return NEVER
    w = edge * (level / tokens) ** (2 / (MARGIN * fine))
    together = 4 * w / tokens**2  # a token may be at the end of a chain of parents
    close = together * TRANSIT**2
    minus = stops(constants, tolerance, level)[1] if tokens % 2 == 0 else 0.0  # halves alone stay antipodes
    return Merging(together, close, level**2, w, minus) if close > LEAST_SQUARE else NEVER


def walk_exponent(constants: PairConstants, edge: float, order: int) -> float:
    """The largest r with E (|D′|/|D|)^r ≤ 1 for all |A|: where it is least, at the edge."""
    w, turn = np.array([[edge]]), np.array([[constants.step * TURN]])
    laws = (log_ratios(constants.dim, order, w, np.array([[constants.step * a]]), turn) for a in SHARES)
    return min(exponent(law) for law in laws)


@allocator
def open_merged(tokens):
    since, size = np.zeros(LANES, np.int64), np.zeros(LANES, np.int64)
    return Merged(since, size, np.zeros(LANES), np.zeros(LANES), np.zeros(tokens, np.int64))


@kernel
def all_merged(layer, replicas, x, forest, bounds, merged):
    """Note which of the first `replicas` lanes have merged at this layer; whether all have."""
    done = True
    for lane in range(replicas):
        if merged.since[lane] == NOT_YET:
            note_merged(layer, lane, x, forest, bounds, merged)
            done &= merged.since[lane] != NOT_YET
    return done


@kernel
def note_merged(layer, lane, x, forest, bounds, merged):
    """One replica: its two clusters, if it has no more."""
    heads, other, square = find_heads(lane, forest, merged.head)
    if heads == 1 and square <= bounds.together:
        merged.since[lane], merged.size[lane] = layer, x.shape[0]
        merged.w[lane], merged.sign[lane] = 0.0, 1.0
    elif heads == 2 and square <= bounds.close:
        minus, plus = gaps(x, 0, other, lane, forest)
        if square <= bounds.relative * min(minus, plus):
            merged.since[lane], merged.size[lane] = layer, with_first(merged.head)
            merged.w[lane] = min(minus, plus) / max(minus, plus)
            merged.sign[lane] = 1.0 if minus <= plus else -1.0


@kernel
def with_first(head):
    """Tokens in the cluster of the first."""
    count = 0
    for i in range(len(head)):
        count += head[i] == 0
    return count


@kernel
def find_heads(lane, forest, head):
    """How many tokens have no parent on their own side, the last of them, and the largest |D|² of the others."""
    heads, other, largest = 0, 0, 0.0
    for i in range(len(head)):
        parent = forest.parent[i, lane]
        if parent < 0 or forest.numbers[i, SIGN, lane] < 0.0:
            heads, other, head[i] = heads + 1, i, i
            continue
        head[i], square = head[parent], 0.0
        for k in range(forest.apart.shape[1]):
            square += forest.apart[i, k, lane] * forest.apart[i, k, lane]
        largest = max(largest, square)
    return heads, other, largest
