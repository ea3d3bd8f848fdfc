"""Spearman's ρ, over all and within groups, and the probability of so large a one by chance."""

import itertools

import numpy as np
import pytest
from scipy.stats import rankdata, spearmanr

from limitformer_papers.beyond import ranks

N = 24
TIED = [3.0, 1.0, 1.0, 2.0, 5.0, 8.0, 8.0, -1.0]
OTHER = [0.1, 0.7, -0.2, 0.4, 0.4, 3.0, 2.0, 0.1]
ALL = np.zeros(N)


def test_spearman_equals_scipys_with_ties():
    assert ranks.spearman(TIED, OTHER) == pytest.approx(spearmanr(TIED, OTHER).statistic, abs=1e-14)


def test_nan_and_infinity_rank_last_and_tied():
    large = [1e9 if not np.isfinite(v) else v for v in (1.0, np.inf, 2.0, np.nan, 0.0)]
    assert ranks.spearman([1.0, np.inf, 2.0, np.nan, 0.0], [1, 5, 3, 4, 2]) == ranks.spearman(large, [1, 5, 3, 4, 2])


def test_p_value_equals_that_of_all_orders():
    """All 720 orders of six values can be listed."""
    x, y = np.array(TIED[:6]), np.array(OTHER[:6])
    orders = np.array(list(itertools.permutations(rankdata(y))))
    every = np.abs(np.corrcoef(np.vstack([rankdata(x), orders]))[0, 1:])
    exact = np.mean(every >= abs(spearmanr(x, y).statistic) - 1e-12)
    p = ranks.p_value(x, y, np.zeros(6), 3)
    assert abs(p - exact) < 5 * np.sqrt(exact * (1 - exact) / ranks.DRAWS)


def test_rho_within_groups_ignores_differences_between_groups():
    """The groups are far apart in both, so ρ is nearly 1 over all and near 0 within."""
    groups = np.repeat([0, 1, 2], 8)
    x, y = np.random.default_rng(7).standard_normal((2, N)) + 100 * groups
    assert ranks.spearman(x, y) > 0.8
    assert ranks.p_value(x, y, ALL, 1) < 1e-3
    assert ranks.p_value(x, y, groups, 1) > 0.05
    assert ranks.p_value(x, x - 200 * groups, groups, 1) < 1e-3  # a relation within groups is detected


def test_rho_within_groups_is_the_mean_over_groups():
    groups = [0, 1, 0, 1, 0, 1, 1, 0]
    own = [spearmanr(*(np.array(v)[np.array(groups) == g] for v in (TIED, OTHER))).statistic for g in (0, 1)]
    assert ranks.within(TIED, OTHER, groups) == pytest.approx(np.mean(own), abs=1e-14)
