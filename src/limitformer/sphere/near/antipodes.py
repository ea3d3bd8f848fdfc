r"""A(x) + A(−x) for a token near the antipode of its parent; it is small if as many tokens are at x as at −x.

With logits ℓ_j = β xᵀQᵀK xʲ, Z = Σ e^{ℓ_j} and Z̄ = Σ e^{−ℓ_j} (1 if unnormalized) it is the sum of
(e^{ℓ_j}/Z + e^{−ℓ_j}/Z̄) xʲ, in which tokens at x and at −x cancel. So it is summed tree by tree (`near_tree`):
xʲ = σ_j t + d_j for the root t, which has the logit ℓ, and ℓ_j = σ_j ℓ + λ_j with λ_j = β xᵀQᵀK d_j. With k± tokens of
σ = ±1, M± = Σ (e^{λ_j} − 1) over them and M̄± = Σ (e^{−λ_j} − 1),

  u = k₊ − k₋ + M₊ − M̄₋,   v = k₋ − k₊ + M₋ − M̄₊,   Z − Z̄ = Σ over trees of e^ℓ u + e^{−ℓ} v,   ζ = (Z − Z̄)/Z̄,

and the coefficient of t is { e^ℓ [u − ζ (k₋ + M̄₋)] − e^{−ℓ} [v − ζ (k₊ + M̄₊)] } / Z. Numbers of tokens cancel as
integers. The remaining terms are small and have all their digits.
"""

from typing import NamedTuple

import numpy as np

from limitformer.numerics.elementary import exponential, exponential_less_one
from limitformer.numerics.kernels import allocator, kernel, strict_kernel
from limitformer.numerics.lanes import LANES
from limitformer.sphere.near.near_tree import NOW, SIGN

# Rows of `Antipodes.numbers`, for each token: σ, e^λ − 1, e^{−λ} − 1, the weight of d;
FACING, RISE, FALL, WEIGHT = 0, 1, 2, 3
# for each root: ℓ, e^ℓ, e^{−ℓ}, and k₊, k₋, M₊, M₋, M̄₊, M̄₋, with the side of −x in the next row.
LOGIT, UP, DOWN, SIZE, MOMENT, MIRRORED = 4, 5, 6, 7, 9, 11
NUMBERS = 13


class Antipodes(NamedTuple):
    """The workspace of one replica."""

    root: np.ndarray  # (N,): the root of each token
    numbers: np.ndarray  # (NUMBERS, N)
    beyond: np.ndarray  # (r, N): d
    turned: np.ndarray  # (r,): β QᵀKᵀ x


@allocator
def open_antipodes(tokens, coordinates):
    return Antipodes(
        np.zeros(tokens, np.int64), np.zeros((NUMBERS, tokens)), np.zeros((coordinates, tokens)), np.zeros(coordinates)
    )


@kernel
def add_antipodes(x, constants, bilinear, tree, work, out):
    """Add A(xᵖ) + A(−xᵖ) to the rows of `out` of the tokens at the antipode of their parent p."""
    for lane in range(LANES):
        if tree.state[NOW, 0, lane] > 0.0:
            continue
        traced = False
        for i in range(1, x.shape[0]):
            if tree.numbers[i, SIGN, lane] < 0.0:
                if not traced:
                    trace_roots(x, lane, tree, work)
                    traced = True
                turn_token(x, tree.parent[i, lane], lane, constants, bilinear, work)
                add_even_part(x, i, lane, constants, work, out)


@strict_kernel
def trace_roots(x, lane, tree, work):
    """Compute the root, σ and d of every token of one replica."""
    for j in range(x.shape[0]):
        parent = tree.parent[j, lane]
        if parent < 0:
            work.root[j], work.numbers[FACING, j] = j, 1.0
            work.beyond[:, j] = 0.0
            continue
        sign = tree.numbers[j, SIGN, lane]
        work.root[j], work.numbers[FACING, j] = work.root[parent], sign * work.numbers[FACING, parent]
        for k in range(x.shape[1]):
            work.beyond[k, j] = sign * work.beyond[k, parent] + tree.apart[j, k, lane]


@strict_kernel
def turn_token(x, p, lane, constants, bilinear, work):
    """Compute the vector whose inner products with tokens are the logits of token p."""
    for k in range(x.shape[1]):
        if constants.isotropic:
            work.turned[k] = constants.beta * x[p, k, lane]
            continue
        work.turned[k] = 0.0
        for m in range(x.shape[1]):
            work.turned[k] += constants.beta * x[p, m, lane] * bilinear[m, k, lane]


@strict_kernel
def add_even_part(x, i, lane, constants, work, out):
    """Add A(xᵖ) + A(−xᵖ) to row i, given `turned` for p; strict, so sums keep their order."""
    of = work.numbers
    top = sum_trees(x, lane, work)
    if constants.isotropic:
        top = constants.beta
    elif constants.fixed > 0.0:
        top = 0.0
    mirrored, excess = totals(top, work)
    normal, mirror, zeta = 1.0 / (mirrored + excess), 1.0 / mirrored, excess / mirrored
    if constants.fixed > 0.0:
        normal, mirror, zeta = constants.fixed, constants.fixed, 0.0
    for j in range(x.shape[0]):
        t = work.root[j]
        up, down = of[UP, t], of[DOWN, t]
        if t == j:
            u, v = surplus(t, of)
            u -= zeta * (of[SIZE + 1, t] + of[MIRRORED + 1, t])
            v -= zeta * (of[SIZE, t] + of[MIRRORED, t])
            for k in range(x.shape[1]):
                out[i, k, lane] += normal * (up * u - down * v) * x[t, k, lane]
        here, there = (up, down) if of[FACING, j] > 0.0 else (down, up)
        of[WEIGHT, j] = normal * here * (1.0 + of[RISE, j]) + mirror * there * (1.0 + of[FALL, j])
    add_beyond(i, lane, work, out)


@strict_kernel
def sum_trees(x, lane, work):
    """Compute logits and the sums over each tree; return the largest absolute logit of a root."""
    of, n, top = work.numbers, x.shape[0], 0.0
    of[SIZE:] = 0.0
    of[LOGIT] = 0.0
    of[RISE] = 0.0
    for k in range(x.shape[1]):
        for j in range(n):
            of[LOGIT, j] += work.turned[k] * x[j, k, lane]
            of[RISE, j] += work.turned[k] * work.beyond[k, j]
    for j in range(n):
        of[RISE, j] = exponential_less_one(of[RISE, j])
        of[FALL, j] = -of[RISE, j] / (1.0 + of[RISE, j])
    for j in range(n):
        t, side = work.root[j], 0 if of[FACING, j] > 0.0 else 1
        top = max(top, abs(of[LOGIT, t]))
        of[SIZE + side, t] += 1.0
        of[MOMENT + side, t] += of[RISE, j]
        of[MIRRORED + side, t] += of[FALL, j]
    return top


@strict_kernel
def surplus(t, of):
    """Return u and v of the tree with root t."""
    number = of[SIZE, t] - of[SIZE + 1, t]
    u = number + (of[MOMENT, t] - of[MIRRORED + 1, t])
    v = -number + (of[MOMENT + 1, t] - of[MIRRORED, t])
    return u, v


@strict_kernel
def totals(top, work):
    """Return Z̄ and Z − Z̄."""
    of, mirrored, excess = work.numbers, 0.0, 0.0
    for t in range(len(work.root)):
        if work.root[t] == t:
            up, down = exponential(of[LOGIT, t] - top), exponential(-of[LOGIT, t] - top)
            of[UP, t], of[DOWN, t] = up, down
            u, v = surplus(t, of)
            mirrored += up * (of[SIZE + 1, t] + of[MIRRORED + 1, t]) + down * (of[SIZE, t] + of[MIRRORED, t])
            excess += up * u + down * v
    return mirrored, excess


@kernel
def add_beyond(i, lane, work, out):
    """Add Σ weight · d to row i."""
    for k in range(out.shape[1]):
        total = 0.0
        for j in range(len(work.root)):
            total += work.numbers[WEIGHT, j] * work.beyond[k, j]
        out[i, k, lane] += total
