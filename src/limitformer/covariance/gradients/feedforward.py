r"""The feed-forward sublayer, forward and backward; letters in `backward`.

**Forward**, tile after tile of hidden units: with pre-activations h = R g and J = √(c/n_h) σ(h),

  [ U_b−1 | J_b ] = [ U_b 0 ] Ω_b,   U_0 = 0,   U = U_B.

**Backward**, from the last tile to the first. Q_J W_post = N is known, so the gradient of J in the coordinates of U is
Y_B = Γ Nᵀ. The coordinates of each tile outside those of U_b have met only fresh numbers:

  [ Y_b−1 | ∂J_b ] = [ Y_b | S Z ] Ω_b,   S Sᵀ = Γ Γᵀ,   Z Gaussian,
  δ_b = √(c/n_h) σ′(h_b) ∘ ∂J_b.

A gated pair has J = √(c/n_h) σ(h) ∘ h′ with h′ = R g′ of W_gate, so that

  δ_b = √(c/n_h) σ′(h_b) ∘ h′_b ∘ ∂J_b,   δ′_b = √(c/n_h) σ(h_b) ∘ ∂J_b,

and W_gate returns the same as W_pre, with δ′ and g′. Both are independent outside the tokens' span: the covariances
of their rows add up. The norms of their gradients are Σ |Rᵀ δ_b|² and Σ |Rᵀ δ′_b|².

The forward pass shows W_pre as g from R. So it returns Σ δ_b g_bᵀ inside the tokens' span, and outside it a Gaussian
matrix whose rows have the covariance C Cᵀ = Σ δ_b δ_bᵀ. Squared norms of the weights' gradients are |Rᵀ C|² and
|Uᵀ Γ|².
"""

from math import erf, exp
from typing import NamedTuple

import numpy as np

from limitformer.covariance.chain.feedforward import (
    GAUSSIAN_ERROR,
    OWN,
    TILE,
    FeedforwardConstants,
    FeedforwardWorkspace,
    activate,
    draw_units,
    multiply_by_gates,
)
from limitformer.covariance.chain.own import call_elementwise
from limitformer.covariance.gradients.matrices import (
    Buffer,
    add_to_entry,
    clear,
    place,
    reflect,
    squared_product,
    turn_back,
)
from limitformer.covariance.gradients.residual import find_root
from limitformer.numerics.factor import FIRST, multiply_into, triangularise
from limitformer.numerics.kernels import kernel
from limitformer.numerics.lanes import LANES, choose, everywhere, load, store
from limitformer.numerics.random import next_normal
from limitformer.numerics.watch import is_halted

PRE, POST = np.arange(2)  # places of the weights' norms
GATE = POST  # in a gated pair, and POST is one further


class UnitBuffers(NamedTuple):
    """The hidden units; the first three are the record of the forward pass."""

    normals: Buffer  # g_b of each tile
    gates: Buffer  # g′_b of each tile; one tile that is not used without gates
    rows: Buffer  # the reflections of Ω_b of each tile
    fresh: Buffer  # Z
    pre: Buffer  # h_b, then √(c/n_h) σ(h_b) of a gated pair
    gate: Buffer  # h′_b
    slope: Buffer  # √(c/n_h) σ′(h_b) of a σ at an address
    partner: Buffer  # δ′_b behind m columns that are not used
    gradient: Buffer  # [Y_b | ∂J_b], then δ_b behind the first m columns
    stacked: Buffer  # [C | δ_b], to be triangularised


def unit_shapes(m: int, r: int, constants: FeedforwardConstants) -> UnitBuffers:
    """Return the shapes for m tokens and r columns of R."""
    tiles = -(-constants.hidden // TILE)
    return UnitBuffers(
        normals=(tiles, r, TILE),
        gates=(tiles if constants.gated else 1, r, TILE),
        rows=(tiles, m, m + TILE),
        fresh=(m, TILE),
        pre=(m, TILE),
        gate=(m, TILE),
        slope=(m, TILE),
        partner=(m, m + TILE),
        gradient=(m, m + TILE),
        stacked=(m, m + TILE),
    )


@kernel
def forward_units(stream, factor, constants, units, out, watch):
    """Draw the numbers of `feedforward.hidden_units` and compute U into `out`."""
    m = factor.shape[0]
    clear(out)
    for b in range((constants.hidden + TILE - 1) // TILE):
        if is_halted(watch):
            return
        size, rows = min(TILE, constants.hidden - b * TILE), units.rows[b]
        place(out, rows, FIRST)
        draw_units(stream, factor, size, FeedforwardWorkspace(units.normals[b], rows))
        activate(rows, m, m + size, constants)
        if constants.gated:
            multiply_by_gates(stream, factor, size, FeedforwardWorkspace(units.gates[b], rows))
        reflect(rows, FIRST, m + size, out, FIRST)


@kernel
def backward_units(stream, factor, constants, units, total, returned, watch):
    """Go from Γ in `total` to the gradient that the branch returns."""
    m = factor.shape[0]
    post = GATE + 1 if constants.gated else POST
    add_to_entry(returned.norms, post, squared_product(total.branch, total.gradient, FIRST, total.gradient.shape[1]))
    find_root(total)
    place(total.seen, units.gradient, FIRST)
    for b in range((constants.hidden + TILE - 1) // TILE - 1, -1, -1):
        if is_halted(watch):
            return
        size, normals = min(TILE, constants.hidden - b * TILE), units.normals[b]
        for i in range(m):
            for j in range(size):
                store(units.fresh, i, j, next_normal(stream))
        multiply_into(total.root, units.fresh, size, units.gradient, m)
        turn_back(units.rows[b], FIRST, m + size, units.gradient)
        multiply_into(factor, normals, size, units.pre, FIRST)
        if constants.gated:
            multiply_into(factor, units.gates[b], size, units.gate, FIRST)
            differentiate_pair(size, constants, units)
            add_to_entry(returned.norms, PRE, squared_product(factor, units.gradient, m, m + size))
            add_to_entry(returned.norms, GATE, squared_product(factor, units.partner, m, m + size))
            backward_matrix(units.partner, units.gates[b], size, units, returned)
        else:
            differentiate(size, constants, units)
        backward_matrix(units.gradient, normals, size, units, returned)
    if not constants.gated:
        add_to_entry(returned.norms, PRE, squared_product(factor, returned.spread, FIRST, m))


@kernel
def backward_matrix(gradient, normals, size, units, returned):
    """inside += δ gᵀ and C Cᵀ += δ δᵀ, for δ behind the first m columns of `gradient`."""
    m = returned.inside.shape[0]
    place(gradient, units.stacked, FIRST)
    place(returned.spread, units.stacked, FIRST)
    for i in range(m):
        for k in range(returned.inside.shape[1]):
            total = everywhere(0.0)
            for j in range(size):
                total = total + load(gradient, i, m + j) * load(normals, k, j)
            store(returned.inside, i, k, load(returned.inside, i, k) + total)
    triangularise(units.stacked, FIRST, m + size, returned.spread, FIRST)


@kernel
def differentiate(size, constants, units):
    """∂J to δ, behind the first m columns of `units.gradient`."""
    pre, gradient = units.pre, units.gradient
    if constants.activation == GAUSSIAN_ERROR:
        differentiate_gaussian_error(pre, size, constants.gain, gradient)
    elif constants.activation == OWN:
        compute_slopes(size, constants, units)
        for i in range(pre.shape[0]):
            for j in range(size):
                k = pre.shape[0] + j
                store(gradient, i, k, load(units.slope, i, j) * load(gradient, i, k))
    else:
        positive, negative = constants.gain * constants.positive, constants.gain * constants.negative
        for i in range(pre.shape[0]):
            for j in range(size):
                slope = choose(load(pre, i, j), everywhere(positive), everywhere(negative))
                k = pre.shape[0] + j
                store(gradient, i, k, slope * load(gradient, i, k))


@kernel
def compute_slopes(size, constants, units):
    """√(c/n_h) σ′(h) into `units.slope`, for σ′ at an address."""
    place(units.pre, units.slope, FIRST)
    for i in range(units.slope.shape[0]):
        call_elementwise(constants.derivative, units.slope, i, FIRST, size, constants.gain)


@kernel
def differentiate_pair(size, constants, units):
    """∂J to δ and δ′ of a gated pair, behind the first m columns of `units.gradient` and `units.partner`."""
    compute_slopes(size, constants, units)
    m = units.pre.shape[0]
    for i in range(m):
        call_elementwise(constants.address, units.pre, i, FIRST, size, constants.gain)
        for j in range(size):
            gradient = load(units.gradient, i, m + j)
            store(units.partner, i, m + j, load(units.pre, i, j) * gradient)
            store(units.gradient, i, m + j, load(units.slope, i, j) * load(units.gate, i, j) * gradient)


@kernel
def differentiate_gaussian_error(pre, size, gain, gradient):
    """(x Φ(x))′ = Φ(x) + x exp(−x²/2)/√(2π)."""
    for i in range(pre.shape[0]):
        for j in range(size):
            for lane in range(LANES):
                x = pre[i, j, lane]
                slope = 0.5 * (1.0 + erf(x * 0.7071067811865476)) + x * exp(-0.5 * x * x) * 0.3989422804014327
                gradient[i, pre.shape[0] + j, lane] *= gain * slope
