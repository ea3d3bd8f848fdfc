r"""Updates that are functions of each entry of the gradients, such as Adam's, without a matrix of that size.

The gradient of step s is c_s A_sᵀ B_s with few rows of A_s (m × n) and B_s (m × p). The sum U of all updates so far is
computed in blocks, used and thrown away: one product of matrices gives a block of each gradient, and one kernel runs
the optimiser's recursion over the steps for each entry. A product with U costs O(t m n p) operations and no memory of
the size n p. Blocks are independent of each other, so that results have the same bits for any number of threads.

`StoredUpdates` keeps U and the optimiser's means instead, where they fit into memory; a product then costs O(m n p).
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitformer.numerics.kernels import driver
from limitformer.sampling.replicas import usable_cores
from limitformer.stepping.updates import UpdateRule

BLOCK_BYTES = 2**20  # of a block of one gradient


class EntrywiseHistory:
    """The updates U_t of a matrix W_t = a W₀ + U_t (n × p) by entries, computed for each product."""

    def __init__(self, rule: UpdateRule, shape: tuple[int, int]) -> None:
        self.rule, self.shape = rule, shape
        self.gradients: list[tuple[Tensor, Tensor]] = []
        self.scales: list[float] = []
        self.rates: list[float] = []
        self.square, self.decay = 0.0, 1.0  # |U|², and the factor a of weight decay

    def add(self, left: Tensor, right: Tensor, scale: float, factor: float) -> None:
        """Add a step with the gradient scale · leftᵀ right at the rule's learning rate times `factor`."""
        self.gradients.append((left, right))
        self.scales.append(scale)
        self.rates.append(self.rule.lr * factor)
        self.decay *= 1.0 - self.rates[-1] * self.rule.weight_decay
        self.square = math.nan

    def times(self, z: Tensor) -> Tensor:
        """Return Z U (m, p) of Z (m, n)."""
        out = z.new_zeros(len(z), self.shape[1])
        self.each_block(1, lambda block, columns: torch.mm(z, block, out=out[:, columns]), z.dtype)
        return out

    def times_transpose(self, d: Tensor) -> Tensor:
        """Return D Uᵀ (m, n) of D (m, p)."""
        out = d.new_zeros(len(d), self.shape[0])
        self.each_block(0, lambda block, rows: torch.mm(d, block.mT, out=out[:, rows]), d.dtype)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Return these rows of U (r, p)."""
        if not self.gradients:
            return torch.zeros(len(ids), self.shape[1])
        gradients = torch.stack([left[:, ids].mT @ right for left, right in self.gradients])
        out = torch.empty_like(gradients[0])
        update_block(self.recursion(out.dtype), gradients.numpy(), out.numpy())
        return out

    def squared(self) -> float:
        """Return |U|²."""
        if math.isnan(self.square):
            self.each_block(1, lambda block, columns: None, self.gradients[0][0].dtype)
        return self.square

    def each_block(self, side: int, use: Callable[[Tensor, slice], Any], dtype: torch.dtype) -> None:
        """Call `use` with each block of U and its place: of columns (n, b) if `side` is 1, else rows (b, p)."""
        if not self.gradients:
            return
        recursion = self.recursion(dtype)

        def one_block(place: slice) -> float:
            factors = [(a, b[:, place]) if side else (a[:, place], b) for a, b in self.gradients]
            gradients = torch.stack([a.mT @ b for a, b in factors])
            block = gradients.new_empty(gradients.shape[1:])
            square = float(update_block(recursion, gradients.numpy(), block.numpy()))
            use(block, place)
            return square

        self.square = math.fsum(each_of(blocks_of(self.shape[side], self.shape[1 - side], dtype), one_block))

    def recursion(self, dtype: torch.dtype) -> NDArray[Any]:
        """Return the numbers of each step (t, 8): c, those of the rule before its last, what U keeps, and the law."""
        rows = []
        for step, (scale, rate) in enumerate(zip(self.scales, self.rates, strict=True), 1):
            *numbers, law = self.rule.numbers(step, rate)
            rows.append([scale, *numbers, 1.0 - rate * self.rule.weight_decay, law])
        return np.array(rows, np.float64 if dtype == torch.float64 else np.float32)


class StoredUpdates(EntrywiseHistory):
    """The same updates, kept as a matrix together with the means of the optimiser."""

    def __init__(self, rule: UpdateRule, shape: tuple[int, int]) -> None:
        super().__init__(rule, shape)
        self.state: list[Tensor] = []  # m, v and U (n, p); none before the first step

    def add(self, left: Tensor, right: Tensor, scale: float, factor: float) -> None:
        """Change the state by a step, as in `EntrywiseHistory`."""
        super().add(left, right, scale, factor)
        self.gradients.clear()
        if not self.state:
            first, updates = left.new_zeros(self.shape), left.new_zeros(self.shape)
            second = left.new_zeros(self.shape) if self.rule.means == 2 else first  # which is then not used
            self.state = [first, second, updates]
        step = self.recursion(left.dtype)[-1]

        def one_block(rows: slice) -> float:
            gradient = left[:, rows].mT @ right
            return float(step_block(step, gradient.numpy(), *(each[rows].numpy() for each in self.state)))

        self.square = math.fsum(each_of(blocks_of(*self.shape, left.dtype), one_block))

    def times(self, z: Tensor) -> Tensor:
        """Return Z U (m, p) of Z (m, n)."""
        return z @ self.state[-1] if self.state else super().times(z)

    def times_transpose(self, d: Tensor) -> Tensor:
        """Return D Uᵀ (m, n) of D (m, p)."""
        return d @ self.state[-1].mT if self.state else super().times_transpose(d)

    def rows(self, ids: Tensor) -> Tensor:
        """Return these rows of U (r, p)."""
        return self.state[-1][ids] if self.state else super().rows(ids)

    def squared(self) -> float:
        """Return |U|², which may be NaN."""
        return self.square


def blocks_of(size: int, other: int, dtype: torch.dtype) -> list[slice]:
    """Divide one side of a matrix, of which the other side has `other` entries, into blocks of about `BLOCK_BYTES`."""
    width = max(16, BLOCK_BYTES // (other * dtype.itemsize))
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]


def each_of(blocks: list[slice], one: Callable[[slice], float]) -> list[float]:
    """Call a function with each block, on several threads if there are several blocks; return what it returns."""
    if usable_cores() == 1 or len(blocks) == 1:
        return [one(each) for each in blocks]
    return list(pool().map(one, blocks))


@cache
def pool() -> ThreadPoolExecutor:
    """Threads for blocks; torch and kernels run without the interpreter's lock."""
    return ThreadPoolExecutor(usable_cores(), thread_name_prefix="limitformer-updates")


@driver
def update_block(numbers, gradients, out):
    """Fill `out` (n, b) with the sum of updates by gradients (t, n, b); return the sum of its squares.

    Args:
        numbers: of `EntrywiseHistory.recursion`.
    """
    steps, rows, columns = gradients.shape
    m, v = np.empty(columns, gradients.dtype), np.empty(columns, gradients.dtype)
    total = 0.0
    for i in range(rows):
        u = out[i]
        m[:], v[:], u[:] = 0, 0, 0
        for s in range(steps):
            step_row(numbers[s], gradients[s, i], m, v, u)
        for j in range(columns):
            total += np.float64(u[j]) * np.float64(u[j])
    return total


@driver
def step_block(numbers, gradient, m, v, u):
    """Change the state (n, p) of a block by one step, whose gradient (n, p) is given; return the sum of U's squares.

    Args:
        numbers: the step's row of `EntrywiseHistory.recursion`.
    """
    total = 0.0
    for i in range(len(u)):
        step_row(numbers, gradient[i], m[i], v[i], u[i])
        for j in range(len(u[i])):
            total += np.float64(u[i, j]) * np.float64(u[i, j])
    return total


@driver  # fast mathematics gives other bits at other alignments
def step_row(numbers, gradient, m, v, u):
    """Change a row of the state by one step of the law `numbers[7]`."""
    scale, b1, b2, of_m, of_v, eps, keeps, law = (
        numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6], numbers[7],
    )  # fmt: skip
    one = numbers.dtype.type(1)
    if law == 0:  # Adam
        for j in range(len(u)):
            g = scale * gradient[j]
            m[j] = b1 * m[j] + (one - b1) * g
            v[j] = b2 * v[j] + (one - b2) * g * g
            u[j] = keeps * u[j] - of_m * m[j] / (math.sqrt(of_v * v[j]) + eps)
    else:  # Lion
        for j in range(len(u)):
            g = scale * gradient[j]
            u[j] = keeps * u[j] - of_m * np.sign(b1 * m[j] + (one - b1) * g)
            m[j] = b2 * m[j] + (one - b2) * g
