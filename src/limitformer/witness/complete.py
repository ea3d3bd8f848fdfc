r"""Weights from the products that a weightless pass has answered.

Let a pass have answered Z W = U and D Wᵀ = B. With orthonormal rows of Q, those of Z, and of P, those of D, it knows
Q W = N and W Pᵀ = M. If N Pᵀ = Q M, these are the products of

  W = QᵀN + (I − QᵀQ) M P + (I − QᵀQ) W̃ (I − PᵀP)

for any remainder W̃. Here W̃ has a low rank and the size of the weight's law: code that reads entries, which no pass has
answered, then finds numbers that the pass did not have.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from limitformer.nn.drawn.simulate import torch_seed
from limitformer.stepping.weights import TrainedWeights
from limitformer.weightless.products import DrawnMatrix, UndrawnMatrix
from limitformer.weightless.run import RandomWeight, WeightlessRun

RANK = 16  # of the remainder
CUT = {torch.float64: 1e-11, torch.float32: 1e-6}  # least singular value of unit rows that is a direction
Weights = dict[str, Tensor | dict[int | None, Tensor]]  # whole, or by slice or row
Products = dict[bool, tuple[Tensor, Tensor]]  # Z and U of W, and D and B of Wᵀ if True


class Known(NamedTuple):
    """Orthonormal rows (k, n), their products (k, p) with a matrix, and the share of them in what was multiplied."""

    directions: Tensor
    images: Tensor
    shares: Tensor


def solved(factor: Tensor, answer: Tensor) -> Known:
    """Return what Z W = U says of W (n × p): orthonormal rows of Z (m, n), and their products with W.

    Rows of very different sizes, such as gradients, count alike; rows of zeros, and those that are not finite, say
    nothing.
    """
    size = torch.linalg.vector_norm(factor, dim=-1, dtype=torch.float64)
    whole = size.isfinite() & (size > 0) & answer.isfinite().all(-1)
    z, u = (each[whole].double() / size[whole, None] for each in (factor, answer))
    if not len(z):
        return Known(z, u, z[:, 0])
    left, values, rows = torch.linalg.svd(z, full_matrices=False)
    count = int((values > CUT[factor.dtype] * values[0]).sum())
    return Known(rows[:count], (left[:, :count].mT @ u) / values[:count, None], values[:count] / values[0])


def completed(left: Known, right: Known, scale: float, dtype: torch.dtype, name: str, seed: int) -> Tensor:
    """Return a W (n × p) with these products, those of Wᵀ on the right, and a remainder of this name and seed.

    N Pᵀ and Q M are equal but for rounding, which is large in directions that were a small share of what was
    multiplied. The number of the larger share is taken for both.
    """
    (q, n, of_q), (p, m, of_p) = ([part.double() for part in each] for each in (left, right))
    n = n + ((q @ m.mT - n @ p.mT) * (of_q[:, None] < of_p)) @ p
    generator = torch.Generator().manual_seed(torch_seed(seed, f"{name}: remainder"))
    rest = torch.randn(RANK, m.shape[1], generator=generator, dtype=torch.float64) * (scale / RANK**0.5)
    other = torch.randn(RANK, p.shape[1], generator=generator, dtype=torch.float64)
    rows = torch.cat([m, rest])
    rows = rows - (rows @ q.mT) @ q
    columns = torch.cat([p, other - (other @ p.mT) @ p])
    return torch.cat([q, rows]).to(dtype).mT @ torch.cat([n, columns]).to(dtype)


def identity_error(products: Products) -> float:
    """Return |U Dᵀ − Z Bᵀ| relative to |U| |D|: both are Z W Dᵀ, so that this is the rounding error of a pass."""
    if products.keys() != {False, True}:
        return 0.0
    (z, u), (d, b) = ((x.double(), y.double()) for x, y in (products[False], products[True]))
    size = float(u.norm() * d.norm())
    error = float((u @ d.mT - z @ b.mT).norm()) / size if size else 0.0
    return 0.0 if math.isnan(error) else error  # a pass that is not finite has no products


def weights_of_pass(run: WeightlessRun, weights: list[RandomWeight], seed: int) -> dict[str, Tensor]:
    """Return weights, as the module stores them, that give all products which a pass of one sample has answered."""
    run.fresh.clear()
    result = {}
    for weight in weights:
        factor = run.factors.get(weight.name, 1.0)
        parts = {key: each for key, each in (run.products or {}).items() if key[0] == weight.name}
        repeats = {key: each for key, each in run.repeats.items() if key.partition("[")[0] == weight.name}
        of_whole = (weight.name, None) in parts or weight.name in repeats
        entries = torch.empty(weight.shape, dtype=run.dtype) if of_whole else run.entries(weight, weight.rows)[0]
        if weight.name in run.kept:
            entries = run.kept[weight.name].detach()[0]
        for (_, part), products in parts.items():
            target = entries if part is None else entries[part]
            shape = len(target), target.numel() // len(target)
            known = [Known(torch.zeros(0, a), torch.zeros(0, b), torch.zeros(0)) for a, b in (shape, shape[::-1])]
            for side, each in products.items():
                known[side] = solved(*each)
            scale = weight.law.std * abs(factor)
            target.copy_(
                completed(known[0], known[1], scale, run.dtype, f"{weight.name}[{part}]", seed).reshape(target.shape)
            )
        for name, repeated in repeats.items():
            target = entries if name == weight.name else entries[int(name.partition("[")[2][:-1])]
            for matrix in repeated.matrices[:1]:
                known = known_of(matrix)
                target.copy_(completed(known[0], known[1], matrix.scale, run.dtype, name, seed).reshape(target.shape))
        if weight.name in run.rows:
            indices, rows = run.rows[weight.name]
            entries[indices] = rows.detach()[0]
        for row, value in weight.law.rows.items() if of_whole else ():
            entries[row] = value
        result[weight.name] = entries / factor
    return result


def known_of(matrix: UndrawnMatrix) -> list[Known]:
    """Return what is known of a matrix on both sides."""
    return [Known(side.basis, side.image, torch.ones(len(side.basis))) for side in (matrix.left, matrix.right)]


def weights_of_training(trained: TrainedWeights, seed: int) -> Weights:
    """Return the weights at the start that give all products of a training: tensors, or by slice or row."""
    result: Weights = {name: {int(k): row for k, row in one.read.items()} for name, one in trained.rows.items()}
    result |= {name: one.initial for name, one in trained.entries.items()}
    for name, parts in trained.matrices.items():
        result[name] = {}
        for part, each in parts.items():
            matrix = each.initial
            if isinstance(matrix, DrawnMatrix):
                result[name][part] = matrix.whole()
                continue
            known = known_of(matrix)
            result[name][part] = completed(known[0], known[1], matrix.scale, trained.dtype, f"{name}[{part}]", seed)
    return result
