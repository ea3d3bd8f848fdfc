"""Density estimates have the sampled law, integrate to one, and do not extend beyond ±1."""

import numpy as np
import pytest

from limitformer.plot import correlation_density, correlations, density, draw_densities, panels

MEAN, DEVIATION = 0.4, 0.9  # of artanh ρ; much of the law lies near +1
NORMAL = 1 / np.sqrt(2 * np.pi)


def sampled(seed, size):
    return np.random.Generator(np.random.Philox(seed)).standard_normal(size)


def bandwidth(size, deviation=1.0):
    return 1.06 * deviation * size**-0.2


def test_density_is_that_of_the_law():
    x = sampled(6, 20_000)
    grid = np.linspace(-4, 4, 81)
    normal = NORMAL * np.exp(-(grid**2) / 2)
    h = bandwidth(x.size)  # bias h² f″/2, variance f/(2√π n h), eight standard deviations at most
    noise = np.sqrt(normal / (2 * np.sqrt(np.pi) * x.size * h)) + 1e-4
    assert (abs(density(x, grid) - normal) < h**2 / 2 * 0.4 + 5 * noise).all()
    assert np.trapezoid(density(x, grid), grid) == pytest.approx(1, abs=0.01)


def test_density_is_the_sum_of_kernels():
    x, grid = sampled(9, 500), np.linspace(-3, 4, 50)
    quarters = np.quantile(x, [0.25, 0.75])
    h = 1.06 * x.size**-0.2 * min(x.std(), (quarters[1] - quarters[0]) / 1.34)
    plain = (NORMAL * np.exp(-(((grid[:, None] - x) / h) ** 2) / 2) / h).mean(1)
    np.testing.assert_allclose(density(x, grid), plain, rtol=1e-12, atol=1e-18)


def test_one_exploded_sample_does_not_flatten_the_density():
    x = sampled(7, 4_096)
    grid = np.linspace(-3, 3, 61)
    exploded = np.append(x, 1e43)
    np.testing.assert_allclose(density(exploded, grid), density(x, grid), atol=2e-3)


def test_histogram_has_the_height_of_the_density():
    """The area of the bars is the share of the samples on the grid."""
    x = np.append(np.random.Generator(np.random.Philox(8)).uniform(0, 1, 1_000), np.full(1_000, 9.0))
    _, (axes,) = panels(1)
    draw_densities(axes, x, x, np.linspace(0, 1, 101))
    bars = axes.patches[0].get_data()
    assert (bars.values * np.diff(bars.edges)).sum() == pytest.approx(0.5)


# Correlations in (−1, 1), with much of the law near the ends.


@pytest.fixture(scope="module")
def rho():
    return np.tanh(MEAN + DEVIATION * sampled(10, 20_000))


def law(grid):
    u = np.arctanh(grid)
    return NORMAL / DEVIATION * np.exp(-(((u - MEAN) / DEVIATION) ** 2) / 2) / (1 - grid**2)


def far_from_the_law(estimate, grid, size):
    """Whether an estimate differs from the law by more than bias and five standard errors, both in u = artanh ρ."""
    exact, stretch, h = law(grid) * (1 - grid**2), 1 - grid**2, bandwidth(size, DEVIATION)
    noise = np.sqrt(exact / (2 * np.sqrt(np.pi) * size * h)) + 2e-4
    bias = h**2 / 2 * 0.4 / DEVIATION**3
    return bool((abs(estimate * stretch - exact) > bias + 5 * noise).any())


def test_correlation_density_is_that_of_the_law(rho):
    grid = correlations()
    assert not far_from_the_law(correlation_density(rho, grid), grid, rho.size)


def test_wrong_twin_kernels_in_rho_miss_the_law(rho):
    grid = correlations()
    assert far_from_the_law(density(rho, grid), grid, rho.size)
    assert far_from_the_law(correlation_density(rho * 0.97, grid), grid, rho.size)


def test_correlation_density_is_not_cut(rho):
    grid = correlations()
    whole, cut = correlation_density(rho, grid), density(rho, grid)
    assert np.trapezoid(whole, grid) == pytest.approx(1, abs=1e-3)
    assert whole[[0, -1]].max() < 1e-9 < 0.1 * whole.max()
    assert np.trapezoid(cut, grid) < 0.98  # the missing part lies beyond +1
    assert cut[-1] > 0.1 * cut.max()


def test_collapsed_samples_have_no_density():
    x = np.tanh(sampled(11, 2_000))
    half = np.append(x, np.ones(2_000))
    grid = correlations()
    assert np.trapezoid(correlation_density(half, grid), grid) == pytest.approx(0.5, abs=0.01)
    assert (correlation_density(np.ones(9), grid) == 0).all()
