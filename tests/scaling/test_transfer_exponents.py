"""Exponents and their intervals on synthetic laws: coverage, curved laws, and wrong twins."""

import numpy as np
import pytest
from scipy.special import ndtri, stdtrit

from limitformer import InputError
from limitformer.scaling.exponents import exponent

REPETITIONS = 2000
SIZES = {3: [64, 256, 1024], 4: [64, 128, 512, 1024], 5: [32, 64, 256, 512, 2048]}
TRUE = 0.98
STANDARD_ERROR = (0.95 * 0.05 / REPETITIONS) ** 0.5


def lognormal(rng, sizes, samples, paired, curve=0.0):
    """Values (samples, sizes) n^(TRUE + curve·log n), with spreads that fall with the size."""
    x = np.log(np.asarray(sizes) / sizes[0])
    own = rng.standard_normal((samples, len(sizes))) * 0.4 * np.linspace(1.0, 0.3, len(sizes))
    common = rng.standard_normal((samples, 1)) * (0.8 + 0.1 * x) if paired else 0.0
    return np.exp(0.3 + TRUE * x + curve * x**2 + own + common)


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


@pytest.mark.parametrize("count", [3, 5])
def test_exponent_fits_powers_at_its_level(count):
    rng = np.random.default_rng(count)
    rejected = sum(
        exponent(lognormal(rng, SIZES[count], 6, False), SIZES[count]).fits is False for _ in range(REPETITIONS)
    )
    assert rejected / REPETITIONS < 0.01 + 4 * (0.01 * 0.99 / REPETITIONS) ** 0.5


def local_exponents(sizes, curve):
    """Exponents between neighbouring sizes: slopes of TRUE·x + curve·x²."""
    x = np.log(np.asarray(sizes) / sizes[0])
    return TRUE + curve * (x[1:] + x[:-1])


def test_exponent_of_curved_law_is_flagged_and_includes_all_local_exponents():
    sizes, curve = SIZES[5], -0.12
    truth, rng = local_exponents(sizes, curve), np.random.default_rng(3)
    flagged = covered = twin = 0
    for _ in range(REPETITIONS):
        values = lognormal(rng, sizes, 16, True, curve)
        result = exponent(values, sizes)
        flagged += result.fits is False
        covered += result.low <= truth.min() and truth.max() <= result.high
        each, _ = sample_slopes(values, sizes)
        half = stdtrit(15, 0.975) * each.std(ddof=1) / 4
        twin += each.mean() - half <= truth.min() and truth.max() <= each.mean() + half
    assert flagged > 0.99 * REPETITIONS
    assert covered > (0.95 - 4 * STANDARD_ERROR) * REPETITIONS
    assert twin == 0  # the wrong twin ignores the lack of fit


def test_exponent_of_exact_power_has_no_error_and_fits():
    sizes = np.array([3.0, 40.0, 500.0])
    result = exponent(np.tile(2.0 * sizes**-0.5, (3, 1)), sizes)
    assert result.value == pytest.approx(-0.5, abs=1e-12)
    assert result.high - result.low < 1e-6
    assert result.fits


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
