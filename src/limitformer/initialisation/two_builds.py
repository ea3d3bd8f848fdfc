r"""Tests of whether tensors of two builds have one law, where their code does not tell it.

* One has a law, the other is a set of numbers: the tests of `weight_tests` and of lines.
* Both are random (K builds each, from their own seeds): mean, log std and log kurtosis of each build are numbers of
  which K are independent, whatever the entries of one build are; Welch's t compares them.
* One is random, the other a set of numbers: the t of one more build.
* Both are numbers: entries count as independent. Welch's t of the means, F of the variances with degrees of freedom
  that follow from the kurtosis, and the Kolmogorov-Smirnov distance of the samples, the only test of few entries.

Rows and columns of a matrix are compared, too: whether some are equal, and whether they span a full space. A line is a
row or a column of n entries, minus the law's mean, divided by its length. Of K independent lines let

  T = Σ_{i<j} (n c_ij − 1),   c_ij the squared cosine of lines i and j.

For lines of independent directions, N = K(K − 1)/2 pairs, E c = 1/n and pairs are uncorrelated: T has mean 0,
variance 2N(n − 1)/(n + 2), and third moment N μ₃ + K(K − 1)(K − 2) · 4(n − 1)/(n + 2)², from triangles. Here
μ₃ = 15n²/((n + 2)(n + 4)) − 9n/(n + 2) + 2. The p-value is the upper tail of the Pearson law of type III with these
moments: at rank r < n the mean of n c is n/r, and with m copies of each of n/m columns it is m. Rows and columns are
both tested, because a few equal rows are seldom both among K rows, but change all columns.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy import special, stats
from torch import Tensor

from limitformer.initialisation.summary import LONG, TensorSummary
from limitformer.initialisation.weight_tests import p_values, pearson_tails, tolerance
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
    """Return P(T ≥ its value) on lines that a fixed generator chooses; 1 if they are too few or too short."""
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


STATISTICS = ("mean", "spread", "shape")
LEAST = 16  # entries; fewer may agree by chance where numbers are coarse
FINEST = 1e-4  # in standard deviations: smaller differences are rounding


def moments(summary: TensorSummary) -> tuple[float, float, float]:
    """Return mean, log std and log kurtosis; a constant has no spread."""
    if summary.std <= 0:
        return summary.mean, -math.inf, 0.0
    return summary.mean, math.log(summary.std), math.log(summary.kurtosis)


def p_of_builds(a: Sequence[TensorSummary], b: Sequence[TensorSummary]) -> dict[str, float]:
    """Return the p-value of each statistic; one of the two may be a single set of numbers."""
    if any(each.std <= 0 for each in (*a, *b)):
        constant = [all(each.std <= 0 for each in one) for one in (a, b)]
        return {"spread": 0.0} if constant[0] != constant[1] else {}
    scale = float(np.median([each.std for each in (*a, *b)]))
    unit = np.array([scale, 1.0, 1.0])
    x, y = (np.array([moments(each) for each in one]) / unit for one in (a, b))
    return {name: welch(x[:, k], y[:, k]) for k, name in enumerate(STATISTICS)}


def welch(x: np.ndarray, y: np.ndarray) -> float:
    """Return the two-sided p-value of equal means; a single number has the variance of the others."""
    apart = abs(float(x.mean() - y.mean()))
    if len(x) == 1 or len(y) == 1:
        many = x if len(x) > 1 else y
        error, degrees = many.std(ddof=1) * math.sqrt(1 + 1 / len(many)), len(many) - 1
    else:
        u, v = x.var(ddof=1) / len(x), y.var(ddof=1) / len(y)
        error = math.sqrt(u + v)
        degrees = (u + v) ** 2 / (u**2 / (len(x) - 1) + v**2 / (len(y) - 1)) if u + v > 0 else len(x) + len(y) - 2
    return float(2 * special.stdtr(degrees, -apart / max(error, FINEST)))


def p_of_numbers(a: TensorSummary, b: TensorSummary) -> dict[str, float]:
    """Return the p-value of each statistic of two sets of independent entries; of few entries, of the shape only."""
    if min(a.std, b.std) <= 0:
        return {"spread": 0.0}
    result = {"shape": float(stats.ks_2samp(a.sample, b.sample, method="auto").pvalue)}
    if min(a.count, b.count) >= LEAST:
        one, other = ((each.mean, each.std * math.sqrt(each.count / (each.count - 1)), each.count) for each in (a, b))
        result["mean"] = float(stats.ttest_ind_from_stats(*one, *other, equal_var=False).pvalue)
        excess = max(a.kurtosis, b.kurtosis, 3.0) - 1
        degrees = [2 * (each.count - 1) / excess for each in (a, b)]
        ratio = (one[1] / other[1]) ** 2
        result["spread"] = float(2 * min(special.fdtr(*degrees, ratio), special.fdtrc(*degrees, ratio)))
    return result


def p_of_law(values: Tensor, summary: TensorSummary, law: Law) -> dict[str, float]:
    """Return the p-values of numbers against a random law; 0 is what the law excludes."""
    if summary.odd:
        return {"NaN": 0.0}
    if not summary.count:
        return {}
    result = p_values(summary, law) | line_p_values(values, summary, law)
    if summary.constant and summary.count >= LONG:
        result["constant"] = 0.0
    if any(dead_lines(summary)):
        result["dead rows"] = 0.0
    if any(not bool((values[row] == value).all()) for row, value in law.rows.items()):
        result["fixed rows"] = 0.0
    return result


def dead_lines(each: TensorSummary) -> tuple[int, int]:
    """Count rows and columns that are all zero; lines of few entries do not count."""
    if each.dead or not len(each.rows):
        return 0, 0
    long = len(each.columns) >= LONG, len(each.rows) >= LONG
    return int((each.rows == 0).sum()) * long[0], int((each.columns == 0).sum()) * long[1]


def same_values(a: Tensor, b: Tensor, rtol: float = 0.0, atol: float = 0.0) -> bool:
    """Return whether two tensors are equal up to rounding to the coarser of their types, or up to `rtol` and `atol`."""
    if a.shape != b.shape or a.is_meta or b.is_meta:
        return False
    if a.dtype == b.dtype and a.layout == b.layout == torch.strided and a.device == b.device and torch.equal(a, b):
        return True
    a, b = (each.to_dense() if each.layout != torch.strided else each for each in (a.detach().cpu(), b.detach().cpu()))
    if not a.is_floating_point() or not b.is_floating_point():
        return bool(torch.equal(a, b)) if a.dtype == b.dtype else bool((a == b).all())
    accuracy = max(rtol, *(4 * torch.finfo(each.dtype).eps for each in (a, b)))
    return bool(torch.allclose(a.double(), b.double(), rtol=accuracy, atol=atol, equal_nan=True))
