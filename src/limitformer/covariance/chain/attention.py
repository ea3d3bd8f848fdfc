r"""The attention sublayer's output factor: U = A R, from the factor R of the tokens.

Logits: Y = X W_Q W_Kᵀ Xᵀ/n = R (T G) Rᵀ with T = bartlett(r, n_k) and G standard normal (`numerics.factor`).
Attention [ST, eq. 9], each part on or off: A = identity·I + softmax(Y/τ) − center·p, where row α of the softmax and
of p runs over the m_α tokens that α sees, p = 1/m_α there. Instead, a user-defined rule may compute A from Y/τ (`own`).

Several heads with an output projection: S_h = A_h R T_h with T_h = bartlett(r, n_k) for the head's values. One Gaussian
matrix follows the outputs side by side, [S_1 | … | S_H]/√(H n_k), so only their lower triangular factor matters.
"""

from typing import NamedTuple

import numpy as np

from limitformer.covariance.chain.own import NOTHING, call_mixing
from limitformer.numerics.elementary import exponentials
from limitformer.numerics.factor import (
    FIRST,
    draw_bartlett,
    draw_gaussian_product,
    multiply,
    multiply_transposed,
    triangularise,
)
from limitformer.numerics.kernels import allocator, kernel
from limitformer.numerics.lanes import everywhere, lane_matrix, larger, load, store
from limitformer.numerics.watch import is_halted


class AttentionConstants(NamedTuple):
    """The numbers of an attention layer; `heads` is at least 1, `address` is that of a user-defined rule."""

    identity: float
    center: float
    inverse_temperature: float
    heads: int
    key_dim: int
    address: int


class AttentionWorkspace(NamedTuple):
    """Scratch matrices, each with LANES as its last dimension; q = min(r, n_k)."""

    trapezoid: np.ndarray  # (r, q)
    square: np.ndarray  # (q, r)
    queries: np.ndarray  # (m, q)
    products: np.ndarray  # (m, r)
    matrix: np.ndarray  # (m, m)
    mixed: np.ndarray  # (m, r)
    head: np.ndarray  # (m, q)
    side_by_side: np.ndarray  # (m, heads q)


@allocator
def attention_workspace(tokens, rank, constants):
    q = min(rank, constants.key_dim)
    return AttentionWorkspace(
        lane_matrix(rank, q),
        lane_matrix(q, rank),
        lane_matrix(tokens, q),
        lane_matrix(tokens, rank),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, rank),
        lane_matrix(tokens, q),
        lane_matrix(tokens, constants.heads * q),
    )


@kernel
def draw_logits(stream, factor, key_dim, work):
    """Y = R T G Rᵀ into `work.matrix`."""
    draw_gaussian_product(stream, key_dim, work.trapezoid, work.square)
    multiply(factor, work.trapezoid, work.queries)
    multiply(work.queries, work.square, work.products)
    multiply_transposed(work.products, factor, work.matrix)


@kernel
def attention_matrix(visible, constants, work):
    """Logits to A, in place; `visible` (m, m): whether the row's token sees the column's."""
    if constants.address != NOTHING:
        call_mixing(constants.address, work.matrix, visible, constants.inverse_temperature)
        return
    for i in range(visible.shape[0]):
        shift_logits(work.matrix, i, visible, constants.inverse_temperature)
    exponentials(work.matrix)
    for i in range(visible.shape[0]):
        normalise_weights(work.matrix, i, visible, constants)


@kernel
def shift_logits(matrix, i, visible, inverse_temperature):
    """Row i to (y − max y)/τ on the tokens that it sees, with their maximum, and to 0 elsewhere."""
    top = everywhere(-np.inf)
    for j in range(visible.shape[1]):
        if visible[i, j]:
            top = larger(top, load(matrix, i, j))
    for j in range(visible.shape[1]):
        if visible[i, j]:
            store(matrix, i, j, inverse_temperature * (load(matrix, i, j) - top))
        else:
            store(matrix, i, j, 0.0)


@kernel
def normalise_weights(matrix, i, visible, constants):
    """Row i of exponentials to identity + softmax − center/m_i."""
    total, count = everywhere(0.0), 0
    for j in range(visible.shape[1]):
        if visible[i, j]:
            total = total + load(matrix, i, j)
            count += 1
    inverse = 1.0 / total
    for j in range(visible.shape[1]):
        diagonal = constants.identity if i == j else 0.0
        if visible[i, j]:
            store(matrix, i, j, load(matrix, i, j) * inverse - constants.center / count + diagonal)
        else:
            store(matrix, i, j, diagonal)


@kernel
def mix_tokens(stream, factor, visible, constants, work, out):
    """A R of one head into `out` (m, r)."""
    draw_logits(stream, factor, constants.key_dim, work)
    attention_matrix(visible, constants, work)
    multiply(work.matrix, factor, out)


@kernel
def mix_heads(stream, factor, visible, constants, work, out, watch):
    """The lower triangular factor of [S_1 | … | S_H]/√(H n_k) into `out` (m, m)."""
    q = work.head.shape[1]
    scale = 1.0 / np.sqrt(constants.heads * constants.key_dim)
    for h in range(constants.heads):
        if is_halted(watch):
            return
        mix_tokens(stream, factor, visible, constants, work, work.mixed)
        draw_bartlett(stream, constants.key_dim, work.trapezoid)
        multiply(work.mixed, work.trapezoid, work.head)
        for i in range(out.shape[0]):
            for k in range(q):
                store(work.side_by_side, i, h * q + k, scale * load(work.head, i, k))
    triangularise(work.side_by_side, FIRST, work.side_by_side.shape[1], out, FIRST)
