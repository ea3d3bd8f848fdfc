r"""The feed-forward sublayer, forward with what the backward pass needs, and backward. Letters in `backward`.

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
from typing import NamedTuple

import numpy as np

from limitformer.chains.backward_attention import add_to_norm, squared_product
from limitformer.chains.backward_residual import factor_of_gradient
from limitformer.chains.checkpoints import lane_stack
from limitformer.chains.feedforward import GAUSSIAN_ERROR, TILE, FeedforwardWorkspace, activate, draw_units
from limitformer.chains.reflections import reflect, turn_back
from limitformer.factor import FIRST, multiply_into, triangularise
from limitformer.kernels import driver, kernel
from limitformer.lanes import LANES, choose, everywhere, lane_matrix, load, store
from limitformer.random import next_normal
from limitformer.watch import halted

PRE, POST = 0, 1  # places of the weights' norms


class UnitsMemory(NamedTuple):
    """What the backward pass needs of every tile; matrices have LANES behind."""

    normals: np.ndarray  # (tiles, r, TILE): g
    rows: np.ndarray  # (tiles, m, m + TILE): the reflections of Ω_b


class UnitsWorkspace(NamedTuple):
    """Scratch matrices, each with LANES behind."""

    root: np.ndarray  # (m, m): S
    scratch: np.ndarray  # (m, w)
    normals: np.ndarray  # (m, TILE): Z
    units: np.ndarray  # (m, TILE): h
    gradient: np.ndarray  # (m, m + TILE): [Y | ∂J]
    rows: np.ndarray  # (m, m + TILE): [C | δ]


@driver
def units_memory(tokens, rank, constants):
    tiles = (constants.hidden + TILE - 1) // TILE
    return UnitsMemory(lane_stack(tiles, rank, TILE), lane_stack(tiles, tokens, tokens + TILE))


@driver
def units_workspace(tokens, width_of_gradient):
    return UnitsWorkspace(
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, width_of_gradient),
        lane_matrix(tokens, TILE),
        lane_matrix(tokens, TILE),
        lane_matrix(tokens, tokens + TILE),
        lane_matrix(tokens, tokens + TILE),
    )


@kernel
def activate_reversibly(stream, factor, constants, memory, out, watch):
    """U into `out` (m, m), from the same numbers as `feedforward.hidden_units`."""
    m = factor.shape[0]
    for i in range(m):
        for k in range(m):
            store(out, i, k, 0.0)
    for b in range(memory.normals.shape[0]):
        if halted(watch):
            return
        size, rows = min(TILE, constants.hidden - b * TILE), memory.rows[b]
        for i in range(m):
            for k in range(m):
                store(rows, i, k, load(out, i, k))
        draw_units(stream, factor, size, FeedforwardWorkspace(memory.normals[b], rows))
        activate(rows, m, m + size, constants)
        reflect(rows, FIRST, m + size, out, FIRST)


@kernel
def pull_through_units(stream, factor, constants, total, memory, work, pulled, spread, norms, watch):
    """Backward through both matrices: `pulled` (m, r), `spread` C (m, m), squared `norms`."""
    m = factor.shape[0]
    add_to_norm(norms, POST, squared_product(total.branch, total.gradient, FIRST, total.gradient.shape[1]))
    factor_of_gradient(total, work.scratch, work.root)
    for i in range(m):
        for k in range(m):
            store(work.gradient, i, k, load(total.seen, i, k))
    for b in range(memory.normals.shape[0] - 1, -1, -1):
        if halted(watch):
            return
        size = min(TILE, constants.hidden - b * TILE)
        for i in range(m):
            for j in range(size):
                store(work.normals, i, j, next_normal(stream))
        multiply_into(work.root, work.normals, size, work.gradient, m)
        turn_back(memory.rows[b], FIRST, m + size, work.gradient)
        multiply_into(factor, memory.normals[b], size, work.units, FIRST)
        differentiate(work.units, size, constants, work.gradient)
        pull_through_matrix(memory.normals[b], size, work, pulled, spread)
    add_to_norm(norms, PRE, squared_product(factor, spread, FIRST, m))


@kernel
def pull_through_matrix(normals, size, work, pulled, spread):
    """pulled += δ gᵀ and C Cᵀ += δ δᵀ, for δ behind the first m columns of `work.gradient`."""
    m = pulled.shape[0]
    for i in range(m):
        for k in range(m):
            store(work.rows, i, k, load(spread, i, k))
        for j in range(m, m + size):
            store(work.rows, i, j, load(work.gradient, i, j))
        for k in range(pulled.shape[1]):
            total = everywhere(0.0)
            for j in range(size):
                total = total + load(work.gradient, i, m + j) * load(normals, k, j)
            store(pulled, i, k, load(pulled, i, k) + total)
    triangularise(work.rows, FIRST, m + size, spread, FIRST)


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
