r"""Attention between tokens on the sphere: A X for N tokens in rows.

* QᵀK = I: the logits β(⟨xⁱ, xʲ⟩ − 1) are symmetric and at most 0, or 2|β| if β < 0, so half of the exponentials do and
  no maximum is needed.
* any QᵀK: the logits |β| xⁱᵀ (±QᵀK) xʲ, from which softmax subtracts the maximum of the row.

With a causal mask the weights of later tokens are zero. Rows are then divided by their sum (softmax, [CT, eq. 2]) or
scaled to exp(logit)/N (unnormalized, [CT, eq. 3]). In between, rows of tokens with a parent become the rows of their
differences (`near.differences`). The last axis of a matrix has LANES entries (`lanes`).
"""

from typing import NamedTuple

import numpy as np

from limitformer.numerics.elementary import exponential, exponentials
from limitformer.numerics.factor import FIRST, multiply, multiply_transposed, transposed_rows
from limitformer.numerics.kernels import allocator, kernel, strict_kernel
from limitformer.numerics.lanes import everywhere, lane_matrix, larger, load, store


class AttentionParameters(NamedTuple):
    """Parameters of attention.

    `fixed` is 0 for softmax, otherwise the factor of the unnormalized weights: exp(β)/N if QᵀK = I, else 1/N.
    """

    beta: float
    fixed: float
    isotropic: bool
    causal: bool


class AttentionScratch(NamedTuple):
    """Scratch memory; r is the number of coordinates."""

    weights: np.ndarray  # (N, N)
    scales: np.ndarray  # (N, 1): factors of the rows of weights
    bilinear: np.ndarray  # (r, r), QᵀK
    turned: np.ndarray  # (N, r), X QᵀK


@allocator
def attention_workspace(tokens, coordinates, bilinear):
    spread = lane_matrix(bilinear.shape[0], bilinear.shape[1])
    for i in range(bilinear.shape[0]):
        for j in range(bilinear.shape[1]):
            spread[i, j, :] = bilinear[i, j]
    return AttentionScratch(
        lane_matrix(tokens, tokens), lane_matrix(tokens, 1), spread, lane_matrix(tokens, coordinates)
    )


@kernel
def weigh(x, constants, work):
    """Compute the weights of the tokens `x` (N, r) and the factors of their rows."""
    if constants.isotropic:
        symmetric_weights(x, constants.beta, work)
        if constants.causal:
            hide_later(work.weights)
    else:
        multiply(x, work.bilinear, work.turned)
        multiply_transposed(work.turned, x, work.weights)
        general_weights(constants.beta, constants.fixed > 0.0, constants.causal, work)
    for i in range(x.shape[0]):
        scale_of_row(i, constants.fixed, work)


@kernel
def mix(x, work, out):
    """Write A X to `out`."""
    multiply(work.weights, x, out)
    for i in range(x.shape[0]):
        scale_row(i, work.scales, out)


@kernel
def symmetric_weights(x, beta, work):
    """Compute exp(β(⟨xⁱ, xʲ⟩ − 1)), exactly 1 on the diagonal."""
    n = x.shape[0]
    for i in range(0, n, 2):
        transposed_rows(x, i, x, i + 2, work.weights)
        for row in range(i, min(i + 2, n)):
            weigh_earlier(row, beta, work.weights)
            store(work.weights, row, row, 1.0)


@strict_kernel
def weigh_earlier(i, beta, weights):
    """Replace ⟨xⁱ, xʲ⟩ in row i by exp(β(⟨xⁱ, xʲ⟩ − 1)) for j < i."""
    for j in range(i):
        w = exponential(beta * (load(weights, i, j) - 1.0))
        store(weights, i, j, w)
        store(weights, j, i, w)


@kernel
def hide_later(weights):
    for i in range(weights.shape[0]):
        for j in range(i + 1, weights.shape[0]):
            store(weights, i, j, everywhere(0.0))


@kernel
def general_weights(beta, unshifted, causal, work):
    """Compute exp(β·logit), shifted by the maximum of the visible logits of the row unless `unshifted`."""
    n = work.weights.shape[0]
    for i in range(n):
        top, seen = everywhere(0.0), i + 1 if causal else n
        if not unshifted:
            top = load(work.weights, i, FIRST)
            for j in range(1, seen):
                top = larger(top, load(work.weights, i, j))
        for j in range(seen):
            store(work.weights, i, j, beta * (load(work.weights, i, j) - top))
    exponentials(work.weights)
    if causal:
        hide_later(work.weights)


@kernel
def scale_of_row(i, fixed, work):
    """Set the factor of row i: one over the sum of its weights, or `fixed` > 0."""
    scale = everywhere(fixed)
    if fixed == 0.0:
        total = everywhere(0.0)
        for j in range(work.weights.shape[1]):
            total = total + load(work.weights, i, j)
        scale = 1.0 / total
    store(work.scales, i, FIRST, scale)


@kernel
def scale_row(i, scales, out):
    scale = load(scales, i, FIRST)
    for k in range(out.shape[1]):
        store(out, i, k, scale * load(out, i, k))
