r"""Rank correlation: how well the order of one list predicts that of another.

Spearman's ρ of x and y (n,) is the correlation of their ranks r and s; ties have their mean rank:

    ρ = Σ (rᵢ − r̄)(sᵢ − s̄)/√(Σ (rᵢ − r̄)² Σ (sᵢ − s̄)²).

NaN counts as ∞, and all ∞ are tied. Within groups, ρ is the mean over the groups, so differences between groups do not
enter it.

If x and y are independent within groups, each order of y there has the same probability. p is the share of drawn orders
whose |ρ| reaches the observed one, which is counted among them [Phipson and Smyth, 2010], so p is never 0.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

Array = NDArray[np.float64]
DRAWS = 10_000
ROUNDING = 1e-12  # sums of ranks depend on their order


def ranks(values: ArrayLike) -> Array:
    """Return ranks from 1 on along the last axis, smallest value first; NaN counts as ∞."""
    array = np.asarray(values, np.float64)
    return np.asarray(rankdata(np.where(np.isnan(array), np.inf, array), axis=-1), np.float64)


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Return ρ of x and y (n,); 0 if all values of one are equal."""
    return float(correlations(ranks(x), ranks(y)))


def correlations(r: Array, s: Array) -> Array:
    """Return the correlations (…) of r and s (…, n)."""
    a, b = (each - each.mean(-1, keepdims=True) for each in (r, s))
    size = np.sqrt((a**2).sum(-1) * (b**2).sum(-1))
    return np.asarray((a * b).sum(-1) / np.where(size > 0, size, 1.0))


def within(x: ArrayLike, y: ArrayLike, groups: ArrayLike) -> float:
    """Return the mean of ρ over the groups (n,)."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return float(np.mean([spearman(x[part], y[part]) for part in parts_of(groups)]))


def parts_of(groups: ArrayLike) -> list[NDArray[np.intp]]:
    """Return the positions of each group's members."""
    names = np.asarray(groups)
    return [np.flatnonzero(names == name) for name in np.unique(names)]


def p_value(x: ArrayLike, y: ArrayLike, groups: ArrayLike, seed: int, draws: int = DRAWS) -> float:
    """Return the probability of so large a |ρ| within groups if x and y are independent there."""
    x, y, parts = np.asarray(x, np.float64), np.asarray(y, np.float64), parts_of(groups)
    random, drawn = generator(seed), np.zeros(draws)
    for part in parts:
        shuffled = random.permuted(np.tile(ranks(y[part]), (draws, 1)), axis=1)
        drawn += correlations(ranks(x[part]), shuffled) / len(parts)
    reached = np.abs(drawn) >= abs(within(x, y, groups)) - ROUNDING
    return (1 + int(reached.sum())) / (1 + draws)


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))
