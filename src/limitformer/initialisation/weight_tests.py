r"""Tests of a tensor's entries against the law that its code draws.

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
"""

import math
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import numpy as np
from scipy import special

from limitformer.initialisation.summary import TensorSummary
from limitformer.weightless import laws
from limitformer.weightless.laws import Law

TESTS = ("mean", "spread", "shape", "range")
K = TypeVar("K", bound=Hashable)
ROUNDED = 1e-4  # relative error of inner products in float32
SMALLEST = 2.0**-24  # steps of float16 below its normal numbers


def p_values(summary: TensorSummary, law: Law) -> dict[str, float]:
    """Return the p-value of each of the four tests of entries that the random `law` should have made."""
    from scipy.stats import kstwo  # slow to import

    if law.kind == laws.ORTHOGONAL:
        return orthogonal_p_values(summary, law)
    moments = even_moments(law)
    return {
        "mean": p_of_mean(summary, law),
        "spread": p_of_spread(summary, law, *moments),
        "shape": float(kstwo.sf(distance(summary, law), max(len(summary.sample), 1))),
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
