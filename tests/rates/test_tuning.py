"""The range in which to tune: its coverage on drawn ratios, its table, and what the networks of the pilot say."""

import csv
import math
from pathlib import Path

import numpy as np
from benchmarks.rates import pilot
from scipy import stats

from limitformer.rates import tuning

DATA = Path(pilot.__file__).parent


def coverage(ends, count, trials=20_000):
    """Return the share of trials in which one more ratio lies within the ends that `count` others give."""
    rng = np.random.default_rng(0)
    logs = 3 + 0.5 * rng.standard_normal((trials, count + 1))
    inside = [low < math.exp(more) < high for *known, more in logs for low, high in [ends(np.array(known))]]
    return float(np.mean(inside))


def test_one_more_ratio_lies_within_the_ends_as_often_as_stated():
    error = 3 * math.sqrt(0.8 * 0.2 / 20_000)
    assert abs(coverage(tuning.ratios_within, 6) - tuning.COVERAGE) < error

    def of_the_mean(logs):  # a twin: the interval of the mean
        half = stats.t.ppf(0.9, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs))
        return math.exp(logs.mean() - half), math.exp(logs.mean() + half)

    def normal(logs):  # a twin: as if mean and deviation were known
        half = stats.norm.ppf(0.9) * logs.std(ddof=1)
        return math.exp(logs.mean() - half), math.exp(logs.mean() + half)

    for twin in (of_the_mean, normal):
        assert coverage(twin, 6) < tuning.COVERAGE - error


def test_range_scales_with_the_critical_rates():
    low, high = tuning.tuning_range([0.1, 0.1])
    assert np.allclose(tuning.tuning_range([0.08, 0.125, 0.1]), (low, high))  # the same geometric mean
    assert np.allclose(tuning.tuning_range([0.3]), (3 * low, 3 * high))
    assert 0.1 / 100 < low < high < 0.1 / 5


def test_range_of_few_networks_that_differ_has_its_coverage():
    """Six networks with a standard deviation of 1.4; ratios and their pilot are drawn anew in each trial."""
    rng, trials, count = np.random.default_rng(1), 4000, 6
    pilot = tuning.pilot_logs()

    def share(variance):
        inside = 0
        for _ in range(trials):
            known = rng.normal(pilot.mean(), pilot.std(ddof=1), len(pilot))
            logs, best = 1.4 * rng.standard_normal(count), -rng.normal(pilot.mean(), pilot.std(ddof=1))
            low, high = tuning.ratios_within(known, variance(logs), count - 1)
            inside += logs.mean() - math.log(high) < best < logs.mean() - math.log(low)
        return inside / trials

    error = 3 * math.sqrt(0.8 * 0.2 / trials)
    assert abs(share(lambda logs: logs.var(ddof=1) / count) - tuning.COVERAGE) < error
    assert share(lambda logs: 0.0) < tuning.COVERAGE - error  # a twin: as if their mean were known
    assert share(lambda logs: logs.var(ddof=1)) > tuning.COVERAGE + error  # a twin: as if there were one network
    critical = np.exp([-1.4, 1.4, -1.4, 1.4, -1.4, 1.4])
    excess = 1.4**2 / 5 - (math.log(2) / 4) ** 2
    low, high = tuning.ratios_within(pilot, excess, 5)
    assert np.allclose(tuning.tuning_range(critical), (1 / high, 1 / low))


def test_table_of_the_package_is_that_of_the_pilot():
    rows = pilot.table(DATA / "trained.jsonl", DATA / "first.jsonl")
    text = Path(tuning.__file__).with_name("pilot.csv").read_text(encoding="utf-8")
    assert [{key: str(each) for key, each in row.items()} for row in rows] == list(csv.DictReader(text.splitlines()))
    assert tuning.leave_one_out()[1] == len(rows) == 30


def test_best_rate_of_a_parabola_is_its_vertex():
    runs = [{"rate": 2.0**k, "held_out": (k - 4.3) ** 2} for k in range(10)]
    assert math.isclose(pilot.best_rate(runs), 2**4.3)
    runs[5]["held_out"] = math.inf  # a neighbour that diverged: the grid decides
    assert math.isclose(pilot.best_rate(runs), 2**4)
