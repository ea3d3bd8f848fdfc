r"""One step of the gradients' SDE, down from t + dt to t; the equation and its letters are in `backward`.

Ψ = T Tᵀ stays positive semi-definite, because T is the triangular factor of

  [ K T (C + √dt A) + (γ²/τ₀)√dt BᵀT | √(2a² dt) P | (γλ/τ₀)√dt BᵀT | (γ/τ₀)√dt D L | (γ/τ₀)√dt DᵀL | √(η dt) S T ]

* A as in `factor_step`, C² = 1 − dt (η + a²(2i + 1) + 2m a²) in row i, K = I + dt γ²/(2τ₀²) Wᵀ;
* P = Mᵀ L⁻ᵀ, so that P Pᵀ = MᵀV⁻¹M;
* B = 𝒞(Y) of the logits Y of the forward step, which the forward pass has kept;
* D = 𝒞(Jᵀ), J = γM − λξ and ξ = L G Tᵀ with a fresh G;
* S = diag(sgn h) of one sample h ~ N(0, V).

M moves by the terms of `backward`, at the M, T and V⁻¹M of the upper end. Where the drift is a mean over Y or h, the
step takes one fresh sample; its mean is right, and its variance is of order dt².
"""

from typing import NamedTuple

from limitformer.covariance.gradients.matrices import Buffer, clear, rescale, transpose
from limitformer.covariance.limit.drift import LimitConstants, second_order_weights
from limitformer.covariance.limit.factor_step import centre_rows, draw_linear, mixing_beyond_noise
from limitformer.numerics.factor import (
    FIRST,
    add_multiple,
    copy,
    gram_of_lower,
    inner,
    multiply_by_lower_transposed,
    multiply_lower,
    trace_of_gram,
    triangularise,
)
from limitformer.numerics.kernels import kernel
from limitformer.numerics.lanes import choose, everywhere, load, magnitude, square_root, store, where_positive
from limitformer.numerics.random import draw_normals, next_normal

BLOCKS = 6  # of the factor T before it is made triangular


class GradientConstants(NamedTuple):
    """The factors of the forward SDE, and those that only the gradients have."""

    forward: LimitConstants
    gamma: float
    lam: float
    inverse_temperature: float  # 1/τ₀; 0 without attention


class GradientState(NamedTuple):
    """The gradients, and the scratch of their step; matrices are (m, m) unless another shape is given."""

    alignment: Buffer  # M
    spread: Buffer  # T, lower triangular; Ψ = T Tᵀ
    moved: Buffer  # the next M
    covariance: Buffer  # V
    solved: Buffer  # L⁻¹M
    inverse: Buffer  # V⁻¹M
    logits: Buffer  # fresh Y
    mixing: Buffer  # B = 𝒞(Y)
    noise: Buffer  # ξ
    answers: Buffer  # J
    response: Buffer  # D = 𝒞(Jᵀ)
    product: Buffer
    normals: Buffer
    units: Buffer  # (m, 1): h
    pulls: Buffer  # (m, 1): T g
    query: Buffer  # (1, 1): |∂W_Q|²/n = |∂W_K|²/n, of the loss over the width


def state_shapes(m: int) -> GradientState:
    """Return the shapes for m tokens."""
    return GradientState._make([(m, m)] * 13 + [(m, 1), (m, 1), (1, 1)])


@kernel
def step_back(stream, dt, constants, mask, factor, logits, state, work):
    """Move M and T from t + dt to t, where V = L Lᵀ with L = `factor` and the forward step had the `logits` Y.

    Every lane has its own dt; where it is 0, nothing moves.
    """
    m, a = factor.shape[0], constants.forward.linear
    gram_of_lower(factor, state.covariance)
    solve(factor, state)
    copy(state.alignment, state.moved)
    draw_linear(stream, dt, constants.forward, -2.0 * m * a * a * dt, state.spread, work)
    for k in range(m, work.rows.shape[1]):
        for i in range(m):
            store(work.rows, i, k, 0.0)
    scale = square_root(2.0 * dt) * a
    for i in range(m):
        for k in range(m):
            store(work.rows, i, m + k, scale * load(state.solved, k, i))
    if constants.inverse_temperature > 0.0:
        carry_mixing(dt, constants, mask, logits, state, work)
        draw_answers(stream, factor, mask, state)
        move_by_softmax(dt, constants, mask, state)
        move_by_answers(dt, constants, mask, state)
        return_through_logits(dt, constants, mask, factor, state, work)
    if constants.forward.kink > 0.0:
        return_through_kink(stream, dt, constants, factor, state, work)
    triangularise(work.rows, FIRST, work.rows.shape[1], state.product, FIRST)
    accept(dt, state.product, state.spread)
    accept(dt, state.moved, state.alignment)


@kernel
def accept(dt, moved, out):
    """`out` = `moved` in the lanes whose `dt` is positive."""
    for i in range(out.shape[0]):
        for k in range(out.shape[1]):
            store(out, i, k, choose(dt, load(moved, i, k), load(out, i, k)))


@kernel
def solve(factor, state):
    """L⁻¹M into `state.solved`, V⁻¹M into `state.inverse`, by substitution. Pivots of the start's L may be negative."""
    m = factor.shape[0]
    for j in range(m):
        for i in range(m):
            rest = load(state.alignment, i, j)
            for k in range(i):
                rest = rest - load(factor, i, k) * load(state.solved, k, j)
            pivot = load(factor, i, i)
            store(state.solved, i, j, where_positive(magnitude(pivot), rest / pivot))
        for i in range(m - 1, -1, -1):
            rest = load(state.solved, i, j)
            for k in range(i + 1, m):
                rest = rest - load(factor, k, i) * load(state.inverse, k, j)
            pivot = load(factor, i, i)
            store(state.inverse, i, j, where_positive(magnitude(pivot), rest / pivot))


@kernel
def carry_mixing(dt, constants, mask, logits, state, work):
    """Add the terms of the forward step's own logits and of W: (γ²/τ₀)√dt 𝒦(Y, M), (MW − WM), BᵀT and WᵀT."""
    m, forward = state.moved.shape[0], constants.forward
    scale, drift = square_root(dt) * forward.mixing, dt * forward.second_order
    copy(logits, state.mixing)
    centre_rows(state.mixing, mask)
    transpose(state.alignment, state.response)
    centre_rows(state.response, mask)
    pull_back(scale, logits, state.alignment, state)
    second_order_weights(state.covariance, mask, work.drift)
    add_product(drift, state.alignment, work.drift.weights, state.moved, FIRST)
    add_product(-1.0 * drift, work.drift.weights, state.alignment, state.moved, FIRST)
    # K (T (C + √dt A)): Wᵀ may as well act on T, the difference is of order dt^(3/2) and has no mean.
    add_transposed_product(drift, work.drift.weights, state.spread, work.rows, FIRST)
    add_transposed_product(scale, state.mixing, state.spread, work.rows, FIRST)
    add_transposed_product(square_root(dt * mixing_beyond_noise(forward)), state.mixing, state.spread, work.rows, 2 * m)


@kernel
def draw_answers(stream, factor, mask, state):
    """Draw fresh logits Y = L G Lᵀ, with B = 𝒞(Y), and ξ = L G Tᵀ."""
    draw_normals(stream, state.normals)
    multiply_lower(factor, state.normals, state.product)
    multiply_by_lower_transposed(state.product, factor, state.logits)
    copy(state.logits, state.mixing)
    centre_rows(state.mixing, mask)
    draw_normals(stream, state.normals)
    multiply_lower(factor, state.normals, state.product)
    multiply_by_lower_transposed(state.product, state.spread, state.noise)


@kernel
def move_by_softmax(dt, constants, mask, state):
    """M += (γ²/τ₀²) dt (Y Qᵀ + YᵀQ), Q = 𝒞(C Y ∘ C Mᵀ), from the second order of the softmax; 𝒞(Mᵀ) in `response`."""
    m, scale = state.moved.shape[0], dt * constants.forward.mixing_drift
    for i in range(m):
        squared = mask.counts[i] * mask.counts[i]  # 𝒞 has divided each of the two by the number of tokens seen
        for k in range(m):
            store(state.product, i, k, squared * load(state.mixing, i, k) * load(state.response, i, k))
    centre_rows(state.product, mask)
    add_product_by_transposed(scale, state.logits, state.product, state.moved)
    add_transposed_product(scale, state.logits, state.product, state.moved, FIRST)


@kernel
def move_by_answers(dt, constants, mask, state):
    """M += 𝒦(Y, J), J = −(λγ/τ₀)√dt ξ + (γ²/τ₀²) dt (λ² V Bᵀ V⁻¹M − γ² B M): the noise of M alone, and its drift."""
    gamma, lam, drift = constants.gamma, constants.lam, dt * constants.forward.mixing_drift
    clear(state.product)
    add_transposed_product(1.0, state.mixing, state.inverse, state.product, FIRST)
    clear(state.answers)
    add_product(drift * lam * lam, state.covariance, state.product, state.answers, FIRST)
    add_product(-gamma * gamma * drift, state.mixing, state.alignment, state.answers, FIRST)
    add_multiple(-lam * gamma * constants.inverse_temperature * square_root(dt), state.noise, state.answers)
    transpose(state.answers, state.response)
    centre_rows(state.response, mask)
    pull_back(everywhere(1.0), state.logits, state.answers, state)


@kernel
def respond(constants, mask, state):
    """D = 𝒞(Jᵀ), J = γM − λξ, into `state.response`."""
    transpose(state.alignment, state.response)
    rescale(state.response, constants.gamma)
    transpose(state.noise, state.product)
    add_multiple(-constants.lam, state.product, state.response)
    centre_rows(state.response, mask)


@kernel
def return_through_logits(dt, constants, mask, factor, state, work):
    """Add the blocks D L and DᵀL, the gradient that comes back through the logits, and store the query's norm."""
    m, scale = factor.shape[0], square_root(dt) * constants.gamma * constants.inverse_temperature
    respond(constants, mask, state)
    add_product(scale, state.response, factor, work.rows, 3 * m)
    add_transposed_product(scale, state.response, factor, work.rows, 4 * m)
    store_query(dt, constants, factor, state)


@kernel
def store_query(dt, constants, factor, state):
    """|∂W_Q|²/n = |∂W_K|²/n = (γ/τ₀)² |LᵀD L|², D in `state.response`, into `state.query`."""
    scale = constants.gamma * constants.inverse_temperature
    clear(state.product)
    add_product(1.0, state.response, factor, state.product, FIRST)
    clear(state.normals)
    add_transposed_product(scale, factor, state.product, state.normals, FIRST)
    store(state.query, 0, 0, choose(dt, trace_of_gram(state.normals), load(state.query, 0, 0)))


@kernel
def return_through_kink(stream, dt, constants, factor, state, work):
    """M += (h sgn hᵀ − |h| 1ᵀ) ∘ 1 (√(η dt) T g + η dt MᵀV⁻¹|h|)ᵀ, and the block √(η dt) diag(sgn h) T."""
    m = factor.shape[0]
    eta = constants.forward.kink
    scale = square_root(eta * dt)
    draw_column(stream, factor, state.normals, state.units)
    draw_column(stream, state.spread, state.normals, state.pulls)
    for j in range(m):
        pull = scale * load(state.pulls, j, 0)
        for k in range(m):
            pull = pull + (eta * dt) * (magnitude(load(state.units, k, 0)) * load(state.inverse, k, j))
        sign = choose(load(state.units, j, 0), everywhere(1.0), everywhere(-1.0))
        for i in range(m):
            h = load(state.units, i, 0)
            store(state.moved, i, j, load(state.moved, i, j) + (h * sign - magnitude(h)) * pull)
        for k in range(m):
            store(work.rows, j, 5 * m + k, scale * sign * load(state.spread, j, k))


@kernel
def draw_column(stream, factor, normals, out):
    """F g into `out` (m, 1), of a lower triangular `factor` F and a fresh g, which takes the first row of `normals`."""
    m = factor.shape[0]
    for k in range(m):
        store(normals, 0, k, next_normal(stream))
    for i in range(m):
        store(out, i, 0, inner(factor, i, normals, 0, FIRST, i + 1))


@kernel
def pull_back(scale, logits, answers, state):
    """M += `scale` 𝒦(Y, J), 𝒦(Y, J) = J B − B J + Y Dᵀ + YᵀD, with B in `state.mixing` and D in `state.response`."""
    add_product(scale, answers, state.mixing, state.moved, FIRST)
    add_product(-1.0 * scale, state.mixing, answers, state.moved, FIRST)
    add_product_by_transposed(scale, logits, state.response, state.moved)
    add_transposed_product(scale, logits, state.response, state.moved, FIRST)


@kernel
def add_product(scale, a, b, out, offset):
    """out[:, offset:] += `scale` a b."""
    for i in range(a.shape[0]):
        for k in range(b.shape[1]):
            total = everywhere(0.0)
            for j in range(a.shape[1]):
                total = total + load(a, i, j) * load(b, j, k)
            store(out, i, offset + k, load(out, i, offset + k) + scale * total)


@kernel
def add_transposed_product(scale, a, b, out, offset):
    """out[:, offset:] += `scale` aᵀ b."""
    for i in range(a.shape[1]):
        for k in range(b.shape[1]):
            total = everywhere(0.0)
            for j in range(a.shape[0]):
                total = total + load(a, j, i) * load(b, j, k)
            store(out, i, offset + k, load(out, i, offset + k) + scale * total)


@kernel
def add_product_by_transposed(scale, a, b, out):
    """out += `scale` a bᵀ."""
    for i in range(a.shape[0]):
        for k in range(b.shape[0]):
            total = inner(a, i, b, k, FIRST, a.shape[1])
            store(out, i, k, load(out, i, k) + scale * total)
