"""Verdicts and predictions of `transfer` on synthetic numbers: error rates, and wrong twins that have other rates."""

import numpy as np
import pytest
from scipy.special import stdtrit

from limitformer.scaling import measures
from limitformer.scaling.exponents import band, exponent, weights_at
from limitformer.scaling.transfer import Transfer

SIZES = (64, 128, 256)
REPETITIONS = 500


def result_of(values, sizes=SIZES, target=None):
    """Return the result of measures (measure, network, size)."""
    every = {f"effect of {k}, first step": each for k, each in enumerate(values)}
    exponents = {name: exponent(each, sizes) for name, each in every.items()}
    return Transfer("width", sizes, "mup", "sgd", {}, every, exponents, target=target)


def size_free(rng, networks, spread):
    """Return nine measures that do not depend on the size; `spread` is that of a network's exponent."""
    slopes = spread * rng.standard_normal((9, networks, 1))
    return np.exp(slopes * np.log(np.array(SIZES) / SIZES[0]))


def by_own_intervals(values):
    """Return whether the earlier rule says that a rate does not transfer."""
    each = [exponent(value, SIZES) for value in values]
    return any(one.low > measures.GROWS or one.high < -measures.GROWS for one in each)


@pytest.mark.parametrize("networks", [4, 8])
def test_rate_without_effects_of_the_size_rarely_fails_to_transfer(networks):
    rng = np.random.default_rng(networks)
    for spread in (0.4, 0.8):
        wrong = sum(result_of(size_free(rng, networks, spread)).transfers is False for _ in range(REPETITIONS))
        assert wrong <= 0.05 * REPETITIONS


def test_wrong_twin_of_the_earlier_rule_fails_too_often():
    """A referee counted 14.6 % for two networks at this spread."""
    rng = np.random.default_rng(2)
    wrong = sum(by_own_intervals(size_free(rng, 2, 0.4)) for _ in range(REPETITIONS)) / REPETITIONS
    assert wrong == pytest.approx(0.146, abs=4 * (0.146 * 0.854 / REPETITIONS) ** 0.5)
    assert result_of(size_free(rng, 2, 0.4)).transfers is None  # two networks decide nothing


def test_rate_with_one_effect_at_the_threshold_rarely_transfers():
    """All intervals must be within the threshold, so that each may have its own level."""
    rng, says = np.random.default_rng(1), 0
    for _ in range(REPETITIONS):
        values = size_free(rng, 4, 0.03)
        values[4] *= (np.array(SIZES) / SIZES[0]) ** measures.FREE
        says += result_of(values).transfers is True
    assert 0 < says <= 0.025 * REPETITIONS + 4 * (0.025 * 0.975 * REPETITIONS) ** 0.5


def law(n, a=0.8, b=2.0):
    return 0.1 * n**a * (1 + b / np.sqrt(n))


def coverage(weights, count):
    """Return how often bands of nine measures at four times the width hold together."""
    rng, hits, sizes = np.random.default_rng(7), 0, np.array([64.0, 128.0, 256.0])
    for _ in range(REPETITIONS):
        own = 0.01 * rng.standard_normal((9, 8, 3)) + 0.01 * rng.standard_normal((9, 8, 1))  # of the seed
        bands = [band((np.log(law(sizes)) + each) @ weights, count) for each in own]
        hits += all(each.low <= np.log(law(1024.0)) <= each.high for each in bands)
    return hits / REPETITIONS


def test_predictions_at_a_target_have_bands_that_hold_together():
    error = (0.95 * 0.05 / REPETITIONS) ** 0.5
    assert coverage(weights_at(SIZES, 1024), 9) > 0.95 - 4 * error
    assert coverage(weights_at(SIZES, 1024), 1) < 0.8  # wrong twin: each band for itself


def test_wrong_twin_pure_power_misses_the_target():
    """Its extrapolated exponent keeps the correction of narrow networks."""
    x = np.log(SIZES) - np.log(SIZES).mean()
    weights = 1 / 3 + (np.log(1024) - np.log(SIZES).mean()) * x / (x @ x)
    assert coverage(weights, 9) < 0.05


@pytest.mark.parametrize(("sizes", "terms"), [((64, 256), 2), ((64, 128, 256), 3), ((64, 96, 128, 256), 3)])
def test_weights_are_exact_for_the_logs_of_the_law(sizes, terms):
    """The route of least squares against the law itself: two sizes know its power alone, three its correction."""
    n = np.array(sizes, float)
    for correction in [0.0] if terms == 2 else [0.0, 2.0]:
        logs = 0.3 + 0.7 * np.log(n) + correction / np.sqrt(n)
        at = 0.3 + 0.7 * np.log(1024) + correction / 32
        assert logs @ weights_at(sizes, 1024) == pytest.approx(at, abs=1e-10)
    np.testing.assert_array_equal(weights_at(sizes, 256), np.eye(len(sizes))[-1])


def test_number_of_networks_that_decide_is_the_first_that_would():
    """Rows with the exponents −s and s keep their spread however many there are."""
    spread, name = 0.3, "effect of 0, first step"
    few = result_of(np.exp(spread * np.array([-1, 1, -1, 1])[:, None] * np.log(np.array(SIZES) / 64))[None])
    assert few.transfers is None
    needed, own = few.networks_needed, few.powers(name).std(ddof=1)
    assert stdtrit(needed - 1, 0.975) * own / needed**0.5 <= measures.FREE
    assert stdtrit(needed - 2, 0.975) * own / (needed - 1) ** 0.5 > measures.FREE
    assert f"Nearest: {needed} networks at each width, if they scatter as these." in few.conclusion


def test_growth_over_the_sizes_is_the_ratio_of_the_ends():
    """Without a target no law is fitted; with one, the effect and its growth are those of the law."""
    values = np.tile(law(np.array(SIZES, float)), (4, 1))[None]
    name = "effect of 0, first step"
    measured, predicted = result_of(values), result_of(values, target=1024)
    assert measured.growth(name).value == pytest.approx(law(256) / law(64), rel=1e-9)
    assert predicted.prediction(name).value == pytest.approx(law(1024), rel=5e-3)  # log(1 + b/√n) to first order
    assert predicted.growth(name).value == pytest.approx(law(1024) / law(64), rel=5e-3)
    assert "from width 64 to 1,024, as these sizes predict" in predicted.conclusion
    assert predicted.cells()[0][-2] == "at 1,024, predicted"
