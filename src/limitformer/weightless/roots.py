r"""Roots of tokens: Z = R Q with orthonormal rows of Q, so that Z W = R N with N = Q W ~ N(0, s²).

Only R is needed to draw Z W. Q is needed in the backward pass, by its products alone. Letters: S samples, M tokens
(rows of Z and of Q), n entries of each. A token that depends on others has a column of zeros in R, and one in Qᵀ.

R is lower triangular with a positive diagonal. Tokens that do not depend on each other have but one such root, and it
moves little with them, so that a seed gives the same sample on every machine and in both precisions. (To begin with
the largest token is as good for the law; but of tokens behind a norm rounding decides which one that is.)

Two ways. In float64, Householder's factorisation of Zᵀ: differences of tokens keep their digits down to 1e-16 of the
tokens. In float32, Cholesky's of the Gram matrix Z Zᵀ, summed in float64: several times as fast at large n, and its
1e-8 is less than the rounding of the tokens. What is new in a token, beyond those before it, counts as nothing below
`LOST`. Between `LOST` and `CLEAR` it may be rounding that has grown, as where tokens collapse or are more than n. Then
the token with most that is new comes next, instead of the next one, which keeps rounding small; R is triangular in
that order, and rounding may decide which sample it is.

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
LOST, CLEAR = 1e-12, 1e-6  # squares, of what is new in a float32 token over all of it
PREFERENCE = 1e-3  # for the first token over the last, of two with as much that is new
COMPARED = 16  # entries of two tokens, before all of them

Matrix = NDArray[np.float64]
Rows = NDArray[np.int64]


class HouseholderRoot(NamedTuple):
    """Of float64 tokens Z (S, M, n)."""

    factor: Tensor  # R (S, M, M)
    basis: Tensor  # Q (S, M, n)

    @property
    def width(self) -> int:
        """n."""
        return self.basis.shape[-1]

    def onto(self, rows: Tensor) -> Tensor:
        """F Qᵀ (S, k, M) of rows F (S, k, n)."""
        return rows @ self.basis.mT

    def along(self, coefficients: Tensor) -> Tensor:
        """C Q (S, k, n) of C (S, k, M)."""
        return coefficients @ self.basis


class GramRoot(NamedTuple):
    """Of float32 tokens Z (S, M, n)."""

    factor: Tensor  # R (S, M, M)
    inverse: Tensor | None  # in float64 (S, M, M): Q = inverseᵀ Z; None where there is no backward pass
    z: Tensor

    @property
    def width(self) -> int:
        """n."""
        return self.z.shape[-1]

    def onto(self, rows: Tensor) -> Tensor:
        """F Qᵀ (S, k, M) of rows F (S, k, n)."""
        assert self.inverse is not None
        return ((rows @ self.z.mT).double() @ self.inverse).to(rows.dtype)

    def along(self, coefficients: Tensor) -> Tensor:
        """C Q (S, k, n) of C (S, k, M)."""
        assert self.inverse is not None
        return (coefficients.double() @ self.inverse.mT).to(coefficients.dtype) @ self.z


Root = HouseholderRoot | GramRoot


def householder_root(z: Tensor) -> HouseholderRoot:
    """By Householder's factorisation of Zᵀ; samples beside one do not change how it is done."""
    first = first_of(z)
    new = z.any(-1) & (first == torch.arange(z.shape[-2], device=z.device))
    some = ~new.all(-1)
    if not some.any():
        return householder(z)
    factor, basis = z.new_empty(*z.shape[:-1], z.shape[-2]), torch.empty_like(z)
    factor[~some], basis[~some] = householder(z[~some])
    factor[some], basis[some] = householder_of_new(z[some], new[some], first[some])
    return HouseholderRoot(factor, basis)


def householder_of_new(z: Tensor, new: Tensor, first: Tensor) -> HouseholderRoot:
    """The same of tokens with repeats and zeros, which are put aside, in directions of their own."""
    aside = torch.diag_embed((~new).to(z.dtype))
    factor, basis = householder(torch.cat([z * new[..., None], aside], dim=-1))
    return HouseholderRoot(rows_of(factor * new[..., None], first), basis[..., : z.shape[-1]])


def householder(z: Tensor) -> HouseholderRoot:
    """The same of tokens that differ."""
    q, r = torch.linalg.qr(z.mT)
    signs = signs_of(r)
    spare = (0, 0, 0, z.shape[-2] - r.shape[-2])  # tokens beyond n add no direction
    return HouseholderRoot(pad(signs * r, spare).mT, pad(signs * q.mT, spare))


def signs_of(r: Tensor) -> Tensor:
    """±1 (S, min(M, n), 1) by which Householder's rows have a positive diagonal."""
    return torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(r.dtype)[..., None]


def gram_root(z: Tensor) -> GramRoot:
    """By Cholesky's factorisation of Z Zᵀ."""
    found = [cholesky(g) for g in gram(z).cpu().numpy()]
    inverse = None
    if torch.is_grad_enabled():
        inverse = torch.from_numpy(np.stack([inverse_of(*each) for each in found])).to(z.device)
    roots = torch.from_numpy(np.stack([root for root, _ in found])).to(z.device, z.dtype)
    return GramRoot(rows_of(roots, first_of(z)), inverse, z)


def cholesky(g: Matrix) -> tuple[Matrix, Rows]:
    """R (M, M) with R Rᵀ = G, and the tokens in whose order R is triangular; others have columns of zeros.

    A token that is infinite or NaN has a row of NaN.
    """
    return of_new(g) or of_any(g)


def of_new(g: Matrix) -> tuple[Matrix, Rows] | None:
    """The same where each token is clearly new, as nearly always."""
    own, rows = g.diagonal(), np.arange(len(g))
    if not (np.isfinite(own) & (own > 0)).all():
        return None
    lower = leading(g, LOST * own)
    return (lower, rows) if len(lower) == len(g) and clear(lower, rows) else None


def of_any(g: Matrix) -> tuple[Matrix, Rows]:
    """The same of tokens that may depend on one another, or be none."""
    finite = np.isfinite(g.diagonal())
    sound = np.flatnonzero(finite & (g.diagonal() > 0))
    part = g[np.ix_(sound, sound)]
    found = in_order(part)
    root, kept = found if clear(*found) else newest_first(part)
    whole = np.zeros_like(g)
    whole[~finite] = np.nan
    whole[np.ix_(sound, sound)] = root
    return whole, sound[kept]


def in_order(g: Matrix) -> tuple[Matrix, Rows]:
    """The same of tokens in their order, without those that depend on earlier ones."""
    root, lost, rows, left = np.zeros_like(g), LOST * g.diagonal(), np.arange(len(g)), g
    while len(rows):
        lower = leading(left, lost[rows])
        end = len(lower)
        taken, rows = rows[:end], rows[end:]
        root[np.ix_(taken, taken)] = lower
        if len(rows):
            below = dtrtrs(lower, left[:end, end:], lower=1)[0].T
            root[np.ix_(rows, taken)] = below
            left = left[end:, end:] - below @ below.T
            new = left.diagonal() > lost[rows]
            rows, left = rows[new], left[np.ix_(new, new)]
    return root, np.flatnonzero(root.diagonal())


def leading(g: Matrix, lost: NDArray[np.float64]) -> Matrix:
    """Cholesky's factor of the rows before the first that depends on those before it."""
    lower, failed = dpotrf(g, lower=1)
    tiny = lower.diagonal() ** 2 <= lost
    if failed:
        tiny[failed - 1] = True
    end = int(np.argmax(tiny)) if tiny.any() else len(g)
    return lower[:end, :end]


def clear(root: Matrix, kept: Rows) -> bool:
    """Whether so much is new in each token that was kept that it cannot be rounding."""
    return bool((root.diagonal()[kept] ** 2 > CLEAR * np.square(root[kept]).sum(-1)).all())


def newest_first(g: Matrix) -> tuple[Matrix, Rows]:
    """The same, next the token with most that is new; of two alike, the earlier one."""
    scale = (1 - PREFERENCE * np.arange(len(g)) / len(g)) / np.sqrt(g.diagonal())
    lower, order, rank, _ = dpstrf(g * scale * scale[:, None], tol=LOST, lower=1)
    root, kept = np.zeros_like(g), order[:rank] - 1
    root[np.ix_(order - 1, kept)] = np.tril(lower)[:, :rank]
    return root / scale[:, None], kept


def inverse_of(root: Matrix, kept: Rows) -> Matrix:
    """The `inverse` of a root that is triangular in this order."""
    if np.array_equal(kept, np.arange(len(root))):  # as nearly always
        return np.ascontiguousarray(dtrtri(root, lower=1)[0].T)
    inverse = np.zeros_like(root)
    if len(kept):
        inverse[np.ix_(kept, kept)] = dtrtri(root[np.ix_(kept, kept)], lower=1)[0].T
    return inverse


def root_of(z: Tensor) -> Root:
    """The root that suits the tokens' precision."""
    return householder_root(z) if z.dtype == torch.float64 else gram_root(z)


def size_of(d: Tensor) -> Tensor:
    """S of D = S P (S, M, M): a root of D Dᵀ."""
    if d.dtype == torch.float64:
        return householder_root(d).factor
    return torch.from_numpy(np.stack([cholesky(g)[0] for g in gram(d).cpu().numpy()])).to(d.device, d.dtype)


def gram(z: Tensor) -> Tensor:
    """Z Zᵀ (S, M, M) in float64, symmetric; by torch alone, whose threads and numpy's would wait for each other."""
    found: Tensor | None = None
    for part in z.detach().split(IN_CACHE, dim=-1):
        wide = part.double()
        found = wide @ wide.mT if found is None else found.baddbmm_(wide, wide.mT)
    assert found is not None
    return mirror(found)


def mirror(lower: Tensor) -> Tensor:
    """What is below the diagonal (S, M, M) above it, too; in place, by blocks, as M may be thousands."""
    for at in range(0, lower.shape[-1], MIRRORED):
        block = lower[:, at : at + MIRRORED, at : at + MIRRORED]
        block.tril_().add_(block.tril(-1).mT)
        lower[:, at : at + MIRRORED, at + MIRRORED :] = lower[:, at + MIRRORED :, at : at + MIRRORED].mT
    return lower


def first_of(z: Tensor) -> Tensor:
    """(S, M): the first token that is identical to this one, to the last bit."""
    first = torch.arange(z.shape[-2], device=z.device).repeat(len(z), 1)
    begins = z[..., 0].sort(-1).values
    if not (begins[..., 1:] == begins[..., :-1]).any():
        return first
    some = z[..., :: -(-z.shape[-1] // COMPARED)]
    alike = (some[:, :, None] == some[:, None]).all(-1).tril(-1)
    sample, row, earlier = torch.nonzero(alike, as_tuple=True)
    same = (z[sample, row] == z[sample, earlier]).all(-1)
    first.index_put_((sample[same].flip(0), row[same].flip(0)), earlier[same].flip(0))  # the earliest is written last
    return first


def rows_of(factor: Tensor, first: Tensor) -> Tensor:
    """The first row for all of those that are identical."""
    return torch.take_along_dim(factor, first[..., None], dim=-2)
