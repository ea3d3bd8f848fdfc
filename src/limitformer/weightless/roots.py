r"""Roots of tokens: Z = R Q with orthonormal rows of Q, so that Z W = R N with N = Q W ~ N(0, s²).

Only R is needed to draw Z W. Q is needed in the backward pass, by its products alone. Letters: S samples, M tokens
(rows of Z), n entries of each, r = min(M, n) rows of Q.

Two ways. In float64, Householder's factorisation of Zᵀ: differences of tokens keep their digits down to 1e-16 of the
tokens. In float32, Cholesky's of the Gram matrix Z Zᵀ, summed in float64: several times as fast at large n, and its
1e-8 is less than the rounding of the tokens. Directions below `LOST` of the largest are rounding, and count as none.

Identical rows of Z get identical rows of R, to the last bit.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg.lapack import dpstrf, dtrtri
from torch import Tensor

IN_CACHE = 4096  # columns that are in float64 at a time
LOST = 1e-12  # of the largest entry of a Gram matrix of float32 tokens
NEAR = 1e-5  # of their lengths: rows of R that may be of identical tokens


class HouseholderRoot(NamedTuple):
    """Of float64 tokens Z (S, M, n)."""

    factor: Tensor  # R (S, M, r)
    basis: Tensor  # Q (S, r, n)

    @property
    def width(self) -> int:
        """n."""
        return self.basis.shape[-1]

    def onto(self, rows: Tensor) -> Tensor:
        """F Qᵀ (S, k, r) of rows F (S, k, n)."""
        return rows @ self.basis.mT

    def along(self, coefficients: Tensor) -> Tensor:
        """C Q (S, k, n) of C (S, k, r)."""
        return coefficients @ self.basis


class GramRoot(NamedTuple):
    """Of float32 tokens Z (S, M, n); r = M, with columns of zeros where directions are lost."""

    factor: Tensor  # R (S, M, r)
    inverse: Tensor | None  # in float64 (S, M, r): Q = inverseᵀ Z; None where there is no backward pass
    z: Tensor

    @property
    def width(self) -> int:
        """n."""
        return self.z.shape[-1]

    def onto(self, rows: Tensor) -> Tensor:
        """F Qᵀ (S, k, r) of rows F (S, k, n)."""
        assert self.inverse is not None
        return ((rows @ self.z.mT).double() @ self.inverse).to(rows.dtype)

    def along(self, coefficients: Tensor) -> Tensor:
        """C Q (S, k, n) of C (S, k, r)."""
        assert self.inverse is not None
        return (coefficients.double() @ self.inverse.mT).to(coefficients.dtype) @ self.z


Root = HouseholderRoot | GramRoot


def householder_root(z: Tensor) -> HouseholderRoot:
    """By Householder's factorisation of Zᵀ."""
    q, r = torch.linalg.qr(z.mT)
    return HouseholderRoot(same_for_same(z, r.mT), q.mT)


def gram_root(z: Tensor) -> GramRoot:
    """By the pivoted Cholesky factorisation of Z Zᵀ (LAPACK's `pstrf`)."""
    found = [pivoted(g) for g in gram(z).cpu().numpy()]
    factor = torch.from_numpy(np.stack([factor_of(*each) for each in found])).to(z.device, z.dtype)
    inverse = None
    if torch.is_grad_enabled():
        inverse = torch.from_numpy(np.stack([inverse_of(*each) for each in found])).to(z.device)
    return GramRoot(same_for_same(z, factor), inverse, z)


def pivoted(g: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """L (M, rank) and the order of rows with L Lᵀ = G[order][:, order]."""
    lower, order, rank, _ = dpstrf(g, tol=LOST * g.diagonal().max(), lower=1)
    return np.tril(lower)[:, :rank], order - 1


def factor_of(lower: NDArray[np.float64], order: NDArray[np.int64]) -> NDArray[np.float64]:
    """R (M, M) with R Rᵀ = G: zeros beyond the rank."""
    factor = np.zeros((len(order), len(order)))
    factor[order, : lower.shape[1]] = lower
    return factor


def inverse_of(lower: NDArray[np.float64], order: NDArray[np.int64]) -> NDArray[np.float64]:
    """Its `inverse` (M, M): zeros beyond the rank."""
    rank = lower.shape[1]
    inverse = np.zeros((len(order), len(order)))
    if rank:
        inverse[order[:rank], :rank] = dtrtri(lower[:rank], lower=1)[0].T
    return inverse


def root_of(z: Tensor) -> Root:
    """The root that suits the tokens' precision."""
    return householder_root(z) if z.dtype == torch.float64 else gram_root(z)


def size_of(d: Tensor) -> Tensor:
    """S of D = S P (S, M, r): a root of D Dᵀ."""
    if d.dtype == torch.float64:
        return torch.linalg.qr(d.mT, mode="r").R.mT
    factors = [factor_of(*pivoted(g)) for g in gram(d).cpu().numpy()]
    return torch.from_numpy(np.stack(factors)).to(d.device, d.dtype)


def gram(z: Tensor) -> Tensor:
    """Z Zᵀ (S, M, M) in float64, symmetric; by torch alone, whose threads and numpy's would wait for each other."""
    found = torch.zeros(*z.shape[:-1], z.shape[-2], dtype=torch.float64, device=z.device)
    for part in z.detach().split(IN_CACHE, dim=-1):
        wide = part.double()
        found.baddbmm_(wide, wide.mT)
    return found.tril_().add_(found.tril(-1).mT)


def same_for_same(z: Tensor, factor: Tensor) -> Tensor:
    """`factor`, with the row of the first of identical rows of `z` for all of them."""
    first = z[..., 0].sort(-1).values
    if not (first[..., 1:] == first[..., :-1]).any():
        return factor  # no two rows begin with the same number
    scale = factor.norm(dim=-1)
    near = torch.cdist(factor, factor) <= NEAR * (scale[..., :, None] + scale[..., None, :])
    sample, row, earlier = torch.nonzero(near.tril(-1), as_tuple=True)
    if not len(row):
        return factor
    same = (z[sample, row] == z[sample, earlier]).all(-1)
    first = torch.arange(z.shape[-2], device=z.device).repeat(len(z), 1)
    first.index_put_((sample[same].flip(0), row[same].flip(0)), earlier[same].flip(0))  # the earliest is written last
    return torch.take_along_dim(factor, first[..., None], dim=-2)
