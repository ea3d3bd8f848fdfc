r"""Queries and keys that are drawn anew in each layer, and heads.

A logit is β xⁱᵀ G xʲ with G = QᵀK. Of i.i.d. N(0, τ²) entries only those in the span of the tokens are ever seen: with
X = R O, O orthonormal rows, the logits are β R (O G Oᵀ) Rᵀ, and O G Oᵀ has i.i.d. N(0, τ²) entries as G has. So the
Gram chain draws an N × N matrix, and nothing has the size of a token. A product G = τ QᵀK/√k, Q and K with k rows of
N(0, 1) entries, is the product of Q Oᵀ and K Oᵀ, which are k × N.

Heads with values of their own add up to Σ_h V_h A_h/√h. Given the A_h that is Gaussian, with the covariance
(1/h) Σ_h ⟨A_hⁱ, A_hʲ⟩ between tokens i and j: what one head does whose rows are [A_1 | … | A_h]/√h.

The stream of the queries is apart from that of the values, which are the same numbers as with fixed ones.
"""

from typing import NamedTuple

import numpy as np

from limitformer.numerics.factor import FIRST, multiply_transposed, triangularise
from limitformer.numerics.kernels import driver, inlined, kernel
from limitformer.numerics.lanes import everywhere, lane_matrix, load, store
from limitformer.numerics.random import Stream, draw_normals, open_stream, rewind


class QueryConstants(NamedTuple):
    """How QᵀK is drawn; β and τ are in the constants of attention."""

    fresh: bool
    head_dim: int  # k, 0 for normal entries
    heads: int


class QueryWorkspace(NamedTuple):
    """Scratch: r the number of coordinates. Empty where nothing is drawn."""

    stream: Stream
    queries: np.ndarray  # (r, k): Qᵀ
    keys: np.ndarray  # (r, k): Kᵀ
    joined: np.ndarray  # (N, h r): [A_1 | … | A_h]/√h
    factor: np.ndarray  # (N, N): its lower triangular factor


@driver
def query_workspace(tokens, coordinates, constants):
    rows = coordinates if constants.head_dim > 0 else 0
    wide = constants.heads * coordinates if constants.heads > 1 else 0
    return QueryWorkspace(
        open_stream(),
        lane_matrix(rows, constants.head_dim),
        lane_matrix(rows, constants.head_dim),
        lane_matrix(tokens, wide),
        lane_matrix(tokens, tokens),
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
    draw_normals(work.stream, work.queries)
    draw_normals(work.stream, work.keys)
    multiply_transposed(work.queries, work.keys, bilinear)
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


@kernel
def factor_of_heads(work):
    """The lower triangular factor of all heads; `joined` is overwritten."""
    triangularise(work.joined, FIRST, work.joined.shape[1], work.factor, FIRST)
