r"""Products of a random matrix W (n × p) that is never drawn, however often it is used.

A program asks only for *left products* Z W and *right products* D Wᵀ, in any order, and each Z and D may depend on all
earlier answers. Let W have entries N(0, s²). All that is known of W at any time is Q W = N and W Pᵀ = M, with
orthonormal rows of Q (k × n) and P (l × p), and

  W = QᵀN + (I − QᵀQ) M P + (I − QᵀQ) W̃ (I − PᵀP),   W̃ fresh, with entries N(0, s²).

* Left: Z = C Q + R q, with orthonormal rows of q that are orthogonal to those of Q. Then N⁺ = (q M) P + g (I − PᵀP)
  with fresh g ~ N(0, s²); the answer is C N + R N⁺, and q and N⁺ are appended to Q and N.
* Right: the same for Wᵀ, with the roles of (Q, N) and (P, Mᵀ) exchanged.

The page `steps` proves it. A use costs O(m (k + l) (n + p)), and the memory is (k + l) (n + p).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from limitformer.weightless.roots import cholesky, householder, inverse_of

NEW = {torch.float64: 1e-11, torch.float32: 1e-6}  # least part of a row, relative to it, that is a new direction
MOSTLY = 0.5  # least length of a new direction without its part along the known ones; a shorter one is rounding error
Draw = Callable[[str, Tensor, int], Tensor]  # (purpose, rows, columns): N(0, 1) of these rows


class Product(NamedTuple):
    """A product with W, and the coefficients (m, k) of the factor in the basis of its side, which now has k rows."""

    answer: Tensor
    coefficients: Tensor


@dataclass(eq=False)
class Side:
    """The products with W, or with Wᵀ, that are known."""

    name: str  # names the random numbers
    basis: Tensor  # orthonormal rows (k, a)
    image: Tensor  # their products with the matrix (k, b)
    uses: int = 0


class UndrawnMatrix:
    """A matrix of shape (n, p) with entries N(0, scale²), of which only products are known."""

    def __init__(self, shape: tuple[int, int], scale: float, draw: Draw, dtype: torch.dtype) -> None:
        self.shape, self.scale, self.draw, self.dtype = shape, scale, draw, dtype
        (n, p), none = shape, torch.empty
        self.left = Side("left", none(0, n, dtype=dtype), none(0, p, dtype=dtype))
        self.right = Side("right", none(0, p, dtype=dtype), none(0, n, dtype=dtype))

    def know_rows(self, rows: dict[int, float]) -> None:
        """Set rows that are constant, before the first product: they are products that are known."""
        if rows:
            self.left.basis = torch.zeros(len(rows), self.shape[0], dtype=self.dtype)
            self.left.basis[range(len(rows)), list(rows)] = 1.0
            constants = torch.tensor(list(rows.values()), dtype=self.dtype)
            self.left.image = constants[:, None].repeat(1, self.shape[1])

    def times(self, z: Tensor) -> Product:
        """Return Z W of Z (m, n)."""
        return self.product(z, self.left, self.right)

    def times_transpose(self, d: Tensor) -> Product:
        """Return D Wᵀ of D (m, p)."""
        return self.product(d, self.right, self.left)

    def product(self, z: Tensor, side: Side, other: Side) -> Product:
        finite = z.isfinite().all(-1, keepdim=True)
        z = z.detach().where(finite, 0.0)
        rest, known = without(z, side.basis)
        q, rows = new_directions(rest, lengths(z), side.basis)
        if len(rows):
            image = self.image_of(q, rows, side, other)
            side.basis, side.image = torch.cat([side.basis, q]), torch.cat([side.image, image])
        side.uses += 1
        coefficients = torch.cat([known, rest @ q.mT], 1)
        return Product((coefficients @ side.image).where(finite, torch.nan), coefficients.where(finite, torch.nan))

    def image_of(self, q: Tensor, rows: Tensor, side: Side, other: Side) -> Tensor:
        """Return the product of new directions, which are those of these rows of the factor."""
        fresh = self.draw(f"{side.name} {side.uses}", rows, side.image.shape[-1]).mul_(self.scale)
        if len(other.basis):
            fresh = fresh - (fresh @ other.basis.mT) @ other.basis + (q @ other.image.mT) @ other.basis
        return fresh


class DrawnMatrix(UndrawnMatrix):
    """A matrix whose entries `whole` draws again for each product, with the same interface."""

    def __init__(self, shape: tuple[int, int], whole: Callable[[], Tensor], draw: Draw, dtype: torch.dtype) -> None:
        super().__init__(shape, 1.0, draw, dtype)
        self.whole = whole

    def image_of(self, q: Tensor, rows: Tensor, side: Side, other: Side) -> Tensor:
        entries = self.whole()
        return q @ (entries if side is self.left else entries.mT)


def lengths(z: Tensor) -> Tensor:
    """Return the length of each row (m,) in float64, where no square overflows."""
    return torch.linalg.vector_norm(z, dim=-1, dtype=torch.float64)


def without(rows: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows (m, n) without their part along an orthonormal basis (k, n), and its coefficients (m, k).

    Projecting twice removes the rounding errors of the first time.
    """
    coefficients = rows.new_zeros(len(rows), len(basis))
    for _ in range(2 if len(basis) else 0):
        part = rows @ basis.mT
        rows, coefficients = rows - part @ basis, coefficients + part
    return rows, coefficients


def new_directions(rest: Tensor, whole: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return an orthonormal basis (r, n) of rows (m, n) that are orthogonal to `basis`, and the rows that gave it.

    Args:
        whole: the length of each row before its part along the basis was taken away; what is small against it is
            rounding error, and gives no direction.
    """
    size = lengths(rest)
    rows = torch.nonzero(size > NEW[rest.dtype] * whole)[:, 0]
    unit = rest[rows].double() / size[rows, None]
    q, kept = orthonormal(unit, rest.dtype)
    q, rows = q.to(rest.dtype), rows[kept]
    if len(rows) and len(basis):  # the direction of a short rest is less exact
        q = (q - (q @ basis.mT) @ basis).double()
        size = lengths(q)
        exact = size > MOSTLY
        q, kept = orthonormal(q[exact] / size[exact, None], rest.dtype)
        q, rows = q.to(rest.dtype), rows[exact][kept]
    return q, rows


def orthonormal(unit: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return an orthonormal basis (r, n) of unit rows (m, n) in float64, and the rows that gave it.

    Rows that depend on others give none. Those of float32 are orthonormalised by Cholesky's factor, twice.
    """
    kept = torch.arange(len(unit))
    if dtype == torch.float64:
        while len(kept):
            factor, basis = (each[0] for each in householder(unit[None, kept]))
            new = factor.diagonal() > NEW[dtype]
            if bool(new.all()):
                return basis, kept
            kept = kept[new]
        return unit[:0], kept
    if not len(kept):
        return unit, kept
    root, rows = cholesky((unit @ unit.mT).numpy())
    q = torch.from_numpy(inverse_of(root, rows)[:, rows]).mT @ unit
    gram = torch.linalg.cholesky(q @ q.mT)
    return torch.linalg.solve_triangular(gram, q, upper=False), torch.from_numpy(rows)
