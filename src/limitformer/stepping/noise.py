r"""The noise of gradients: how much the gradients of sequences differ, and the batch at which this stops to matter.

Let the gradient of one sequence have mean G and covariance Σ. A batch of B sequences is divided into K pieces of b_k
sequences with mean gradients g_k; ḡ is that of the batch. Then

  E Σ_k b_k |g_k − ḡ|² = (K − 1) tr Σ,   E |ḡ|² = |G|² + tr Σ/B,

so that tr Σ and |G|² have unbiased estimates, of which the second may be negative, while the weights have not seen the
batch. Their ratio tr Σ/|G|² is the simple
noise scale (arXiv 1812.06162, which compares two sizes of batch): at that batch the noise of the mean gradient is as
large as G. Its interval over networks is Fieller's, because |G|² may be near 0: then it has no upper end.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy.special import stdtrit

LEVEL = 0.95
ALL = "all weights"


def noise_of(
    squares: Mapping[str, float], alone: Sequence[tuple[float, Mapping[str, float]]], sequences: int
) -> dict[str, tuple[float, float]]:
    """Return unbiased estimates of |G|² and tr Σ of each weight.

    Args:
        squares: |ḡ|² by weight.
        alone: of each piece its share w = b_k/B of the batch, and |w g_k|² by weight.
        sequences: B.
    """
    result = {}
    for name, square in squares.items():
        between = sum(part.get(name, 0.0) / share for share, part in alone) - square
        trace = sequences * between / (len(alone) - 1)
        result[name] = square - trace / sequences, trace
    return result


class NoiseScale(NamedTuple):
    """The ratio of two means, with the ends of its interval: 0 and ∞ where nothing is known."""

    scale: float
    low: float
    high: float


def noise_scale(trace: NDArray[np.float64], signal: NDArray[np.float64]) -> NoiseScale:
    """Return tr Σ/|G|² of networks, as the ratio of their means.

    >>> [round(each, 2) for each in noise_scale(np.array([9.0, 11.0, 10.0]), np.array([1.0, 1.1, 0.9]))]
    [10.0, 7.74, 12.91]
    """
    s, g, count = float(trace.mean()), float(signal.mean()), len(trace)
    value = s / g if g > 0 else math.inf
    if count < 2 or not math.isfinite(s + g):
        return NoiseScale(value, 0.0, math.inf)
    t = float(stdtrit(count - 1, (1 + LEVEL) / 2))
    (of_s, both), (_, of_g) = (np.cov(trace, signal) * t**2 / count).tolist()
    a, b, c = g**2 - of_g, s * g - both, s**2 - of_s
    root = math.sqrt(max(b**2 - a * c, 0.0))
    if a > 0 and g > 0:
        return NoiseScale(value, max((b - root) / a, 0.0), (b + root) / a)
    return NoiseScale(value, (b - root) / a if a < 0 < c else 0.0, math.inf)


def noise_rows(data: xr.Dataset, kind: Callable[[str], str]) -> list[dict[str, Any]]:
    """Return a row for each step of each kind of weight, and of all weights, at one rate; none without noise."""
    if "weight_noise" not in data:
        return []
    weights: dict[str, list[int]] = {ALL: list(range(data.sizes["weight"]))}
    for k, name in enumerate(data["weight"].values):
        weights.setdefault(kind(str(name)), []).append(k)
    rows = []
    for which, places in weights.items():
        for step in range(data.sizes["step"]):
            one = data.isel(step=step, weight=places)
            known = one["weight_noise"].notnull().any("weight").values
            trace, signal = (one[key].sum("weight").values[known] for key in ("weight_noise", "weight_signal"))
            if known.any():
                means = {"signal": float(signal.mean()), "noise": float(trace.mean())}
                rows.append({"weights": which, "step": step + 1} | means | noise_scale(trace, signal)._asdict())
    return rows
