"""Lemma 1: tokens stay on the sphere; and overlaps keep their digits next to ±1."""

from functools import cache

import numpy as np
import pytest
from scipy import stats

import limitformer as lf
from sphere_naive import euler_maruyama, gaps_of, naive_chain, near_plus, normalised, tokens_at
from statistics_checks import ALPHA, assert_same_law

SAMPLES = 10_000
E = np.finfo(float).eps


# --- the sphere -------------------------------------------------------------------------------------------------------

SIZE = {"tokens": 3, "dim": 4, "beta": 2.0, "layers_per_unit_time": 100}
ON_THE_SPHERE = [
    lf.StochasticTransformer(**SIZE, sigma=1.5),
    lf.StochasticTransformer(**{**SIZE, "tokens": 5}, values="rademacher"),
    lf.HybridTransformer(**SIZE, epsilon=2.0),
]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("model", ON_THE_SPHERE, ids=lambda m: f"{type(m).__name__} {m.values}")
@pytest.mark.parametrize("of", [lambda m: m, lf.limit], ids=["chain", "limit"])
def test_tokens_stay_on_the_sphere(model, of):
    """[CT, Lemma 1] After 50,000 layers, or steps of the limit, lengths are 1 to 1e-12, and tokens have moved."""
    options = {"horizon": 500.0, "keep": "tokens", "samples": 9, "seed": 0}
    x = lf.simulate(of(model), tokens_at(1, model.tokens, model.dim), **options)["tokens"].values
    assert x.shape == (9, 101, model.tokens, model.dim)
    assert np.abs(np.linalg.norm(x, axis=-1) - 1).max() < 1e-12
    assert np.abs(x[:, -1] - x[:, 0]).max(axis=(1, 2)).min() > 0.1


@pytest.mark.parametrize("model", [ON_THE_SPHERE[0], ON_THE_SPHERE[2]], ids=["stochastic", "hybrid"])
def test_wrong_twin_plain_euler_leaves_the_sphere(model):
    """The increments of the SDE at the same dt."""
    start = tokens_at(1, 3, 4)
    y = euler_maruyama(model, start, 0.01, 10, 100, seed=1)
    assert np.abs(np.linalg.norm(y, axis=-1) - 1).max() > 1e-2
    x = lf.simulate(lf.limit(model), start, horizon=0.1, dt=0.01, keep="tokens", samples=100, seed=1)["tokens"].values
    assert np.abs(np.linalg.norm(x, axis=-1) - 1).max() < 4 * E


# --- next to ±1 -------------------------------------------------------------------------------------------------------


def near_minus(model, layers, rng):
    """Return log w_n/w_0 of two tokens near −1: a + b = 1 on the short sum, a − b = tanh β on the long difference."""
    c_small = model.sigma / model.layers_per_unit_time**0.5
    c_big, total = c_small * np.tanh(model.beta), np.zeros(SAMPLES)
    for _ in range(layers):
        big = np.zeros((SAMPLES, model.dim))
        big[:, 0] = 1
        small = np.roll(big, 1, axis=1)
        big += c_big * rng.standard_normal(big.shape)
        small += c_small * rng.standard_normal(big.shape)
        length = (big**2).sum(1)
        across = (small**2).sum(1) - (small * big).sum(1) ** 2 / length
        total += np.log(across / length)
    return total


def log_of(gaps):
    """Return log gap, −∞ for a gap of 0."""
    return np.log(gaps, out=np.full_like(gaps, -np.inf), where=gaps > 0)


def test_the_gap_keeps_its_digits_at_plus_one():
    """Gaps from 1e-12 down to 1e-34, twice the exponent of rounding; 1 − |z| (the wrong twin) has no digits."""
    model = lf.StochasticTransformer(tokens=2, dim=6, beta=1.0, layers_per_unit_time=20)
    z = 1 - 1e-12
    data = lf.simulate(model, z, samples=SAMPLES, seed=1, horizon=10.0, record=[10.0])
    gap, w = data["gap"].values[:, 0, 0], (1 - z) / (1 + z)
    exact = np.log(2 * w) + near_plus(model, 200, np.random.default_rng(2))
    assert np.median(gap) < 1e-30
    lost = log_of(1 - np.abs(data["overlap"].values[:, 0, 0]))
    assert_same_law({"log gap": np.log(gap)}, {"log gap": exact}, wrong={"log gap": lost})
    rate = np.log(gap).mean() - np.log(2 * w)
    assert -52 < rate < -45  # (dim − 1) σ² T = 50 for infinitely many layers


def test_the_gap_keeps_its_digits_at_minus_one():
    """The start is at 1e-6 from the antipode; exchanged coefficients of sum and difference (the wrong twin) fail."""
    model = lf.StochasticTransformer(tokens=2, dim=3, beta=1.2, layers_per_unit_time=20)
    start = np.array([[0.6, 0.8, 0.0], [-0.6, -0.8, 1e-6]])
    data = lf.simulate(model, normalised(start), samples=SAMPLES, seed=1, horizon=20.0, record=[0.0, 20.0])
    gap = data["gap"].values[:, :, 0]
    np.testing.assert_allclose(gap[:, 0], 5e-13, rtol=1e-9)
    exact, wrong = (np.log(5e-13) + f(model, 400, np.random.default_rng(3)) for f in (near_minus, near_plus))
    assert_same_law({"log gap": np.log(gap[:, 1])}, {"log gap": exact}, wrong={"log gap": wrong})
    lost = log_of(1 - np.abs(data["overlap"].values[:, 1, 0]))
    assert stats.ks_2samp(lost, exact, method="asymp").pvalue < ALPHA
    assert gap[:, 1].min() < 1e-30


COLLAPSING = lf.StochasticTransformer(tokens=2, dim=6, beta=1.0, layers_per_unit_time=10)
NEAR = np.array([[1.0, 0, 0, 0, 0, 0], [0.9, 0.19**0.5, 0, 0, 0, 0]])


@cache
def naive_gaps():
    """Return log gaps after 80 naive layers, also computed from differences."""
    return np.log(gaps_of(naive_chain(COLLAPSING, NEAR, 80, SAMPLES, seed=2))[:, 0])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("method", ["overlap", "gram", "coordinates"])
def test_all_methods_agree_on_gaps_far_below_rounding(method):
    """Gaps are near 1e-16, some below 1e-22, where 1 − |z| (the wrong twin) is zero or one rounding."""
    data = lf.simulate(COLLAPSING, NEAR, samples=SAMPLES, seed=1, horizon=8.0, record=[8.0], method=method)
    gap = data["gap"].values[:, 0, 0]
    assert np.median(gap) < 1e-15
    assert gap.min() < 1e-22
    lost = log_of(1 - np.abs(data["overlap"].values[:, 0, 0]))
    assert_same_law({"log gap": np.log(gap)}, {"log gap": naive_gaps()}, wrong={"log gap": lost})


@pytest.mark.parametrize("method", ["overlap", "gram", "coordinates"])
def test_overlap_and_gap_are_one_number(method):
    """|z| + gap = 1 to rounding, and their sign is that of ⟨x, y⟩."""
    model = lf.StochasticTransformer(tokens=2, dim=3, beta=2.0, layers_per_unit_time=10)
    data = lf.simulate(model, samples=3000, seed=1, horizon=3.0, method=method)
    z, gap = data["overlap"].values, data["gap"].values
    assert np.abs(np.abs(z) + gap - 1).max() < 4 * E
    assert gap.min() >= 0
    assert gap.max() <= 1
    assert z.min() < -0.9 < 0.9 < z.max()
