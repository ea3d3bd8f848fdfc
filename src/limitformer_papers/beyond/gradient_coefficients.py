r"""Drift and covariance of the gradients' SDE, dense; for checks on few tokens. Letters in
`limitformer.covariance.limit_gradients.backward`.

The means over logits are exact. Logits are Y = Σ_ij g_ij Lᵢ Lⱼᵀ over the columns of L, V = L Lᵀ, with independent
standard normal g_ij. So a bilinear f has E f(Y, Y) = Σ_ij f(Lᵢ Lⱼᵀ, Lᵢ Lⱼᵀ). Means over pre-activations h ~ N(0, V)
have closed forms, in which h_α is regressed on the h that stand in a sign or a modulus.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitformer.covariance.limit import CovarianceLimit

Matrix = NDArray[np.float64]


class GradientCoefficients:
    """The coefficients at one V, M and Ψ.

    Attributes:
        limit: the limit.
        covariance: V (m, m), positive definite.
        alignment: M (m, m).
        spread: Ψ (m, m), positive semi-definite.
    """

    def __init__(self, limit: CovarianceLimit, covariance: Matrix, alignment: Matrix, spread: Matrix) -> None:
        self.limit, self.covariance, self.alignment, self.spread = limit, covariance, alignment, spread
        self.constants = limit.constants()
        self.gamma, self.lam = limit.gamma, np.sqrt(1 - limit.gamma**2)
        self.mask = limit.mask_for(len(covariance))
        root = np.linalg.cholesky(covariance)
        self.logits = [np.outer(x, y) for x, y in product(root.T, repeat=2)]
        self.noises = [np.outer(x, y) for x, y in product(root.T, symmetric_root(spread).T)]
        self.inverse = np.linalg.solve(covariance, alignment)

    def centred(self, logits: Matrix) -> Matrix:
        """Return 𝒞(Y)."""
        seen, counts = self.mask.seen, self.mask.counts[:, None]
        means = (logits * seen).sum(-1, keepdims=True) / counts
        return (logits - means) * seen / counts

    def pulled_back(self, logits: Matrix, answers: Matrix) -> Matrix:
        """Return 𝒦(Y, J)."""
        mixing, response = self.centred(logits), self.centred(answers.T)
        return answers @ mixing - mixing @ answers + logits @ response.mT + logits.mT @ response

    def drift(self) -> tuple[Matrix, Matrix]:
        """Return the drifts of M and Ψ in a step down in t."""
        v, m, psi = self.covariance, self.alignment, self.spread
        of_alignment = np.zeros_like(v)
        of_spread = 2 * self.constants.linear**2 * (m.T @ self.inverse - len(v) * psi)
        if self.constants.mixing_drift > 0:
            moved, spread = self.drift_of_attention()
            of_alignment += self.constants.mixing_drift * moved
            of_spread += self.constants.mixing_drift * spread
        if self.constants.kink > 0:
            of_alignment += self.constants.kink * np.einsum("abk,kb->ab", kinks(v), self.inverse)
            of_spread -= self.constants.kink * (2 / np.pi) * np.arccos(correlations(v)) * psi
        return of_alignment, of_spread

    def drift_of_attention(self) -> tuple[Matrix, Matrix]:
        """Return the drifts over γ²/τ₀²."""
        v, m, psi, gamma, lam = self.covariance, self.alignment, self.spread, self.gamma, self.lam
        seen, counts = self.mask.seen, self.mask.counts[:, None]
        of_alignment, of_spread, weights = np.zeros_like(v), np.zeros_like(v), np.zeros_like(v)
        for y in self.logits:
            b = self.centred(y)
            squares = (b * counts) ** 2 * seen
            weights += (squares - squares.sum(1, keepdims=True) * seen / counts) / counts
            second = self.centred(b * self.centred(m.T) * counts**2)
            of_alignment += self.pulled_back(y, lam**2 * v @ b.T @ self.inverse - gamma**2 * b @ m)
            of_alignment += y @ second.T + y.T @ second
            of_spread += b.T @ psi @ b
        of_alignment += (m @ weights - weights @ m) / 2
        of_spread += (weights.T @ psi + psi @ weights) / 2
        for answers in (gamma * m, *(lam * noise for noise in self.noises)):
            d = self.centred(answers.T)
            of_spread += d @ v @ d.T + d.T @ v @ d
        return of_alignment, of_spread

    def covariance_given_path(self) -> tuple[Matrix, Matrix]:
        """Return the covariance of M's and of Ψ's own noise, (m², m²) each; the two are uncorrelated."""
        v, psi, size = self.covariance, self.spread, len(self.covariance) ** 2
        of_alignment = np.zeros((size, size))
        if self.constants.mixing_drift > 0:
            scale = self.lam * self.gamma / np.sqrt(self.gamma**2 / self.constants.mixing_drift)
            of_alignment += summed(scale * self.pulled_back(y, noise) for y in self.logits for noise in self.noises)
        if self.constants.kink > 0:
            of_alignment += self.constants.kink * np.einsum("abcd,bd->abcd", squared_kinks(v), psi).reshape(size, size)
        both = np.einsum("ac,bd->abcd", psi, psi) + np.einsum("ad,bc->abcd", psi, psi)
        return of_alignment, 2 * self.constants.linear**2 * both.reshape(size, size)

    def response_to(self, logits: Matrix) -> tuple[Matrix, Matrix]:
        """Return what the `logits` Y (…, m, m) of a forward step of length 1 add to M and Ψ."""
        b = self.centred(logits)
        mixed = b.mT @ self.spread
        return self.constants.mixing * self.pulled_back(logits, self.alignment), self.constants.mixing * (
            mixed + mixed.mT
        )


def symmetric_root(matrix: Matrix) -> Matrix:
    values, vectors = np.linalg.eigh(matrix)
    root: Matrix = vectors * np.sqrt(np.maximum(values, 0))
    return root


def summed(matrices: Any) -> Matrix:
    """Return Σ over `matrices` of their entries' outer products."""
    vectors = np.array([np.ravel(each) for each in matrices])
    total: Matrix = vectors.T @ vectors
    return total


def correlations(v: Matrix) -> Matrix:
    deviation = np.sqrt(np.diag(v))
    rho: Matrix = np.clip(v / np.outer(deviation, deviation), -1, 1)
    return rho


def moduli(v: Matrix, i: int, j: int) -> float:
    """Return E |h_i||h_j|."""
    rho = correlations(v)[i, j]
    return float(2 / np.pi * np.sqrt(v[i, i] * v[j, j]) * (np.sqrt(1 - rho**2) + rho * np.arcsin(rho)))


def signed_square(v: Matrix, i: int, j: int) -> float:
    """Return E h_i² sgn(h_i h_j)."""
    rho = correlations(v)[i, j]
    return float(2 / np.pi * v[i, i] * (np.arcsin(rho) + rho * np.sqrt(1 - rho**2)))


def modulus_and_sign(v: Matrix, a: int, k: int, b: int) -> float:
    """Return E h_a |h_k| sgn h_b."""
    if k == b:
        return float(v[a, b])
    on_k, on_b = np.linalg.solve(v[np.ix_([k, b], [k, b])], v[[k, b], a])
    return float(on_k * signed_square(v, k, b) + on_b * moduli(v, k, b))


def two_signs(v: Matrix, a: int, c: int, b: int, d: int) -> float:
    """Return E h_a h_c sgn(h_b h_d)."""
    if b == d:
        return float(v[a, c])
    pair = [b, d]
    weights = np.linalg.solve(v[np.ix_(pair, pair)], v[np.ix_(pair, [a, c])])  # (b and d, a and c)
    rest = v[a, c] - v[np.ix_([a], pair)][0] @ weights[:, 1]
    within = np.array([[signed_square(v, b, d), moduli(v, b, d)], [moduli(v, b, d), signed_square(v, d, b)]])
    sign = 2 / np.pi * np.arcsin(correlations(v)[b, d])
    return float(rest * sign + weights[:, 0] @ within @ weights[:, 1])


def of_indices(m: int, count: int, value: Callable[..., float]) -> Matrix:
    """Return the array of `value` at all `count` indices of m tokens."""
    out = np.empty((m,) * count)
    for index in product(range(m), repeat=count):
        out[index] = value(*index)
    return out


def kinks(v: Matrix) -> Matrix:
    """Return E (h_a sgn h_b − |h_a|) |h_k|, (a, b, k)."""
    return of_indices(len(v), 3, lambda a, b, k: modulus_and_sign(v, a, k, b) - moduli(v, a, k))


def squared_kinks(v: Matrix) -> Matrix:
    """Return E (h_a sgn h_b − |h_a|)(h_c sgn h_d − |h_c|), (a, b, c, d)."""

    def entry(a: int, b: int, c: int, d: int) -> float:
        mixed = modulus_and_sign(v, a, c, b) + modulus_and_sign(v, c, a, d)
        return two_signs(v, a, c, b, d) - mixed + moduli(v, a, c)

    return of_indices(len(v), 4, entry)
