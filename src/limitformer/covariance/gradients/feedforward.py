r"""The feed-forward sublayer, forward with what the backward pass needs, and backward. Letters in `backward`,
names in `layout`.

Forward, tile after tile of hidden units: with pre-activations h = R g and J = √(c/n_h) σ(h),

  [ U_b−1 | J_b ] = [ U_b 0 ] Ω_b,   U_0 = 0,   U = U_B.

Backward, from the last tile to the first. Q_J W_post = N is known, so the gradient of J in the coordinates of U is
Y_B = Γ Nᵀ, and each tile's coordinates beside those of U_b have met nothing but fresh numbers:

  [ Y_b−1 | ∂J_b ] = [ Y_b | S Z ] Ω_b,   S Sᵀ = Γ Γᵀ,   Z Gaussian,
  δ_b = √(c/n_h) σ′(h_b) ∘ ∂J_b.

W_pre was seen as g from R: it pulls back Σ δ_b g_bᵀ, and outside the tokens' span a Gaussian matrix whose rows have
the covariance C Cᵀ = Σ δ_b δ_bᵀ. Squared norms of the weights' gradients are |Rᵀ C|² and |Uᵀ Γ|².
"""

from math import erf, exp

import numpy as np

from limitformer.covariance.chain.feedforward import (
    GAUSSIAN_ERROR,
    TILE,
    FeedforwardWorkspace,
    activate,
    draw_units,
)
from limitformer.covariance.gradients.attention import add_to_norm, squared_product
from limitformer.covariance.gradients.layout import (
    BRANCH,
    GRADIENT,
    PULLED,
    ROOT,
    SEEN,
    SPREAD,
    SQUARE,
    UNIT_FRESH,
    UNIT_GRADIENT,
    UNIT_NORMALS,
    UNIT_ROWS,
    UNIT_STACKED,
    UNITS,
)
from limitformer.covariance.gradients.reflections import reflect, turn_back
from limitformer.covariance.gradients.residual import find_root, place
from limitformer.covariance.gradients.scratch import matrix, matrix_of
from limitformer.numerics.factor import FIRST, multiply_into, triangularise
from limitformer.numerics.kernels import kernel
from limitformer.numerics.lanes import LANES, choose, everywhere, load, store
from limitformer.numerics.random import next_normal
from limitformer.numerics.watch import is_halted

PRE, POST = np.arange(2)  # places of the weights' norms


@kernel
def clear_matrix(a):
    """Zeros."""
    for i in range(a.shape[0]):
        for k in range(a.shape[1]):
            store(a, i, k, 0.0)


@kernel
def activate_reversibly(stream, factor, constants, scratch, watch):
    """U, from the same numbers as `feedforward.hidden_units`."""
    m, out = factor.shape[0], matrix(scratch, SQUARE + BRANCH)
    clear_matrix(out)
    for b in range((constants.hidden + TILE - 1) // TILE):
        if is_halted(watch):
            return
        size, rows = min(TILE, constants.hidden - b * TILE), matrix_of(scratch, UNIT_ROWS, b)
        place(out, rows, FIRST)
        draw_units(stream, factor, size, FeedforwardWorkspace(matrix_of(scratch, UNIT_NORMALS, b), rows))
        activate(rows, m, m + size, constants)
        reflect(rows, FIRST, m + size, out, FIRST)


@kernel
def pull_through_units(stream, factor, constants, scratch, watch):
    """Backward through both matrices, to `pulled`, C and the squared norms."""
    m, total, returned = factor.shape[0], matrix(scratch, SQUARE + GRADIENT), matrix(scratch, UNIT_GRADIENT)
    fresh, units = matrix(scratch, UNIT_FRESH), matrix(scratch, UNITS)
    add_to_norm(scratch, POST, squared_product(matrix(scratch, SQUARE + BRANCH), total, FIRST, total.shape[1]))
    find_root(total, scratch)
    place(matrix(scratch, SQUARE + SEEN), returned, FIRST)
    for b in range((constants.hidden + TILE - 1) // TILE - 1, -1, -1):
        if is_halted(watch):
            return
        size, normals = min(TILE, constants.hidden - b * TILE), matrix_of(scratch, UNIT_NORMALS, b)
        for i in range(m):
            for j in range(size):
                store(fresh, i, j, next_normal(stream))
        multiply_into(matrix(scratch, ROOT), fresh, size, returned, m)
        turn_back(matrix_of(scratch, UNIT_ROWS, b), FIRST, m + size, returned)
        multiply_into(factor, normals, size, units, FIRST)
        differentiate(units, size, constants, returned)
        pull_through_matrix(normals, size, returned, scratch)
    add_to_norm(scratch, PRE, squared_product(factor, matrix(scratch, SPREAD), FIRST, m))


@kernel
def pull_through_matrix(normals, size, returned, scratch):
    """pulled += δ gᵀ and C Cᵀ += δ δᵀ, for δ behind the first m columns of `returned`."""
    pulled, spread, stacked = matrix(scratch, PULLED), matrix(scratch, SPREAD), matrix(scratch, UNIT_STACKED)
    m = pulled.shape[0]
    place(returned, stacked, FIRST)
    place(spread, stacked, FIRST)
    for i in range(m):
        for k in range(pulled.shape[1]):
            total = everywhere(0.0)
            for j in range(size):
                total = total + load(returned, i, m + j) * load(normals, k, j)
            store(pulled, i, k, load(pulled, i, k) + total)
    triangularise(stacked, FIRST, m + size, spread, FIRST)


@kernel
def differentiate(units, size, constants, gradient):
    """∂J to δ, behind the first m columns of `gradient`."""
    if constants.activation == GAUSSIAN_ERROR:
        differentiate_gaussian_error(units, size, constants.gain, gradient)
    else:
        positive, negative = constants.gain * constants.positive, constants.gain * constants.negative
        for i in range(units.shape[0]):
            for j in range(size):
                slope = choose(load(units, i, j), everywhere(positive), everywhere(negative))
                k = units.shape[0] + j
                store(gradient, i, k, slope * load(gradient, i, k))


@kernel
def differentiate_gaussian_error(units, size, gain, gradient):
    """(x Φ(x))′ = Φ(x) + x exp(−x²/2)/√(2π)."""
    for i in range(units.shape[0]):
        for j in range(size):
            for lane in range(LANES):
                x = units[i, j, lane]
                slope = 0.5 * (1.0 + erf(x * 0.7071067811865476)) + x * exp(-0.5 * x * x) * 0.3989422804014327
                gradient[i, units.shape[0] + j, lane] *= gain * slope
