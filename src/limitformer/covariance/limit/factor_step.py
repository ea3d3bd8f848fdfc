r"""One step of the covariance SDE, dV = b dt + N + Nᵀ with, for V = L Lᵀ and independent standard normal G₁, G₂,

  N = √dt { a L G₁ Lᵀ + (γ²/τ₀) B V },   B = centred rows of Y = L G₂ Lᵀ, over m_α  (`centre_rows`),

whose covariance is exactly Σ(V) of [ST, Thm 3.2, Thm 4.2, Cor. 4.3] at a cost of O(m³); no pair-by-pair matrix.

**Factor step** (default). It stays positive semi-definite by construction and never needs a root of V:

  R ← triangular factor of [ K (R (C + √dt A) + (γ²/τ₀)√dt B R) | (γλ/τ₀)√dt B R | √(η dt) |R g| ].

Its square has the SDE's mean and covariance up to O(dt²), term by term:

* A is lower triangular with independent entries, N(0, a²) on the diagonal and N(0, 2a²) below. So A + Aᵀ has the law
  of a (G₁ + G₁ᵀ), and R (C + √dt A) is lower triangular, because R is. E AAᵀ is diagonal, a² (2i + 1) in row
  i = 0, 1, …; the diagonal C takes it back: C² = 1 − η dt − dt a² (2i + 1).
* The terms with B add (γ⁴ + γ²λ²)/τ₀² E BVBᵀ = γ²/τ₀² V∘P.
* K = I + dt γ²/(2τ₀²) W adds γ²/(2τ₀²)(WV + VWᵀ).
* The last column, g ~ N(0, I) and |·| entry by entry, adds η E|h||h|ᵀ with h ~ N(0, V). That is
  ηV + γ² ν(ρ)√(V_αα V_ββ): the drift of the ReLU, as a sample of it.

* A smooth activation has two blocks more, √(γ²c₁ dt) diag V, and √(2γ²c₁ dt) diag(R g) R of another g, whose squares
  have the means γ²c₁V_αα V_ββ dt and 2γ²c₁V_αβ² dt. Token α is multiplied by 1 + dt γ²c₂V_αα, and C² loses γ²c₀ dt.

**With a mask** the rows of R are the tokens. A token's row of B depends on what it sees, so E BVBᵀ = V∘P is not a
multiple of V: the second block adds the γ²λ²/τ₀² part of it, and W is a full matrix.

**Without a mask** the rows of R are a first token x⁰ and the differences yᵅ = xᵅ − x⁰. The rows of B
have mean zero, so B R needs only the differences, and the row of a difference is (xᵅ − x⁰) G (C L)ᵀ. Every difference
moves by a part of itself and keeps its relative precision, even where tokens align to 10⁻¹⁶. W has rank one.

* V∘P is a multiple of V, so the second block becomes γ²λ²/τ₀² P dt = ρx in C², with x = (γ²/τ₀)² P dt and ρ = λ²/γ².
* Two more orders of C², κx² + μx³ with κ = ρ²/2 − ρ + 3/2 and μ = ρκ − ρ³/3 + ρ² − κ − 3ρ + 5, matter far out. There
  only the mixing of two tokens acts, and it multiplies their squared distance by (C + √x g)² in every step,
  g ~ N(0, 1). With these orders E log (C + √x g)² is (ρ − 1) x, as in the SDE, up to O(x⁴). Whether d explodes depends
  on that number.

Every lane has its own dt. `short_steps.measure_pace` must have measured the state where the step begins.

Tokens may align until their differences are 10¹⁶ times shorter than they are;
in rows of their own the differences keep their digits. In a lower triangular factor x⁰ has only one entry, so that y
and x differ only in the first column.
"""

from typing import NamedTuple

import numpy as np

from limitformer.covariance.limit.drift import (
    DriftWorkspace,
    add_second_order_to_differences,
    add_second_order_to_tokens,
    drift_workspace,
    is_smooth,
)
from limitformer.numerics.factor import (
    FIRST,
    copy,
    gram,
    inner,
    multiply_by_lower,
    multiply_by_lower_transposed,
    multiply_lower,
    multiply_lower_by_lower,
    trace_of_gram,
    triangularise,
)
from limitformer.numerics.kernels import allocator, kernel
from limitformer.numerics.lanes import everywhere, lane_matrix, load, magnitude, square_root, store, where_positive
from limitformer.numerics.random import draw_normals, next_normal


@kernel
def to_differences(tokens, out):
    copy(tokens, out)
    for i in range(1, tokens.shape[0]):
        store(out, i, 0, load(tokens, i, 0) - load(tokens, 0, 0))


@kernel
def to_tokens(differences, out):
    copy(differences, out)
    for i in range(1, differences.shape[0]):
        store(out, i, 0, load(differences, i, 0) + load(differences, 0, 0))


@kernel
def to_step_factor(tokens, mask, out):
    """out: the factor to move, from the lower triangular factor `tokens` of V."""
    if mask.full:
        to_differences(tokens, out)
    else:
        copy(tokens, out)


@kernel
def tokens_of(factor, mask, out):
    """out: a factor of V whose rows are the tokens."""
    if mask.full:
        to_tokens(factor, out)
    else:
        copy(factor, out)


@kernel
def covariance_of(factor, mask, scratch, out):
    if mask.full:
        to_tokens(factor, scratch)
        gram(scratch, out)
    else:
        gram(factor, out)


@kernel
def trace_of_tokens(differences):
    first = load(differences, 0, 0)
    total = first * first
    for i in range(1, differences.shape[0]):
        total = total + (first * first + variance_beyond_first(differences, i))
    return total


@kernel
def trace_of(factor, mask):
    """Return tr V, a bound of |V|."""
    if mask.full:
        return trace_of_tokens(factor)
    return trace_of_gram(factor)


@kernel
def variance_beyond_first(differences, i):
    """Return V_ii − V₀₀ = |yⁱ|² + 2 ⟨yⁱ, x⁰⟩."""
    squared = inner(differences, i, differences, i, FIRST, i + 1)
    return squared + 2.0 * (load(differences, i, 0) * load(differences, 0, 0))


@kernel
def variance_of(factor, mask, i):
    """Return V_ii at a step's factor."""
    if mask.full and i > 0:
        first = load(factor, 0, 0)
        return first * first + variance_beyond_first(factor, i)
    return inner(factor, i, factor, i, FIRST, i + 1)


@kernel
def centre(differences, means, out):
    """out = C X (m, m), X the tokens: each column minus its mean, all relative to x⁰; the means into `means` (m, 1)."""
    m = differences.shape[0]
    for k in range(m):
        total = everywhere(0.0)
        for i in range(1, m):
            total = total + load(differences, i, k)
        mean = total / float(m)
        store(means, k, 0, mean)
        store(out, 0, k, -1.0 * mean)
        for i in range(1, m):
            store(out, i, k, load(differences, i, k) - mean)


@kernel
def join_twins(twins, differences):
    """Set equal tokens to the same row; an explosion would blow their rounding up to the size of the others."""
    for i in range(1, len(twins)):
        if twins[i] < i:
            for k in range(differences.shape[1]):
                first = twins[i] == 0
                store(differences, i, k, everywhere(0.0) if first else load(differences, twins[i], k))


@kernel
def keep_opposite(differences):
    """Set y = −2x⁰ for two antipodes; an explosion would blow the rounding of their sum up to their difference."""
    store(differences, 1, 0, -2.0 * load(differences, 0, 0))
    store(differences, 1, 1, everywhere(0.0))


class StepWorkspace(NamedTuple):
    """Scratch of one thread, few enough for the cache; matrices are (m, m, LANES) unless another shape is given."""

    drift: DriftWorkspace
    pace: np.ndarray  # (2, 1, LANES): the pace; P
    normals: np.ndarray  # C V C, then A, then G₂, then B
    turned: np.ndarray  # C R, then L G₂, then B R or B V
    moved: np.ndarray  # W times the first block, or L G₁ Lᵀ
    variances: np.ndarray  # (m, 1, LANES): diag V
    column: np.ndarray  # (m, 1, LANES): s, then the normals of the kink or square
    sums: np.ndarray  # (m, 1, LANES)
    failed: np.ndarray  # (1, 1, LANES): positive where V has no root
    rows: np.ndarray  # (m, columns, LANES): the blocks; m columns, with a mask 2m, and 1 for a kink, m + 1 for a square


@allocator
def step_workspace(tokens, constants, mask):
    masked = constants.mixing > 0.0 and not mask.full
    columns = tokens + (tokens if masked else 0) + (1 if constants.kink > 0.0 else 0)
    columns += tokens + 1 if constants.square > 0.0 else 0
    return StepWorkspace(
        drift_workspace(tokens),
        lane_matrix(2, 1),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, 1),
        lane_matrix(tokens, 1),
        lane_matrix(tokens, 1),
        lane_matrix(1, 1),
        lane_matrix(tokens, columns),
    )


@kernel
def factor_step(stream, dt, constants, mask, factor, out, work):
    """Move the lower triangular `factor`, measured, by dt into `out`."""
    if mask.full:
        blocks_of_differences(stream, dt, constants, factor, work)
    else:
        blocks_of_tokens(stream, dt, constants, mask, factor, work)
    if is_smooth(constants):
        add_smooth(stream, dt, constants, mask, factor, work)
    triangularise(work.rows, FIRST, work.rows.shape[1], out, FIRST)
    if mask.full:
        join_twins(mask.twins, out)
        if mask.opposite:
            keep_opposite(out)


@kernel
def blocks_of_differences(stream, dt, constants, factor, work):
    """The blocks of the next factor without a mask into `work.rows`."""
    if constants.mixing > 0.0:
        draw_linear(stream, dt, constants, diagonal_growth(dt, constants, load(work.pace, 1, 0)), factor, work)
        add_mixing_to_differences(stream, dt, constants, factor, work)
        add_second_order_to_differences(dt, constants, work)
    else:
        draw_linear(stream, dt, constants, everywhere(0.0), factor, work)
    if constants.kink > 0.0:
        add_kink_to_differences(stream, dt, constants, factor, work)


@kernel
def blocks_of_tokens(stream, dt, constants, mask, factor, work):
    """The blocks of the next factor with a mask into `work.rows`."""
    draw_linear(stream, dt, constants, everywhere(0.0), factor, work)
    if constants.mixing > 0.0:
        add_mixing_to_tokens(stream, dt, constants, mask, factor, work)
        add_mixing_block(dt, constants, work)
        add_second_order_to_tokens(dt, constants, work)
    if constants.kink > 0.0:
        add_kink_to_tokens(stream, dt, constants, factor, work)


@kernel
def mixing_beyond_noise(constants):
    """Return γ²λ²/τ₀² = γ²/τ₀² − (γ²/τ₀)²."""
    return max(0.0, constants.mixing_drift - constants.mixing**2)


@kernel
def diagonal_growth(dt, constants, spread):
    """Return ρx + κx² + μx³."""
    ratio = mixing_beyond_noise(constants) / constants.mixing**2
    second = 0.5 * ratio**2 - ratio + 1.5
    third = ratio * second - ratio**3 / 3.0 + ratio**2 - second - 3.0 * ratio + 5.0
    x = constants.mixing**2 * (dt * spread)
    return x * (ratio + x * (second + x * third))


@kernel
def draw_linear(stream, dt, constants, growth, factor, work):
    """R (C + √dt A) into the first block of `work.rows`; `growth` is added to C²."""
    m = factor.shape[0]
    diagonal, below = square_root(dt) * constants.linear, square_root(2.0 * dt) * constants.linear
    for i in range(m):
        for j in range(i):
            store(work.normals, i, j, below * next_normal(stream))
        bent = constants.kink + 3.0 * constants.square + 2.0 * constants.cube
        lost = dt * (bent + constants.linear**2 * (2 * i + 1))
        store(work.normals, i, i, square_root(growth + (1.0 - lost)) + diagonal * next_normal(stream))
        for j in range(i + 1, m):
            store(work.normals, i, j, 0.0)
            store(work.rows, i, j, 0.0)
    multiply_lower_by_lower(factor, work.normals, work.rows)


@kernel
def add_mixing_to_differences(stream, dt, constants, factor, work):
    draw_normals(stream, work.normals)
    multiply_lower(factor, work.normals, work.turned)
    multiply_by_lower_transposed(work.turned, factor, work.normals)
    centre_differences(work.normals)
    add_mixing(dt, constants, factor, work)


@kernel
def centre_differences(logits):
    """Logits at the differences to B in place; the logit at x⁰ is 0, and x⁰ does not enter B R."""
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
def add_mixing_to_tokens(stream, dt, constants, mask, factor, work):
    draw_mixing(stream, factor, mask, work)
    add_mixing(dt, constants, factor, work)


@kernel
def draw_mixing(stream, factor, mask, work):
    """B, drawn from the lower triangular factor of V, into `work.normals`."""
    draw_normals(stream, work.normals)
    multiply_lower(factor, work.normals, work.turned)
    multiply_by_lower_transposed(work.turned, factor, work.normals)
    centre_rows(work.normals, mask)


@kernel
def centre_rows(logits, mask):
    """Y to B in place: B_αν = (C_α Y_α)_ν / m_α."""
    m = logits.shape[0]
    for a in range(m):
        mean = everywhere(0.0)
        for k in range(m):
            if mask.seen[a, k]:
                mean = mean + load(logits, a, k)
        mean = mean / mask.counts[a]
        for k in range(m):
            if mask.seen[a, k]:
                store(logits, a, k, (load(logits, a, k) - mean) / mask.counts[a])
            else:
                store(logits, a, k, 0.0)


@kernel
def add_mixing(dt, constants, factor, work):
    """Add (γ²/τ₀)√dt B R to the first block of `work.rows`, B in `work.normals`; B R stays in `work.turned`."""
    m, scale = factor.shape[0], square_root(dt) * constants.mixing
    multiply_by_lower(work.normals, factor, work.turned)
    for i in range(m):
        for k in range(m):
            store(work.rows, i, k, load(work.rows, i, k) + scale * load(work.turned, i, k))


@kernel
def add_mixing_block(dt, constants, work):
    """(γλ/τ₀)√dt B R into the second block of `work.rows`."""
    m, scale = work.turned.shape[0], square_root(dt * mixing_beyond_noise(constants))
    for i in range(m):
        for k in range(m):
            store(work.rows, i, m + k, scale * load(work.turned, i, k))


@kernel
def add_smooth(stream, dt, constants, mask, factor, work):
    """Store the blocks of a smooth activation, the last ones of `work.rows`, and multiply the tokens of the first one.

    The row of a difference is that of its token minus that of the first token: z_αx_α − z₀x₀ = z_αy + (z_α − z₀)x₀.
    """
    m, last = factor.shape[0], work.rows.shape[1] - 1
    scale = dt * constants.cube
    column, block = square_root(constants.square * dt), square_root(2.0 * constants.square * dt)
    for k in range(m):
        store(work.column, k, 0, next_normal(stream) if constants.square > 0.0 else everywhere(0.0))
    for i in range(m - 1, -1, -1):  # the first token last
        own, z = variance_of(factor, mask, i), everywhere(0.0)
        for k in range(i + 1):
            z = z + load(factor, i, k) * load(work.column, k, 0)
        beyond, difference = everywhere(0.0), z
        if mask.full and i > 0:
            beyond, z = variance_beyond_first(factor, i), z + load(factor, 0, 0) * load(work.column, 0, 0)
        for k in range(m):
            x = load(work.rows, i, k)
            store(work.rows, i, k, x + scale * (own * x + beyond * load(work.rows, 0, k)))
            if constants.square > 0.0:
                x = z * load(factor, i, k)
                if mask.full and i > 0:
                    x = x + difference * load(factor, 0, k)
                store(work.rows, i, last - m + k, block * x)
        if constants.square > 0.0:
            store(work.rows, i, last, column * (beyond if mask.full and i > 0 else own))


@kernel
def add_kink_to_differences(stream, dt, constants, factor, work):
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


@kernel
def add_kink_to_tokens(stream, dt, constants, factor, work):
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
