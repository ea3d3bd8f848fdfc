r"""The factor step without a mask, on differences: rows x⁰ and yᵅ = xᵅ − x⁰ of R, α ≥ 1 (`differences`).

  R ← triangular factor of [ K (R (C + √dt A) + (γ²/τ₀)√dt B R) | √(η dt) |R g| ],

with the letters of `steps`. The rows of B have mean zero, so B R needs the differences alone, and the rows of a
difference are (xᵅ − x⁰) G (C L)ᵀ: every difference is moved by a part of itself and keeps its relative precision, where
tokens that align by 10¹⁶ to one would lose it. K = I + dt γ²/(2τ₀²m) diag(V) sᵀ, in the row of a difference V_αα − V₀₀.
"""

from limitformer.covariance.limit.step_parts import add_mixing, draw_linear, rest_of_mixing
from limitformer.numerics.factor import multiply_by_lower_transposed, multiply_lower
from limitformer.numerics.kernels import kernel
from limitformer.numerics.lanes import everywhere, load, magnitude, square_root, store, where_positive
from limitformer.numerics.random import draw_normals, next_normal


@kernel
def free_rows(stream, dt, constants, factor, work):
    """The blocks of the next factor into `work.rows`."""
    if constants.mixing > 0.0:
        draw_linear(stream, dt, constants, growth(dt, constants, load(work.pace, 1, 0)), factor, work)
        mix(stream, dt, constants, factor, work)
        bend(dt, constants, work)
    else:
        draw_linear(stream, dt, constants, everywhere(0.0), factor, work)
    if constants.kink > 0.0:
        add_kink(stream, dt, constants, factor, work)


@kernel
def growth(dt, constants, spread):
    """ρx + κx² + μx³."""
    ratio = rest_of_mixing(constants) / constants.mixing**2
    second = 0.5 * ratio**2 - ratio + 1.5
    third = ratio * second - ratio**3 / 3.0 + ratio**2 - second - 3.0 * ratio + 5.0
    x = constants.mixing**2 * (dt * spread)
    return x * (ratio + x * (second + x * third))


@kernel
def mix(stream, dt, constants, factor, work):
    """Add (γ²/τ₀)√dt B R to `work.rows`."""
    draw_normals(stream, work.normals)
    multiply_lower(factor, work.normals, work.turned)
    multiply_by_lower_transposed(work.turned, factor, work.normals)
    centre_differences(work.normals)
    add_mixing(dt, constants, factor, work)


@kernel
def centre_differences(logits):
    """Logits at the differences to B in place: that at x⁰ is 0, and x⁰ takes no part in B R."""
    m = logits.shape[0]
    for i in range(m):
        mean = everywhere(0.0)
        for k in range(1, m):
            mean = mean + load(logits, i, k)
        mean = mean / float(m)
        store(logits, i, 0, 0.0)
        for k in range(1, m):
            store(logits, i, k, (load(logits, i, k) - mean) / float(m))


@kernel
def bend(dt, constants, work):
    """Multiply `work.rows` by K; Σ s = 0, so the differences alone enter Σ s_ν xᵛ."""
    m, scale = work.variances.shape[0], dt * (constants.second_order / work.variances.shape[0])
    for k in range(m):
        total = everywhere(0.0)
        for i in range(1, m):
            total = total + load(work.column, i, 0) * load(work.rows, i, k)
        store(work.sums, k, 0, total)
    for i in range(m):
        weight = scale * load(work.variances, i, 0)
        for k in range(m):
            store(work.rows, i, k, load(work.rows, i, k) + weight * load(work.sums, k, 0))


@kernel
def add_kink(stream, dt, constants, factor, work):
    """√(η dt) |R g| into the last column of `work.rows`; |h + δ| − |h| = (2h + δ) δ/(|h + δ| + |h|)."""
    m, last = factor.shape[0], work.rows.shape[1] - 1
    scale = square_root(constants.kink * dt)
    for k in range(m):
        store(work.column, k, 0, next_normal(stream))
    first = load(factor, 0, 0) * load(work.column, 0, 0)
    store(work.rows, 0, last, scale * magnitude(first))
    for i in range(1, m):
        change = everywhere(0.0)
        for k in range(i + 1):
            change = change + load(factor, i, k) * load(work.column, k, 0)
        both = magnitude(first + change) + magnitude(first)
        store(work.rows, i, last, scale * where_positive(both, (first + (first + change)) * change / both))
