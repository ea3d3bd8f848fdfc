r"""Trees of tokens that are near one another or near one another's antipodes: differences stored as separate numbers.

Coordinates of two unit vectors give |x ∓ y| with an absolute error of 1e-16. Hence a token i within a radius of an
earlier token p, or of −xᵖ, is stored as

  xⁱ = s xᵖ + D,    s = ±1,    D with a relative error of 1e-16;

p is its *parent*. A token without a parent is a *root*. Parents have lower numbers than their children and were the
nearest tokens when they were linked. So the difference of any two tokens of one tree is a sum of D's, and none of these
is much longer than that difference. Each replica has its own trees.

A parent on the same side, s = 1, is preferred unless it is ACROSS times as far as one on the other side. Links change
every few layers: a root near an earlier token gets a parent. Less often a token changes its parent, if
another token is much nearer or is the first on its own side. A token farther than twice the radius becomes a root at
once.

A replica is *gathered* if it is one tree with all |D| negligible and QᵀK = I; its attention is known.
With k₊ of N tokens at the root x, k₋ at −x and e = e^{−2β}, A(x) = a x and A(x) + A(−x) = C x + Σ W_j d_j for tokens
σ_j x + d_j, where

  softmax:       a = (k₊ − k₋e)/Z₊,      C = 2e (k₊² − k₋²)/(Z₊Z₋),    W = 1/Z₊ + e/Z₋ at x, e/Z₊ + 1/Z₋ at −x,
  unnormalized:  a = (k₊ − k₋e) f,       C = (1 + e)(k₊ − k₋) f,        W = (1 + e) f,

Z± = k± + k∓e and f = e^β/N. Because d_j sums the differences D from the root to token j, Σ W_j d_j = Σ ω_i D_i, where
ω_i depends only on the tree. The other terms of `differences` are of order β|D|² and are omitted if β|D| is
negligible.

* **Radius**: 1e-2, or less so that |β ⟨D, QᵀK x⟩| ≤ 0.05. That is half the range of the series of eˣ − 1 in
  `differences`, because |D| may grow to twice the radius. A difference of coordinates has a relative error of 1e-14
  there.
* **Updates**: a gap falls at a rate of at most (dim − 1) (step · Σ weights)² per layer. So |D| becomes at most about e²
  times smaller between two updates and loses no significant digits.
"""

from math import exp, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from limitformer.models import SphereModel, StochasticTransformer
from limitformer.numerics.elementary import exponential
from limitformer.numerics.factor import FIRST, transposed_rows
from limitformer.numerics.kernels import allocator, kernel, strict_kernel
from limitformer.numerics.lanes import LANES, all_below, choose, everywhere, lane_matrix, larger, load, magnitude, store

NEGLIGIBLE = 1e-10  # largest |D|, and largest omitted term relative to D

# Rows of a tree's `state`: positive if the replica is gathered, 1 if all its tokens are in one tree, a, C.
NOW, SINGLE, ROOT, EVEN = np.int64(0), np.int64(1), np.int64(2), np.int64(3)
STATES = 4
# Columns of its `numbers`: the sign to the parent, the length before normalisation, ω, σ.
SIGN, LENGTH, OMEGA, SIGMA = np.int64(0), np.int64(1), np.int64(2), np.int64(3)


@kernel
def note_gathered(longest, beta, tree):
    """Mark the replicas that are gathered, given their largest |D|²."""
    edge = NEGLIGIBLE / max(beta, 1.0)
    single = load(tree.state, SINGLE, FIRST)
    store(tree.state, NOW, FIRST, choose(single, edge * edge - longest, everywhere(-1.0)))


@kernel
def all_gathered(state):
    return all_below(-1.0 * load(state, NOW, FIRST), 0.0)


@strict_kernel
def weigh_tree(lane, beta, fixed, tree):
    """Compute a, C and ω of a replica whose tokens are in one tree."""
    state, numbers = tree.state, tree.numbers
    n, plus = numbers.shape[0], 0.0
    for j in range(n):
        p = tree.parent[j, lane]
        numbers[j, SIGMA, lane] = 1.0 if p < 0 else numbers[j, SIGN, lane] * numbers[p, SIGMA, lane]
        plus += numbers[j, SIGMA, lane] > 0.0
    minus, e = n - plus, exponential(-2.0 * beta)
    at_plus, at_minus = 1.0 / (plus + minus * e), 1.0 / (minus + plus * e)
    state[EVEN, 0, lane] = 2.0 * e * (plus - minus) * n * at_plus * at_minus
    if fixed > 0.0:
        at_plus = at_minus = fixed
        state[EVEN, 0, lane] = (1.0 + e) * (plus - minus) * fixed
    state[ROOT, 0, lane] = (plus - minus * e) * at_plus
    for j in range(n):
        here = numbers[j, SIGMA, lane] > 0.0
        numbers[j, OMEGA, lane] = at_plus + e * at_minus if here else e * at_plus + at_minus
    for j in range(n - 1, 0, -1):  # children before their parents
        numbers[tree.parent[j, lane], OMEGA, lane] += numbers[j, SIGN, lane] * numbers[j, OMEGA, lane]


@kernel
def attend_gathered(x, tree, out):
    """Write attention, or its differences, into the rows of `out` for the replicas that are gathered."""
    now = load(tree.state, NOW, FIRST)
    for k in range(x.shape[1]):
        root = load(x, FIRST, k)
        even = load(tree.state, EVEN, FIRST) * root
        store(out, FIRST, k, choose(now, load(tree.state, ROOT, FIRST) * root, load(out, FIRST, k)))
        for i in range(1, x.shape[0]):
            even = even + load(tree.numbers, i, OMEGA) * load(tree.apart, i, k)
        for i in range(1, x.shape[0]):
            across = choose(-1.0 * load(tree.numbers, i, SIGN), even, everywhere(0.0))
            store(out, i, k, choose(now, across, load(out, i, k)))


CLOSER = 1e-3
ACROSS = 100.0


class NearTree(NamedTuple):
    """The links of N tokens with r coordinates; the last axis of a matrix has LANES entries."""

    parent: np.ndarray  # (N, LANES), −1 for a root
    children: np.ndarray  # (N,): replicas in which the token has a parent
    numbers: np.ndarray  # (N, 4): s, 0 for a root; the length before normalisation; ω and σ if it is gathered
    apart: np.ndarray  # (N, r): D; undefined for a root
    change: np.ndarray  # (N, N), scratch
    leader: np.ndarray  # (2, r): the parent of a token, and the length of that parent
    state: np.ndarray  # (STATES, 1)


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


RADIUS = 1e-2
LARGEST_CHANGE = 0.05  # of a logit over the radius
LARGEST_LOGIT = 600.0  # beyond it Z̄ of `antipodes` could underflow relative to Z
GAP_FLOOR = 1e-28  # least gap that coordinates resolve without differences
RAREST = 16
FALL = 4.0  # largest fall of the logarithm of a gap between two updates
CHANGE_FALL = 16.0  # and of one gap relative to another between two updates that change parents

Rows = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]


def nearness(model: SphereModel, step: float, drift: float, coordinates: int) -> tuple[float, int, int]:
    """Return the squared radius, and the layers between two updates and between two changes of parents.

    The radius is 0, and no differences are stored, for logits beyond LARGEST_LOGIT unless QᵀK = I, and for a causal
    mask, where nearby tokens attend to different prefixes.
    """
    largest = abs(model.beta) * (drawn_norm(model, coordinates) if model.is_fresh else model.largest_bilinear)
    if model.is_causal or (largest > LARGEST_LOGIT and not model.is_isotropic):
        return 0.0, RAREST, RAREST
    radius = min(RADIUS, LARGEST_CHANGE / max(largest, 1e-300))
    weights = exp(min(largest, LARGEST_LOGIT)) if model.attention == "unnormalized" else 1.0
    rate = max(model.dim - 1, 4) * (step * weights) ** 2 + 2 * drift * weights
    every = int(min(max(FALL / max(rate, 1e-300), 1), RAREST))
    return radius**2, every, every * int(min(max(CHANGE_FALL / max(rate * every, 1e-300), 1), 1000))


def drawn_norm(model: SphereModel, coordinates: int) -> float:
    """Return a bound on the norm of a drawn QᵀK (coordinates, coordinates).

    A layer exceeds it with a probability below 1e-3, and below 1e-7 for normal entries [Davidson and Szarek, 2001].
    """
    assert isinstance(model, StochasticTransformer)
    if model.head_dim is None:
        return model.tau * (2 * sqrt(coordinates) + 6)
    side = sqrt(coordinates) + sqrt(model.head_dim) + 4
    return model.tau * side * side / sqrt(model.head_dim)


def alone(rows: NDArray[np.float64]) -> Rows:
    """Return the rows with no parents and zero signs."""
    return rows, np.full(len(rows), -1), np.zeros(len(rows))


def related(tokens: NDArray[np.float64], near: float) -> Rows:
    """Link each token to the nearest earlier one within √`near`; return rows (N, d), parents (−1: none), signs (N,)."""
    rows, parents, signs = alone(tokens.copy())
    for i in range(1, len(tokens)):
        apart = tokens[i] - np.stack([tokens[:i], -tokens[:i]])  # (2, i, d)
        square = (apart**2).sum(-1)
        mirrored, parent = np.unravel_index(square.argmin(), square.shape)
        if square[mirrored, parent] <= near:
            rows[i], parents[i], signs[i] = apart[mirrored, parent], parent, 1 - 2 * mirrored
    return rows, parents, signs


def related_pair(overlap: float, coordinates: int, near: float) -> Rows:
    """Return two tokens of overlap z; row 1 holds the components of the second along and across the first."""
    sign = 1.0 if overlap >= 0 else -1.0
    gap = 1 - abs(overlap)
    rows, parents, signs = alone(np.zeros((2, coordinates)))
    rows[1, :2] = overlap, np.sqrt(gap * (1 + abs(overlap)))
    if 2 * gap <= near:
        rows[1, 0], parents[1], signs[1] = -sign * gap, 0, sign
    return rows, parents, signs
