r"""The range in which to tune a learning rate, from a pilot of thirty networks that were trained.

`pilot.csv` has, for each network of `benchmarks/rates/pilot.py`, its critical rate c (geometric mean of four networks
of the same law, on a batch as trained) and its best rate b: that of the lowest loss on unseen text after 150 steps
without warm-up, by a parabola through the best of ten rates and its neighbours. With the mean m and the standard
deviation s of ln(c/b) over n networks, the range of a further network is

  c exp(−m ± t s √(1 + 1/n)),  t the quantile of Student's distribution with n − 1 degrees of freedom,

in which its best rate lies with a probability of `COVERAGE`, if its ratio is one more of the same normal law.

The range is wider for few networks whose critical rates differ much. Let e be the standard error of their ln c. If it
is above `KNOWN`, e² − KNOWN² is added to s² (1 + 1/n), and t has Satterthwaite's degrees of freedom; below, the pilot's
scatter covers it, as its own critical rates come from four networks. The range has its coverage on average over
networks: four that happen to agree, of a law that scatters much, give one that is too narrow.
"""

import csv
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray
from scipy import stats

COVERAGE = 0.8
KNOWN = math.log(2) / 4  # standard error of ln c, from which c is known within a factor of √2


def tuning_range(critical: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the range in which the best rate of a network with these critical rates is expected."""
    logs, count = np.log(critical), len(critical)
    excess = max(0.0, logs.var(ddof=1) / count - KNOWN**2) if count > 1 else 0.0
    low, high = ratios_within(pilot_logs(), excess, count - 1)
    middle = float(np.exp(np.mean(logs)))
    return middle / high, middle / low


def ratios_within(logs: NDArray[np.float64], excess: float = 0.0, freedom: int = 1) -> tuple[float, float]:
    """Return the ends of the interval of one more ratio c/b, from the logarithms of known ones.

    Args:
        excess, freedom: the variance that is added to that of the ratio, and its degrees of freedom.
    """
    count = len(logs)
    own = logs.var(ddof=1) * (1 + 1 / count)
    degrees = (own + excess) ** 2 / (own**2 / (count - 1) + excess**2 / max(freedom, 1))
    half = stats.t.ppf((1 + COVERAGE) / 2, degrees) * math.sqrt(own + excess)
    return math.exp(logs.mean() - half), math.exp(logs.mean() + half)


@cache
def pilot_logs() -> NDArray[np.float64]:
    """Return ln(c/b) of the networks of the pilot."""
    text = files("limitformer.rates").joinpath("pilot.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return np.array([math.log(float(row["critical"]) / float(row["best"])) for row in rows])


@cache
def leave_one_out() -> tuple[int, int]:
    """Return how many networks of the pilot have their best rate in the range that the others give, of how many."""
    logs, count = pilot_logs(), 0
    for k in range(len(logs)):
        low, high = ratios_within(np.delete(logs, k))
        count += low < math.exp(logs[k]) < high
    return count, len(logs)
