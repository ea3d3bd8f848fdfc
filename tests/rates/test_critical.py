"""Critical rates: the search, and the interval of the rate that nine of ten networks bear."""

import math

import numpy as np
import pytest
from scipy import stats

from limitformer.rates.critical import (
    ENOUGH,
    HIGHEST,
    LEVEL,
    LOWEST,
    RESOLUTION,
    borne_rate,
    critical_rate,
    networks_needed,
)
from limitformer.rates.rate import FEWEST, MOST, NARROW

TRUE, SPREAD = math.log(0.01) - stats.norm.ppf(0.9) * 0.4, 0.4  # rates exp(N(log 0.01, 0.4²))


@pytest.mark.parametrize("start", [1e-7, 0.0199, 0.021, 3.0])
def test_search_ends_at_the_first_rate_that_is_not_borne(start):
    tried = []

    def bears(rate):
        tried.append(rate)
        return rate < 0.02 or 5 < rate < 6  # a huge step may memorise

    found = critical_rate(bears, start)
    assert abs(math.log(found / 0.02)) <= math.log(RESOLUTION) / 2
    assert len(tried) <= 26


def test_search_without_an_end():
    assert critical_rate(lambda rate: True, 1e-3) == math.inf
    assert critical_rate(lambda rate: False, 1e-3) == 0.0
    for start in (60.0, 100.0):
        assert critical_rate(lambda rate: rate <= HIGHEST, start) == math.inf
        assert critical_rate(lambda rate: rate < 90, start) == pytest.approx(90, rel=RESOLUTION - 1)
    limits = []
    critical_rate(lambda rate: limits.append(rate) or True, 1.0)
    critical_rate(lambda rate: limits.append(rate), 1.0)
    critical_rate(lambda rate: limits.append(rate) or True, 60.0)
    assert min(limits) >= LOWEST / 2
    assert max(limits) <= HIGHEST


@pytest.mark.parametrize("count", [4, 9])
def test_interval_covers_the_quantile_in_95_of_100(count):
    rng, trials = np.random.default_rng(count), 2000
    inside = twin = 0
    for _ in range(trials):
        logs = rng.normal(math.log(0.01), SPREAD, count)
        one = borne_rate(np.exp(logs), level=0.95)
        inside += math.log(one.low) < TRUE < math.log(one.high)
        half = stats.t.ppf(0.975, count - 1) * logs.std(ddof=1) / math.sqrt(count)  # of the mean, moved: too narrow
        twin += abs(logs.mean() - stats.norm.ppf(0.9) * logs.std(ddof=1) - TRUE) < half
    error = 3 * math.sqrt(0.95 * 0.05 / trials)
    assert abs(inside / trials - 0.95) < error
    assert abs(twin / trials - 0.95) > error


def test_interval_that_ends_the_search_covers_in_95_of_100():
    """Networks are added until it is narrow, which costs coverage: an interval of the level .95 has less."""
    rng, trials, spread = np.random.default_rng(0), 3000, 0.5
    true, inside = -stats.norm.ppf(0.9) * spread, {LEVEL: 0, 0.95: 0}
    for _ in range(trials):
        rates = np.exp(rng.normal(0, spread, MOST))
        for level in inside:
            tries = (borne_rate(rates[:count], level=level) for count in range(FEWEST, MOST + 1))
            one = next((each for each in tries if each.factor <= NARROW), None) or borne_rate(rates, level=level)
            inside[level] += math.log(one.low) < true < math.log(one.high)
    error = 2.5 * math.sqrt(0.95 * 0.05 / trials)
    assert inside[LEVEL] / trials > 0.95 - error
    assert inside[0.95] / trials < 0.95 - error


def test_interval_of_equal_rates_has_the_width_of_the_resolution():
    one = borne_rate([0.01] * 5)
    assert one.low < 0.01 < one.high * RESOLUTION
    assert 1 < one.factor < RESOLUTION**2


def test_networks_needed_make_the_interval_narrow_enough():
    count = networks_needed(SPREAD, 2.0)
    logs = np.random.default_rng(0).normal(size=count)
    same, fewer = (SPREAD * (each - each.mean()) / each.std(ddof=1) for each in (logs, logs[:-1]))
    assert borne_rate(np.exp(same)).factor <= 2.0 < borne_rate(np.exp(fewer)).factor
    assert networks_needed(50.0, 2.0) == ENOUGH
