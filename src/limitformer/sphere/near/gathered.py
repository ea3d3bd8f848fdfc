r"""Attention if all tokens of a replica are at x and −x to ten digits, with QᵀK = I.

With k₊ of N tokens at the root x, k₋ at −x and e = e^{−2β}, A(x) = a x and A(x) + A(−x) = C x + Σ W_j d_j for tokens
σ_j x + d_j, where

  softmax:       a = (k₊ − k₋e)/Z₊,      C = 2e (k₊² − k₋²)/(Z₊Z₋),    W = 1/Z₊ + e/Z₋ at x, e/Z₊ + 1/Z₋ at −x,
  unnormalized:  a = (k₊ − k₋e) f,       C = (1 + e)(k₊ − k₋) f,        W = (1 + e) f,

Z± = k± + k∓e and f = e^β/N. Because d_j sums the differences D from the root to token j, Σ W_j d_j = Σ ω_i D_i, where
ω_i depends only on the tree. The other terms of `differences` are of order β|D|² and are omitted if β|D| is
negligible.
"""

import numpy as np

from limitformer.numerics.elementary import exponential
from limitformer.numerics.factor import FIRST
from limitformer.numerics.kernels import kernel, strict_kernel
from limitformer.numerics.lanes import all_below, choose, everywhere, load, store

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
