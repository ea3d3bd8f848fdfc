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
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from limitformer.weightless.maps import squared_product
from limitformer.weightless.roots import cholesky, householder, inverse_of
from limitformer.weightless.tensors import same_memory

NEW = {torch.float64: 1e-11, torch.float32: 1e-6}  # least part of a row, relative to it, that is a new direction
MOSTLY = 0.5  # least length of a new direction without its part along the known ones; a shorter one is rounding error
RESERVED = 8  # times the rows that are needed
Draw = Callable[[str, Tensor, int], Tensor]  # (purpose, rows, columns): N(0, 1) of these rows


class Product(NamedTuple):
    """A product with W, and the coefficients (m, k) of the factor in the basis of its side, which now has k rows."""

    answer: Tensor
    coefficients: Tensor


class Rows:
    """Rows (k, n) that grow; memory for more is reserved, and not taken before it is used."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.count, self.memory = 0, torch.empty(0, size, dtype=dtype)

    def append(self, rows: Tensor) -> None:
        end = self.count + len(rows)
        if end > len(self.memory):
            memory = self.memory.new_empty(RESERVED * end, self.memory.shape[1])
            memory[: self.count] = self.memory[: self.count]
            self.memory = memory
        self.memory[self.count : end] = rows
        self.count = end

    def first(self, count: int) -> Tensor:
        return self.memory[:count]


@dataclass(eq=False)
class Side:
    """The products with W, or with Wᵀ, that are known."""

    name: str  # names the random numbers
    directions: Rows  # orthonormal (k, a); matrices that always multiply the same tensors share them
    products: Rows  # of the directions with the matrix (k, b)
    uses: int = 0

    @property
    def basis(self) -> Tensor:
        return self.directions.first(self.products.count)

    @property
    def image(self) -> Tensor:
        return self.products.first(self.products.count)


class Extension(NamedTuple):
    """The split of rows (m, n) over a basis that was extended for it."""

    coefficients: Tensor  # (m, k)
    directions: Rows
    rows: Tensor  # those that gave new directions
    finite: Tensor  # which rows are finite (m, 1); the others count as zero


class Bases:
    """Extends bases, once for matrices that share a basis and multiply the same tensor, such as queries and keys."""

    def __init__(self) -> None:
        self.empty: dict[tuple[int, torch.dtype], Rows] = {}
        self.recent: list[tuple[Tensor, int, Rows, int, Extension]] = []

    def of_size(self, size: int, dtype: torch.dtype) -> Rows:
        """Return the empty basis of this size, with which all matrices begin."""
        return self.empty.setdefault((size, dtype), Rows(size, dtype))

    def extended(self, z: Tensor, directions: Rows, count: int) -> Extension:
        """Extend the first `count` of some directions by those of rows (m, n)."""
        for tensor, version, before, known, extension in self.recent:
            if before is directions and known == count and version == z._version and same_memory(tensor, z):
                return extension
        finite = z.isfinite().all(-1, keepdim=True)
        whole, basis = z.detach().where(finite, 0.0), directions.first(count)
        rest, along = without(whole, basis)
        q, rows = new_directions(rest, lengths(whole), basis)
        grown = directions
        if count == 0 or directions.count != count:  # another matrix has extended it in another way, or will
            grown = Rows(z.shape[-1], z.dtype)
            grown.append(basis)
        grown.append(q)
        extension = Extension(torch.cat([along, rest @ q.mT], 1), grown, rows, finite)
        self.recent = [*self.recent[-1:], (z.detach(), z._version, directions, count, extension)]
        return extension


class UndrawnMatrix:
    """A matrix of shape (n, p) with entries N(0, scale²), of which only products are known."""

    def __init__(self, shape: tuple[int, int], scale: float, draw: Draw, dtype: torch.dtype, bases: Bases) -> None:
        self.shape, self.scale, self.draw, self.dtype, self.bases = shape, scale, draw, dtype, bases
        n, p = shape
        self.left = Side("left", bases.of_size(n, dtype), Rows(p, dtype))
        self.right = Side("right", bases.of_size(p, dtype), Rows(n, dtype))

    def know_rows(self, rows: dict[int, float]) -> None:
        """Set rows that are constant, before the first product: they are products that are known."""
        if rows:
            directions = torch.zeros(len(rows), self.shape[0], dtype=self.dtype)
            directions[range(len(rows)), list(rows)] = 1.0
            constants = torch.tensor(list(rows.values()), dtype=self.dtype)
            self.left.directions = Rows(self.shape[0], self.dtype)
            self.left.directions.append(directions)
            self.left.products.append(constants[:, None].repeat(1, self.shape[1]))

    def times(self, z: Tensor) -> Product:
        """Return Z W of Z (m, n); a row that is not finite has an answer of NaN."""
        return self.product(z, self.left, self.right)

    def times_transpose(self, d: Tensor) -> Product:
        """Return D Wᵀ of D (m, p)."""
        return self.product(d, self.right, self.left)

    def product(self, z: Tensor, side: Side, other: Side) -> Product:
        """Return the product with the matrix, or its transpose, whose products are those of `side`."""
        count = side.products.count
        coefficients, side.directions, rows, finite = self.bases.extended(z, side.directions, count)
        if len(rows):
            new = side.directions.memory[count : count + len(rows)]
            side.products.append(self.image_of(new, rows, side, other))
        side.uses += 1
        answer = coefficients @ side.image
        if bool(finite.all()):
            return Product(answer, coefficients)
        return Product(answer.where(finite, torch.nan), coefficients.where(finite, torch.nan))

    def image_of(self, q: Tensor, rows: Tensor, side: Side, other: Side) -> Tensor:
        """Return the product of new directions, which are those of these rows of the factor."""
        fresh = self.draw(f"{side.name} {side.uses}", rows, other.basis.shape[-1]).mul_(self.scale)
        if len(other.basis):
            known = q @ other.image.mT - fresh @ other.basis.mT
            fresh.addmm_(known, other.basis)
        return fresh


class DrawnMatrix(UndrawnMatrix):
    """A matrix whose entries `whole` draws again for each product, with the same interface."""

    def __init__(self, shape: tuple[int, int], whole: Callable[[], Tensor], dtype: torch.dtype, bases: Bases) -> None:
        super().__init__(shape, 1.0, no_numbers, dtype, bases)
        self.whole = whole

    def image_of(self, q: Tensor, rows: Tensor, side: Side, other: Side) -> Tensor:
        entries = self.whole()
        return q @ (entries if side is self.left else entries.mT)


def no_numbers(purpose: str, rows: Tensor, columns: int) -> Tensor:
    raise AssertionError("a matrix with entries needs no other random numbers")


def lengths(z: Tensor) -> Tensor:
    """Return the length of each row (m,) in float64, also where squares overflow."""
    size = torch.linalg.vector_norm(z, dim=-1)
    return size.double() if bool(size.isfinite().all()) else torch.linalg.vector_norm(z, dim=-1, dtype=torch.float64)


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
    q, indices = orthonormal(unit, rest.dtype)
    q, rows = q.to(rest.dtype), rows[indices]
    if len(rows) and len(basis):  # the direction of a short rest is less exact
        q = (q - (q @ basis.mT) @ basis).double()
        size = lengths(q)
        exact = size > MOSTLY
        q, indices = orthonormal(q[exact] / size[exact, None], rest.dtype)
        q, rows = q.to(rest.dtype), rows[exact][indices]
    return q, rows


def orthonormal(unit: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return an orthonormal basis (r, n) of unit rows (m, n) in float64, and the rows that gave it.

    Rows that depend on others give none. Those of float32 are orthonormalised by Cholesky's factor, twice; those of
    float64 by Householder's, which has no pivots, or one at a time if some depend on others.
    """
    indices = torch.arange(len(unit))
    if dtype == torch.float64:
        factor, basis = (each[0] for each in householder(unit[None]))
        return (basis, indices) if bool((factor.diagonal() > NEW[dtype]).all()) else one_at_a_time(unit)
    if not len(indices):
        return unit, indices
    root, rows = cholesky((unit @ unit.mT).numpy())
    q = torch.from_numpy(inverse_of(root, rows)[:, rows]).mT @ unit
    gram = torch.linalg.cholesky(q @ q.mT)
    return torch.linalg.solve_triangular(gram, q, upper=False), torch.from_numpy(rows)


def one_at_a_time(unit: Tensor) -> tuple[Tensor, Tensor]:
    """Return `orthonormal` of rows that may depend on each other, such as repeats, or rows beyond their size."""
    basis, indices = torch.empty(min(unit.shape), unit.shape[1], dtype=unit.dtype), list[int]()
    for k, row in enumerate(unit):
        rest, _ = without(row[None], basis[: len(indices)])
        size = lengths(rest)
        if size > NEW[unit.dtype]:
            basis[len(indices)] = rest[0] / size
            indices.append(k)
        if len(indices) == len(basis):
            break
    return basis[: len(indices)], torch.tensor(indices, dtype=torch.long)


class RepeatedMap:
    """The maps Z W and D Wᵀ, by an undrawn matrix for each sample, of all uses of a weight in a pass."""

    def __init__(self) -> None:
        self.matrices: list[UndrawnMatrix] = []
        self.factors: list[tuple[Tensor, Tensor]] = []  # of the gradient Σ Zᵀ D (S, M, n), (S, M, p)

    def of_samples(self, numbers: Any, shape: tuple[int, int], dtype: torch.dtype) -> list[UndrawnMatrix]:
        """Return the matrix of each sample, with the random numbers of a weight (`implicit.WeightNumbers`)."""
        if not self.matrices:
            self.matrices = [
                UndrawnMatrix(shape, numbers.scale, partial(numbers.rows_of, sample), dtype, Bases())
                for sample in range(numbers.samples)
            ]
        return self.matrices

    def squared_gradient(self) -> Tensor | None:
        """Return |∂W|² (S,) after a backward pass, None without one."""
        if not self.factors:
            return None
        left, right = (torch.cat(each, 1) for each in zip(*self.factors, strict=True))
        return squared_product(left, right)


class RepeatedUse(torch.autograd.Function):
    """One use of a `RepeatedMap`."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, anchor: Tensor, repeated: RepeatedMap, matrices: list[UndrawnMatrix], transpose: bool,
        frozen: bool,
    ) -> Tensor:  # fmt: skip
        """Return Z W (S, M, p), or Z Wᵀ."""
        ctx.repeated, ctx.matrices, ctx.transpose, ctx.frozen = repeated, matrices, transpose, frozen
        ctx.save_for_backward(z)
        return products_of(matrices, z, transpose)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        """Return D Wᵀ (S, M, n), or D W, and note the factors of the weight's gradient."""
        (z,) = ctx.saved_tensors
        if not ctx.frozen:
            factors = (d, z) if ctx.transpose else (z, d)
            ctx.repeated.factors.append((factors[0].detach(), factors[1].detach()))
        back = products_of(ctx.matrices, d, not ctx.transpose) if ctx.needs_input_grad[0] else None
        return back, None, None, None, None, None


def products_of(matrices: list[UndrawnMatrix], z: Tensor, transpose: bool) -> Tensor:
    """Return the product of each sample's rows (S, M, ·) with its matrix, or the transpose; matrices are on the CPU."""
    each = zip(matrices, z.cpu(), strict=True)
    answers = [(w.times_transpose(rows) if transpose else w.times(rows)).answer for w, rows in each]
    return torch.stack(answers).to(z.device)
