r"""Queries and keys that are drawn anew in each layer, and heads.

A logit is β xⁱᵀ G xʲ with G = QᵀK. If G has i.i.d. N(0, τ²) entries, only its action on the span of the tokens matters:
with X = R O, O orthonormal rows, the logits are β R (O G Oᵀ) Rᵀ, and O G Oᵀ has i.i.d. N(0, τ²) entries too. So the
Gram chain draws an N × N matrix, and no array has the size of a token. For a product G = τ QᵀK/√k, where Q and K have k
rows of N(0, 1) entries, Q Oᵀ is k × N. Its triangular factor and K Oᵀ, rotated with it, are N² numbers for any k
(`factor`).

Heads with separate values add up to Σ_h V_h A_h/√h. Given the A_h, this sum is Gaussian with the covariance
(1/h) Σ_h ⟨A_hⁱ, A_hʲ⟩ between tokens i and j. One head with the rows [A_1 | … | A_h]/√h has the same law.

Queries and values have separate streams, so the values are the same numbers as with fixed queries.
"""

from math import copysign
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from limitformer.models import SphereModel, StochasticTransformer
from limitformer.numerics.factor import draw_gaussian_product, multiply
from limitformer.numerics.kernels import allocator, inlined, kernel
from limitformer.numerics.lanes import everywhere, lane_matrix, load, store
from limitformer.numerics.random import Stream, draw_normals, open_stream


class QueryConstants(NamedTuple):
    """The law of QᵀK; β and τ are in the constants of attention."""

    fresh: bool
    head_dim: int  # k, 0 for normal entries
    heads: int


class QueryWorkspace(NamedTuple):
    """Scratch memory; r is the number of coordinates and q = min(r, k)."""

    stream: Stream
    trapezoid: np.ndarray  # (r, q), triangular factor of a product of two matrices
    square: np.ndarray  # (q, r)
    joined: np.ndarray  # (N, h r): [A_1 | … | A_h]/√h, empty for one head


@allocator
def query_workspace(tokens, coordinates, constants):
    rank = min(coordinates, constants.head_dim)
    wide = constants.heads * coordinates if constants.heads > 1 else 0
    return QueryWorkspace(
        open_stream(), lane_matrix(coordinates, rank), lane_matrix(rank, coordinates), lane_matrix(tokens, wide)
    )


@inlined
def draw_queries(head_dim, work, bilinear):
    """Draw a new QᵀK/τ into `bilinear` (r, r)."""
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
    """Copy the attention of one head (N, r) into its columns of `joined`."""
    scale, first = everywhere(1.0 / np.sqrt(heads)), head * mixed.shape[1]
    for i in range(mixed.shape[0]):
        for k in range(mixed.shape[1]):
            store(joined, i, first + k, scale * load(mixed, i, k))


def signed_beta(model: SphereModel) -> float:
    """Return β for QᵀK = I, βτ for a drawn QᵀK/τ, else |β|; `signed_bilinear` then has the sign."""
    if isinstance(model, StochasticTransformer) and model.is_fresh:
        return model.logit_scale
    return model.beta if model.is_isotropic else abs(model.beta)


def signed_bilinear(model: SphereModel, coordinates: int) -> NDArray[np.float64]:
    """Return QᵀK with the sign of β; the kernels take |β|, so that the largest logit has the largest weight.

    The array is empty if QᵀK = I, and zeros (coordinates, coordinates) to fill if QᵀK is drawn.
    """
    if model.is_fresh:
        return np.zeros((coordinates, coordinates))
    return np.zeros((0, 0)) if model.is_isotropic else copysign(1.0, model.beta) * model.bilinear()


def query_constants(model: SphereModel) -> QueryConstants:
    """Return the law of the drawn queries and keys; one head without draws if they are fixed."""
    if isinstance(model, StochasticTransformer) and model.is_fresh:
        return QueryConstants(True, model.head_dim or 0, model.heads)
    return QueryConstants(False, 0, 1)
