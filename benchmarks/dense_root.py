r"""The step of the paper: the diffusion matrix over pairs α ≤ β, its symmetric root, and one Gaussian vector.

Batched in torch, with every shortcut that keeps a dense root: Σ is assembled from V_αδ W_βω, W = a²V + (γ²/τ₀)²
V C V C V/m², and the root is taken by a batched eigendecomposition (Cholesky fails, since Σ is singular).
"""

import torch
from torch import Tensor

from limitformer.covariance.limit import CovarianceLimit


def dense_root_step(limit: CovarianceLimit, v: Tensor, dt: float) -> Tensor:
    """Take one Euler-Maruyama step with attention only [ST, Thm 4.2]; v has shape (samples, m, m)."""
    m = v.shape[-1]
    rows, columns = torch.triu_indices(m, m).unbind()
    sigma = diffusion(limit, v, rows, columns)
    values, vectors = torch.linalg.eigh(sigma)
    normals = torch.randn(*v.shape[:-2], len(rows), 1, dtype=v.dtype)
    noise = (vectors * values.clamp(min=0).sqrt()[..., None, :]) @ (vectors.mT @ normals)
    moved = torch.zeros_like(v)
    moved[..., rows, columns] = noise[..., 0]
    moved[..., columns, rows] = noise[..., 0]
    return v + dt * drift(limit, v) + dt**0.5 * moved


def diffusion(limit: CovarianceLimit, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return Σ(V) with shape (samples, pairs, pairs)."""
    constants = limit.constants()
    m = v.shape[-1]
    centred = v - v.mean(-1, keepdim=True)  # V C
    w = constants.linear**2 * v + constants.mixing**2 / m**2 * (centred @ centred @ v)
    a, b, d, o = rows[:, None], columns[:, None], rows[None], columns[None]
    return (
        v[..., a, d] * w[..., b, o]
        + v[..., a, o] * w[..., b, d]
        + v[..., b, d] * w[..., a, o]
        + v[..., b, o] * w[..., a, d]
    )


def drift(limit: CovarianceLimit, v: Tensor) -> Tensor:
    """Return b(V) with shape (samples, m, m)."""
    constants = limit.constants()
    m = v.shape[-1]
    variances = v.diagonal(dim1=-2, dim2=-1)
    centred = v - v.mean(-1, keepdim=True)
    spread = (centred * centred.mT).sum((-1, -2)) / m**2
    s = variances - 2 * v.mean(-1) + 2 * v.mean((-1, -2))[..., None] - variances.mean(-1, keepdim=True)
    outer = variances[..., None] * (v @ s[..., None]).mT / (2 * m)
    return constants.mixing_drift * (v * spread[..., None, None] + outer + outer.mT)
