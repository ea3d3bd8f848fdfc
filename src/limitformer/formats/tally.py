r"""`Tally`: how many numbers of a tensor have which exponent. From it follow the shares of every format.

Numbers are float32. Zeros are not counted, nor infinities and numbers from 2¹²⁶ on, by which models mask.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr
from torch import Tensor

from limitformer.formats.table import NumberFormat
from limitformer.numerics.kernels import driver
from limitformer.weightless.laws import CONSTANT, NORMAL, ORTHOGONAL, TRUNCATED, UNIFORM, Law

BIAS = 127  # of the exponents of float32
EXPONENTS = 256
MASKS = BIAS + 126  # the exponent from which on numbers are masks


def zeros() -> NDArray[np.float64]:
    return np.zeros(EXPONENTS)


@dataclass(eq=False)
class Tally:
    """Counts of numbers.

    Attributes:
        within: by k, how many |x| lie in (2^(k − 127), 2^(k − 126)].
        powers: by k, how many |x| are 2^(k − 127).
        over: how many round beyond each of the formats.
        largest: the largest |x|.
        lost: by format, how many numbers change nothing where they are added, and how many are added.
    """

    formats: Sequence[NumberFormat]
    within: NDArray[np.float64] = field(default_factory=zeros)
    powers: NDArray[np.float64] = field(default_factory=zeros)
    over: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    largest: float = 0.0
    lost: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.over = self.over if len(self.over) else np.zeros(len(self.formats))

    @property
    def count(self) -> float:
        """How many numbers are not zero."""
        return float(self.within.sum())

    def add(self, x: Tensor) -> None:
        """Count the numbers of a tensor."""
        values = x.detach().to("cpu", torch.float32).contiguous().numpy().reshape(-1)
        limits = np.array([each.beyond for each in self.formats], np.float32).view(np.int32)
        most = count(values.view(np.int32), self.within, self.powers, limits, self.over)
        self.largest = max(self.largest, float(np.int32(most).view(np.float32)))

    def merge(self, other: "Tally") -> None:
        """Add the counts of another tensor."""
        self.within, self.powers, self.over = (
            self.within + other.within, self.powers + other.powers, self.over + other.over,
        )  # fmt: skip
        self.largest = max(self.largest, other.largest)
        for name, (some, every) in other.lost.items():
            mine = self.lost.get(name, [0.0, 0.0])
            self.lost[name] = [mine[0] + some, mine[1] + every]

    def at_most(self, exponent: int, strictly: bool = False) -> float:
        """Return how many |x| are at most 2^exponent, or `strictly` below it."""
        place = min(max(exponent + BIAS, 0), EXPONENTS - 1)
        below = float(self.within[:place].sum())
        return below - float(self.powers[place]) if strictly else below

    def zero(self, which: NumberFormat, scale: int = 0) -> float:
        """Return how many round to zero once they are multiplied by 2^scale."""
        return self.at_most(which.smallest - 1 - scale)

    def subnormal(self, which: NumberFormat, scale: int = 0) -> float:
        """Return how many that do not round to zero are below the smallest normal number."""
        return max(self.at_most(which.normal - scale, strictly=True) - self.zero(which, scale), 0.0)

    def room(self, which: NumberFormat) -> int:
        """Return the exponent of the largest power of two that keeps all numbers within the format."""
        return math.floor(math.log2(which.largest / self.largest)) if self.largest else 0

    def middle(self) -> int:
        """Return the exponent of the power of two that brings the median |x| into (½, 1]."""
        return BIAS - 1 - int(np.searchsorted(np.cumsum(self.within), self.count / 2))


@driver
def count(bits, within, powers, limits, over):
    """Add to the counts of a `Tally`; return the largest |x|. All numbers are given as bits."""
    most, least = np.int32(0), limits.min()
    for each in bits:
        size = each & 0x7FFFFFFF
        exponent = size >> 23
        if size == 0 or exponent >= MASKS:
            continue
        within[(size - 1) >> 23] += 1
        if size & 0x7FFFFF == 0:
            powers[exponent] += 1
        most = max(most, size)
        if size >= least:
            for k in range(len(limits)):
                over[k] += size >= limits[k]
    return most


def tally_of_law(law: Law, entries: int, formats: Sequence[NumberFormat]) -> Tally:
    """Return the expected counts of the entries of a weight, and the median of the largest."""
    result = Tally(formats)
    if law.kind == CONSTANT:
        result.add(torch.full((1,), law.shift))
        for each in (result.within, result.powers, result.over):
            each *= entries
        return result
    edges = np.concatenate([[0.0], 2.0 ** (np.arange(1, EXPONENTS) - BIAS)])
    below = sizes_below(law, edges)
    result.within[:-1] = entries * np.diff(below)
    result.over = entries * (1 - sizes_below(law, np.array([each.beyond for each in formats])))
    low, high = 0.0, abs(law.scale) * 40 + abs(law.shift)
    for _ in range(60):  # bisection of P(|w| ≤ x) = 2^(−1/entries)
        middle = (low + high) / 2
        inside = float(sizes_below(law, np.array([middle]))[0])
        low, high = (middle, high) if inside < 0.5 ** (1 / entries) else (low, middle)
    result.largest = high
    return result


def sizes_below(law: Law, sizes: NDArray[Any]) -> NDArray[Any]:
    """Return P(|w| ≤ x) of an entry; those of an orthogonal matrix are nearly normal."""
    scale = law.std if law.kind == ORTHOGONAL else abs(law.scale)
    shift = law.shift if law.scale >= 0 else -law.shift

    def cumulative(x: NDArray[Any]) -> NDArray[Any]:
        g = (x - shift) / scale
        if law.kind == UNIFORM:
            return np.clip(g, 0.0, 1.0)
        low, high = (law.low, law.high) if law.kind == TRUNCATED else (-np.inf, np.inf)
        return (ndtr(np.clip(g, low, high)) - ndtr(low)) / (ndtr(high) - ndtr(low))

    assert law.kind in (NORMAL, UNIFORM, TRUNCATED, ORTHOGONAL)
    return np.asarray(cumulative(sizes) - cumulative(-sizes))
