r"""The lifetime of antipodal unequal clusters at large |β|: the leading term of the exact integral of `hitting`.

Softmax attention, p ≠ q. As β grows, the attraction between the clusters tends to zero at every fixed overlap, and the
drift to that of two free tokens: s(u) → sech u. The clusters spend their lifetime near −1, where the noise of
δ = a₊ − a₋ exceeds that of two free tokens. With v = 4(1 + z)/δ² there

  g² = 2σ²(1 + v)/v,    s = 2eᵘ ((1 + v)/v)^{(d−2)/2},    eᵘ = δ √(v/8),

  ∫ du/(g² s) = 1/(2√2 σ²δ) ∫₀^∞ v^{(d−3)/2} (1 + v)^{−d/2} dv = B(½, (d−1)/2)/(2√2 σ²δ),

and the way out contributes ∫ s du = ∫_{−1}^b dz/√(1 − z²) = π/2 + arcsin b. Twice the product of the two, with
δ → 2 e^{−2|β|} |p² − q²|/(pq), is

  E(−1 → b)  ~  (π/2 + arcsin b) · B(½, (d−1)/2)/(2√2) · pq/|p² − q²| · e^{2|β|}/σ².

for fixed b in (−1, 1). The omitted factor of s, e^{−(d−2) ∫ (p/q + q/p) e^{−|β|(1−z)} du}, is the attraction at b. As
|β|(1 − b) → ∞ the exact integral is shorter by the relative (d − 2)(p/q + q/p) e^{−|β|(1−b)}/(β² (1 − b²)^{3/2} (π/2 +
arcsin b)); at b = 0.9 that is 1.53 times the true difference at |β|(1 − b) = 4, and 1.22 times at 10.
"""

from math import asin, exp, pi, sqrt

from scipy.special import beta as euler_beta


def inverse_push(p: int, q: int) -> float:
    """Return 2e^{−2|β|}/δ = pq/|p² − q²| for clusters of unequal size."""
    return p * q / abs(p * p - q * q)


def leading_lifetime(inverse: float, dim: int, beta: float, sigma: float, target: float) -> float:
    """Return the right-hand side with `inverse` for pq/|p² − q²| and b = `target` in (−1, 1)."""
    way = pi / 2 + asin(target)
    bottom = float(euler_beta(0.5, (dim - 1) / 2)) / (2 * sqrt(2))
    return way * bottom * inverse * exp(2 * abs(beta)) / sigma**2
