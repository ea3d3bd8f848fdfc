r"""The attention sublayer's output factor: U = A R, from the factor R of the tokens.

Logits: Y = X W_Q W_Kᵀ Xᵀ/n = R (T G) Rᵀ with T = bartlett(r, n_k) and G standard normal [design of `factor`].
Attention [ST, eq. 9], each part on or off: A = identity·I + softmax(Y/τ) − center·p, where row α of the softmax and
of p runs over the m_α tokens that α sees, p = 1/m_α there.

Several heads with an output projection: S_h = A_h R T_h with T_h = bartlett(r, n_k) for the head's values. The
outputs side by side, [S_1 | … | S_H]/√(H n_k), meet one Gaussian matrix, so only their lower triangular factor
matters.
"""

from typing import NamedTuple

import numpy as np

from limitformer.factor import (
    draw_bartlett,
    draw_gaussian_product,
    multiply,
    multiply_transposed,
    triangularise,
)
from limitformer.kernels import driver, kernel


class AttentionConstants(NamedTuple):
    """What the kernels need to know of an attention layer. `heads` counts from 1."""

    identity: float
    center: float
    inverse_temperature: float
    heads: int
    key_dim: int


class AttentionWorkspace(NamedTuple):
    """Scratch matrices: q = min(r, n_k)."""

    trapezoid: np.ndarray  # (r, q)
    square: np.ndarray  # (q, r)
    queries: np.ndarray  # (m, q)
    products: np.ndarray  # (m, r)
    matrix: np.ndarray  # (m, m)
    mixed: np.ndarray  # (m, r)
    head: np.ndarray  # (m, q)
    side_by_side: np.ndarray  # (m, heads q)


@driver
def attention_workspace(tokens, rank, constants):
    q = min(rank, constants.key_dim)
    return AttentionWorkspace(
        np.empty((rank, q)),
        np.empty((q, rank)),
        np.empty((tokens, q)),
        np.empty((tokens, rank)),
        np.empty((tokens, tokens)),
        np.empty((tokens, rank)),
        np.empty((tokens, q)),
        np.empty((tokens, constants.heads * q)),
    )


@kernel
def draw_logits(stream, factor, key_dim, work):
    """Y = R T G Rᵀ into `work.matrix`."""
    draw_gaussian_product(stream, key_dim, work.trapezoid, work.square)
    multiply(factor, work.trapezoid, work.queries)
    multiply(work.queries, work.square, work.products)
    multiply_transposed(work.products, factor, work.matrix)


@kernel
def attention_matrix(matrix, visible, constants):
    """Logits to A, row by row, in place; `visible` (m, m) says which tokens a row sees."""
    for i in range(matrix.shape[0]):
        top, count = -np.inf, 0
        for j in range(matrix.shape[1]):
            if visible[i, j]:
                count += 1
                top = max(top, matrix[i, j])
        total = 0.0
        for j in range(matrix.shape[1]):
            weight = np.exp(constants.inverse_temperature * (matrix[i, j] - top)) if visible[i, j] else 0.0
            matrix[i, j] = weight
            total += weight
        for j in range(matrix.shape[1]):
            matrix[i, j] = (matrix[i, j] / total - constants.center / count) if visible[i, j] else 0.0
        matrix[i, i] += constants.identity


@kernel
def mix_tokens(stream, factor, visible, constants, work, out):
    """A R of one head into `out` (m, r)."""
    draw_logits(stream, factor, constants.key_dim, work)
    attention_matrix(work.matrix, visible, constants)
    multiply(work.matrix, factor, out)


@kernel
def mix_heads(stream, factor, visible, constants, work, out):
    """The lower triangular factor of [S_1 | … | S_H]/√(H n_k) into `out` (m, m)."""
    q = work.head.shape[1]
    scale = 1.0 / np.sqrt(constants.heads * constants.key_dim)
    for h in range(constants.heads):
        mix_tokens(stream, factor, visible, constants, work, work.mixed)
        draw_bartlett(stream, constants.key_dim, work.trapezoid)
        multiply(work.mixed, work.trapezoid, work.head)
        for i in range(out.shape[0]):
            for k in range(q):
                work.side_by_side[i, h * q + k] = scale * work.head[i, k]
    triangularise(work.side_by_side, 0, out)
