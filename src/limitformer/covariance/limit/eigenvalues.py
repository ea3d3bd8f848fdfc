r"""Crossings of the largest and the least eigenvalue between two recorded points of the limit's paths.

As for exits from a ball (`ball`), an eigenvalue λ that is inside at both points may have crossed its end e between
them: with a Brownian bridge of log λ it did with probability

  exp(−2 log(e/λ₀) log(e/λ₁)/(σ²h)),   σ² = 4 (a² + (γ²/τ₀)² tr(V Q V Qᵀ)) at the first point,

where u is the eigenvector, uᵀ(N + Nᵀ)u/λ the noise of log λ, and Q has the centred rows of u uᵀ, over m_α.
"""

import numpy as np
from numpy.typing import NDArray

from limitformer.covariance.limit.covariance import CovarianceLimit

Array = NDArray[np.float64]


def crossing_chances(limit: CovarianceLimit, covariance: Array, times: Array, smallest: float, largest: float) -> Array:
    """Return the probability of a crossing between neighbouring points, (samples, points − 1).

    Args:
        limit: the limit.
        covariance: V (samples, points, m, m).
        times: times of the points (points,).
        smallest: the end of the least eigenvalue.
        largest: the end of the largest eigenvalue.
    """
    values, vectors = np.linalg.eigh(covariance)
    stays = np.ones((len(covariance), len(times) - 1))
    for k, end in ((0, smallest), (-1, largest)):
        variance = log_variance(limit, covariance[:, :-1], vectors[:, :-1, :, k])
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.log(end / np.maximum(values[..., k], 0)) * (1 if k else -1)
            chance = np.exp(-2 * room[:, :-1] * room[:, 1:] / (variance * np.diff(times)))
        inside = (room[:, :-1] > 0) & (room[:, 1:] > 0)
        stays *= 1 - np.where(inside & (variance > 0), chance, ~inside)
    return 1 - stays


def log_variance(limit: CovarianceLimit, covariance: Array, vector: Array) -> Array:
    """Return σ² of log λ for V (..., m, m) and the eigenvector (..., m) of λ."""
    constants, mask = limit.constants(), limit.mask_for(covariance.shape[-1])
    means = vector @ mask.seen.T / mask.counts
    centred = vector[..., :, None] * np.where(mask.seen, vector[..., None, :] - means[..., :, None], 0)
    centred /= mask.counts[:, None]
    mixed = ((covariance @ centred @ covariance) * centred).sum((-2, -1))
    return np.asarray(4 * (constants.linear**2 + constants.mixing**2 * mixed))
