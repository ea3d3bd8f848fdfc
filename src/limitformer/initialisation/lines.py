r"""Compare the rows and columns of a matrix: whether some are equal, and whether they span a full space.

A line is a row or a column of n entries, minus the law's mean, divided by its length. Of K independent lines let

  T = Σ_{i<j} (n c_ij − 1),   c_ij the squared cosine of lines i and j.

For lines of independent directions, N = K(K − 1)/2 pairs, E c = 1/n and pairs are uncorrelated: T has mean 0, variance
2N(n − 1)/(n + 2), and third moment N μ₃ + K(K − 1)(K − 2) · 4(n − 1)/(n + 2)², the last from triangles, with
μ₃ = 15n²/((n + 2)(n + 4)) − 9n/(n + 2) + 2. The p-value is the upper tail of the Pearson law of type III with these
moments: at rank r < n the mean of n c is n/r, and with m copies of each of n/m columns it is m. Rows and columns are
both tested, because a few equal rows are seldom both among K rows, but change all columns.
"""

import math

import torch
from torch import Tensor

from limitformer.initialisation.summary import LONG, TensorSummary
from limitformer.initialisation.weight_tests import pearson_tails, tolerance
from limitformer.weightless.laws import ORTHOGONAL, Law

FEWEST = 24  # lines, and entries of each, below which the law of T is not known well enough
MOST = 256  # largest number of lines
ENTRIES = 2048  # largest number of entries of a line


def line_p_values(values: Tensor, summary: TensorSummary, law: Law) -> dict[str, float]:
    """Return the p-value of the test of rows and columns; of an orthogonal law, 0 if they are not orthogonal."""
    if law.kind == ORTHOGONAL:
        return {} if are_orthogonal(values.detach(), tolerance(summary)) else {"orthogonal": 0.0}
    return {"lines": p_of_lines(values, law)}


def are_orthogonal(values: Tensor, error: float) -> bool:
    """Return whether rows or columns, whichever are fewer, are orthogonal and of one length; some are compared."""
    table = values.flatten(1)
    lines = table if len(table) <= table.shape[1] else table.mT
    x = lines[fixed_choice(len(lines), MOST).to(lines.device)].to("cpu", torch.float64)
    products = x @ x.mT
    square = float(products.diagonal().mean())
    return bool((products - square * torch.eye(len(x), dtype=x.dtype)).abs().max() <= error * square)


def p_of_lines(values: Tensor, law: Law) -> float:
    """Return 0 if two lines are equal, else the p-value of T; leading dimensions are rows. A vector has p = 1."""
    if values.dim() < 2:
        return 1.0
    fixed = torch.tensor(sorted(law.rows), dtype=torch.long, device=values.device)
    rows = values.detach().index_select(0, others(len(values), fixed)) if len(fixed) else values.detach()
    table = rows.reshape(-1, values.shape[-1])
    if any_equal(table) or any_equal(table.mT):
        return 0.0
    return min(1.0, 2 * min(p_of_angles(table, law.mean), p_of_angles(table.mT, law.mean)))


def others(count: int, fixed: Tensor) -> Tensor:
    """Return the numbers below `count` that are not in `fixed`."""
    numbers = torch.arange(count, device=fixed.device)
    return numbers[~torch.isin(numbers, fixed)]


def any_equal(lines: Tensor) -> bool:
    """Return whether two lines of `LONG` entries or more are equal and not zero, comparing a few entries first."""
    if lines.shape[1] < LONG or len(lines) < 2:
        return False
    few = lines[:, torch.linspace(0, lines.shape[1] - 1, LONG).long().to(lines.device)].cpu().float()
    _, key, count = torch.unique(few, dim=0, return_inverse=True, return_counts=True)
    first: dict[int, int] = {}
    for line in torch.nonzero((count[key] > 1) & (few != 0).any(1)).flatten().tolist():
        other = first.setdefault(int(key[line]), line)
        if other != line and torch.equal(lines[line], lines[other]):
            return True
    return False


def p_of_angles(lines: Tensor, mean: float) -> float:
    """Return P(T is as large) for lines fixed_choice by a fixed generator; 1 if there are too few or too short ones."""
    some, entries = fixed_choice(len(lines), MOST), fixed_choice(lines.shape[1], ENTRIES)
    x = lines[some.to(lines.device)][:, entries.to(lines.device)].to("cpu", torch.float64) - mean
    x = x[(x + mean != 0).any(1)]  # a dead line is another finding
    k, n = x.shape
    if min(k, n) < FEWEST:
        return 1.0
    unit = torch.nn.functional.normalize(x, dim=1)
    pairs = k * (k - 1) / 2
    total = n * (float((unit @ unit.mT).square().sum()) - k) / 2 - pairs
    width = math.sqrt(2 * pairs * (n - 1) / (n + 2))
    third = pairs * (15 * n**2 / ((n + 2) * (n + 4)) - 9 * n / (n + 2) + 2)
    third += k * (k - 1) * (k - 2) * 4 * (n - 1) / (n + 2) ** 2
    return pearson_tails(total / width, third / width**3)[1]


def fixed_choice(count: int, most: int) -> Tensor:
    """Return at most `most` of the numbers below `count`, always the same ones."""
    if count <= most:
        return torch.arange(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:most]
