"""Theorem 1 and Lemmas 2 and 3 of [CT]: layers converge to the SDE that `lf.limit` gives."""

from dataclasses import replace
from functools import cache
from importlib import import_module

import numpy as np
import pytest
from scipy.integrate import solve_ivp

import limitformer as lf
from sphere_naive import draw, euler_maruyama, naive_attention, naive_layer, tokens_at
from statistics_checks import STANDARD_ERRORS, assert_same_law, standard_errors

SAMPLES = 10_000
SIZE = {"beta": 1.7, "layers_per_unit_time": 1}
PAIR = 1.3 * np.random.default_rng(5).standard_normal((2, 3, 4)) / 2
MODELS = {
    "softmax": lf.StochasticTransformer(tokens=3, dim=4, sigma=1.3, **SIZE),
    "unnormalized": lf.StochasticTransformer(tokens=4, dim=3, sigma=0.8, attention="unnormalized", **SIZE),
    "Q and K": lf.StochasticTransformer(tokens=3, dim=4, sigma=1.3, query_key=PAIR, **SIZE),
    "Q and K, unnormalized": lf.StochasticTransformer(
        tokens=2, dim=4, query_key=PAIR, attention="unnormalized", **SIZE
    ),
    "hybrid": lf.HybridTransformer(tokens=3, dim=4, epsilon=0.7, **SIZE),
    "hybrid, unnormalized": lf.HybridTransformer(tokens=4, dim=3, epsilon=0.7, attention="unnormalized", **SIZE),
    "hybrid, Q and K": lf.HybridTransformer(tokens=3, dim=4, epsilon=1.3, query_key=PAIR, **SIZE),
}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))


def start_of(model):
    return tokens_at(3, model.tokens, model.dim)


def directions(model):
    """Return the unit matrices E_kl (d², d, d), or the number (1,), in which values vary."""
    if isinstance(model, lf.HybridTransformer):
        return np.ones(1)
    return np.eye(model.dim**2).reshape(-1, model.dim, model.dim)


def one_layer_derivatives(model):
    """Return first and second derivatives (directions, N, d) of a layer by the values, without the hybrid's 1/L."""
    x, h = start_of(model), 1e-3
    if isinstance(model, lf.HybridTransformer):  # X + ω A with ω = ε v alone: so many layers that 1/L is nothing
        many = 10**18
        model, unit = replace(model, layers_per_unit_time=many), many**0.5 * directions(model)
        x = x[None]
    else:
        unit = directions(model)
    steps = np.array([naive_layer(x, model, k * h * unit) for k in (-2, -1, 0, 1, 2)])
    first = np.tensordot([1, -8, 0, 8, -1], steps, 1) / (12 * h)
    second = np.tensordot([-1, 16, -30, 16, -1], steps, 1) / (12 * h * h)
    return first, second


def tangent_of(y, a):
    return a - (y * a).sum(1, keepdims=True) * y


@every_model
def test_drift_is_the_mean_step(model):
    """Half the sum of second derivatives by the values, and P⊥A for the 1/L of the hybrid: to 1e-8."""
    y, (_, second) = start_of(model), one_layer_derivatives(model)
    a, expected = naive_attention(y, model), second.sum(0) / 2
    hybrid = isinstance(model, lf.HybridTransformer)
    expected = expected + tangent_of(y, a) if hybrid else expected
    drift = lf.limit(model).drift(y)
    assert np.abs(drift - expected).max() < 1e-8
    wrong = tangent_of(y, a) if hybrid else drift * model.dim / (model.dim - 1)  # F left out; dim for dim − 1
    assert np.abs(wrong - expected).max() > 1e-2


@every_model
def test_diffusion_is_the_covariance_of_the_step(model):
    """Products of first derivatives, summed over the values: to 1e-8; the wrong twin has no projection."""
    first, _ = one_layer_derivatives(model)
    y = start_of(model)
    diffusion = lf.limit(model).diffusion(y)
    assert diffusion.shape == (model.tokens, model.dim) * 2
    assert np.abs(diffusion - np.einsum("mik,mjl->ikjl", first, first)).max() < 1e-8
    a = naive_attention(y, model)
    if isinstance(model, lf.HybridTransformer):
        wrong = model.epsilon**2 * np.einsum("ik,jl->ikjl", a, a)
    else:
        wrong = model.sigma**2 * np.einsum("ij,kl->ikjl", a @ a.T, np.eye(model.dim))
    assert np.abs(wrong - diffusion).max() > 1e-2


@every_model
def test_attention_of_the_limit(model):
    y = start_of(model)
    np.testing.assert_allclose(lf.limit(model).attention(y), naive_attention(y, model), rtol=1e-14, atol=1e-15)


@every_model
def test_the_sde_stays_on_the_sphere(model):
    """Itô: d|Y|² = 2⟨Y, drift⟩ + tr diffusion = 0, and no noise along Y [CT, Lemma 1]; the drift alone would leave."""
    y, limit = start_of(model), lf.limit(model)
    drift, diffusion = limit.drift(y), limit.diffusion(y)
    radial = 2 * (y * drift).sum(1)
    spread = np.einsum("ikik->i", diffusion)
    assert np.abs(radial + spread).max() < 1e-14
    assert radial.min() < -1e-3
    assert np.abs(np.einsum("ik,ikjl->ijl", y, diffusion)).max() < 1e-14


@pytest.mark.parametrize(("name", "law"), [("softmax", "uniform"), ("hybrid, unnormalized", "rademacher")])
def test_one_naive_layer_has_the_moments_of_the_limit(name, law):
    """L times mean and covariance of one layer at L = 10⁴, with the mean of V and −V together."""
    layers, size = 10_000, 100_000
    model = replace(MODELS[name], layers_per_unit_time=layers, values=law)
    y, rng = start_of(model), np.random.default_rng(1)
    hybrid = isinstance(model, lf.HybridTransformer)
    value = draw(law, rng, (size,) if hybrid else (size, model.dim, model.dim))
    up, down = (naive_layer(np.broadcast_to(y, (size, *y.shape)), model, s * value) - y for s in (1, -1))
    drift = lf.limit(model).drift(y)
    means = layers * (up + down) / 2
    wrong = tangent_of(y, naive_attention(y, model)) if hybrid else drift * model.dim / (model.dim - 1)
    assert_moments(means.reshape(size, -1), drift.ravel(), wrong.ravel())
    flat = up.reshape(size, -1) * layers**0.5
    diffusion = lf.limit(model).diffusion(y).reshape((flat.shape[1],) * 2)
    one, other = np.triu_indices(flat.shape[1])
    assert_moments(flat[:, one] * flat[:, other], diffusion[one, other], 1.1 * diffusion[one, other])


def assert_moments(samples, right, wrong):
    """Compare means (k,) to five standard errors plus a bias of order 1/L; the wrong means must fail."""
    error = 5 * samples.std(0) / len(samples) ** 0.5 + 5e-4
    assert (np.abs(samples.mean(0) - right) < error).all()
    assert (np.abs(samples.mean(0) - wrong) > error).any()


# --- paths ------------------------------------------------------------------------------------------------------------

START = tokens_at(1, 3, 3)
THREE = lf.StochasticTransformer(tokens=3, dim=3, beta=1.7, layers_per_unit_time=400, sigma=1.3)
TWO = replace(THREE, tokens=2)
HYBRID = lf.HybridTransformer(tokens=3, dim=3, beta=1.7, layers_per_unit_time=400, epsilon=1.1)


def overlaps(model, start, seed=1, horizon=0.5, **options):
    data = lf.simulate(model, start, samples=SAMPLES, seed=seed, horizon=horizon, record=[horizon], **options)
    z = data["overlap"].values[:, 0]
    return {f"z{k}": z[:, k] for k in range(z.shape[1])} | {"log gap": np.log(data["gap"].values[:, 0].min(1))}


@cache
def limit_of(model):
    """Return overlaps of the SDE in steps of 1/400."""
    return overlaps(lf.limit(model), START[: model.tokens], seed=2, dt=1 / 400)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("model", "law"),
    [(TWO, "gaussian"), (THREE, "uniform"), (THREE, "rademacher"), (THREE, "truncated normal")],
    ids=lambda x: getattr(x, "tokens", x),
)
def test_every_law_of_the_values_has_one_limit(model, law):
    """[CT, Theorem 1] 400 layers per unit of time against the SDE; values that are a tenth larger are rejected."""
    start, limit = START[: model.tokens], limit_of(model)
    one = overlaps(replace(model, values=law), start)
    assert_same_law(one, limit, wrong=overlaps(replace(model, sigma=1.1 * model.sigma, values=law), start))


@pytest.mark.parametrize("law", ["gaussian", "rademacher"])
def test_every_law_of_the_noise_has_one_limit(law):
    """[CT, Lemma 3] The hybrid model has one limit too."""
    limit = limit_of(HYBRID)
    one, wrong = (overlaps(replace(HYBRID, values=law, epsilon=e), START) for e in (1.1, 1.1 * 1.15))
    assert_same_law(one, limit, wrong=wrong)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("model", [replace(THREE, sigma=0.8), HYBRID], ids=["stochastic", "hybrid"])
def test_limit_equals_euler_maruyama_of_the_paper(model):
    """⟨Yⁱ, Yʲ⟩ against Euler-Maruyama of [CT, eqs 6, 8]; half of the second drift is rejected."""
    start = tokens_at(8, 3, 3)  # no overlap near ±1, where leaving the sphere would be seen
    first, second = np.triu_indices(3, 1)

    def euler(drift):
        y = euler_maruyama(model, start, 1 / 500, 100, SAMPLES, seed=3, drift=drift)
        return {f"z{k}": (y[:, i] * y[:, j]).sum(-1) for k, (i, j) in enumerate(zip(first, second, strict=True))}

    limit = overlaps(lf.limit(model), start, horizon=0.2, dt=1 / 500)
    del limit["log gap"]
    assert_same_law(euler(1.0), limit, wrong=euler(0.5))


def test_limit_depends_neither_on_layers_nor_on_law():
    """Models that differ only in these have the same bits."""
    model = replace(THREE, dim=5)
    start = tokens_at(1, 3, 5)
    run = {"samples": 20, "seed": 3, "horizon": 0.5, "dt": 0.02}
    one = lf.simulate(lf.limit(model), start, **run)
    other = lf.simulate(lf.limit(replace(model, layers_per_unit_time=7, values="rademacher")), start, **run)
    wrong = lf.simulate(lf.limit(replace(model, sigma=1.4)), start, **run)
    assert one["overlap"].values.tobytes() == other["overlap"].values.tobytes()
    assert one["overlap"].values.tobytes() != wrong["overlap"].values.tobytes()


def test_a_step_of_the_limit_is_a_layer():
    """L = 1/dt layers with Gaussian values and the limit's steps: one law, other random numbers."""
    chain = overlaps(replace(THREE, layers_per_unit_time=20), START)
    limit = overlaps(lf.limit(THREE), START, dt=0.05)
    assert_same_law(chain, limit, wrong=overlaps(replace(THREE, layers_per_unit_time=2), START))
    assert not np.isin(chain["z0"], limit["z0"]).any()


# --- ε = 0 ------------------------------------------------------------------------------------------------------------


def flow(model, start, time):
    """Return tokens of dY = P⊥A dt [CT, Lemma 2] at `time`."""

    def right(_, y):
        y = y.reshape(start.shape)
        return tangent_of(y, naive_attention(y, model)).ravel()

    return solve_ivp(right, (0, time), start.ravel(), rtol=1e-11, atol=1e-12).y[:, -1].reshape(start.shape)


@pytest.mark.parametrize(
    ("name", "of"), [("hybrid", "limit"), ("hybrid, unnormalized", "chain"), ("hybrid, Q and K", "limit")]
)
def test_without_noise_layers_converge_to_the_flow(name, of):
    """The error is of order 1/L: half at twice the layers, so extrapolation removes it."""
    model = replace(MODELS[name], epsilon=0.0)
    start = start_of(model)
    exact, ends = flow(model, start, 1.0), []
    for layers in (200, 400):
        options = {} if of == "chain" else {"dt": 1 / layers}
        process = replace(model, layers_per_unit_time=layers)
        process = process if of == "chain" else lf.limit(model)
        data = lf.simulate(process, start, samples=1, seed=0, horizon=1.0, record=[1.0], keep="tokens", **options)
        ends.append(data["tokens"].values[0, 0])
    first, second = (np.abs(end - exact).max() for end in ends)
    assert 1.9 < first / second < 2.1
    assert np.abs(2 * ends[1] - ends[0] - exact).max() < 0.02 * second


# ---------------------------------------------------------------- the default step

POINTS = [
    *(
        lf.StochasticTransformer(tokens=2, dim=dim, beta=beta, attention=attention, layers_per_unit_time=100)
        for dim, beta, attention in [(3, 4.0, "softmax"), (16, 1.5, "unnormalized"), (64, 3.0, "softmax")]
    ),
    lf.StochasticTransformer(tokens=2, dim=128, beta=4.0, attention="unnormalized", layers_per_unit_time=100),
    lf.HybridTransformer(tokens=2, dim=3, beta=3.0, epsilon=1.5, attention="unnormalized", layers_per_unit_time=100),
    lf.HybridTransformer(tokens=2, dim=128, beta=4.0, epsilon=2.0, layers_per_unit_time=100),
]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("model", POINTS, ids=lambda m: f"{type(m).__name__} {m.dim} {m.beta} {m.attention}")
def test_the_default_step_resolves_the_model(model, monkeypatch):
    """E z and E z² from z = 0.3 against the exact law; two long steps are rejected."""
    rate = lf.limit(model).fastest_rate
    horizon = (2.0 if isinstance(model, lf.StochasticTransformer) else 3.0) / rate
    run = {"samples": 20_000, "seed": 1, "progress": False}
    data = lf.simulate(lf.limit(model), 0.3, **run, horizon=horizon, record=[horizon])
    law = lf.overlap(model).density([horizon], start=0.3, steps=200)
    z, weights = np.tanh(law["artanh_overlap"].values), law["density"].values[0] * law.attrs["spacing"]
    ends = float(law["above"].values[0]), float(law["below"].values[0])
    monkeypatch.setattr(import_module("limitformer.sphere.chain"), "COARSEST", np.inf)
    coarse = lf.simulate(lf.limit(model), 0.3, **run, horizon=horizon, record=[horizon], dt=horizon / 2)
    errors = {}
    for name, paths in (("default", data), ("two steps", coarse)):
        last = paths["overlap"].values[:, -1, 0]
        exact = (weights * z).sum() + ends[0] - ends[1], (weights * z**2).sum() + sum(ends)
        errors[name] = np.abs([standard_errors(last, exact[0]), standard_errors(last**2, exact[1])]).max()
    assert errors["default"] < STANDARD_ERRORS
    assert errors["two steps"] > STANDARD_ERRORS


def test_too_long_steps_are_refused():
    """The message has the rate, the longest allowed step and the default."""
    model = lf.limit(POINTS[4])
    needed = rf"move at a rate of {model.fastest_rate:.3g}: it must be at most .*; got 0.01. The default takes"
    with pytest.raises(lf.InputError, match=needed):
        lf.simulate(model, samples=1, seed=0, horizon=1.0, dt=0.01)
    longest = 0.5 / model.fastest_rate
    assert lf.simulate(model, samples=1, seed=0, horizon=10 * longest, dt=longest * 0.999).attrs["dt"] < longest
