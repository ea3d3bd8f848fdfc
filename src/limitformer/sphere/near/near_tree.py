r"""Differences of tokens that are next to each other or to each other's antipode, as numbers of their own.

Coordinates of two unit vectors tell |x ∓ y| to 1e-16, however small it is. So a token i that is within a radius of ± an
earlier token p is carried as

  xⁱ = s xᵖ + D,    s = ±1,    D with digits of its own;

p is its *parent*. A token without a parent is a *root*. Each replica has a forest of its own. As parents come first and
were the nearest ones when they were chosen, the difference of any two tokens of a tree is a sum of D's, none of which
is much longer than it.

A parent on the same side, s = 1, is preferred to one across if it is not ACROSS times as far. A forest changes at looks
(`relations`): roots near to an earlier token get a parent; less often, a token that has another one much nearer than
its parent, or one on its own side, changes over. A token farther than twice the radius becomes a root at once.

A replica is *gathered* if it is one tree with all |D| negligible (and QᵀK = I): then its attention is known
(`gathered`).
"""

from typing import NamedTuple

import numpy as np

from limitformer.numerics.factor import FIRST, transposed_block
from limitformer.numerics.kernels import allocator, kernel
from limitformer.numerics.lanes import (
    LANES,
    choose,
    everywhere,
    lane_matrix,
    larger,
    load,
    magnitude,
    store,
)
from limitformer.sphere.near.gathered import LENGTH, NOW, SIGN, SINGLE, STATES, weigh_tree

CLOSER = 1e-3
ACROSS = 100.0


class Forest(NamedTuple):
    """The relations of N tokens with r coordinates; matrices have LANES behind."""

    parent: np.ndarray  # (N, LANES), −1 for a root
    children: np.ndarray  # (N,): replicas in which the token has a parent
    numbers: np.ndarray  # (N, 4): s, 0 for a root; the length before a token is normalised; ω and σ of `gathered`
    apart: np.ndarray  # (N, r): D; anything for a root
    change: np.ndarray  # (N, N), scratch
    change_flat: np.ndarray  # its memory in one row
    leader: np.ndarray  # (2, r): a token's parent, and its length
    state: np.ndarray  # (STATES, 1), of `gathered`


@allocator
def open_forest(tokens, coordinates):
    """No relations."""
    change = lane_matrix(tokens, tokens)
    return Forest(
        np.full((tokens, LANES), -1, np.int64),
        np.zeros(tokens, np.int64),
        lane_matrix(tokens, 4),
        lane_matrix(tokens, coordinates),
        change,
        change.reshape(tokens * tokens * LANES),
        lane_matrix(2, coordinates),
        lane_matrix(STATES, 1),
    )


@kernel
def plant(parent, sign, constants, x, forest):
    """The relations (N,) at the start, the same in all lanes; `x` has D's in place of tokens that have a parent."""
    for i in range(x.shape[0]):
        store(forest.numbers, i, SIGN, sign[i])
        for lane in range(LANES):
            forest.parent[i, lane] = parent[i]
        if parent[i] < 0:
            continue
        for k in range(x.shape[1]):
            store(forest.apart, i, k, load(x, i, k))
            store(x, i, k, sign[i] * load(x, parent[i], k) + load(x, i, k))
    store(forest.state, NOW, FIRST, -1.0)
    settle(constants, forest)


@kernel
def settle(constants, forest):
    """Bring up to date what depends on the relations alone; `constants` are those of attention."""
    n = len(forest.children)
    forest.children[:] = 0
    for lane in range(LANES):
        related = 0
        for i in range(n):
            if forest.parent[i, lane] >= 0:
                forest.children[i] += 1
                related += 1
        single = constants.isotropic and related == n - 1
        forest.state[SINGLE, 0, lane] = 1.0 if single else 0.0
        if single:
            weigh_tree(lane, constants.beta, constants.fixed, forest)


@kernel
def any_related(children):
    """Whether a token has a parent."""
    related = False
    for i in range(len(children)):
        related |= children[i] > 0
    return related


@kernel
def relation(i, j, lane, forest):
    """σ = ±1 of two tokens of one tree, xⁱ ≈ σ xʲ; 0 if they are in different ones."""
    sigma = 1.0
    while i != j:
        child = max(i, j)  # a parent comes before its children
        parent = forest.parent[child, lane]
        if parent < 0:
            return 0.0
        sigma *= forest.numbers[child, SIGN, lane]
        i, j = min(i, j), parent
    return sigma


@kernel
def difference(i, j, sigma, k, lane, forest):
    """Coordinate k of xⁱ − σ xʲ, of two tokens of one tree."""
    total, of_i, of_j = 0.0, 1.0, -sigma
    while i != j:
        if i > j:
            total += of_i * forest.apart[i, k, lane]
            of_i *= forest.numbers[i, SIGN, lane]
            i = forest.parent[i, lane]
        else:
            total += of_j * forest.apart[j, k, lane]
            of_j *= forest.numbers[j, SIGN, lane]
            j = forest.parent[j, lane]
    return total


@kernel
def gaps(x, i, j, lane, forest):
    """(1 − z, 1 + z) of tokens i and j of one replica: |xⁱ ∓ xʲ|²/2, from their own difference where they have one."""
    minus, plus, own = 0.0, 0.0, 0.0
    sigma = relation(i, j, lane, forest)
    for k in range(x.shape[1]):
        less, more = x[i, k, lane] - x[j, k, lane], x[i, k, lane] + x[j, k, lane]
        minus += less * less
        plus += more * more
        if sigma != 0.0:
            part = difference(i, j, sigma, k, lane, forest)
            own += part * part
    return 0.5 * (own if sigma > 0.0 else minus), 0.5 * (own if sigma < 0.0 else plus)


@kernel
def look(x, near, change_over, constants, forest):
    """Find new relations: `near` is the square of the radius."""
    n = x.shape[0]
    closest = everywhere(0.0)
    for i in range(0, n, 2):
        for j in range(0, i + 2, 4):
            transposed_block(x, i, x, j, x.shape[1], forest.change)
        for row in range(i, min(i + 2, n)):
            for j in range(row):
                alone = load(forest.numbers, row, SIGN)
                overlap = magnitude(load(forest.change, row, j))
                store(forest.change, row, j, overlap)
                closest = larger(closest, choose(alone * alone, everywhere(0.0), overlap))
    store(forest.numbers, FIRST, LENGTH, closest)
    changed = False
    for lane in range(LANES):
        if change_over or forest.numbers[0, LENGTH, lane] >= 1.0 - 0.5 * near:
            changed |= relate(x, near, change_over, lane, forest)
    if changed:
        settle(constants, forest)


@kernel
def relate(x, near, change_over, lane, forest):
    """Find parents for the roots of a replica, or for all of its tokens; whether there were any."""
    changed = False
    for i in range(1, x.shape[0]):
        parent = forest.parent[i, lane]
        if parent >= 0 and not change_over:
            continue
        best, sign, least, limit = -1, 1.0, np.inf, np.inf
        for j in range(i):
            if j != parent and forest.change[i, j, lane] < 1.0 - near:
                continue
            minus, plus = gaps(x, i, j, lane, forest)
            cost = min(minus, ACROSS * ACROSS * plus)
            if j == parent:
                limit = cost
            elif (cost < least or (cost == least and minus == cost)) and 2.0 * min(minus, plus) <= near:
                best, sign, least = j, 1.0 if cost == minus else -1.0, cost
        if parent >= 0 and sign <= forest.numbers[i, SIGN, lane]:
            limit *= CLOSER * CLOSER
        if best >= 0 and least < limit:
            adopt(x, i, best, sign, lane, forest)
            changed = True
    return changed


@kernel
def adopt(x, i, j, sign, lane, forest):
    """Make j the parent of i, xⁱ ≈ sign · xʲ."""
    sigma = relation(i, j, lane, forest)
    for k in range(x.shape[1]):
        if sigma != 0.0:
            forest.apart[i, k, lane] = difference(i, j, sigma, k, lane, forest)
        else:
            forest.apart[i, k, lane] = x[i, k, lane] - sign * x[j, k, lane]
    forest.parent[i, lane] = j
    forest.numbers[i, SIGN, lane] = sign


@kernel
def release(i, lane, forest):
    """Make token i of a replica a root."""
    forest.parent[i, lane] = -1
    forest.numbers[i, SIGN, lane] = 0.0
