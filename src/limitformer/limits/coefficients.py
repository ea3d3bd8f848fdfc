r"""Coefficients of the covariance SDE dV = b(V) dt + N + Nᵀ, N the structured noise of `noise`.

Letters: m tokens; token α sees m_α of them (all m without a mask); p_α is 1/m_α on what α sees and 0 elsewhere;
C_α y = y − (p_α·y) on what α sees and 0 elsewhere; M_ακ = (p_α V)_κ.

Attention [ST, Thm 4.2], here for any row-wise mask; the unmasked case is C_α = I − 11ᵀ/m:
  b_αβ = (γ²/τ₀²) { V_αβ P_αβ + ½ (W V + V Wᵀ)_αβ },
  P_αβ = Σ_νκ V_νκ (C_α V C_βᵀ)_νκ / (m_α m_β),
  W_αν = V_αα (V_νν − 2 M_αν + 2 p_αᵀV p_α − p_α·diag V) / m_α  on what α sees: S₂^{αν}/m_α of [ST, eq. 10].
With 1_α the indicator of what α sees, P needs no four-index sum:
  P_αβ = 1_αᵀ(V∘V)1_β/(m_α m_β) − Σ_κ∈β M_ακ²/m_β − Σ_ν∈α M_βν²/m_α + (p_αᵀV p_β)².

Feed-forward [ST, eq. 6]:  b_αβ = γ² ν(ρ_αβ) √(V_αα V_ββ),  ν(ρ) = (c₊ − c₋)²/(2π) (√(1 − ρ²) − ρ arccos ρ).
"""

from typing import NamedTuple

import numpy as np

from limitformer.factor import multiply, multiply_transposed
from limitformer.kernels import driver, kernel


class LimitConstants(NamedTuple):
    """The SDE's numbers. `mixing` and `kink` are 0 where there is no attention or no feed-forward layer."""

    linear: float  # N holds `linear`·L G Lᵀ
    mixing: float  # γ²/τ₀: N holds `mixing`·B V
    mixing_drift: float  # γ²/τ₀²
    kink: float  # η = γ² (c₊ − c₋)²/4, so that γ² (c₊ − c₋)²/(2π) = 2η/π


class Mask(NamedTuple):
    """`seen` (m, m): 1 where the row's token sees the column's; `counts` (m,): m_α."""

    seen: np.ndarray
    counts: np.ndarray


class DriftWorkspace(NamedTuple):
    """Scratch matrices, all (m, m)."""

    means: np.ndarray
    weights: np.ndarray
    squares: np.ndarray
    product: np.ndarray
    spread: np.ndarray


@driver
def drift_workspace(tokens):
    shape = (tokens, tokens)
    return DriftWorkspace(np.empty(shape), np.empty(shape), np.empty(shape), np.empty(shape), np.empty(shape))


@kernel
def second_order_weights(v, mask, work):
    """W into `work.weights`, M into `work.means`."""
    multiply(mask.seen, v, work.means)
    m = v.shape[0]
    for a in range(m):
        count = mask.counts[a]
        mean_of_means, mean_variance = 0.0, 0.0
        for k in range(m):
            work.means[a, k] /= count
            mean_of_means += mask.seen[a, k] * work.means[a, k] / count
            mean_variance += mask.seen[a, k] * v[k, k] / count
        for k in range(m):
            s = v[a, a] * (v[k, k] - 2.0 * work.means[a, k] + 2.0 * mean_of_means - mean_variance)
            work.weights[a, k] = mask.seen[a, k] * s / count


@kernel
def spread_of_logits(v, mask, work):
    """P into `work.spread`, from M in `work.means`."""
    m = v.shape[0]
    for i in range(m):
        for j in range(m):
            work.squares[i, j] = v[i, j] * v[i, j]
    multiply(mask.seen, work.squares, work.product)
    multiply_transposed(work.product, mask.seen, work.spread)  # 1_αᵀ(V∘V)1_β
    multiply_transposed(work.means, mask.seen, work.product)  # m_β p_αᵀV p_β
    for i in range(m):
        for j in range(m):
            mean = work.product[i, j] / mask.counts[j]
            work.spread[i, j] = work.spread[i, j] / (mask.counts[i] * mask.counts[j]) + mean * mean
            work.squares[i, j] = work.means[i, j] * work.means[i, j]
    multiply_transposed(work.squares, mask.seen, work.product)  # Σ_κ∈β M_ακ²
    for i in range(m):
        for j in range(m):
            cross = work.product[i, j] / mask.counts[j] + work.product[j, i] / mask.counts[i]
            work.spread[i, j] -= cross


@kernel
def attention_drift(v, mask, work, out):
    """V∘P + ½ (W V + V Wᵀ) into `out`."""
    second_order_weights(v, mask, work)
    spread_of_logits(v, mask, work)
    multiply(work.weights, v, work.product)
    for i in range(v.shape[0]):
        for j in range(v.shape[0]):
            out[i, j] = v[i, j] * work.spread[i, j] + 0.5 * (work.product[i, j] + work.product[j, i])


@kernel
def kink_drift(v, i, j):
    """(2/π) (√(1 − ρ²) − ρ arccos ρ) √(V_ii V_jj): what the kink of a ReLU adds to a covariance."""
    scale = np.sqrt(v[i, i] * v[j, j])
    if i == j or scale == 0.0:
        return 0.0
    rho = min(1.0, max(-1.0, v[i, j] / scale))
    return scale * (np.sqrt(1.0 - rho * rho) - rho * np.arccos(rho)) * (2.0 / np.pi)


@kernel
def drift(v, constants, mask, work, out):
    """b(V) into `out` (m, m)."""
    if constants.mixing_drift > 0.0:
        attention_drift(v, mask, work, out)
    for i in range(v.shape[0]):
        for j in range(v.shape[0]):
            mixed = constants.mixing_drift * out[i, j] if constants.mixing_drift > 0.0 else 0.0
            out[i, j] = mixed + constants.kink * kink_drift(v, i, j)


@kernel
def centre_rows(logits, mask):
    """Y to B in place: B_αν = (C_α Y_α)_ν / m_α."""
    for a in range(logits.shape[0]):
        mean = 0.0
        for k in range(logits.shape[1]):
            mean += mask.seen[a, k] * logits[a, k]
        mean /= mask.counts[a]
        for k in range(logits.shape[1]):
            logits[a, k] = mask.seen[a, k] * (logits[a, k] - mean) / mask.counts[a]
