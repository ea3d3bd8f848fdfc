r"""Trees of tokens that are near one another or near one another's antipodes: differences stored as separate numbers.

Coordinates of two unit vectors give |x ∓ y| with an absolute error of 1e-16. Hence a token i within a radius of an
earlier token p, or of −xᵖ, is stored as

  xⁱ = s xᵖ + D,    s = ±1,    D with a relative error of 1e-16;

p is its *parent*. A token without a parent is a *root*. Parents have lower numbers than their children and were the
nearest tokens when they were linked. So the difference of any two tokens of one tree is a sum of D's, and none of these
is much longer than that difference. Each replica has its own trees.

A parent on the same side, s = 1, is preferred unless it is ACROSS times as far as one on the other side. Links change
every few layers (`relations`): a root near an earlier token gets a parent. Less often a token changes its parent, if
another token is much nearer or is the first on its own side. A token farther than twice the radius becomes a root at
once.

A replica is *gathered* if it is one tree with all |D| negligible and QᵀK = I; its attention is known (`gathered`).
"""

from typing import NamedTuple

import numpy as np

from limitformer.numerics.factor import FIRST, transposed_rows
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


class NearTree(NamedTuple):
    """The links of N tokens with r coordinates; the last axis of a matrix has LANES entries."""

    parent: np.ndarray  # (N, LANES), −1 for a root
    children: np.ndarray  # (N,): replicas in which the token has a parent
    numbers: np.ndarray  # (N, 4): s, 0 for a root; the length before normalisation; ω and σ of `gathered`
    apart: np.ndarray  # (N, r): D; undefined for a root
    change: np.ndarray  # (N, N), scratch
    leader: np.ndarray  # (2, r): the parent of a token, and the length of that parent
    state: np.ndarray  # (STATES, 1), of `gathered`


@allocator
def open_near_tree(tokens, coordinates):
    return NearTree(
        np.full((tokens, LANES), -1, np.int64),
        np.zeros(tokens, np.int64),
        lane_matrix(tokens, 4),
        lane_matrix(tokens, coordinates),
        lane_matrix(tokens, tokens),
        lane_matrix(2, coordinates),
        lane_matrix(STATES, 1),
    )


@kernel
def link_initial(parent, sign, constants, x, tree):
    """Link tokens at the start, equally in all lanes; rows of `x` with a parent hold D and become tokens."""
    for i in range(x.shape[0]):
        store(tree.numbers, i, SIGN, sign[i])
        for lane in range(LANES):
            tree.parent[i, lane] = parent[i]
        if parent[i] < 0:
            continue
        for k in range(x.shape[1]):
            store(tree.apart, i, k, load(x, i, k))
            store(x, i, k, sign[i] * load(x, parent[i], k) + load(x, i, k))
    store(tree.state, NOW, FIRST, -1.0)
    refresh_counts(constants, tree)


@kernel
def refresh_counts(constants, tree):
    """Recompute all that depends only on the links; `constants` are those of attention."""
    n = len(tree.children)
    tree.children[:] = 0
    for lane in range(LANES):
        related = 0
        for i in range(n):
            if tree.parent[i, lane] >= 0:
                tree.children[i] += 1
                related += 1
        single = constants.isotropic and related == n - 1
        tree.state[SINGLE, 0, lane] = 1.0 if single else 0.0
        if single:
            weigh_tree(lane, constants.beta, constants.fixed, tree)


@kernel
def any_related(children):
    related = False
    for i in range(len(children)):
        related |= children[i] > 0
    return related


@kernel
def relation(i, j, lane, tree):
    """Return σ = ±1 with xⁱ ≈ σ xʲ for two tokens of one tree, otherwise 0."""
    sigma = 1.0
    while i != j:
        child = max(i, j)  # a parent comes before its children
        parent = tree.parent[child, lane]
        if parent < 0:
            return 0.0
        sigma *= tree.numbers[child, SIGN, lane]
        i, j = min(i, j), parent
    return sigma


@kernel
def difference(i, j, sigma, k, lane, tree):
    """Return coordinate k of xⁱ − σ xʲ for two tokens of one tree."""
    total, of_i, of_j = 0.0, 1.0, -sigma
    while i != j:
        if i > j:
            total += of_i * tree.apart[i, k, lane]
            of_i *= tree.numbers[i, SIGN, lane]
            i = tree.parent[i, lane]
        else:
            total += of_j * tree.apart[j, k, lane]
            of_j *= tree.numbers[j, SIGN, lane]
            j = tree.parent[j, lane]
    return total


@kernel
def gaps(x, i, j, lane, tree):
    """Return (1 − z, 1 + z) of tokens i and j: |xⁱ ∓ xʲ|²/2, by the sum of D's if they are in one tree."""
    minus, plus, own = 0.0, 0.0, 0.0
    sigma = relation(i, j, lane, tree)
    for k in range(x.shape[1]):
        less, more = x[i, k, lane] - x[j, k, lane], x[i, k, lane] + x[j, k, lane]
        minus += less * less
        plus += more * more
        if sigma != 0.0:
            part = difference(i, j, sigma, k, lane, tree)
            own += part * part
    return 0.5 * (own if sigma > 0.0 else minus), 0.5 * (own if sigma < 0.0 else plus)


@kernel
def update_links(x, near, change_over, constants, tree):
    """Link roots near an earlier token, and relink other tokens if `change_over`; `near` is the squared radius."""
    n = x.shape[0]
    closest = everywhere(0.0)
    for i in range(0, n, 2):
        transposed_rows(x, i, x, i + 2, tree.change)
        for row in range(i, min(i + 2, n)):
            for j in range(row):
                alone = load(tree.numbers, row, SIGN)
                overlap = magnitude(load(tree.change, row, j))
                store(tree.change, row, j, overlap)
                closest = larger(closest, choose(alone * alone, everywhere(0.0), overlap))
    store(tree.numbers, FIRST, LENGTH, closest)
    changed = False
    for lane in range(LANES):
        if change_over or tree.numbers[0, LENGTH, lane] >= 1.0 - 0.5 * near:
            changed |= link(x, near, change_over, lane, tree)
    if changed:
        refresh_counts(constants, tree)


@kernel
def link(x, near, change_over, lane, tree):
    """Link the roots of one replica, or all its tokens if `change_over`; return whether a link changed."""
    changed = False
    for i in range(1, x.shape[0]):
        parent = tree.parent[i, lane]
        if parent >= 0 and not change_over:
            continue
        best, sign, least, limit = -1, 1.0, np.inf, np.inf
        for j in range(i):
            if j != parent and tree.change[i, j, lane] < 1.0 - near:
                continue
            minus, plus = gaps(x, i, j, lane, tree)
            cost = min(minus, ACROSS * ACROSS * plus)
            if j == parent:
                limit = cost
            elif (cost < least or (cost == least and minus == cost)) and 2.0 * min(minus, plus) <= near:
                best, sign, least = j, 1.0 if cost == minus else -1.0, cost
        if parent >= 0 and sign <= tree.numbers[i, SIGN, lane]:
            limit *= CLOSER * CLOSER
        if best >= 0 and least < limit:
            relink(x, i, best, sign, lane, tree)
            changed = True
    return changed


@kernel
def relink(x, i, j, sign, lane, tree):
    """Make j the parent of i, with xⁱ ≈ sign · xʲ."""
    sigma = relation(i, j, lane, tree)
    for k in range(x.shape[1]):
        if sigma != 0.0:
            tree.apart[i, k, lane] = difference(i, j, sigma, k, lane, tree)
        else:
            tree.apart[i, k, lane] = x[i, k, lane] - sign * x[j, k, lane]
    tree.parent[i, lane] = j
    tree.numbers[i, SIGN, lane] = sign


@kernel
def unlink(i, lane, tree):
    tree.parent[i, lane] = -1
    tree.numbers[i, SIGN, lane] = 0.0
