r"""One sublayer: X ← λX + γ·branch, in factors.

With the branch's output factor U (m × k) and a Gaussian n × n matrix after it,

  R ← triangular factor of [ λR + (γ/√n) U H | (γ/√n) U T ],

H (k × r) standard normal, T = bartlett(k, n − r): the parts of the output inside and outside the directions that R
already has. With n = r there is no outside, and R stays as it is, a dense m × n matrix.

Normalisation of a factor's rows.

The factor's first `mean_columns` columns (0 or 1) belong to the direction of the vector of ones, e = 1/√n: the
entry there is the token's mean over its coordinates. LayerNorm sets it to zero; RMSNorm has no such column. A
user-defined norm multiplies by s(variance + eps), s at `address` (`own`), instead of 1/√(variance + eps).
"""

from typing import NamedTuple

import numpy as np

from limitformer.covariance.chain.own import NOTHING, call_elementwise
from limitformer.numerics.factor import copy, draw_bartlett, inner, multiply, triangularise
from limitformer.numerics.kernels import allocator, kernel
from limitformer.numerics.lanes import lane_matrix, load, square_root, store
from limitformer.numerics.random import draw_normals


@kernel
def scale_of(factor, i, mean_columns, eps):
    """Return 1/√(variance + eps) of token i."""
    return 1.0 / square_root(inner(factor, i, factor, i, mean_columns, factor.shape[1]) + eps)


@kernel
def normalise(factor, mean_columns, eps, address, out):
    """out = rows of `factor` (m, r) minus their mean, divided by √(variance + eps) or times s."""
    columns = factor.shape[1]
    for i in range(factor.shape[0]):
        if address == NOTHING:
            scale = scale_of(factor, i, mean_columns, eps)
        else:
            store(out, i, 0, inner(factor, i, factor, i, mean_columns, columns) + eps)
            call_elementwise(address, out, i, 0, 1, 1.0)
            scale = load(out, i, 0)
        for k in range(mean_columns):
            store(out, i, k, 0.0)
        for k in range(mean_columns, columns):
            store(out, i, k, scale * load(factor, i, k))


@kernel
def backward_norm(factor, mean_columns, eps, inside, outside):
    """Gradient of the output of `normalise` to that of its input, the factor R, in place.

    With y = s (x − x̄), s = 1/√(variance + eps): ∂x = s (∂y − y ⟨y, ∂y⟩/n), without its mean. `inside` (m, r) has the
    coordinates of ∂y in the directions of R, `outside` (m, any) is a factor of ∂y outside them.
    """
    columns = factor.shape[1]
    for i in range(factor.shape[0]):
        scale = scale_of(factor, i, mean_columns, eps)
        share = scale * scale * inner(factor, i, inside, i, mean_columns, columns)
        for k in range(mean_columns):
            store(inside, i, k, 0.0)
        for k in range(mean_columns, columns):
            store(inside, i, k, scale * (load(inside, i, k) - share * load(factor, i, k)))
        for k in range(outside.shape[1]):
            store(outside, i, k, scale * load(outside, i, k))


NO_NORM, PRE_NORM, POST_NORM = 0, 1, 2


class ResidualConstants(NamedTuple):
    """λ, γ/√n, n − r and the place of the norm; the other fields are those of the norm."""

    skip: float
    branch: float
    outside: int
    placement: int
    mean_columns: int
    eps: float
    address: int


class ResidualWorkspace(NamedTuple):
    """Scratch matrices with LANES as the last dimension; the output factor has k columns, t = min(k, n − r)."""

    branch: np.ndarray  # (m, k)
    inside: np.ndarray  # (k, r)
    outside: np.ndarray  # (k, t)
    moved: np.ndarray  # (m, r)
    added: np.ndarray  # (m, t)
    rows: np.ndarray  # (m, r + t)


@allocator
def residual_workspace(tokens, rank, columns, constants):
    t = min(columns, constants.outside)
    return ResidualWorkspace(
        lane_matrix(tokens, columns),
        lane_matrix(columns, rank),
        lane_matrix(columns, t),
        lane_matrix(tokens, rank),
        lane_matrix(tokens, t),
        lane_matrix(tokens, rank + t),
    )


@kernel
def add_branch(stream, factor, constants, work):
    """Update `factor` (m, r) in place by the branch whose output factor is `work.branch`."""
    m, r = factor.shape[0], factor.shape[1]
    t = work.added.shape[1]
    draw_normals(stream, work.inside)
    draw_bartlett(stream, constants.outside, work.outside)
    multiply(work.branch, work.inside, work.moved)
    multiply(work.branch, work.outside, work.added)
    for i in range(m):
        for k in range(r):
            carried, moved = load(factor, i, k), load(work.moved, i, k)
            store(work.rows, i, k, constants.skip * carried + constants.branch * moved)
        for k in range(t):
            store(work.rows, i, r + k, constants.branch * load(work.added, i, k))
    if t == 0:
        copy(work.rows, factor)
        return
    for i in range(m):
        for k in range(constants.mean_columns):
            store(factor, i, k, load(work.rows, i, k))
    triangularise(work.rows, constants.mean_columns, r + t, factor, constants.mean_columns)
