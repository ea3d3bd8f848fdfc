r"""One step of the covariance SDE, dV = b dt + N + Nᵀ with, for V = L Lᵀ and independent standard normal G₁, G₂,

  N = √dt { a L G₁ Lᵀ + (γ²/τ₀) B V },   B = centred rows of Y = L G₂ Lᵀ, over m_α  (`coefficients`),

whose covariance is exactly Σ(V) of [ST, Thm 3.2, Thm 4.2, Cor. 4.3] at a cost of O(m³); no pair-by-pair matrix.

**Factor step** (default), stays positive semi-definite by construction and never needs a root of V:

  R ← triangular factor of [ K (√(1 − (m a² + η) dt) R + a√dt R G₁ + (γ²/τ₀)√dt B R)
                             | (γλ/τ₀)√dt B R | √(η dt) |R g| ],   K = I + dt γ²/(2τ₀²) W.

Its square has the SDE's mean and covariance up to O(dt²). E R G₁G₁ᵀRᵀ = mV, which the root takes back. The two
terms with B add (γ⁴ + γ²λ²)/τ₀² E BVBᵀ = γ²/τ₀² V∘P; K adds γ²/(2τ₀²)(WV + VWᵀ). The last column, g ~ N(0, I) and
|·| entry by entry, adds η E|h||h|ᵀ with h ~ N(0, V), which is ηV + γ² ν(ρ)√(V_αα V_ββ): the drift of the ReLU, as a
sample of it.

**Euler-Maruyama step**, as in the paper: V ← V + b dt + N + Nᵀ. It can leave the cone of covariance matrices; the
root of V then does not exist and the path ends there.
"""

from typing import NamedTuple

import numpy as np

from limitformer.factor import gram, multiply, multiply_transposed, triangularise
from limitformer.kernels import driver, kernel
from limitformer.limits.coefficients import (
    DriftWorkspace,
    centre_rows,
    drift,
    drift_workspace,
    second_order_weights,
)
from limitformer.random import Stream, draw_normals, open_stream

CONE_ROUNDING = 1e-10  # how negative a pivot may be, relative to the trace, and still count as rounding


class StepWorkspace(NamedTuple):
    """Scratch of one thread; all (m, m) but where said."""

    stream: Stream
    drift: DriftWorkspace
    factor: np.ndarray
    previous: np.ndarray
    covariance: np.ndarray
    normals: np.ndarray
    turned: np.ndarray
    logits: np.ndarray
    mixed: np.ndarray
    moved: np.ndarray
    kink_normals: np.ndarray  # (m, 1)
    kink: np.ndarray  # (m, 1)
    rows: np.ndarray  # (m, m), (m, m + 1), (m, 2m) or (m, 2m + 1): the blocks of the factor step that there are


@driver
def step_workspace(tokens, constants):
    shape = (tokens, tokens)
    columns = tokens + (tokens if constants.mixing > 0.0 else 0) + (1 if constants.kink > 0.0 else 0)
    return StepWorkspace(
        open_stream(),
        drift_workspace(tokens),
        np.empty(shape),
        np.empty(shape),
        np.empty(shape),
        np.empty(shape),
        np.empty(shape),
        np.empty(shape),
        np.empty(shape),
        np.empty(shape),
        np.empty((tokens, 1)),
        np.empty((tokens, 1)),
        np.empty((tokens, columns)),
    )


@kernel
def draw_mixing(factor, mask, work):
    """B, drawn from the factor of V, into `work.logits`."""
    draw_normals(work.stream, work.normals)
    multiply(factor, work.normals, work.turned)
    multiply_transposed(work.turned, factor, work.logits)
    centre_rows(work.logits, mask)


@kernel
def factor_step(dt, constants, mask, work):
    """Move `work.factor` by dt with the step that stays positive semi-definite."""
    m = work.factor.shape[0]
    root = np.sqrt(1.0 - dt * (m * constants.linear**2 + constants.kink))
    draw_normals(work.stream, work.normals)
    multiply(work.factor, work.normals, work.turned)
    for i in range(m):
        for k in range(m):
            work.rows[i, k] = root * work.factor[i, k] + np.sqrt(dt) * constants.linear * work.turned[i, k]
    if constants.mixing > 0.0:
        add_mixing(dt, constants, mask, work)
    if constants.kink > 0.0:
        add_kink(dt, constants, work)
    triangularise(work.rows, 0, work.factor)


@kernel
def add_mixing(dt, constants, mask, work):
    """The two blocks of the factor step that come from attention."""
    m = work.factor.shape[0]
    draw_mixing(work.factor, mask, work)
    multiply(work.logits, work.factor, work.mixed)
    # γλ/τ₀ from γ²/τ₀ and γ²/τ₀²: (γλ/τ₀)² = γ²/τ₀² − γ⁴/τ₀².
    rest = np.sqrt(max(0.0, constants.mixing_drift - constants.mixing**2))
    for i in range(m):
        for k in range(m):
            work.moved[i, k] = work.rows[i, k] + np.sqrt(dt) * constants.mixing * work.mixed[i, k]
            work.rows[i, m + k] = np.sqrt(dt) * rest * work.mixed[i, k]
    gram(work.factor, work.covariance)
    second_order_weights(work.covariance, mask, work.drift)
    multiply(work.drift.weights, work.moved, work.mixed)
    for i in range(m):
        for k in range(m):
            work.rows[i, k] = work.moved[i, k] + 0.5 * dt * constants.mixing_drift * work.mixed[i, k]


@kernel
def add_kink(dt, constants, work):
    """The last column of the factor step, the drift of the ReLU."""
    draw_normals(work.stream, work.kink_normals)
    multiply(work.factor, work.kink_normals, work.kink)
    last = work.rows.shape[1] - 1
    for i in range(work.factor.shape[0]):
        work.rows[i, last] = np.sqrt(constants.kink * dt) * abs(work.kink[i, 0])


@kernel
def cholesky(v, out):
    """Lower triangular L with L Lᵀ = V into `out`; False where V is not positive semi-definite."""
    m = v.shape[0]
    trace = 0.0
    for i in range(m):
        trace += v[i, i]
    for j in range(m):
        for i in range(m):
            out[i, j] = 0.0
        pivot = v[j, j]
        for k in range(j):
            pivot -= out[j, k] * out[j, k]
        if not pivot >= -CONE_ROUNDING * trace:
            return False
        for i in range(j, m):
            rest = v[i, j]
            for k in range(j):
                rest -= out[i, k] * out[j, k]
            if pivot > CONE_ROUNDING * trace:
                out[i, j] = rest / np.sqrt(pivot)
            elif abs(rest) > np.sqrt(CONE_ROUNDING) * trace:
                return False
    return True


@kernel
def euler_maruyama_step(dt, constants, mask, work):
    """Move `work.covariance` by dt as in the paper, given its root in `work.factor`."""
    m = work.factor.shape[0]
    draw_normals(work.stream, work.normals)
    multiply(work.factor, work.normals, work.turned)
    multiply_transposed(work.turned, work.factor, work.moved)
    for i in range(m):
        for k in range(m):
            work.moved[i, k] *= constants.linear
    if constants.mixing > 0.0:
        draw_mixing(work.factor, mask, work)
        multiply(work.logits, work.covariance, work.mixed)
        for i in range(m):
            for k in range(m):
                work.moved[i, k] += constants.mixing * work.mixed[i, k]
    drift(work.covariance, constants, mask, work.drift, work.turned)
    for i in range(m):
        for k in range(m):
            noise = np.sqrt(dt) * (work.moved[i, k] + work.moved[k, i])
            work.covariance[i, k] += dt * work.turned[i, k] + noise
