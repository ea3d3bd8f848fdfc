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
from limitformer.lanes import LANES, everywhere, load, magnitude, square_root, store, where_positive
from limitformer.limits.coefficients import (
    DriftWorkspace,
    centre_rows,
    drift,
    drift_workspace,
    second_order_weights,
)
from limitformer.random import Stream, draw_normals, next_normal, open_stream
from limitformer.recording import Ledger, open_ledger

CONE_ROUNDING = 1e-10  # how negative a pivot may be, relative to the trace, and still count as rounding


class StepWorkspace(NamedTuple):
    """Scratch of one thread; matrices are (m, m, LANES) but where said."""

    stream: Stream
    ledger: Ledger  # its `now` is the V of the Euler-Maruyama step
    drift: DriftWorkspace
    factor: np.ndarray
    previous: np.ndarray
    normals: np.ndarray
    turned: np.ndarray
    logits: np.ndarray
    mixed: np.ndarray
    moved: np.ndarray
    kink_normals: np.ndarray  # (m, 1, LANES)
    failed: np.ndarray  # (1, 1, LANES): positive where V has no root
    rows: np.ndarray  # (m, m), (m, m + 1), (m, 2m) or (m, 2m + 1): the blocks of the factor step that there are


@driver
def step_workspace(tokens, constants):
    shape = (tokens, tokens, LANES)
    columns = tokens + (tokens if constants.mixing > 0.0 else 0) + (1 if constants.kink > 0.0 else 0)
    return StepWorkspace(
        open_stream(),
        open_ledger(tokens),
        drift_workspace(tokens),
        np.empty(shape),
        np.empty(shape),
        np.empty(shape),
        np.empty(shape),
        np.empty(shape),
        np.empty(shape),
        np.empty(shape),
        np.empty((tokens, 1, LANES)),
        np.empty((1, 1, LANES)),
        np.empty((tokens, columns, LANES)),
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
    kept = np.sqrt(1.0 - dt * (m * constants.linear**2 + constants.kink))
    added = np.sqrt(dt) * constants.linear
    draw_normals(work.stream, work.normals)
    multiply(work.factor, work.normals, work.turned)
    for i in range(m):
        for k in range(m):
            store(work.rows, i, k, kept * load(work.factor, i, k) + added * load(work.turned, i, k))
    if constants.mixing > 0.0:
        add_mixing(dt, constants, mask, work)
    if constants.kink > 0.0:
        add_kink(dt, constants, work)
    triangularise(work.rows, 0, work.rows.shape[1], work.factor, 0)


@kernel
def add_mixing(dt, constants, mask, work):
    """The two blocks of the factor step that come from attention."""
    m = work.factor.shape[0]
    draw_mixing(work.factor, mask, work)
    multiply(work.logits, work.factor, work.mixed)
    # γλ/τ₀ from γ²/τ₀ and γ²/τ₀²: (γλ/τ₀)² = γ²/τ₀² − γ⁴/τ₀².
    rest = np.sqrt(dt * max(0.0, constants.mixing_drift - constants.mixing**2))
    added, half = np.sqrt(dt) * constants.mixing, 0.5 * dt * constants.mixing_drift
    for i in range(m):
        for k in range(m):
            mixed = load(work.mixed, i, k)
            store(work.moved, i, k, load(work.rows, i, k) + added * mixed)
            store(work.rows, i, m + k, rest * mixed)
    gram(work.factor, work.logits)
    second_order_weights(work.logits, mask, work.drift)
    multiply(work.drift.weights, work.moved, work.mixed)
    for i in range(m):
        for k in range(m):
            store(work.rows, i, k, load(work.moved, i, k) + half * load(work.mixed, i, k))


@kernel
def add_kink(dt, constants, work):
    """The last column of the factor step, the drift of the ReLU."""
    m, last = work.factor.shape[0], work.rows.shape[1] - 1
    scale = np.sqrt(constants.kink * dt)
    for k in range(m):
        store(work.kink_normals, k, 0, next_normal(work.stream))
    for i in range(m):
        total = everywhere(0.0)
        for k in range(m):
            total = total + load(work.factor, i, k) * load(work.kink_normals, k, 0)
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
    multiply(work.factor, work.normals, work.turned)
    multiply_transposed(work.turned, work.factor, work.moved)
    if constants.mixing > 0.0:
        draw_mixing(work.factor, mask, work)
        multiply(work.logits, v, work.mixed)
    for i in range(m):
        for k in range(m):
            noise = constants.linear * load(work.moved, i, k)
            if constants.mixing > 0.0:
                noise = noise + constants.mixing * load(work.mixed, i, k)
            store(work.moved, i, k, noise)
    drift(v, constants, mask, work.drift, work.turned)
    for i in range(m):
        for k in range(m):
            noise = np.sqrt(dt) * (load(work.moved, i, k) + load(work.moved, k, i))
            store(v, i, k, load(v, i, k) + dt * load(work.turned, i, k) + noise)
