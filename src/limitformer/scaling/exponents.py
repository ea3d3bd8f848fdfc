r"""`exponent`: the power of the size with which a measure grows, with its interval, from samples at several sizes.

For sample i and size n_j let y_ij = log of the measure and x_j = log n_j. The exponent of a sample is its least-squares
slope, b_i = Σ_j c_j y_ij with c_j = (x_j − x̄)/Σ(x − x̄)². The answer is the mean of the b_i, and its interval that of
Student with samples − 1 degrees of freedom. This is exact for logs that are jointly normal, for any variances, with
shared seeds (which correlate sizes) or separate ones. Weighted least squares would have to estimate its weights.

Logs of samples, not the log of their mean: few rare networks dominate a mean, and its log is biased at few samples.
The exponent is that of the typical (geometric mean) network, over these sizes: it may change beyond them.

`weights_at`: the measure at a size N that was not run. The law c·n^a(1 + b/√n) has two powers, of which a wide network
keeps one; to first order its log is log c + a log n + b/√n, which least squares fit to each network with three or more
sizes. With two sizes b = 0 is assumed. The prediction is a sum over sizes, w · y_i, so that Student's interval over
networks is as exact as that of an exponent. Bands of K measures that hold together have the level 1 − 0.05/K each.
"""

from dataclasses import dataclass
from math import inf, isfinite
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from limitformer.base.errors import require

LEVEL = 0.95  # of the intervals
SIZE_FREE = 0.05  # |exponent| of a measure that does not depend on the size; a choice of limitformer's
LEAST_SIZES = 2


@dataclass(frozen=True)
class Band:
    """A positive number with its band."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return the number and its band, such as `3.9 (3.1 to 4.8)`."""
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class Exponent:
    """A power of the size.

    Attributes:
        value: the exponent of the typical network.
        low, high: its interval, which contains it in 95 % of repetitions.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return the exponent with half its interval, such as `0.98 ± 0.03`."""
        if not isfinite(self.low) or not isfinite(self.high):
            return f"{self.value:.2f}, of unknown error"
        return f"{self.value:.2f} ± {self.high - self.value:.2f}"


def exponent(
    values: Annotated[ArrayLike, "samples sizes"], sizes: Annotated[ArrayLike, "sizes"], name: str = "the measure"
) -> Exponent:
    """Return the exponent of a positive measure over the size.

    Args:
        values: of each sample at each size; a row has a NaN where a sample is missing, and is left out.
        sizes: two or more different ones.
        name: of the measure, for errors.

    Raises:
        InputError: the shapes do not agree, or a value is not positive.

    >>> print(exponent([[1.0, 2.1, 3.9], [1.1, 2.0, 4.2], [0.9, 2.0, 4.0]], [10, 20, 40]))
    1.01 ± 0.15
    """
    x, y = logs(values, sizes, name)
    centred = x - x.mean()
    each = band(y @ (centred / (centred @ centred)))
    return Exponent(each.value, each.low, each.high)


def weights_at(sizes: Annotated[ArrayLike, "sizes"], at: float) -> NDArray[np.float64]:
    """Return the weights of the logs at ascending sizes whose sum is the log at `at`."""
    n = np.asarray(sizes, dtype=float)
    if at in n:
        return np.asarray(n == at, dtype=float)
    terms = min(len(n), 3)  # of the law: c, a, and b
    design, row = (np.stack([np.ones_like(x), np.log(x), x**-0.5])[:terms].T for x in (n, np.array([float(at)])))
    result: NDArray[np.float64] = np.linalg.lstsq(design.T, row[0], rcond=None)[0]
    return result


def band(each: NDArray[np.float64], measures: int = 1) -> Band:
    """Return the mean of a number of each network with its band, which holds with those of other measures together.

    Args:
        measures: how many bands hold together in 95 % of repetitions.
    """
    value, count = float(each.mean()), len(each)
    if count < 2:
        return Band(value, -inf, inf)
    half = half_width(float(each.std(ddof=1)), np.array([count]), measures)[0]
    return Band(value, value - half, value + half)


def half_width(spread: float, networks: NDArray[np.int64], measures: int) -> NDArray[np.float64]:
    """Return half the width of a band of networks with this standard deviation."""
    quantile = stdtrit(networks - 1, 1 - (1 - LEVEL) / (2 * measures))
    result: NDArray[np.float64] = spread / np.sqrt(networks) * quantile
    return result


def logs(values: ArrayLike, sizes: ArrayLike, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the logs of ascending sizes, and those of the values of whole samples."""
    n, v = np.asarray(sizes, dtype=float), np.asarray(values, dtype=float)
    require(n.ndim == 1, f"sizes must be a list of numbers; got shape {n.shape}.")
    enough = len(set(n.tolist())) == len(n) >= LEAST_SIZES and bool(np.all((n > 0) & np.isfinite(n)))
    require(enough, f"sizes must be two or more different positive numbers; got {n.tolist()}.")
    require(v.shape == (*v.shape[:1], len(n)), f"{name} must be (samples, {len(n)}); got {v.shape}.")
    v = v[~np.isnan(v).any(axis=1)]
    require(len(v) > 0, f"{name} has no sample with a value at every size.")
    for size, column in zip(n, v.T, strict=True):
        bad = column[~((column > 0) & np.isfinite(column))]
        require(not len(bad), f"{name} must be positive and finite; got {[*bad, 0][0]:g} at size {size:g}.")
    order = np.argsort(n)
    return np.log(n[order]), np.log(v[:, order])


def is_size_free(result: Exponent, threshold: float = SIZE_FREE) -> bool | None:
    """Whether a measure does not depend on the size: its interval is within ± the threshold.

    None: the interval has exponents on both sides of the threshold, so that more samples are needed.
    """
    if -threshold <= result.low and result.high <= threshold:
        return True
    return False if result.low > threshold or result.high < -threshold else None
