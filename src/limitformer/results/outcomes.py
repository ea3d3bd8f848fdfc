r"""Probabilities of the final states of tokens, from simulated samples, with Wilson intervals.

The state of a sample at a time is one of

* *single cluster*: all tokens together [CT, eq. 9],
* *antipodal pair*: at least one pair antipodal [CT, eq. 10, Sec. 6],
* *unresolved*: neither,

within the tolerance (`sphere.outcome`). Wilson's interval for k of n at z standard deviations has the ends
(k + z²/2 ± z √(k(n − k)/n + z²/4)) / (n + z²); it has its coverage also for k = 0 and k = n.
"""

from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from limitformer.base.errors import require, require_real
from limitformer.results.datasets import tokens_of
from limitformer.sphere.outcome import ANTIPODAL, CLUSTERS, LABELS, UNRESOLVED, outcomes_of_overlaps

OUTCOMES = ("single cluster", "antipodal pair", "unresolved")


def wilson(successes: ArrayLike, trials: int, level: float = 0.95) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the ends of Wilson's interval of a probability, from `successes` in `trials`.

    >>> low, high = wilson(0, 100)
    >>> round(float(high), 4)
    0.037
    """
    k, z = np.asarray(successes, np.float64), ndtri((1 + level) / 2)
    middle, half = k + z**2 / 2, z * np.sqrt(k * (trials - k) / trials + z**2 / 4)
    low, high = (middle - half) / (trials + z**2), (middle + half) / (trials + z**2)
    return np.maximum(low, 0), np.minimum(high, 1)


def outcomes(samples: xr.Dataset, *, tolerance: float | None = None, level: float = 0.95) -> xr.Dataset:
    """Estimate the probabilities of the outcomes by time, from a simulation of a model on the sphere.

    Args:
        samples: with overlaps (`keep="overlap"`) or outcomes (`keep="outcome"`).
        tolerance: how near to ±1 counts as arrived; None is the simulation's. Only overlaps allow another value.
        level: coverage of the intervals.

    Returns:
        `probability`, `low` and `high` (outcome, time) for the outcomes of `OUTCOMES`; `cluster_probability` (clusters,
        time) of the number of clusters.

    Raises:
        InputError: no samples, other data, or a tolerance that these data do not allow.

    >>> import limitformer as lf
    >>> model = lf.StochasticTransformer(tokens=2, dim=3, beta=2.0, layers_per_unit_time=50)
    >>> samples = lf.simulate(model, horizon=50.0, samples=200, seed=0, record=[50.0])
    >>> float(lf.outcomes(samples).probability.sum("outcome")[0])
    1.0
    """
    level = require_real("level", level)
    require(0 < level < 1, f"level must lie in (0, 1); got {level}.")
    labels = labels_of(samples, tolerance)
    count = labels.shape[0]
    require(count > 0, "outcomes needs at least one sample; got none.")
    antipodal = labels[..., ANTIPODAL] > 0
    single = (labels[..., CLUSTERS] == 1) & (labels[..., UNRESOLVED] == 0)
    hits = np.stack([single, antipodal, ~single & ~antipodal]).sum(1)
    low, high = wilson(hits, count, level)
    kinds = np.arange(1, labels[..., CLUSTERS].max() + 1)
    numbers = (labels[..., CLUSTERS][None] == kinds[:, None, None]).mean(1)
    used = float(samples.attrs["tolerance"]) if tolerance is None else tolerance
    return xr.Dataset(
        {
            "probability": (("outcome", "time"), hits / count),
            "low": (("outcome", "time"), low),
            "high": (("outcome", "time"), high),
            "cluster_probability": (("clusters", "time"), numbers),
        },
        {"outcome": list(OUTCOMES), "time": samples["time"], "clusters": kinds},
        {"samples": count, "level": level, "tolerance": used},
    )


def labels_of(samples: xr.Dataset, tolerance: float | None) -> NDArray[np.int32]:
    """Return the outcome (sample, time, 4) of every sample."""
    if "clusters" in samples:
        used: Any = samples.attrs["tolerance"]
        require(
            tolerance is None or tolerance == used,
            f"These outcomes were read with tolerance {used}; got {tolerance}. Simulate again, or keep the overlaps.",
        )
        return np.stack([samples[name].values for name in LABELS], axis=-1)
    require("overlap" in samples, "outcomes needs overlaps or outcomes of tokens on the sphere (simulate's keep).")
    require(
        samples.attrs.get("pairs", "all") == "all",
        f"outcomes needs all pairs of tokens, and {samples.sizes['pair']} were kept. Leave pairs out of simulate, or "
        'keep="outcome".',
    )
    tolerance = float(samples.attrs["tolerance"]) if tolerance is None else require_real("tolerance", tolerance)
    require(0 < tolerance < 0.5, f"tolerance must lie in (0, 0.5); got {tolerance}.")
    overlap, gap = samples["overlap"].values, samples["gap"].values
    require(bool(np.isfinite(gap).all()), "Some overlaps are not finite numbers: these samples cannot be counted.")
    return outcomes_of_overlaps(overlap, gap, tokens_of(overlap.shape[2]), tolerance)
