r"""The factor step with a mask, on the tokens themselves: rows xᵅ of R.

  R ← triangular factor of [ K (R (C + √dt A) + (γ²/τ₀)√dt B R) | (γλ/τ₀)√dt B R | √(η dt) |R g| ],

with the letters of `steps`. A token's row of B depends on what it sees, so E BVBᵀ = V∘P is no multiple of V: the second
block adds the γ²λ²/τ₀² part of it, and K = I + dt γ²/(2τ₀²) W has a full matrix W.
"""

from limitformer.covariance.limit.coefficients import centre_rows
from limitformer.covariance.limit.step_parts import add_mixing, draw_linear, rest_of_mixing
from limitformer.numerics.factor import (
    FIRST,
    multiply_by_lower_transposed,
    multiply_into,
    multiply_lower,
)
from limitformer.numerics.kernels import kernel
from limitformer.numerics.lanes import everywhere, load, magnitude, square_root, store
from limitformer.numerics.random import draw_normals, next_normal


@kernel
def masked_rows(stream, dt, constants, mask, factor, work):
    """The blocks of the next factor into `work.rows`."""
    draw_linear(stream, dt, constants, everywhere(0.0), factor, work)
    if constants.mixing > 0.0:
        mix(stream, dt, constants, mask, factor, work)
        spread_rows(dt, constants, work)
        bend(dt, constants, work)
    if constants.kink > 0.0:
        add_kink(stream, dt, constants, factor, work)


@kernel
def draw_mixing(stream, factor, mask, work):
    """B, drawn from the lower triangular factor of V, into `work.normals`."""
    draw_normals(stream, work.normals)
    multiply_lower(factor, work.normals, work.turned)
    multiply_by_lower_transposed(work.turned, factor, work.normals)
    centre_rows(work.normals, mask)


@kernel
def mix(stream, dt, constants, mask, factor, work):
    """Add (γ²/τ₀)√dt B R to the first block of `work.rows`; B R stays in `work.turned`."""
    draw_mixing(stream, factor, mask, work)
    add_mixing(dt, constants, factor, work)


@kernel
def spread_rows(dt, constants, work):
    """(γλ/τ₀)√dt B R into the second block of `work.rows`."""
    m, scale = work.turned.shape[0], square_root(dt * rest_of_mixing(constants))
    for i in range(m):
        for k in range(m):
            store(work.rows, i, m + k, scale * load(work.turned, i, k))


@kernel
def bend(dt, constants, work):
    """Multiply the first block of `work.rows` by K = I + dt γ²/(2τ₀²) W."""
    m, scale = work.moved.shape[0], dt * constants.second_order
    multiply_into(work.drift.weights, work.rows, m, work.moved, FIRST)
    for i in range(m):
        for k in range(m):
            store(work.rows, i, k, load(work.rows, i, k) + scale * load(work.moved, i, k))


@kernel
def add_kink(stream, dt, constants, factor, work):
    """√(η dt) |R g| into the last column of `work.rows`."""
    m, last = factor.shape[0], work.rows.shape[1] - 1
    scale = square_root(constants.kink * dt)
    for k in range(m):
        store(work.column, k, 0, next_normal(stream))
    for i in range(m):
        total = everywhere(0.0)
        for k in range(i + 1):
            total = total + load(factor, i, k) * load(work.column, k, 0)
        store(work.rows, i, last, scale * magnitude(total))
