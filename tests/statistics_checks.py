"""Statistical checks with stated levels."""

import numpy as np
from numpy.typing import NDArray
from scipy.stats import ks_2samp

ALPHA = 1e-4  # of each Kolmogorov-Smirnov test
STANDARD_ERRORS = 4.0


def least_p(x: dict[str, NDArray[np.float64]], y: dict[str, NDArray[np.float64]]) -> tuple[float, str]:
    """Return the smallest p-value of the KS tests of all statistics, and the statistic's name.

    The distance that is largest for its sizes has it, and is the only one whose p, which takes longest, is asked for.
    """
    name = max(x, key=lambda name: distance(x[name], y[name]) * effective_size(x[name], y[name]) ** 0.5)
    return float(ks_2samp(x[name], y[name], method="asymp").pvalue), name


def distance(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Return the Kolmogorov–Smirnov distance of two samples (n,) and (m,); ∞ if one contains NaN."""
    x, y = np.sort(x), np.sort(y)  # NaN last
    both = np.concatenate([x, y])
    if np.isnan(x[-1] + y[-1]):
        return np.inf
    return float(np.abs(np.searchsorted(x, both, "right") / len(x) - np.searchsorted(y, both, "right") / len(y)).max())


def effective_size(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    return len(x) * len(y) / (len(x) + len(y))


def assert_same_law(x, y, wrong) -> None:
    """Assert that `x` and `y` pass every KS test and that `wrong` and `y` fail at least one: {statistic: samples}
    each."""
    p, name = least_p(x, y)
    assert p > ALPHA, f"{name}: p = {p:.2g}"
    p, name = least_p(wrong, y)
    assert p < ALPHA, f"the wrong twin passes: its least p is {p:.2g}, of {name}"


def standard_errors(samples: NDArray[np.float64], exact: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (mean − exact)/standard error for samples (n, k)."""
    return (samples.mean(0) - exact) / (samples.std(0) / len(samples) ** 0.5)


def covariance_standard_errors(samples: NDArray[np.float64], exact: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the deviations of the covariance matrix of samples (n, k) in standard errors of means of products."""
    centre, size = samples.mean(0), len(samples)
    mean, squares = np.zeros((2, *exact.shape))
    for begin in range(0, size, 10_000):  # which stay in the cache
        centred = samples[begin : begin + 10_000] - centre
        mean += centred.T @ centred / size
        centred *= centred
        squares += centred.T @ centred / size
    return (mean - exact) / np.sqrt((squares - mean**2) / size)
