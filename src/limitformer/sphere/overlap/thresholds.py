r"""Exponents of one layer next to two antipodal clusters of N/2 tokens each (docs/equal-clusters.md).

QᵀK = I, Gaussian values, s = σ/√L. A layer maps a cluster's place y, a small difference Δ within a cluster and the
small sum g of the two places, Δ, g ⟂ y, as

  Y = y + a s V y,    Δ → P Δ/|Y|,    g → P (g + b s V g)/|Y|,    P the projection orthogonal to Y,

softmax: a = tanh β, b = 1; unnormalized: a = sinh β, b = cosh β. The logarithms of |Δ| and |g| change on average by

  within  = E[½ ψ(m + J) − ψ(d/2 + J)] − ½ log(2a²s²),
  between = log(b/a) + ½ E[ψ(m + K) − ψ(d/2 + J)],

with ψ the digamma function, m = (d − 1)/2, J ~ Poisson(1/(2a²s²)), q ~ Beta(m + J, ½) given J, K ~ Poisson(q/(2b²s²))
given q. Indeed |Y|²/(a²s²) is χ²_{d+2J}, q is |P g|² for |g| = 1, |P(g + bsVg)|²/(b²s²) is χ²_{d−1+2K}, and
E log χ²_k = log 2 + ψ(k/2).

Thresholds of β and ε at which the ends start to attract.

  stochastic:            −1 attracts for cosh 2β > d − 2                                        [CT, Lemma 5];
  hybrid, unnormalized:  for ε² < 2e^{−β} +1 attracts, for ε² > 2e^{−β} −1                      [CT, Prop. 1];
  hybrid, softmax:       +1 attracts for ε² < 2, −1 for ε² > 1 + e^{−2β}                        (beyond the paper).

With softmax, in between both ends attract if β > 0, and neither if β < 0.

In the hybrid model the drift of u is positive for ε² < 1/damping (`motion`). The values of 1/damping at the ends are
both thresholds, for unequal clusters too. With unnormalized attention they may have the opposite order; then neither
end attracts between them.
"""

from math import acosh, inf, log, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import digamma, gammaln

from limitformer.base.errors import InputError, require, require_count, require_real
from limitformer.sphere.overlap.motion import HybridMotion, Motion, StochasticMotion
from limitformer.sphere.overlap.motions import DrawnMotion
from limitformer.sphere.overlap.position import at_overlap

Array = NDArray[np.float64]

DEVIATIONS = 12.0  # of a Poisson variable on either side of its mean
NODES = 60  # of the angle of Beta(m + J, ½)
SPACING = 0.1  # of the trapezoidal rule in the logit of v
LEAST_BETA, LARGEST_BETA = 1e-3, 12.0  # between which a threshold is searched
LARGEST_DIM = 1_000_000  # arccosh(dim − 2)/2 = 7.3; thresholds of few layers are a little higher


class Exponents(NamedTuple):
    """Mean changes of log |Δ| within a cluster and of log |g| between the two, in one layer."""

    within: float
    between: float


def exponents(dim: int, beta: float, step: float, attention: str = "softmax") -> Exponents:
    """Return the exponents at `step` = σ/√L; `InputError` unless dim ≥ 2, β > 0 and step > 0.

    >>> within, between = exponents(dim=4, beta=1.0, step=0.2)
    >>> round(within, 5), round(between, 5)
    (-0.03466, -0.01372)
    """
    dim, beta, step = require_count("dim", dim, 2), require_real("beta", beta), require_real("step", step)
    require(beta > 0, f"beta must be positive, because clusters do not move at beta = 0; got {beta}.")
    require(step > 0, f"step, σ/√L, must be positive; got {step}.")
    if attention not in ("softmax", "unnormalized"):
        raise InputError(f"attention must be softmax or unnormalized; got {attention!r}. Nearest: softmax.")
    unit = 1.0 if attention == "softmax" else float(np.cosh(beta))
    return exponents_of(dim, float(np.tanh(beta)) * unit * step, unit * step)


def exponents_of(dim: int, along: float, across: float) -> Exponents:
    """Return the exponents at `along` = a s and `across` = b s."""
    m, (j, mass) = (dim - 1) / 2, poisson_nodes(1 / (2 * along**2))
    length = float(mass @ digamma(dim / 2 + j))  # E log |Y|², but for log(2a²s²)
    within = float(mass @ digamma(m + j)) / 2 - length - np.log(2 * along**2) / 2
    q, share = beta_nodes(m + j)
    projected = (mass[:, None] * share * mean_digamma(m, q / (2 * across**2))).sum()
    return Exponents(float(within), float(np.log(across / along) + (projected - length) / 2))


def poisson_nodes(mean: float) -> tuple[Array, Array]:
    """Return nodes (k,) and weights (k,) of Poisson(mean): every value, or three or more per standard deviation."""
    deviation = mean**0.5
    low, high = max(0, int(mean - DEVIATIONS * deviation)), int(mean + DEVIATIONS * deviation) + 40
    j = np.arange(low, high, max(1, int(deviation / 3)), dtype=float)
    log_mass = j * np.log(mean) - gammaln(j + 1)
    mass = np.exp(log_mass - log_mass.max())
    return j, mass / mass.sum()


def beta_nodes(m: Array) -> tuple[Array, Array]:
    """Return nodes and weights (k, NODES) of q ~ Beta(m, ½) for m (k,): q = cos²θ, θ of density ∝ cos^{2m−1}θ."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    cosine = np.cos(np.minimum(np.pi / 2, 9 / np.sqrt(2 * m))[:, None] * (nodes + 1) / 2)
    share = cosine ** (2 * m - 1)[:, None] * weights
    return cosine**2, share / share.sum(1, keepdims=True)


def mean_digamma(k: float, mean: Array) -> Array:
    """Return E ψ(k + Poisson(mean)) = ψ(k) + ∫₀¹ (1 − e^{−mean·v}) (1 − v)^{k−1} dv/v, by the logit of v."""
    x = np.arange(-40 - np.log(max(float(mean.max()), 1.0)), 40 / k, SPACING)
    v, rest = 1 / (1 + np.exp(-x)), 1 / (1 + np.exp(x))
    sums = [-np.expm1(-row[:, None] * v) @ rest**k for row in mean]
    result: Array = digamma(k) + SPACING * np.array(sums)
    return result


def critical_beta(dim: int, step: float) -> float:
    """Return β* with softmax: two equal clusters attract for β > β* and repel below; 0 if it is below 0.001.

    `step` is σ/√L. As it goes to 0, β* → arccosh(d − 2)/2, or 0 for d ≤ 3.

    >>> [round(critical_beta(4, step), 4) for step in (0.01, 0.2, 1.0)]
    [0.6585, 0.6754, 1.0405]
    """

    def between(beta: float) -> float:
        return exponents(dim, beta, step).between

    require(dim <= LARGEST_DIM, f"The threshold of few layers needs dim <= {LARGEST_DIM:,}; got {dim:,}.")
    return float(brentq(between, LEAST_BETA, LARGEST_BETA, xtol=1e-10)) if between(LEAST_BETA) > 0 else 0.0


def stochastic_critical_beta(motion: StochasticMotion) -> float:
    """Return the bound of |β|: arccosh(d − 2)/2, 0 for d ≤ 3, ∞ for unequal clusters or drawn queries in d ≥ 4."""
    if motion.minus.growth < 0 or (isinstance(motion, DrawnMotion) and motion.dim > 3):
        return inf
    return acosh(motion.dim - 2) / 2 if motion.dim > 3 else 0.0


def unnormalized_critical_beta(epsilon: float) -> float:
    """Return the β with ε² = 2e^{−β}, negative for ε² > 2, infinite for ε = 0."""
    return log(2 / epsilon**2) if epsilon > 0 else inf


def softmax_critical_beta(epsilon: float) -> float:
    """Return the β with ε² = 1 + e^{−2β}, negative for ε² > 2, infinite for ε ≤ 1."""
    return -log(epsilon**2 - 1) / 2 if epsilon > 1 else inf


def amplitude(motion: HybridMotion, end: float) -> float:
    """Return the ε at which the slope at z = `end` changes its sign, infinite if there is none."""
    damping = float(motion.damping(at_overlap(end)))
    return 1 / sqrt(damping) if damping > 0 else inf


def hybrid_of(motion: Motion, name: str) -> HybridMotion:
    """Return `motion`; raise `InputError` unless it has an ε."""
    if not isinstance(motion, HybridMotion):
        raise InputError(f"{name} belongs to the HybridTransformer, which has an epsilon; use critical_beta here.")
    return motion
