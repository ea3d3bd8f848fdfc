r"""Queries and keys that are drawn anew in each layer, and heads.

A logit is β xⁱᵀ G xʲ with G = QᵀK. Of i.i.d. N(0, τ²) entries only those in the span of the tokens are ever seen: with
X = R O, O orthonormal rows, the logits are β R (O G Oᵀ) Rᵀ, and O G Oᵀ has i.i.d. N(0, τ²) entries as G has. So the
Gram chain draws an N × N matrix, and nothing has the size of a token. Of a product G = τ QᵀK/√k, Q and K with k rows of
N(0, 1) entries, Q Oᵀ is k × N: its triangular factor and K Oᵀ turned with it are N² numbers for any k (`factor`).

Heads with values of their own add up to Σ_h V_h A_h/√h. Given the A_h that is Gaussian, with the covariance
(1/h) Σ_h ⟨A_hⁱ, A_hʲ⟩ between tokens i and j: what one head does whose rows are [A_1 | … | A_h]/√h.

The stream of the queries is apart from that of the values, which are the same numbers as with fixed ones.
"""

from typing import NamedTuple

import numpy as np

from limitformer.numerics.factor import draw_gaussian_product, multiply
from limitformer.numerics.kernels import allocator, inlined, kernel
from limitformer.numerics.lanes import everywhere, lane_matrix, load, store
from limitformer.numerics.random import Stream, draw_normals, open_stream, rewind


class QueryConstants(NamedTuple):
    """How QᵀK is drawn; β and τ are in the constants of attention."""

    fresh: bool
    head_dim: int  # k, 0 for normal entries
    heads: int


class QueryWorkspace(NamedTuple):
    """Scratch: r the number of coordinates, q = min(r, k)."""

    stream: Stream
    trapezoid: np.ndarray  # (r, q), of a product of two matrices
    square: np.ndarray  # (q, r)
    joined: np.ndarray  # (N, h r): [A_1 | … | A_h]/√h, empty for one head


@allocator
def query_workspace(tokens, coordinates, constants):
    rank = min(coordinates, constants.head_dim)
    wide = constants.heads * coordinates if constants.heads > 1 else 0
    return QueryWorkspace(
        open_stream(), lane_matrix(coordinates, rank), lane_matrix(rank, coordinates), lane_matrix(tokens, wide)
    )


@kernel
def begin_queries(query_key, replica, work):
    """From the first of a replica's numbers."""
    rewind(work.stream, query_key, replica)


@inlined
def draw_queries(head_dim, work, bilinear):
    """A new QᵀK/τ into `bilinear` (r, r)."""
    if head_dim == 0:
        draw_normals(work.stream, bilinear)
        return
    draw_gaussian_product(work.stream, head_dim, work.trapezoid, work.square)
    multiply(work.trapezoid, work.square, bilinear)
    scale = everywhere(1.0 / np.sqrt(head_dim))
    for i in range(bilinear.shape[0]):
        for j in range(bilinear.shape[1]):
            store(bilinear, i, j, scale * load(bilinear, i, j))


@kernel
def join_head(head, heads, mixed, joined):
    """Put what one head makes of the tokens (N, r) beside what the others made."""
    scale, first = everywhere(1.0 / np.sqrt(heads)), head * mixed.shape[1]
    for i in range(mixed.shape[0]):
        for k in range(mixed.shape[1]):
            store(joined, i, first + k, scale * load(mixed, i, k))
