"""Outcomes: clusters and antipodal pairs against brute force, Wilson's interval against SciPy's."""

import numpy as np
import pytest
import xarray as xr
from scipy.sparse.csgraph import connected_components
from scipy.stats import binomtest

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.numerics.lanes import LANES
from limitformer.results.outcomes import OUTCOMES, wilson
from limitformer.sampling.arrays import all_pairs, as_result_array
from limitformer.sphere.near.near_tree import open_near_tree
from limitformer.sphere.outcome import outcomes_of_overlaps
from limitformer.sphere.tokens.process import Record, record_workspace, write_point
from sphere_naive import gaps_of, normalised, overlaps_of

TOLERANCE = 0.1


def brute_force(x, tolerance):
    """Return (clusters, largest, antipodal pairs, unresolved pairs) of tokens (N, d) by SciPy's graphs."""
    minus = ((x[:, None] - x[None]) ** 2).sum(-1) / 2
    plus = ((x[:, None] + x[None]) ** 2).sum(-1) / 2
    together = minus <= tolerance
    clusters, names = connected_components(together, directed=False)
    upper = np.triu_indices(len(x), 1)
    antipodal = ~together & (plus <= tolerance)
    unresolved = (~together & ~antipodal)[upper].sum()
    return [clusters, np.bincount(names).max(), antipodal[upper].sum(), unresolved]


def by_kernel(x, tolerance):
    """Return outcomes (samples, 4) of tokens (samples, N, d)."""
    pairs, out = all_pairs(x.shape[1]), np.full((len(x), 1, 4), -1, np.int32)
    work, tree = record_workspace(x.shape[1]), open_near_tree(*x.shape[1:])
    for begin in range(0, len(x), LANES):
        part = x[begin : begin + LANES]
        lanes = np.zeros((*x.shape[1:], LANES))
        lanes[..., : len(part)] = np.moveaxis(part, 0, -1)
        nothing = as_result_array(np.empty((len(part), 1, 0)))
        outcomes, stopped = out[begin : begin + LANES], np.empty(len(part))
        write_point(lanes, tree, 0, Record(pairs, tolerance, nothing, nothing, outcomes, nothing, stopped), work)
    return out[:, 0]


def configurations(seed, samples, tokens, dim=3):
    """Return tokens at distances near the tolerance, around two axes and their antipodes, or anywhere."""
    rng = np.random.default_rng(seed)
    which = rng.integers(0, rng.choice([1, 4], (samples, 1)), (samples, tokens))
    centres = np.concatenate([np.eye(dim)[:2], -np.eye(dim)[:2]])[which]
    spread = rng.choice([0.05, 0.2, 0.4, 5.0], (samples, 1, 1))
    return normalised(centres + spread * rng.standard_normal((samples, tokens, dim)))


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_outcomes_equal_brute_force(tokens):
    """The kernel uses tokens, the library also overlaps; another tolerance (the wrong twin) gives other outcomes."""
    x = configurations(tokens, 400, tokens)
    expected = np.array([brute_force(one, TOLERANCE) for one in x])
    np.testing.assert_array_equal(by_kernel(x, TOLERANCE), expected)
    np.testing.assert_array_equal(outcomes_of_overlaps(overlaps_of(x), gaps_of(x), tokens, TOLERANCE), expected)
    if tokens > 1:
        assert (by_kernel(x, 0.8 * TOLERANCE) != expected).any()
        assert len(np.unique(expected, axis=0)) > tokens
    if tokens > 2:
        chained = (expected[:, 0] == 1) & (expected[:, 3] > 0)  # one cluster, but not every pair is near
        assert chained.any()


@pytest.mark.parametrize("sign", [1, -1])
def test_gap_equal_to_the_tolerance_counts_as_arrived(sign):
    """1 ∓ z is exactly the tolerance 1/8; one rounding more does not count."""
    x = np.array([[[1.0, 0.0], [sign * 1.0, 0.5]]])
    arrived = [[1, 2, 0, 0]] if sign == 1 else [[2, 1, 1, 0]]
    np.testing.assert_array_equal(by_kernel(x, 0.125), arrived)
    np.testing.assert_array_equal(by_kernel(x, np.nextafter(0.125, 0)), [[2, 1, 0, 1]])
    pair = np.array([[sign * 0.875]]), np.array([[0.125]])
    np.testing.assert_array_equal(outcomes_of_overlaps(*pair, 2, 0.125), arrived)
    np.testing.assert_array_equal(outcomes_of_overlaps(*pair, 2, np.nextafter(0.125, 0)), [[2, 1, 0, 1]])


# --- Wilson -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_wilson_against_scipy(level):
    for trials in (1, 7, 100, 10_000):
        for k in sorted({0, 1, trials // 3, trials - 1, trials}):
            low, high = wilson(k, trials, level)
            theirs = binomtest(k, trials).proportion_ci(level, method="wilson")
            np.testing.assert_allclose([low, high], theirs, rtol=1e-12, atol=1e-15)
            assert 0 <= low <= k / trials <= high + 1e-15 <= 1 + 1e-15


# --- outcomes ---------------------------------------------------------------------------------------------------------

PAIR = lf.StochasticTransformer(tokens=2, dim=3, beta=2.0, layers_per_unit_time=20)
FOUR = lf.StochasticTransformer(tokens=4, dim=3, beta=3.0, layers_per_unit_time=20)


@pytest.mark.parametrize("model", [PAIR, FOUR], ids=["two", "four"])
def test_probabilities_are_shares_of_the_samples(model):
    """The shares are counted here from the tokens, one sample at a time."""
    run = {"samples": 500, "seed": 1, "horizon": 6.0, "record": [0.0, 2.0, 6.0], "method": "coordinates"}
    samples = lf.simulate(model, **run, tolerance=0.05)
    x = lf.simulate(model, **run, keep="tokens")["tokens"].values
    table = lf.outcomes(samples, level=0.9)
    for t in range(3):
        labels = np.array([brute_force(one, 0.05) for one in x[:, t]])
        single = (labels[:, 0] == 1) & (labels[:, 3] == 0)
        antipodal = labels[:, 2] > 0
        hits = [single.sum(), antipodal.sum(), (~single & ~antipodal).sum()]
        np.testing.assert_array_equal(table["probability"][:, t], np.array(hits) / 500)
        for name, k in zip(OUTCOMES, hits, strict=True):
            theirs = binomtest(int(k), 500).proportion_ci(0.9, method="wilson")
            one = table.sel(outcome=name).isel(time=t)
            np.testing.assert_allclose([one["low"], one["high"]], theirs, rtol=1e-12, atol=1e-15)
        for clusters in range(1, model.tokens + 1):
            share = float(table["cluster_probability"].sel(clusters=clusters)[t])
            assert share == (labels[:, 0] == clusters).mean()
    assert table["time"].equals(samples["time"])
    assert table.attrs == {"samples": 500, "level": 0.9, "tolerance": 0.05}
    np.testing.assert_allclose(table["probability"].sum("outcome"), 1, rtol=1e-15)
    assert float(table["probability"].sel(outcome="antipodal pair")[-1]) > 0.05


def test_another_tolerance_from_the_same_overlaps():
    run = {"samples": 500, "seed": 1, "horizon": 3.0, "record": [3.0]}
    samples = lf.simulate(FOUR, **run, tolerance=0.01)
    wide = lf.outcomes(samples, tolerance=0.2)
    xr.testing.assert_identical(wide, lf.outcomes(lf.simulate(FOUR, **run, tolerance=0.2)))
    assert (wide["probability"] != lf.outcomes(samples)["probability"]).any()


@pytest.mark.parametrize(
    ("keep", "settings", "message"),
    [
        ("overlap", {"tolerance": 0.5}, "tolerance must lie in (0, 0.5); got 0.5."),
        ("overlap", {"tolerance": "a"}, "tolerance must be a number; got 'a'."),
        ("overlap", {"level": 95}, "level must lie in (0, 1); got 95.0."),
        ("outcome", {"tolerance": 0.01}, "These outcomes were read with tolerance 0.001; got 0.01. Simulate again,"),
        ("tokens", {}, "outcomes needs overlaps or outcomes of tokens on the sphere (simulate's keep)."),
    ],
)
def test_outcomes_refuses_bad_input(keep, settings, message):
    samples = lf.simulate(PAIR, samples=3, seed=0, horizon=1.0, keep=keep)
    with pytest.raises(InputError) as caught:
        lf.outcomes(samples, **settings)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("start", "outcome"), [(1.0, "single cluster"), (-1.0, "antipodal pair"), (0.0, "unresolved")])
def test_the_outcome_of_a_start(start, outcome):
    samples = lf.simulate(PAIR, start, samples=20, seed=0, horizon=1.0, record=[0.0], keep="outcome")
    assert float(lf.outcomes(samples).probability.sel(outcome=outcome)[0]) == 1
