r"""The drift of the covariance SDE dV = b(V) dt + N + Nᵀ; the noise N and the default step are in `factor_step`.

Letters: m tokens; token α sees m_α of them (all m without a mask); p_α is 1/m_α on what α sees and 0 elsewhere;
C_α y = y − (p_α·y) on what α sees and 0 elsewhere; M_ακ = (p_α V)_κ.

Attention [ST, Thm 4.2], here for any row-wise mask; the unmasked case is C_α = I − 11ᵀ/m:
  b_αβ = (γ²/τ₀²) V_αβ P_αβ + γ²/(2τ₀²) (W V + V Wᵀ)_αβ,   ½ from the second order of the softmax,
  P_αβ = Σ_νκ V_νκ (C_α V C_βᵀ)_νκ / (m_α m_β),
  W_αν = V_αα (V_νν − 2 M_αν + 2 p_αᵀV p_α − p_α·diag V) / m_α  on what α sees: S₂^{αν}/m_α of [ST, eq. 10].
With 1_α the indicator of what α sees, P needs no four-index sum:
  P_αβ = 1_αᵀ(V∘V)1_β/(m_α m_β) − Σ_κ∈β M_ακ²/m_β − Σ_ν∈α M_βν²/m_α + (p_αᵀV p_β)².

Feed-forward [ST, eq. 6]:  b_αβ = γ² ν(ρ_αβ) √(V_αα V_ββ),  ν(ρ) = (c₊ − c₋)²/(2π) (√(1 − ρ²) − ρ arccos ρ).

A smooth activation, σ_n(x) = x + σ″x²/(2q√n) + σ‴x³/(6q²n) + … with the derivatives at 0:
  b_αβ = γ² (c₁ (V_αα V_ββ + 2V_αβ²) + c₂ V_αβ (V_αα + V_ββ) − c₀ V_αβ),
  c₁ = σ″²/(4q²),   c₂ = σ‴/(2q²),   c₀ = 3c₁ + 2c₂.
The variance of one token has the drift γ²c₀ (V² − V): it may explode if c₀ > 0.

**Where each term is written.** To change the second-order term W V + V Wᵀ or the term V∘P, change this file and the ½
in `CovarianceLimit.constants`. Each term has more than one form, because the factor step never forms b:

* W is `second_order_weights`. Without a mask W = diag(V) sᵀ/m, and s is `second_order_row`, from C V C, which does not
  cancel where tokens are nearly parallel.
* W V + V Wᵀ is added to b by `attention_drift`. The factor step multiplies its factor by I + dt γ²/(2τ₀²) W:
  `add_second_order_to_tokens` with a mask, `add_second_order_to_differences` without.
* P is `spread_of_logits`; without a mask `spread_without_mask`, the same number for every pair, again from C V C. The
  factor step has V∘P in its noise and in `factor_step.diagonal_growth`.
* The term of the ReLU is `kink_drift`. The factor step draws a sample of it (`factor_step.add_kink_to_…`).
* That of a smooth activation is `add_smooth_drift`. The factor step has it in `factor_step.add_smooth`, and c₀ in C².

b is held against the paper's nested sums by `test_theorem_4_2_drift` and `test_causal_drift`, and the factor step
against b by `test_one_step_has_the_drift_and_covariance_of_the_limit` (tests/covariance/test_limit.py). `theory.md`
computes b by hand, and `explosion` has the closed form for two tokens. The pace of `short_steps` reads W, s and P to
choose the length of a step; an error there moves no drift.
"""

from typing import NamedTuple

import numpy as np

from limitformer.numerics.factor import FIRST, inner, multiply, multiply_into, put_in_lanes
from limitformer.numerics.kernels import allocator, driver, kernel
from limitformer.numerics.lanes import LANES, everywhere, lane_matrix, load, store


class LimitConstants(NamedTuple):
    """Factors of the SDE; `mixing` is 0 without attention, `kink` without a feed-forward layer."""

    linear: float  # of L G Lᵀ in N
    mixing: float  # γ²/τ₀, of B V in N
    mixing_drift: float  # γ²/τ₀², of V∘P
    second_order: float  # γ²/(2τ₀²), of W V + V Wᵀ, with the ½ of Theorem 4.2
    kink: float  # η = γ² (c₊ − c₋)²/4, so that γ² (c₊ − c₋)²/(2π) = 2η/π
    square: float  # γ²c₁
    cube: float  # γ²c₂


class Mask(NamedTuple):
    """The visibility of tokens, and coincidences of the start that an unmasked limit keeps."""

    full: bool  # every token sees every token
    seen: np.ndarray  # (m, m): whether the row's token sees the column's
    counts: np.ndarray  # (m,): m_α
    twins: np.ndarray  # (m,): the first token that equals this one at the start; they stay equal
    opposite: bool = False  # whether the tokens are two antipodes, which they stay


class DriftWorkspace(NamedTuple):
    """Scratch matrices (m, m, LANES)."""

    means: np.ndarray  # M
    weights: np.ndarray  # W
    product: np.ndarray
    spread: np.ndarray  # P


@allocator
def drift_workspace(tokens):
    return DriftWorkspace(
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, tokens),
    )


@kernel
def mean_over_seen(v, mask, out):
    """M_ακ = (p_α V)_κ into `out`."""
    m = v.shape[0]
    for a in range(m):
        for k in range(m):
            total = everywhere(0.0)
            for n in range(m):
                if mask.seen[a, n]:
                    total = total + load(v, n, k)
            store(out, a, k, total / mask.counts[a])


@kernel
def second_order_weights(v, mask, work):
    """W into `work.weights`, M into `work.means`."""
    mean_over_seen(v, mask, work.means)
    m = v.shape[0]
    for a in range(m):
        mean_of_means, mean_variance = everywhere(0.0), everywhere(0.0)
        for k in range(m):
            if mask.seen[a, k]:
                mean_of_means = mean_of_means + load(work.means, a, k)
                mean_variance = mean_variance + load(v, k, k)
        constant = (2.0 * mean_of_means - mean_variance) / mask.counts[a]
        scale = load(v, a, a) / mask.counts[a]
        for k in range(m):
            if mask.seen[a, k]:
                s = load(v, k, k) - 2.0 * load(work.means, a, k) + constant
                store(work.weights, a, k, scale * s)
            else:
                store(work.weights, a, k, 0.0)


@kernel
def second_order_row(centred, out):
    """s_ν = V_νν − 2 V_νx̄ + 2 V_x̄x̄ − V̄ = (C V C)_νν − tr(C V C)/m into `out` (m, 1); S₂^{αν} = V_αα s_ν."""
    m = centred.shape[0]
    mean = everywhere(0.0)
    for k in range(m):
        mean = mean + load(centred, k, k) / float(m)
    for k in range(m):
        store(out, k, 0, load(centred, k, k) - mean)


@kernel
def add_second_order_to_tokens(dt, constants, work):
    """Multiply the tokens, the first block of `work.rows`, by K = I + dt γ²/(2τ₀²) W."""
    m, scale = work.moved.shape[0], dt * constants.second_order
    multiply_into(work.drift.weights, work.rows, m, work.moved, FIRST)
    for i in range(m):
        for k in range(m):
            store(work.rows, i, k, load(work.rows, i, k) + scale * load(work.moved, i, k))


@kernel
def add_second_order_to_differences(dt, constants, work):
    """Multiply the differences in `work.rows` by K = I + dt γ²/(2τ₀²m) diag(V) sᵀ.

    Σ s = 0, so that Σ s_ν xᵛ needs only the differences. The row of a difference has V_αα − V₀₀ instead of V_αα.
    """
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
def spread_of_logits(v, mask, work):
    """P into `work.spread`, from M in `work.means`."""
    m = v.shape[0]
    for b in range(m):
        for n in range(m):
            squares = everywhere(0.0)  # Σ_κ∈β V_νκ²
            for k in range(m):
                if mask.seen[b, k]:
                    squares = squares + load(v, n, k) * load(v, n, k)
            store(work.product, b, n, squares)
    for a in range(m):
        for b in range(a + 1):
            p = spread_of_pair(a, b, mask, work)
            store(work.spread, a, b, p)
            store(work.spread, b, a, p)


@kernel
def spread_of_pair(a, b, mask, work):
    """Return P_αβ, from M in `work.means` and Σ_κ∈β V_νκ² in `work.product`."""
    squares, rows, columns, mean = everywhere(0.0), everywhere(0.0), everywhere(0.0), everywhere(0.0)
    for n in range(mask.seen.shape[0]):
        if mask.seen[a, n]:
            x = load(work.means, b, n)
            columns = columns + x * x
            squares = squares + load(work.product, b, n)
        if mask.seen[b, n]:
            x = load(work.means, a, n)
            rows = rows + x * x
            mean = mean + x
    mean = mean / mask.counts[b]
    shares = rows / mask.counts[b] + columns / mask.counts[a]
    return squares / (mask.counts[a] * mask.counts[b]) - shares + mean * mean


@kernel
def spread_without_mask(centred):
    """Return P = tr(V C V C)/m² = |C V C|²/m², the same for every pair without a mask; C V C is `centred`."""
    m = centred.shape[0]
    squares = everywhere(0.0)
    for i in range(m):
        squares = squares + inner(centred, i, centred, i, FIRST, m)
    return squares / float(m * m)


@kernel
def attention_drift(v, constants, mask, work, out):
    """γ²/τ₀² V∘P + γ²/(2τ₀²) (W V + V Wᵀ) into `out`."""
    second_order_weights(v, mask, work)
    spread_of_logits(v, mask, work)
    multiply(work.weights, v, work.product)
    for i in range(v.shape[0]):
        for j in range(v.shape[0]):
            both = load(work.product, i, j) + load(work.product, j, i)
            spread = constants.mixing_drift * (load(v, i, j) * load(work.spread, i, j))
            store(out, i, j, spread + constants.second_order * both)


@kernel
def kink_drift(v, i, j, lane):
    """Return (2/π) (√(1 − ρ²) − ρ arccos ρ) √(V_ii V_jj), which the kink of a ReLU adds to a covariance."""
    scale = np.sqrt(v[i, i, lane] * v[j, j, lane])
    if i == j or scale == 0.0:
        return 0.0
    rho = min(1.0, max(-1.0, v[i, j, lane] / scale))
    return scale * (np.sqrt(1.0 - rho * rho) - rho * np.arccos(rho)) * (2.0 / np.pi)


@kernel
def is_smooth(constants):
    """Return whether there is a smooth activation that bends."""
    return constants.square > 0.0 or constants.cube != 0.0


@kernel
def add_smooth_drift(v, constants, out):
    """Add γ² (c₁ (V_αα V_ββ + 2V_αβ²) + c₂ V_αβ (V_αα + V_ββ) − c₀ V_αβ) to `out`."""
    for i in range(v.shape[0]):
        for j in range(v.shape[0]):
            first, second, both = load(v, i, i), load(v, j, j), load(v, i, j)
            squares = constants.square * (first * second + both * (2.0 * both - 3.0))
            cubes = constants.cube * (both * (first + second - 2.0))
            store(out, i, j, load(out, i, j) + (squares + cubes))


@kernel
def drift(v, constants, mask, work, out):
    """b(V) into `out` (m, m, LANES)."""
    m = v.shape[0]
    if constants.mixing_drift > 0.0:
        attention_drift(v, constants, mask, work, out)
    for i in range(m):
        for j in range(m):
            for lane in range(LANES):
                mixed = out[i, j, lane] if constants.mixing_drift > 0.0 else 0.0
                out[i, j, lane] = mixed + constants.kink * kink_drift(v, i, j, lane)
    if is_smooth(constants):
        add_smooth_drift(v, constants, out)


@driver
def drift_at(v, constants, mask):
    """Return b(V) of one V (m, m)."""
    m = v.shape[0]
    in_lanes, out = lane_matrix(m, m), lane_matrix(m, m)
    put_in_lanes(v, in_lanes)
    drift(in_lanes, constants, mask, drift_workspace(m), out)
    return out[:, :, 0].copy()
