r"""The summary of a tensor: its moments, from one pass in float64, and a sample of its entries for a distribution test.

The entries are read in pieces, so that a tensor of 10⁸ needs no copy. Rows that the law fixes, such as that of the
padding, are left out. The sample takes one entry from each of equal stretches, at an irregular place that depends on
the size only: it does not coincide with any structure of the matrix.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

PIECE = 2**20  # entries that are read at a time
SAMPLE = 2**14  # entries in the Kolmogorov-Smirnov test
COARSE = (torch.bfloat16, torch.float16)  # types that checkpoints are rounded to, whatever their present type
LONG = 8  # a row of fewer entries may be zero by chance where numbers are coarse


@dataclass(frozen=True)
class TensorSummary:
    """Count, moments and extremes of the finite entries of a tensor, and mean squares of its rows and columns.

    `spacing` is the relative distance of neighbouring numbers: 2⁻⁷ if all entries are bfloat16 numbers.
    """

    count: int
    odd: int  # NaN or infinite
    mean: float
    std: float
    kurtosis: float  # 3 if they are normal
    low: float
    high: float
    spacing: float
    sample: np.ndarray = field(repr=False)  # sorted
    rows: np.ndarray = field(repr=False)  # mean square of each; empty for a vector
    columns: np.ndarray = field(repr=False)

    @property
    def constant(self) -> bool:
        """Whether all entries are the same number."""
        return self.count > 0 and self.low == self.high

    @property
    def dead(self) -> bool:
        """Whether all entries are zero."""
        return self.constant and self.low == 0.0

    def second(self, centre: float) -> float:
        """Return the mean of (x − centre)²."""
        return self.std**2 + (self.mean - centre) ** 2

    def log_error(self) -> float:
        """Return the standard error of log `std`."""
        excess = max(self.kurtosis - 1, 0.2) if math.isfinite(self.kurtosis) else 2.0
        return math.sqrt(excess / 4 / max(self.count, 1))


def summarise(tensor: Tensor, constant_rows: Iterable[int] = ()) -> TensorSummary:
    """Return moments and a sorted sample of a tensor of floating numbers, without the rows `constant_rows`."""
    values = tensor.detach()
    sample = sample_of(values, set(constant_rows))
    finite = sample[np.isfinite(sample)]
    pivot = float(finite.mean()) if len(finite) else 0.0
    total, low, high, odd = np.zeros(5), math.inf, -math.inf, 0
    lines = values.dim() >= 2 and values.numel() > 0
    rows = np.zeros(math.prod(values.shape[:-1]) if lines else 0)
    columns, read = np.zeros(values.shape[-1] if lines else 0), 0
    for piece in pieces(values, set(constant_rows)):
        good = piece.isfinite()
        if not bool(good.all()):
            odd += int((~good).sum())
            piece = torch.where(good, piece, pivot)
        d = piece - pivot
        d2 = d * d
        total += [int(good.sum()), *(float(x.sum()) for x in (d, d2, d2 * d, d2 * d2))]
        low, high = min(low, float(piece.min())), max(high, float(piece.max()))
        if lines:
            squares = piece * piece
            rows[read : read + len(piece)] = squares.mean(1)
            columns += squares.sum(0).numpy()
            read += len(piece)
    count = int(total[0])
    mean, variance, fourth = central(total)
    return TensorSummary(
        count, odd, pivot + mean, math.sqrt(variance), fourth / variance**2 if variance > 0 else math.nan, low, high,
        spacing_of(finite, values.dtype), np.sort(finite), rows[:read], columns / max(read, 1),
    )  # fmt: skip


def central(total: np.ndarray) -> tuple[float, float, float]:
    """Return mean, variance and fourth central moment from the sums of powers 0 to 4."""
    n = max(total[0], 1.0)
    m1, m2, m3, m4 = (float(x) / n for x in total[1:])
    variance = max(m2 - m1**2, 0.0)
    return m1, variance, max(m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4, 0.0)


def pieces(values: Tensor, skipped: set[int]) -> Iterator[Tensor]:
    """Yield blocks of whole rows in float64, all leading dimensions being rows; a vector is rows of one."""
    if values.dim() < 2 or not values.numel():
        for piece in values.reshape(-1).split(PIECE):
            if len(piece):
                yield piece.to("cpu", torch.float64)[None]
        return
    table = values.reshape(-1, values.shape[-1])
    step = max(1, PIECE // max(table.shape[1], 1))
    for start in range(0, len(table), step):
        piece = table[start : start + step]
        rows = unskipped(values, range(start, start + len(piece)), skipped)
        piece = piece if rows is None else piece[rows.to(piece.device)]
        if piece.numel():
            yield piece.to("cpu", torch.float64)


def unskipped(values: Tensor, rows: range, skipped: set[int]) -> Tensor | None:
    """Return which rows of the table are outside the `skipped` entries of the first dimension; None: all."""
    inner = math.prod(values.shape[1:-1])
    if not any(rows.start <= s * inner + k < rows.stop for s in skipped for k in (0, inner - 1)):
        return None
    return torch.tensor([row // inner not in skipped for row in rows])


def sample_of(values: Tensor, skipped: set[int]) -> np.ndarray:
    """Return entries, in float64, at places that depend on the size only."""
    n = values.numel()
    if not n:
        return np.zeros(0)
    if n <= SAMPLE:
        places = torch.arange(n)
    else:
        jitter = torch.rand(SAMPLE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        places = ((torch.arange(SAMPLE) + jitter) * (n / SAMPLE)).long().clamp(max=n - 1)
    if skipped and values.dim():
        inner = n // len(values)
        places = places[~torch.isin(places // inner, torch.tensor(sorted(skipped)))]
    where = torch.unravel_index(places.to(values.device), values.shape) if values.dim() else (...,)
    return np.atleast_1d(values[where].to("cpu", torch.float64).numpy())


def spacing_of(sample: np.ndarray, dtype: torch.dtype) -> float:
    """Return the relative spacing of the coarsest type that holds all entries."""
    entries = torch.from_numpy(sample)
    for coarse in COARSE:
        if bool((entries.to(coarse).double() == entries).all()):
            return max(torch.finfo(coarse).eps, torch.finfo(dtype).eps)
    return torch.finfo(dtype).eps
