"""Exponents and their intervals on synthetic laws: coverage, and wrong twins."""

import numpy as np
import pytest
from scipy.special import ndtri, stdtrit

from limitformer import InputError
from limitformer.scaling.exponents import exponent

REPETITIONS = 2000
SIZES = {3: [64, 256, 1024], 4: [64, 128, 512, 1024], 5: [32, 64, 256, 512, 2048]}
TRUE = 0.98
STANDARD_ERROR = (0.95 * 0.05 / REPETITIONS) ** 0.5


def lognormal(rng, sizes, samples, paired):
    """Values (samples, sizes) n^TRUE, with spreads that fall with the size."""
    x = np.log(np.asarray(sizes) / sizes[0])
    own = rng.standard_normal((samples, len(sizes))) * 0.4 * np.linspace(1.0, 0.3, len(sizes))
    common = rng.standard_normal((samples, 1)) * (0.8 + 0.1 * x) if paired else 0.0
    return np.exp(0.3 + TRUE * x + own + common)


def coverage(sizes, samples, paired, low_and_high):
    rng = np.random.default_rng([len(sizes), samples, paired])
    hits = 0
    for _ in range(REPETITIONS):
        low, high = low_and_high(lognormal(rng, sizes, samples, paired), sizes)
        hits += low <= TRUE <= high
    return hits / REPETITIONS


def own(values, sizes):
    result = exponent(values, sizes)
    return result.low, result.high


def sample_slopes(values, sizes):
    x = np.log(sizes) - np.log(sizes).mean()
    return np.log(values) @ x / (x @ x), x


def with_normal_quantile(values, sizes):
    each, _ = sample_slopes(values, sizes)
    half = ndtri(0.975) * each.std(ddof=1) / len(each) ** 0.5
    return each.mean() - half, each.mean() + half


def with_every_value_apart(values, sizes):
    """Errors of sizes that share no seed."""
    each, x = sample_slopes(values, sizes)
    variances = np.log(values).var(axis=0, ddof=1) / len(each)
    half = stdtrit(len(each) - 1, 0.975) * (variances @ (x / (x @ x)) ** 2) ** 0.5
    return each.mean() - half, each.mean() + half


@pytest.mark.parametrize(("count", "samples", "paired"), [(3, 4, False), (4, 8, True), (5, 3, False), (5, 3, True)])
def test_exponent_interval_covers_the_true_exponent(count, samples, paired):
    share = coverage(SIZES[count], samples, paired, own)
    assert abs(share - 0.95) < 4 * STANDARD_ERROR


def test_wrong_twin_normal_quantile_covers_too_rarely():
    assert coverage(SIZES[3], 4, False, with_normal_quantile) < 0.95 - 8 * STANDARD_ERROR


def test_wrong_twin_unpaired_errors_of_paired_sizes_cover_too_often():
    assert coverage(SIZES[4], 8, True, with_every_value_apart) > 0.95 + 8 * STANDARD_ERROR


def test_exponent_of_exact_power_has_no_error():
    sizes = np.array([3.0, 40.0, 500.0])
    result = exponent(np.tile(2.0 * sizes**-0.5, (3, 1)), sizes)
    assert result.value == pytest.approx(-0.5, abs=1e-12)
    assert result.high - result.low < 1e-6


def test_exponent_of_one_sample_at_two_sizes_has_unknown_error():
    result = exponent([[1.0, 2.0]], [10, 20])
    assert result.value == pytest.approx(1.0)
    assert (result.low, result.high) == (-np.inf, np.inf)
    assert str(result) == "1.00, of unknown error"


def test_exponent_leaves_out_samples_with_missing_values():
    values = lognormal(np.random.default_rng(0), SIZES[3], 5, False)
    missing = np.vstack([values, [1.0, np.nan, 1.0]])
    assert exponent(missing, SIZES[3]) == exponent(values, SIZES[3])


@pytest.mark.parametrize(
    ("values", "sizes", "message"),
    [
        ([[1.0, 0.0]], [1, 2], "loss must be positive and finite; got 0 at size 2"),
        ([[1.0, np.inf]], [1, 2], "loss must be positive and finite; got inf at size 2"),
        ([[1.0, 2.0]], [1, 1], "two or more different positive numbers"),
        ([[1.0]], [1], "two or more different positive numbers"),
        ([1.0, 2.0], [1, 2], r"loss must be \(samples, 2\)"),
        ([[np.nan, 2.0]], [1, 2], "no sample with a value at every size"),
    ],
)
def test_exponent_refuses_values_and_sizes(values, sizes, message):
    with pytest.raises(InputError, match=message):
        exponent(values, sizes, "loss")
