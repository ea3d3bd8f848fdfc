r"""Critical learning rates: each network's own, and the rate that nine of ten networks bear.

A network *bears* a rate if the loss of the batch is lower after the steps than before. Its critical rate is the
smallest at which it does not. Whether a network bears a rate is not monotone in it, as a huge step can memorise a
batch; so rates rise by factors of `STRIDE` from one that the network bears, and the first interval that ends with a
rate that it does not bear is halved on the logarithmic scale. The search may step over smaller rates that a network
does not bear: `rate` tries all networks at the lower end of the interval, which becomes the critical rate of those
that do not bear it.

Logarithms of critical rates vary between networks like normal numbers. With their mean m and standard deviation s over
n networks, nine of ten bear exp(m − z s), z = Φ⁻¹(.9), and √n (m − q)/s has a noncentral t distribution with the
parameter z √n, where q is the true quantile. Its quantiles are the ends of the interval: it has its level for normal
logarithms and a fixed n. As networks are added until the interval is narrow, it covers less often; at a level of .97
in 95 to 97 of 100 cases (s from 0.2 to 1, at most 40 networks; a test repeats s = 0.5).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import stats

STRIDE = 2.0
RESOLUTION = 1.1  # ratio of the ends between which a critical rate is known
SHARE = 0.9  # of the networks that bear the rate
LEVEL = 0.97  # of an interval of a fixed number of networks
ENOUGH = 500  # networks, more than anybody would wait for
LOWEST, HIGHEST = 1e-12, 100.0


def critical_rate(bears: Callable[[float], bool], start: float) -> float:
    """Return the smallest rate that `bears` denies, above one that it affirms, within a factor of √`RESOLUTION`.

    Returns 0 if no rate above `LOWEST` is borne, and infinity if every rate up to `HIGHEST` is.

    >>> round(critical_rate(lambda rate: rate < 0.02, 1.0), 2)
    0.02
    """
    low = high = start
    if bears(start):
        while low < HIGHEST and bears(high := min(low * STRIDE, HIGHEST)):
            low = high
        if low >= HIGHEST:
            return math.inf
    else:
        while not bears(low := high / STRIDE):
            high = low
            if high < LOWEST:
                return 0.0
    while high / low > RESOLUTION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if bears(middle) else (low, middle)
    return math.sqrt(low * high)


@dataclass(frozen=True)
class BorneRate:
    """The rate that `SHARE` of all networks bear, with the ends of its interval: 0 and ∞ where nothing is known.

    Attributes:
        spread: the standard deviation of their natural logarithms; NaN for one network.
    """

    rate: float
    low: float
    high: float
    spread: float

    @property
    def factor(self) -> float:
        """Ratio of the ends of the interval."""
        return self.high / self.low if self.low > 0 else math.inf


def borne_rate(critical: Sequence[float], level: float = LEVEL) -> BorneRate:
    """Estimate the rate that `SHARE` of all networks bear, from critical rates that are finite and positive.

    >>> each = borne_rate([0.010, 0.012, 0.009, 0.011, 0.010])
    >>> f"{each.rate:.4f} ({each.low:.4f} to {each.high:.4f})"
    '0.0090 (0.0061 to 0.0100)'
    """
    logs, count = np.log(critical), len(critical)
    z, spread = stats.norm.ppf(SHARE), float(logs.std(ddof=1)) if count > 1 else math.nan
    if count < 2:
        return BorneRate(float(critical[0]), 0.0, math.inf, spread)
    spread = max(spread, math.log(RESOLUTION) / math.sqrt(12))  # a critical rate is known to this alone
    least, most = ends(count, level)
    mean = float(logs.mean())
    rate, low, high = (math.exp(mean - factor * spread) for factor in (z, most, least))
    return BorneRate(rate, low, high, spread)


def networks_needed(spread: float, factor: float) -> int:
    """Return the number of networks whose interval would have ends of this ratio, at most `ENOUGH`."""
    for count in range(2, ENOUGH):
        low, high = ends(count, LEVEL)
        if spread * (high - low) <= math.log(factor):
            return count
    return ENOUGH


@cache
def ends(count: int, level: float) -> tuple[float, float]:
    """Return the ends of the interval of (m − q)/s."""
    root, z = math.sqrt(count), stats.norm.ppf(SHARE)
    low, high = stats.nct.ppf([(1 - level) / 2, (1 + level) / 2], count - 1, z * root) / root
    return float(low), float(high)
