r"""One step of the covariance SDE, dV = b dt + N + Nᵀ with, for V = L Lᵀ and independent standard normal G₁, G₂,

  N = √dt { a L G₁ Lᵀ + (γ²/τ₀) B V },   B = centred rows of Y = L G₂ Lᵀ, over m_α  (`coefficients`),

whose covariance is exactly Σ(V) of [ST, Thm 3.2, Thm 4.2, Cor. 4.3] at a cost of O(m³); no pair-by-pair matrix.

**Factor step** (default), stays positive semi-definite by construction and never needs a root of V:

  R ← triangular factor of [ K (R (C + √dt A) + (γ²/τ₀)√dt B R) | (γλ/τ₀)√dt B R | √(η dt) |R g| ].

Its square has the SDE's mean and covariance up to O(dt²), term by term:

* A is lower triangular with independent entries, N(0, a²) on the diagonal and N(0, 2a²) below, so that A + Aᵀ has the
  law of a (G₁ + G₁ᵀ) and, R being lower triangular, R (C + √dt A) is too. E AAᵀ is diagonal, a² (2i + 1) in row
  i = 0, 1, …; the diagonal C takes it back: C² = 1 − η dt − dt a² (2i + 1).
* The terms with B add (γ⁴ + γ²λ²)/τ₀² E BVBᵀ = γ²/τ₀² V∘P. Without a mask V∘P is a multiple of V, and the second
  block becomes γ²λ²/τ₀² P dt in C².
* K = I + dt γ²/(2τ₀²) W adds γ²/(2τ₀²)(WV + VWᵀ). Without a mask W = diag(V) sᵀ/m has rank one.
* The last column, g ~ N(0, I) and |·| entry by entry, adds η E|h||h|ᵀ with h ~ N(0, V), which is
  ηV + γ² ν(ρ)√(V_αα V_ββ): the drift of the ReLU, as a sample of it.

**Euler-Maruyama step**, as in the paper: V ← V + b dt + N + Nᵀ. It can leave the cone of covariance matrices; the
root of V then does not exist and the path ends there.
"""

from typing import NamedTuple

import numpy as np

from limitformer.factor import (
    FIRST,
    gram,
    gram_of_lower,
    inner,
    multiply,
    multiply_by_lower,
    multiply_by_lower_transposed,
    multiply_into,
    multiply_lower,
    multiply_lower_by_lower,
    triangularise,
)
from limitformer.kernels import driver, kernel
from limitformer.lanes import everywhere, lane_matrix, load, magnitude, square_root, store, where_positive
from limitformer.limits.coefficients import (
    DriftWorkspace,
    add_rows,
    centre_columns,
    centre_rows,
    drift,
    drift_workspace,
    second_order_row,
    second_order_weights,
    spread_without_mask,
)
from limitformer.random import Stream, draw_normals, next_normal, open_stream
from limitformer.recording import Ledger, open_ledger

CONE_ROUNDING = 1e-10  # how negative a pivot may be, relative to the trace, and still count as rounding


class StepWorkspace(NamedTuple):
    """Scratch of one thread; matrices are (m, m, LANES) but where said. Few of them, so that they stay in cache."""

    stream: Stream
    ledger: Ledger  # its `now` is the V of the Euler-Maruyama step
    drift: DriftWorkspace
    factor: np.ndarray
    moved_factor: np.ndarray  # where the factor step goes, in turn with `factor`
    normals: np.ndarray  # C V C, then A, then G₂, then B
    turned: np.ndarray  # C R, then L G₂, then B R or B V
    moved: np.ndarray  # W times the first block; L G₁ Lᵀ
    variances: np.ndarray  # (m, 1, LANES): diag V
    column: np.ndarray  # (m, 1, LANES): s, then the normals of the kink
    sums: np.ndarray  # (m, 1, LANES)
    failed: np.ndarray  # (1, 1, LANES): positive where V has no root
    rows: np.ndarray  # the blocks of the factor step that there are: m columns, m more with a mask, one with a kink


@driver
def step_workspace(tokens, constants, mask):
    masked = constants.mixing > 0.0 and not mask.full
    columns = tokens + (tokens if masked else 0) + (1 if constants.kink > 0.0 else 0)
    return StepWorkspace(
        open_stream(),
        open_ledger(tokens),
        drift_workspace(tokens),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, tokens),
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
def draw_mixing(factor, mask, work):
    """B, drawn from the lower triangular factor of V, into `work.normals`."""
    draw_normals(work.stream, work.normals)
    multiply_lower(factor, work.normals, work.turned)
    multiply_by_lower_transposed(work.turned, factor, work.normals)
    centre_rows(work.normals, mask)


@kernel
def factor_step(dt, constants, mask, factor, out, work):
    """Move `factor`, lower triangular, by dt with the step that stays positive semi-definite, into `out`."""
    if constants.mixing > 0.0 and mask.full:
        growth = dt * rest_of_mixing(constants) * describe_covariance(factor, work)
        draw_linear(dt, constants, growth, factor, work)
        mix(dt, constants, mask, factor, work)
        bend_without_mask(dt, constants, work)
    else:
        draw_linear(dt, constants, everywhere(0.0), factor, work)
        if constants.mixing > 0.0:
            mix(dt, constants, mask, factor, work)
            spread_rows(dt, constants, work)
            bend(dt, constants, mask, factor, work)
    if constants.kink > 0.0:
        add_kink(dt, constants, factor, work)
    triangularise(work.rows, FIRST, work.rows.shape[1], out, FIRST)


@kernel
def rest_of_mixing(constants):
    """γ²λ²/τ₀² = γ²/τ₀² − (γ²/τ₀)²."""
    return max(0.0, constants.mixing_drift - constants.mixing**2)


@kernel
def describe_covariance(factor, work):
    """diag V and s into `work.variances` and `work.column`; P. By way of C R and C V C, which do not cancel."""
    m = factor.shape[0]
    for i in range(m):
        store(work.variances, i, 0, inner(factor, i, factor, i, FIRST, i + 1))
    centre_columns(factor, work.sums, work.turned)
    gram(work.turned, work.normals)
    second_order_row(work.normals, work.column)
    return spread_without_mask(work.normals)


@kernel
def draw_linear(dt, constants, growth, factor, work):
    """R (C + √dt A) into the first block of `work.rows`; `growth` is added to C²."""
    m = factor.shape[0]
    diagonal, below = np.sqrt(dt) * constants.linear, np.sqrt(2.0 * dt) * constants.linear
    for i in range(m):
        for j in range(i):
            store(work.normals, i, j, below * next_normal(work.stream))
        lost = dt * (constants.kink + constants.linear**2 * (2 * i + 1))
        store(work.normals, i, i, square_root(growth + (1.0 - lost)) + diagonal * next_normal(work.stream))
        for j in range(i + 1, m):
            store(work.normals, i, j, 0.0)
            store(work.rows, i, j, 0.0)
    multiply_lower_by_lower(factor, work.normals, work.rows)


@kernel
def mix(dt, constants, mask, factor, work):
    """Add (γ²/τ₀)√dt B R to the first block of `work.rows`; B R stays in `work.turned`."""
    m = factor.shape[0]
    draw_mixing(factor, mask, work)
    multiply_by_lower(work.normals, factor, work.turned)
    scale = np.sqrt(dt) * constants.mixing
    for i in range(m):
        for k in range(m):
            store(work.rows, i, k, load(work.rows, i, k) + scale * load(work.turned, i, k))


@kernel
def bend_without_mask(dt, constants, work):
    """Multiply the first block of `work.rows` by K = I + dt γ²/(2τ₀² m) diag(V) sᵀ."""
    m = work.variances.shape[0]
    add_rows(work.column, work.rows, m, work.sums)
    half = 0.5 * dt * constants.mixing_drift / m
    for i in range(m):
        weight = half * load(work.variances, i, 0)
        for k in range(m):
            store(work.rows, i, k, load(work.rows, i, k) + weight * load(work.sums, k, 0))


@kernel
def spread_rows(dt, constants, work):
    """(γλ/τ₀)√dt B R into the second block of `work.rows`."""
    m, scale = work.turned.shape[0], np.sqrt(dt * rest_of_mixing(constants))
    for i in range(m):
        for k in range(m):
            store(work.rows, i, m + k, scale * load(work.turned, i, k))


@kernel
def bend(dt, constants, mask, factor, work):
    """Multiply the first block of `work.rows` by K = I + dt γ²/(2τ₀²) W."""
    m, half = factor.shape[0], 0.5 * dt * constants.mixing_drift
    gram_of_lower(factor, work.normals)
    second_order_weights(work.normals, mask, work.drift)
    multiply_into(work.drift.weights, work.rows, m, work.moved, FIRST)
    for i in range(m):
        for k in range(m):
            store(work.rows, i, k, load(work.rows, i, k) + half * load(work.moved, i, k))


@kernel
def add_kink(dt, constants, factor, work):
    """√(η dt) |R g| into the last column of `work.rows`."""
    m, last = factor.shape[0], work.rows.shape[1] - 1
    scale = np.sqrt(constants.kink * dt)
    for k in range(m):
        store(work.column, k, 0, next_normal(work.stream))
    for i in range(m):
        total = everywhere(0.0)
        for k in range(i + 1):
            total = total + load(factor, i, k) * load(work.column, k, 0)
        store(work.rows, i, last, scale * magnitude(total))


@kernel
def cholesky(v, out, failed):
    """Lower triangular L with L Lᵀ = V into `out`; `failed` is positive where V is not positive semi-definite."""
    m = v.shape[0]
    rounding, wrong = everywhere(0.0), everywhere(0.0)
    for i in range(m):
        rounding = rounding + CONE_ROUNDING * load(v, i, i)
    loose = rounding / np.sqrt(CONE_ROUNDING)
    for j in range(m):
        pivot = rest_of(v, out, j, j)
        wrong = wrong + where_positive(-1.0 * rounding - pivot, everywhere(1.0))
        inverse = where_positive(pivot - rounding, 1.0 / square_root(pivot))
        for i in range(m):
            if i < j:
                store(out, i, j, 0.0)
            else:
                rest = rest_of(v, out, i, j)
                store(out, i, j, rest * inverse)
                # Next to a pivot of zero everything must be zero too, up to rounding.
                excess = where_positive(magnitude(rest) - loose, everywhere(1.0))
                wrong = wrong + where_positive(rounding - pivot, excess)
    store(failed, 0, 0, wrong)


@kernel
def rest_of(v, root, i, j):
    """V_ij less what the columns of the root before j explain."""
    rest = load(v, i, j)
    for k in range(j):
        rest = rest - load(root, i, k) * load(root, j, k)
    return rest


@kernel
def euler_maruyama_step(dt, constants, mask, work):
    """Move V in `work.ledger.now` by dt as in the paper, given its root in `work.factor`."""
    m, v = work.factor.shape[0], work.ledger.now
    draw_normals(work.stream, work.normals)
    multiply_lower(work.factor, work.normals, work.turned)
    multiply_by_lower_transposed(work.turned, work.factor, work.moved)
    if constants.mixing > 0.0:
        draw_mixing(work.factor, mask, work)
        multiply(work.normals, v, work.turned)
    for i in range(m):
        for k in range(m):
            noise = constants.linear * load(work.moved, i, k)
            if constants.mixing > 0.0:
                noise = noise + constants.mixing * load(work.turned, i, k)
            store(work.moved, i, k, noise)
    drift(v, constants, mask, work.drift, work.turned)
    for i in range(m):
        for k in range(m):
            noise = np.sqrt(dt) * (load(work.moved, i, k) + load(work.moved, k, i))
            store(v, i, k, load(v, i, k) + dt * load(work.turned, i, k) + noise)
