r"""Tests of a tensor's entries against the law that its code draws, with their exact or well-founded levels.

Let h be the standardised entry, of mean 0, variance 1, fourth moment κ, sixth moment κ₆, and n entries be independent.

* *mean*: √n times the mean of h is N(0, 1), exactly so for a normal law; uniform and truncated sums have lighter tails.
* *spread*: S = mean of h² has mean 1, variance (κ − 1)/n and skewness (κ₆ − 3κ + 2) (κ − 1)^(−3/2)/√n. The Pearson law
  of type III with these three moments is taken: χ²ₙ/n exactly for a normal law.
* *shape*: Kolmogorov-Smirnov distance D of the sample, with its exact distribution at its size.
* *range*: the largest |h|; P(it is as large) = 1 − (1 − q)ⁿ, exact.

Numbers that were rounded to bfloat16 or float16, then or later, are random to this accuracy only. D is taken at the
edges of the cells that are rounded to one number: there the rounded entries have the distribution function that the
exact ones had, so that the level holds. Mean and spread are allowed the bias that rounding can make; torch draws
uniform bfloat16 numbers on 2⁸ levels, which is allowed for too.
"""

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np
from scipy import special

from limitformer.initialisation.summary import Held
from limitformer.weightless import laws
from limitformer.weightless.laws import Law

TESTS = ("mean", "spread", "shape", "range")
K = TypeVar("K", bound=Hashable)
SMALLEST = 2.0**-24  # steps of float16 below its normal numbers


def p_values(held: Held, law: Law) -> dict[str, float]:
    """Of the four tests, each by itself, of entries that the random `law` should have made."""
    from scipy.stats import kstwo  # slow to import

    moments = even_moments(law)
    return {
        "mean": p_of_mean(held, law),
        "spread": p_of_spread(held, law, *moments),
        "shape": float(kstwo.sf(distance(held, law), max(len(held.sample), 1))),
        "range": p_of_range(held, law),
    }


def p_of_mean(held: Held, law: Law) -> float:
    """Two-sided."""
    away = max(abs(held.mean - law.mean) - rounding(held, law) * law.std, 0.0)
    return math.erfc(away * math.sqrt(held.count / 2) / law.std)


def p_of_spread(held: Held, law: Law, fourth: float, sixth: float) -> float:
    """Two-sided, of the mean square about the law's mean."""
    s = held.second(law.mean) / law.std**2
    slack = 2 * rounding(held, law)
    s = max(s - slack, 1.0) if s > 1 else min(s + slack, 1.0)
    width = math.sqrt((fourth - 1) / held.count)
    skew = (sixth - 3 * fourth + 2) / (fourth - 1) ** 1.5 / math.sqrt(held.count)
    return min(1.0, 2 * min(pearson_tails((s - 1) / width, skew)))


def pearson_tails(z: float, skew: float) -> tuple[float, float]:
    """Probabilities below and above z, of mean 0, variance 1 and this skewness: a shifted gamma law."""
    if abs(skew) < 1e-6:
        return float(special.ndtr(z)), float(special.ndtr(-z))
    a = 4 / skew**2
    x = max(a + math.copysign(z, z * skew) * math.sqrt(a), 0.0)
    tails = float(special.gammainc(a, x)), float(special.gammaincc(a, x))
    return tails if skew > 0 else tails[::-1]


def p_of_range(held: Held, law: Law) -> float:
    """Of the entry that is farthest from the law's mean."""
    far = max(held.high - law.mean, law.mean - held.low)
    far -= 2 * held.spacing * max(far, abs(law.mean)) + coarse(held, law) * law.std
    tail = 1.0 - float(np.diff(cdf(np.array([law.mean - far, law.mean + far]), law))[0])
    if law.kind == laws.NORMAL:
        tail = math.erfc(max(far, 0.0) / law.std / math.sqrt(2))
    return float(-np.expm1(held.count * np.log1p(-min(tail, 1 - 1e-16))))


def rounding(held: Held, law: Law) -> float:
    """Bound, in standard deviations, of what rounding does to the mean; half of it to the relative variance."""
    step = held.spacing * (abs(law.mean) + 2 * law.std) / law.std
    return step**2 / 12 + coarse(held, law)


def coarse(held: Held, law: Law) -> float:
    """What torch's bounded laws of few levels are off by, in standard deviations."""
    return 2 * held.spacing if law.kind in (laws.UNIFORM, laws.TRUNCATED) else 0.0


def distance(held: Held, law: Law) -> float:
    """Kolmogorov-Smirnov distance between the sample and the law, at the edges of rounding."""
    x, number = np.unique(held.sample, return_counts=True)
    if not len(x):
        return 0.0
    above = np.cumsum(number) / number.sum()
    below = above - number / number.sum()
    low, high = cell(x, held.spacing)
    off = max(np.abs(above - cdf(high, law)).max(), np.abs(below - cdf(low, law)).max())
    return float(max(off - coarse(held, law), 0.0))


def cell(x: np.ndarray, spacing: float) -> tuple[np.ndarray, np.ndarray]:
    """Edges of the numbers that are rounded to each of x."""
    mantissa, exponent = np.frexp(x)
    step = np.maximum(spacing * np.ldexp(1.0, exponent - 1), SMALLEST if spacing > 1e-5 else 0.0) / 2
    inner = np.where(np.abs(mantissa) == 0.5, step / 2, step)  # towards zero a power of two has closer neighbours
    return x - np.where(x > 0, inner, step), x + np.where(x < 0, inner, step)


def cdf(x: np.ndarray, law: Law) -> np.ndarray:
    """Of an entry, at x."""
    g = (x - law.shift) / law.scale
    if law.kind == laws.UNIFORM:
        found = np.clip(g, 0.0, 1.0)
    elif law.kind == laws.TRUNCATED:
        low, high = special.ndtr(law.low), special.ndtr(law.high)
        found = np.clip((special.ndtr(g) - low) / (high - low), 0.0, 1.0)
    else:
        assert law.kind == laws.NORMAL
        found = special.ndtr(g)
    return found if law.scale > 0 else 1.0 - found


def even_moments(law: Law) -> tuple[float, float]:
    """Fourth and sixth central moment of an entry of standard deviation 1."""
    if law.kind == laws.NORMAL:
        return 3.0, 15.0
    if law.kind == laws.UNIFORM:
        return 9 / 5, 27 / 7
    assert law.kind == laws.TRUNCATED
    raw = truncated_raw_moments(law, 6)
    about = [sum(math.comb(k, j) * raw[j] * (-raw[1]) ** (k - j) for j in range(k + 1)) for k in (2, 4, 6)]
    return about[1] / about[0] ** 2, about[2] / about[0] ** 3


def truncated_raw_moments(law: Law, last: int) -> list[float]:
    """E gᵏ, k = 0 to `last`, of N(0, 1) between `low` and `high`: by parts, (k − 1) E gᵏ⁻² + boundary."""
    edges, mass = (law.low, law.high), float(special.ndtr(law.high) - special.ndtr(law.low))
    density = [math.exp(-x * x / 2) / math.sqrt(2 * math.pi) / mass for x in edges]
    found = [1.0, density[0] - density[1]]
    for k in range(2, last + 1):
        low, high = (d * x ** (k - 1) if d else 0.0 for x, d in zip(edges, density, strict=True))
        found.append((k - 1) * found[k - 2] + low - high)
    return found


def holm(found: Mapping[K, float]) -> dict[K, float]:
    """Corrected for their number: rejecting those below α makes any false rejection with probability at most α."""
    ordered, worst, corrected = sorted(found, key=lambda key: found[key]), 0.0, {}
    for place, key in enumerate(ordered):
        worst = max(worst, min(1.0, (len(ordered) - place) * found[key]))
        corrected[key] = worst
    return corrected
