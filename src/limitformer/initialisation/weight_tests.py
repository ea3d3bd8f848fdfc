r"""Tests of a tensor's entries against the law that its code draws, and of tensors of two builds for one law.

Let h be the standardised entry, of mean 0, variance 1, fourth moment κ, sixth moment κ₆, and n entries be independent.

* *mean*: √n times the mean of h is N(0, 1), exactly so for a normal law; uniform and truncated sums have lighter tails.
* *spread*: S = mean of h² has mean 1, variance (κ − 1)/n and skewness (κ₆ − 3κ + 2) (κ − 1)^(−3/2)/√n. The Pearson law
  of type III with these three moments is used: χ²ₙ/n exactly for a normal law.
* *shape*: Kolmogorov-Smirnov distance D of the sample, with its exact distribution at its size.
* *range*: the largest |h|; P(it is as large) = 1 − (1 − q)ⁿ, exact, with q = P(|h| is as large).

An orthogonal matrix has dependent entries: it is gain times the first rows or columns V of a Haar matrix of O(L).

* *mean*: with unit vectors u and v of equal entries, uᵀ V v is an entry of a uniform unit vector of L entries. Its
  square is Beta(½, (L − 1)/2), and so is that of each entry of V.
* *spread*: the sum of squares is gain² times the smaller side.
* *range*: P is at most n q. The shape is not tested; `lines` tests whether rows or columns are orthogonal.

Entries that were rounded to bfloat16 or float16 are random only to this accuracy. D is computed at the edges of the
cells that are rounded to one number: there the rounded entries have the distribution function of the exact ones, so
that the level holds. Mean and spread may have the bias that rounding can make. They may also have the error of torch's
uniform bfloat16 numbers, which have 2⁸ levels.

Of two builds whose code does not tell the law:

* One has a law, the other is a set of numbers: the tests above and that of lines, below.
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
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from scipy import special, stats
from torch import Tensor

from limitformer.initialisation.summary import LONG, TensorSummary
from limitformer.weightless import laws
from limitformer.weightless.laws import Law

K = TypeVar("K", bound=Hashable)
ROUNDED = 1e-4  # relative error of inner products in float32
SMALLEST = 2.0**-24  # steps of float16 below its normal numbers


def p_values(summary: TensorSummary, law: Law) -> dict[str, float]:
    """Return the p-value of each of the four tests of entries that the random `law` should have made."""
    if law.kind == laws.ORTHOGONAL:
        return orthogonal_p_values(summary, law)
    moments = even_moments(law)
    return {
        "mean": p_of_mean(summary, law),
        "spread": p_of_spread(summary, law, *moments),
        "shape": float(stats.kstwo.sf(distance(summary, law), max(len(summary.sample), 1))),
        "range": p_of_range(summary, law),
    }


def orthogonal_p_values(summary: TensorSummary, law: Law) -> dict[str, float]:
    """Return the p-values of mean, spread and range of an orthogonal matrix; that of the spread is 0 or 1."""
    gain, sides = abs(law.scale), law.matrix
    off = max(abs(summary.mean) - rounding(summary, law) * law.std, 0.0) * math.sqrt(math.prod(sides))
    squares = summary.second(0.0) * summary.count / min(sides)
    far = max(summary.high, -summary.low) * (1 - summary.spacing)
    return {
        "mean": float(outside(off / gain, law)),
        "spread": float(abs(squares / gain**2 - 1) <= tolerance(summary)),
        "range": float(min(1.0, summary.count * outside(far / gain, law))),
    }


def tolerance(summary: TensorSummary) -> float:
    """Bound the relative error of inner products of orthonormal lines that were rounded."""
    return 2 * summary.spacing + ROUNDED


def outside(x: Any, law: Law) -> Any:
    """Return P(|v| ≥ |x|) of an entry v of a Haar matrix."""
    return special.betainc((max(law.matrix) - 1) / 2, 0.5, 1 - np.minimum(np.square(x), 1.0))


def p_of_mean(summary: TensorSummary, law: Law) -> float:
    """Return the two-sided p-value of the mean."""
    away = max(abs(summary.mean - law.mean) - rounding(summary, law) * law.std, 0.0)
    return math.erfc(away * math.sqrt(summary.count / 2) / law.std)


def p_of_spread(summary: TensorSummary, law: Law, fourth: float, sixth: float) -> float:
    """Return the two-sided p-value of the mean square about the law's mean."""
    s = summary.second(law.mean) / law.std**2
    slack = 2 * rounding(summary, law)
    s = max(s - slack, 1.0) if s > 1 else min(s + slack, 1.0)
    width = math.sqrt((fourth - 1) / summary.count)
    skew = (sixth - 3 * fourth + 2) / (fourth - 1) ** 1.5 / math.sqrt(summary.count)
    return min(1.0, 2 * min(pearson_tails((s - 1) / width, skew)))


def pearson_tails(z: float, skew: float) -> tuple[float, float]:
    """Return the probabilities below and above z under a shifted gamma law of mean 0, variance 1 and this skewness."""
    if abs(skew) < 1e-6:
        return float(special.ndtr(z)), float(special.ndtr(-z))
    a = 4 / skew**2
    x = max(a + math.copysign(z, z * skew) * math.sqrt(a), 0.0)
    tails = float(special.gammainc(a, x)), float(special.gammaincc(a, x))
    return tails if skew > 0 else tails[::-1]


def p_of_range(summary: TensorSummary, law: Law) -> float:
    """Return the p-value of the entry that is farthest from the law's mean."""
    far = max(summary.high - law.mean, law.mean - summary.low)
    far -= 2 * summary.spacing * max(far, abs(law.mean)) + coarse(summary, law) * law.std
    tail = 1.0 - float(np.diff(cdf(np.array([law.mean - far, law.mean + far]), law))[0])
    if law.kind == laws.NORMAL:
        tail = math.erfc(max(far, 0.0) / law.std / math.sqrt(2))
    return float(-np.expm1(summary.count * np.log1p(-min(tail, 1 - 1e-16))))


def rounding(summary: TensorSummary, law: Law) -> float:
    """Bound the effect of rounding on the mean, in standard deviations; on the relative variance it is half of that."""
    step = summary.spacing * (abs(law.mean) + 2 * law.std) / law.std
    return step**2 / 12 + coarse(summary, law)


def coarse(summary: TensorSummary, law: Law) -> float:
    """Return the error of torch's bounded laws, which have few levels, in standard deviations."""
    return 2 * summary.spacing if law.kind in (laws.UNIFORM, laws.TRUNCATED) else 0.0


def distance(summary: TensorSummary, law: Law) -> float:
    """Return the Kolmogorov-Smirnov distance between the sample and the law, at the edges of rounding."""
    x, number = np.unique(summary.sample, return_counts=True)
    if not len(x):
        return 0.0
    above = np.cumsum(number) / number.sum()
    below = above - number / number.sum()
    low, high = cell(x, summary.spacing)
    off = max(np.abs(above - cdf(high, law)).max(), np.abs(below - cdf(low, law)).max())
    return float(max(off - coarse(summary, law), 0.0))


def cell(x: np.ndarray, spacing: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges of the numbers that are rounded to each of x."""
    mantissa, exponent = np.frexp(x)
    step = np.maximum(spacing * np.ldexp(1.0, exponent - 1), SMALLEST if spacing > 1e-5 else 0.0) / 2
    inner = np.where(np.abs(mantissa) == 0.5, step / 2, step)  # towards zero a power of two has closer neighbours
    return x - np.where(x > 0, inner, step), x + np.where(x < 0, inner, step)


def cdf(x: np.ndarray, law: Law) -> np.ndarray:
    """Return P(entry ≤ x) under the law."""
    g = (x - law.shift) / law.scale
    if law.kind == laws.UNIFORM:
        below = np.clip(g, 0.0, 1.0)
    elif law.kind == laws.TRUNCATED:
        low, high = special.ndtr(law.low), special.ndtr(law.high)
        below = np.clip((special.ndtr(g) - low) / (high - low), 0.0, 1.0)
    elif law.kind == laws.ORTHOGONAL:
        below = 0.5 + np.sign(g) * (1 - outside(g, law)) / 2
    else:
        assert law.kind == laws.NORMAL
        below = special.ndtr(g)
    return below if law.scale > 0 else 1.0 - below


def even_moments(law: Law) -> tuple[float, float]:
    """Return the fourth and sixth central moment of an entry of standard deviation 1."""
    if law.kind == laws.NORMAL:
        return 3.0, 15.0
    if law.kind == laws.UNIFORM:
        return 9 / 5, 27 / 7
    assert law.kind == laws.TRUNCATED
    raw = truncated_raw_moments(law, 6)
    about = [sum(math.comb(k, j) * raw[j] * (-raw[1]) ** (k - j) for j in range(k + 1)) for k in (2, 4, 6)]
    return about[1] / about[0] ** 2, about[2] / about[0] ** 3


def truncated_raw_moments(law: Law, last: int) -> list[float]:
    """Return E gᵏ, k = 0 to `last`, of N(0, 1) between `low` and `high`: by parts, (k − 1) E gᵏ⁻² + boundary."""
    edges, mass = (law.low, law.high), float(special.ndtr(law.high) - special.ndtr(law.low))
    density = [math.exp(-x * x / 2) / math.sqrt(2 * math.pi) / mass for x in edges]
    moments = [1.0, density[0] - density[1]]
    for k in range(2, last + 1):
        low, high = (d * x ** (k - 1) if d else 0.0 for x, d in zip(edges, density, strict=True))
        moments.append((k - 1) * moments[k - 2] + low - high)
    return moments


def holm(p_values: Mapping[K, float]) -> dict[K, float]:
    """Correct p-values for their number: rejecting those below α has a false rejection with probability at most α."""
    ordered, worst, corrected = sorted(p_values, key=lambda key: p_values[key]), 0.0, {}
    for place, key in enumerate(ordered):
        worst = max(worst, min(1.0, (len(ordered) - place) * p_values[key]))
        corrected[key] = worst
    return corrected


FEWEST = 24  # lines, and entries of each, below which the law of T is not known well enough
MOST = 256  # largest number of lines
ENTRIES = 2048  # largest number of entries of a line


def line_p_values(values: Tensor, summary: TensorSummary, law: Law) -> dict[str, float]:
    """Return the p-value of the test of rows and columns; of an orthogonal law, 0 if they are not orthogonal."""
    if law.kind == laws.ORTHOGONAL:
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
