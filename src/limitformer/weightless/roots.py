r"""Roots of tokens: Z = R Q with orthonormal rows of Q, so that Z W = R N with N = Q W ~ N(0, s²).

The forward pass needs R, the backward pass also products with Q. Letters: S samples, M tokens (rows of Z and of Q),
n entries of each. A token that depends on earlier ones has a column of zeros in R, and one in Qᵀ.

R is lower triangular with a positive diagonal. Independent tokens have only one such root, and it is continuous in
them, so that a seed gives the same sample on every machine and in both precisions. (Starting from the largest token
has the same law; but tokens behind a norm have equal lengths, so that rounding would choose the first.)

There are two factorisations:

* float64: Householder's of Zᵀ. Differences of tokens keep their digits down to 1e-16 of the tokens.
* float32: Cholesky's of the Gram matrix Z Zᵀ, summed in float64. It is several times as fast at large n, and its error
  of 1e-8 is below the rounding of the tokens. Products with Q = R⁻¹ Z are summed in float64 too, since R⁻¹ is large
  where tokens collapse, and overflows float32 where they are tiny.

The *residual* of a token is its part orthogonal to the tokens before it. Cholesky treats a residual below `LOST` as
zero. Between `LOST` and `CLEAR` it may be rounding error, as where tokens collapse or are more than n. Then the next
token is the one with the largest residual, which bounds the error; R is triangular in that order, and rounding may
decide the order, and so the sample.

Identical rows of Z get identical rows of R, to the last bit.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg.lapack import dpotrf, dpstrf, dtrtri, dtrtrs
from torch import Tensor
from torch.nn.functional import pad

IN_CACHE = 4096  # columns that are in float64 at a time
MIRRORED = 256  # rows of a symmetric matrix that are copied at a time
LOST, CLEAR = 1e-12, 1e-6  # squared residual of a float32 token over its squared length
PREFERENCE = 1e-3  # for the first token over the last, where residuals are equal
COMPARED = 16  # entries of two tokens that are compared before all of them

Matrix = NDArray[np.float64]
Rows = NDArray[np.int64]


class HouseholderRoot(NamedTuple):
    """The root of float64 tokens Z (S, M, n)."""

    factor: Tensor  # R (S, M, M)
    basis: Tensor  # Q (S, M, n)

    @property
    def width(self) -> int:
        return self.basis.shape[-1]

    def onto(self, rows: Tensor) -> Tensor:
        """Return F Qᵀ (S, k, M) of rows F (S, k, n)."""
        return rows @ self.basis.mT

    def along(self, coefficients: Tensor) -> Tensor:
        """Return C Q (S, k, n) of C (S, k, M)."""
        return coefficients @ self.basis


class GramRoot(NamedTuple):
    """The root of float32 tokens Z (S, M, n)."""

    factor: Tensor  # R (S, M, M)
    inverse: Tensor | None  # float64 (S, M, M): Q = inverseᵀ Z; None without a backward pass
    z: Tensor

    @property
    def width(self) -> int:
        return self.z.shape[-1]

    def onto(self, rows: Tensor) -> Tensor:
        """Return F Qᵀ (S, k, M) of rows F (S, k, n)."""
        assert self.inverse is not None
        products = sum(a.double() @ b.double().mT for a, b in zip(*map(self.parts, (rows, self.z)), strict=True))
        return (products @ self.inverse).to(rows.dtype)

    def along(self, coefficients: Tensor) -> Tensor:
        """Return C Q (S, k, n) of C (S, k, M)."""
        assert self.inverse is not None
        rows = coefficients.double() @ self.inverse.mT
        return torch.cat([(rows @ each.double()).to(coefficients.dtype) for each in self.parts(self.z)], -1)

    @staticmethod
    def parts(z: Tensor) -> tuple[Tensor, ...]:
        return z.split(IN_CACHE, -1)


Root = HouseholderRoot | GramRoot


def householder_root(z: Tensor) -> HouseholderRoot:
    """Factorise Zᵀ by Householder; each sample is treated independently of the others."""
    first = first_of(z)
    new = z.any(-1) & (first == torch.arange(z.shape[-2], device=z.device))
    repeats = ~new.all(-1)
    if not repeats.any():
        return householder(z)
    factor, basis = z.new_empty(*z.shape[:-1], z.shape[-2]), torch.empty_like(z)
    factor[~repeats], basis[~repeats] = householder(z[~repeats])
    # Repeats and zeros are replaced by extra directions, and removed again.
    is_new = new[repeats][..., None]
    extra = torch.diag_embed((~new[repeats]).to(z.dtype))
    root = householder(torch.cat([z[repeats] * is_new, extra], dim=-1))
    factor[repeats], basis[repeats] = rows_of(root.factor * is_new, first[repeats]), root.basis[..., : z.shape[-1]]
    return HouseholderRoot(factor, basis)


def householder(z: Tensor) -> HouseholderRoot:
    """Householder root of tokens without repeats and zeros."""
    q, r = torch.linalg.qr(z.mT)
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(r.dtype)[..., None]  # for a positive diagonal
    spare = (0, 0, 0, z.shape[-2] - r.shape[-2])  # tokens beyond n add no direction
    return HouseholderRoot(pad(signs * r, spare).mT, pad(signs * q.mT, spare))


def gram_root(z: Tensor, backward: bool = True) -> GramRoot:
    """Factorise Z Zᵀ by Cholesky."""
    factors = [cholesky(g) for g in gram(z).cpu().numpy()]
    inverse = None
    if backward:
        inverse = torch.from_numpy(np.stack([inverse_of(*each) for each in factors])).to(z.device)
    roots = torch.from_numpy(np.stack([root for root, _ in factors])).to(z.device, z.dtype)
    return GramRoot(rows_of(roots, first_of(z)), inverse, z)


def cholesky(g: Matrix) -> tuple[Matrix, Rows]:
    """Return R (M, M) with R Rᵀ = G, and the tokens with a column, in the order in which R is triangular.

    The other tokens have columns of zeros. A token that is infinite or NaN has a row of NaN.
    """
    return cholesky_of_independent(g) or cholesky_of_any(g)


def cholesky_of_independent(g: Matrix) -> tuple[Matrix, Rows] | None:
    """Cholesky root where every residual is clear of rounding, as nearly always; else None."""
    own, rows = g.diagonal(), np.arange(len(g))
    if not (np.isfinite(own) & (own > 0)).all():
        return None
    lower = leading(g, LOST * own)
    return (lower, rows) if len(lower) == len(g) and clear(lower, rows) else None


def cholesky_of_any(g: Matrix) -> tuple[Matrix, Rows]:
    """Cholesky root of tokens that may depend on each other, be zero, or not be finite."""
    finite = np.isfinite(g.diagonal())
    sound = np.flatnonzero(finite & (g.diagonal() > 0))
    part = g[np.ix_(sound, sound)]
    root, rows = in_order(part)
    if not clear(root, rows):  # the token with the largest residual is next; among equal ones, the earlier
        scale = (1 - PREFERENCE * np.arange(len(part)) / len(part)) / np.sqrt(part.diagonal())
        lower, order, rank, _ = dpstrf(part * scale * scale[:, None], tol=LOST, lower=1)
        root, rows = np.zeros_like(part), order[:rank] - 1
        root[np.ix_(order - 1, rows)] = np.tril(lower)[:, :rank]
        root = root / scale[:, None]
    whole = np.zeros_like(g)
    whole[~finite] = np.nan
    whole[np.ix_(sound, sound)] = root
    return whole, sound[rows]


def in_order(g: Matrix) -> tuple[Matrix, Rows]:
    """Cholesky root of tokens in their order, without those that depend on earlier ones."""
    root, lost, rows, rest = np.zeros_like(g), LOST * g.diagonal(), np.arange(len(g)), g
    while len(rows):
        lower = leading(rest, lost[rows])
        end = len(lower)
        taken, rows = rows[:end], rows[end:]
        root[np.ix_(taken, taken)] = lower
        if len(rows):
            below = dtrtrs(lower, rest[:end, end:], lower=1)[0].T
            root[np.ix_(rows, taken)] = below
            rest = rest[end:, end:] - below @ below.T
            new = rest.diagonal() > lost[rows]
            rows, rest = rows[new], rest[np.ix_(new, new)]
    return root, np.flatnonzero(root.diagonal())


def leading(g: Matrix, lost: NDArray[np.float64]) -> Matrix:
    """Return Cholesky's factor of the rows up to the first that depends on those before it."""
    lower, failed = dpotrf(g, lower=1)
    tiny = lower.diagonal() ** 2 <= lost
    if failed:
        tiny[failed - 1] = True
    end = int(np.argmax(tiny)) if tiny.any() else len(g)
    return lower[:end, :end]


def clear(root: Matrix, rows: Rows) -> bool:
    """Whether the residuals of these tokens are too large to be rounding."""
    return bool((root.diagonal()[rows] ** 2 > CLEAR * np.square(root[rows]).sum(-1)).all())


def inverse_of(root: Matrix, rows: Rows) -> Matrix:
    """Return `GramRoot.inverse` of a root that is triangular in the order of `rows`."""
    if len(rows) and np.array_equal(rows, np.arange(len(root))):  # as nearly always
        return np.ascontiguousarray(dtrtri(root, lower=1)[0].T)
    inverse = np.zeros_like(root)
    if len(rows):
        inverse[np.ix_(rows, rows)] = dtrtri(root[np.ix_(rows, rows)], lower=1)[0].T
    return inverse


def root_of(z: Tensor, backward: bool = True) -> Root:
    """Return the root by the factorisation that suits the tokens' precision; `backward`: also for products with Q."""
    return householder_root(z) if z.dtype == torch.float64 else gram_root(z, backward)


def size_of(d: Tensor) -> Tensor:
    """Return S (S, M, M) of D = S P, a root of D Dᵀ."""
    if d.dtype == torch.float64:
        return householder_root(d).factor
    return torch.from_numpy(np.stack([cholesky(g)[0] for g in gram(d).cpu().numpy()])).to(d.device, d.dtype)


def gram(z: Tensor) -> Tensor:
    """Return Z Zᵀ (S, M, M) in float64, symmetric to the last bit.

    Torch multiplies, since its threads and those of NumPy would wait for each other.
    """
    result: Tensor | None = None
    for part in z.detach().split(IN_CACHE, dim=-1):
        wide = part.double()
        result = wide @ wide.mT if result is None else result.baddbmm_(wide, wide.mT)
    assert result is not None
    for at in range(0, result.shape[-1], MIRRORED):  # the lower triangle to the upper one, as M may be thousands
        block = result[:, at : at + MIRRORED, at : at + MIRRORED]
        block.tril_().add_(block.tril(-1).mT)
        result[:, at : at + MIRRORED, at + MIRRORED :] = result[:, at + MIRRORED :, at : at + MIRRORED].mT
    return result


def first_of(z: Tensor) -> Tensor:
    """Return (S, M): for each token the index of the first that equals it to the last bit."""
    first = torch.arange(z.shape[-2], device=z.device).repeat(len(z), 1)
    begins = z[..., 0].sort(-1).values
    if not (begins[..., 1:] == begins[..., :-1]).any():
        return first
    some = z[..., :: -(-z.shape[-1] // COMPARED)]
    alike = (some[:, :, None] == some[:, None]).all(-1).tril(-1)
    sample, row = torch.nonzero(alike.any(-1), as_tuple=True)
    leader = alike[sample, row].int().argmax(-1)  # of the tokens with these entries; nearly always they are equal
    equal = (z[sample, row] == z[sample, leader]).all(-1)
    first[sample[equal], row[equal]] = leader[equal]
    if equal.all():
        return first
    alike[sample[equal], row[equal]] = False
    sample, row, earlier = torch.nonzero(alike, as_tuple=True)
    same = (z[sample, row] == z[sample, earlier]).all(-1)
    first.index_put_((sample[same].flip(0), row[same].flip(0)), earlier[same].flip(0))  # the earliest is written last
    return first


def rows_of(factor: Tensor, first: Tensor) -> Tensor:
    """Give identical tokens the row of the first of them."""
    return torch.take_along_dim(factor, first[..., None], dim=-2)
