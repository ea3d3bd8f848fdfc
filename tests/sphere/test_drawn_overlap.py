"""The diffusion of two tokens with drawn queries, heads or a causal mask: its averages, the theorem
on antipodes, and lifetimes, against attention by its definition and simulation."""

from math import asin, exp, inf, pi

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import beta as euler_beta

import limitformer as lf
from limitformer.sphere.overlap.drawn import DrawnAttention, at_antipodes, both_at_once, x_first
from limitformer.sphere.overlap.position import at_overlap
from sphere_naive import tokens_at
from statistics_checks import STANDARD_ERRORS, assert_same_law, standard_errors

SAMPLES = 30_000


def stochastic(tokens=2, dim=4, **more):
    defaults = {"beta": 1.0, "layers_per_unit_time": 100, "query_key": "gaussian"}
    return lf.StochasticTransformer(**{**defaults, "tokens": tokens, "dim": dim, **more})


def pair_at(z, dim):
    first, second = np.eye(dim)[0], z * np.eye(dim)[0] + np.sqrt(1 - z * z) * np.eye(dim)[1]
    return np.array([first, second])


def drawn_bilinear(model, samples, seed):
    """QᵀK (samples, dim, dim), every entry drawn."""
    rng = np.random.default_rng(seed)
    if model.head_dim is None:
        return model.tau * rng.standard_normal((samples, model.dim, model.dim))
    query, key = rng.standard_normal((2, samples, model.head_dim, model.dim))
    return model.tau / model.head_dim**0.5 * np.swapaxes(query, -1, -2) @ key


def products(x, model, bilinear):
    """Return N₁ + N₂ and κ (samples, 2) of two tokens or clusters, from attention by its definition."""
    logits = model.beta * x @ bilinear @ x.T
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    if model.mask == "causal":
        weights = weights * np.tri(len(x))
    a = weights / weights.sum(-1, keepdims=True) @ x
    first, second = a[:, 0], a[:, -1]
    return np.stack([(first**2).sum(1) + (second**2).sum(1), (first * second).sum(1)], 1)


def coefficients(sums, kappa, z, model):
    """Return drift and variance of z from N₁ + N₂ and κ, in which they are linear (`overlap.motion`)."""
    drift = (1 - model.dim) / 2 * z * sums + (z * z + model.dim - 2) * kappa
    return model.sigma**2 * np.stack([drift, (1 - z * z) * (sums - 2 * z * kappa)], -1)


# Five models of each kind, each at four overlaps.
OVERLAPS = (-0.95, -0.4, 0.3, 0.8)
MODELS = [
    (dim, tau, head_dim, clusters, mask)
    for dim, tau in [(2, 0.7), (3, 2.0), (4, 5.0), (6, 1.0), (9, 12.0)]
    for head_dim, clusters, mask in [(None, (1, 1), "none"), (None, (3, 1), "none"), (None, (1, 1), "causal")]
] + [(3, 2.0, 2, (1, 1), "none"), (4, 0.7, 5, (1, 2), "none")]


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(("dim", "tau", "head_dim", "clusters", "mask"), MODELS)
def test_averages_equal_means_over_drawn_attention(dim, tau, head_dim, clusters, mask):
    model, other = (
        stochastic(sum(clusters), dim, tau=tau * factor, head_dim=head_dim, mask=mask, sigma=1.3) for factor in (1, 1.3)
    )
    bilinear, errors, wrong = drawn_bilinear(model, SAMPLES, seed=dim), [], []
    for z in OVERLAPS:
        x = np.repeat(pair_at(z, dim), clusters, axis=0)
        moments = coefficients(*products(x, model, bilinear).T, z, model)
        errors.append(standard_errors(moments, both_coefficients(model, clusters, z)))
        wrong.append(standard_errors(moments, both_coefficients(other, clusters, z)))
    assert np.abs(errors).max() < STANDARD_ERRORS
    assert np.abs(wrong).max() > STANDARD_ERRORS


def both_coefficients(model, clusters, z):
    diffusion = lf.overlap(model, clusters)
    return np.array([float(diffusion.drift(z)), float(diffusion.diffusion(z)) ** 2])


@pytest.mark.parametrize("more", [{"tau": 2.0}, {"tau": 0.5, "dim": 7}, {"tau": 2.0, "mask": "causal"}])
def test_both_variables_agree(more):
    """z = tanh U: dZ = (1 − z²)(μ − z g²) dt + (1 − z²) g dB for dU = μ dt + g dB; and the slope is −2μ/g²."""
    diffusion = lf.overlap(stochastic(**more))
    z = np.array([-0.9, -0.3, 0.0, 0.4, 0.95])
    u, rest = np.arctanh(z), 1 - z * z
    drift, noise = diffusion.artanh_drift(u), diffusion.artanh_diffusion(u)
    np.testing.assert_allclose(diffusion.drift(z), rest * (drift - z * noise**2), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(diffusion.diffusion(z), rest * noise, rtol=1e-9)
    slope = np.gradient(
        np.log(diffusion.scale_density(np.tanh(np.array([0.3, 0.301]))))
        + np.log(1 - np.tanh(np.array([0.3, 0.301])) ** 2),
        0.001,
    )[0]
    at = -2 * diffusion.artanh_drift(0.3005) / diffusion.artanh_diffusion(0.3005) ** 2
    assert slope == pytest.approx(float(at), rel=1e-4)


def test_limit_of_two_tokens_uses_the_averages():
    model = stochastic(2, 5, tau=2.0, head_dim=3, sigma=1.2)
    x = tokens_at(3, 2, 5)
    drawn = products(x, model, drawn_bilinear(model, SAMPLES, seed=1))
    noise = lf.limit(model).diffusion(x)
    drift = lf.limit(model).drift(x)
    sums = -2 * (drift * x).sum() / ((model.dim - 1) * model.sigma**2)
    along = np.einsum("kk->", noise[0, :, 1, :]) / model.sigma**2
    z = float(x[0] @ x[1])
    exact = np.array([sums, along / (model.dim - 2 + z * z)])
    assert np.abs(standard_errors(drawn, exact)).max() < STANDARD_ERRORS
    with pytest.raises(lf.NoLimitError, match="known only for two tokens"):
        lf.limit(stochastic(3, 5)).drift(tokens_at(3, 3, 5))
    with pytest.raises(lf.NoLimitError, match="attention is random"):
        lf.limit(model).attention(x)


def test_heads_with_shared_values_divide_the_averages():
    """A layer with one V sees ΣA_k/√h: C/h and q̃/h replace C and q̃, and K has one more factor h.

    The wrong twins are the averages of one head, and those without the factor h.
    """
    z, heads, model = -0.4, 3, stochastic(2, 4, tau=2.0)
    rng, x = np.random.default_rng(2), pair_at(z, 4)
    logits = 2.0 * x @ rng.standard_normal((SAMPLES, heads, 4, 4)) @ x.T
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    a = (weights / weights.sum(-1, keepdims=True) @ x).sum(1) / heads**0.5
    squares = np.stack([(a**2).sum((1, 2)), (a[:, 0] * a[:, 1]).sum(1)], 1)
    c, bend = (float(value) for value in DrawnAttention(model.logit_scale)(at_overlap(z)))

    def expected(n):
        return np.array([1 + z + (c + bend * (1 + z)) / n * (1 - z), (1 + z - c / n * (1 - z)) / 2])

    assert np.abs(standard_errors(squares, heads * expected(heads))).max() < STANDARD_ERRORS
    for twin in (heads * expected(1), expected(heads)):
        assert np.abs(standard_errors(squares, twin)).max() > 2 * STANDARD_ERRORS


@pytest.mark.parametrize(("wide", "mean", "deviation"), [(5.0, 0.0, 7.0), (30.0, -1.2, 12.0)])
def test_two_orders_of_integration_agree(wide, mean, deviation):
    np.testing.assert_allclose(x_first(wide, mean, deviation), both_at_once(wide, mean, deviation), rtol=1e-11)
    assert abs(x_first(wide, mean, deviation)[0] / x_first(wide * 1.01, mean, deviation)[0] - 1) > 1e-4


@pytest.mark.parametrize("b", [0.05, 4.0, 40.0])
def test_tables_equal_the_tabulated_averages(b):
    drawn = DrawnAttention(b)
    for z in (-0.999, -0.4, 0.6, 0.99):
        c, bend = drawn(at_overlap(z))
        less, spread = (x_first if b > 9 else both_at_once)(b * (1 - z), 0.0, b * (1 - z * z) ** 0.5)
        np.testing.assert_allclose([float(1 - c), float(bend) * (1 + z)], [less, spread], rtol=1e-9)


# The theorem: antipodes attract if and only if (d − 1)m > (d − 3)(1 + q).


def gaussian_mean(function):
    return quad(lambda s: function(s) * exp(-s * s / 2) / (2 * pi) ** 0.5, -12, 12, limit=400, points=[0.0])[0]


@pytest.mark.parametrize("b", [1e-3, 1.75, 100.0])
def test_averages_at_antipodes_equal_quadrature(b):
    m, q = at_antipodes(b)
    assert m == pytest.approx(gaussian_mean(lambda s: np.tanh(b * s) ** 2), rel=1e-8)
    assert q == pytest.approx(b * b * gaussian_mean(lambda s: np.cosh(min(abs(b * s), 300.0)) ** -4), rel=1e-6)


@pytest.mark.parametrize("head_dim", [None, 1, 6])
def test_antipodes_never_attract_from_dimension_four_on(head_dim):
    for b in np.geomspace(1e-3, 1e5, 25 if head_dim is None else 7):
        m, q = at_antipodes(float(b), head_dim)
        assert 1 + q > 3 * m


def test_both_bounds_of_the_proof_are_needed_and_hold():
    """1 + q − 3m is at least 1 − 2c², and above c(2b/3 + 3/b) − 2 ≥ 2√2 c − 2, where c = E s tanh(bs)."""
    signs, second = [], []
    for b in (0.2, 1.0, 1.74, 5.0, 50.0):
        m, q = at_antipodes(b)
        c = b * (1 - m)
        assert c == pytest.approx(gaussian_mean(lambda s, b=b: s * np.tanh(b * s)), rel=1e-7)
        second.append(c * (2 * b / 3 + 3 / b) - 2)
        assert 1 + q - 3 * m >= 1 - 2 * c * c - 1e-9
        assert 1 + q - 3 * m > second[-1] >= 8**0.5 * c - 2
        signs.append((1 - 2 * c * c > 0, 8**0.5 * c - 2 > 0))
        assert any(signs[-1])
    assert signs[1] == (True, False)  # as the page says of b = 1 and b = 5
    assert signs[3] == (False, True)
    assert min(second) == second[2] == pytest.approx(0.0528, abs=1e-4)  # positive before it is weakened


@pytest.mark.parametrize(
    ("dim", "b", "kind", "critical"),
    [
        (2, 3.0, "attracting", 0.0),
        (3, 0.01, "attracting", 0.0),
        (3, 50.0, "attracting", 0.0),
        (4, 1.75, "non-attracting", inf),
        (7, 9.0, "non-attracting", inf),
    ],
)
def test_antipodes_attract_only_in_two_and_three_dimensions(dim, b, kind, critical):
    diffusion = lf.overlap(stochastic(2, dim, tau=b))
    assert diffusion.boundaries.minus.kind == kind
    assert diffusion.boundaries.plus.kind == "attracting"
    assert diffusion.critical_beta == critical
    # The transition of [CT, Theorem 2], which has another answer in dimension 4.
    fixed = lf.overlap(stochastic(2, dim, beta=b, query_key=None))
    assert (fixed.boundaries.minus.kind == kind) == (dim < 4)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("dim", "b", "rate"), [(3, 1.0, -0.394), (4, 1.0, 0.141), (4, 1.75, 0.054), (5, 1.0, 0.676)])
def test_rate_at_antipodes_is_that_of_a_linearised_simulation(dim, b, rate):
    """D = X¹ + X², tiny, at a pair of antipodes: every matrix drawn in full."""
    diffusion = lf.overlap(stochastic(2, dim, tau=b))
    exact = float(diffusion.artanh_drift(-300.0))
    assert exact == pytest.approx(rate, abs=1e-3)
    rates = linearised_rates(dim, b, layers=500, per_unit=300, samples=6000, seed=4)
    assert abs(rates.mean() - exact) < STANDARD_ERRORS * rates.std() / len(rates) ** 0.5 + 3e-3
    colder = float(lf.overlap(stochastic(2, dim, tau=0.5 * b)).artanh_drift(-300.0))
    assert abs(rates.mean() - colder) > STANDARD_ERRORS * rates.std() / len(rates) ** 0.5 + 3e-3


def linearised_rates(dim, b, layers, per_unit, samples, seed):
    """Return d log|D|/dt (samples,) of D = X¹ + X² to first order.

    A(x) + A(−x + D) = D + b(1 − tanh²(b xᵀGx)) (DᵀGx) x.
    """
    rng = np.random.default_rng(seed)
    x = np.tile(np.eye(dim)[0], (samples, 1))
    d = np.tile(np.eye(dim)[1], (samples, 1))
    total = np.zeros(samples)
    for _ in range(layers):
        g, v = rng.standard_normal((2, samples, dim, dim))
        keyed = each_times(g, x)
        t = np.tanh(b * (keyed * x).sum(1))[:, None]
        of_sum = d + b * (1 - t**2) * (keyed * d).sum(1)[:, None] * x
        total += step(x, d, t, of_sum, v, per_unit)
    return total * per_unit / layers


def each_times(matrices, vectors):
    """Multiply many small matrices and vectors in half the time of `@`."""
    return np.einsum("sij,sj->si", matrices, vectors)


def step(x, d, t, of_sum, v, per_unit):
    """Move the pair in place; return the logarithm of the growth of D."""
    c = per_unit**-0.5
    y = x + c * t * each_times(v, x)
    e = d + c * each_times(v, of_sum)
    length = np.linalg.norm(y, axis=1, keepdims=True)
    x[:] = y / length
    e = (e - (e * x).sum(1, keepdims=True) * x) / length
    size = np.linalg.norm(e, axis=1)
    d[:] = e / size[:, None]
    return np.log(size)


# Causal masks: no antipodes, and how long they last.


@pytest.mark.parametrize(("beta", "lifetime"), [(1.0, 6.77), (2.0, 61.6)])
def test_lifetime_of_antipodes_behind_a_causal_mask(beta, lifetime):
    diffusion = lf.overlap(stochastic(2, 4, beta=beta, query_key=None, mask="causal"))
    assert diffusion.mean_hitting_time(0.9, start=-1.0) == pytest.approx(lifetime, rel=1e-3)
    assert diffusion.boundaries.minus.kind == "entrance"
    assert diffusion.antipodal_probability(start=-1.0) == 0


def test_mean_time_from_antipodes_equals_the_integral():
    """It is 6.77 at β = 1 behind a mask; the 4.12 of two tokens and one without a mask is rejected."""
    model = stochastic(2, 4, query_key=None, mask="causal")
    times = first_passages(model, 0.9, horizon=40.0)
    error = times.std() / len(times) ** 0.5
    assert abs(times.mean() - lf.overlap(model).mean_hitting_time(0.9, start=-1.0)) < STANDARD_ERRORS * error + 0.05
    clusters = lf.overlap(stochastic(3, 4, query_key=None), (2, 1))
    assert abs(times.mean() - clusters.mean_hitting_time(0.9, start=-1.0)) > STANDARD_ERRORS * error + 0.05


def first_passages(model, target, horizon):
    """Return the first times above the target from −1; a replica that never arrives counts to the horizon."""
    paths = lf.simulate(
        lf.limit(model),
        -1.0,
        samples=1500,
        seed=6,
        horizon=horizon,
        record=np.linspace(0, horizon, 1501),
        progress=False,
    )
    above = paths.overlap.values[:, :, 0] > target
    assert above.any(1).mean() > 0.99
    return paths.time.values[np.where(above.any(1), above.argmax(1), -1)]


@pytest.mark.parametrize(("dim", "target"), [(2, 0.0), (7, -0.3)])
def test_lifetime_behind_a_causal_mask_has_its_leading_constant(dim, target):
    ratios = [
        diffusion.mean_hitting_time(target, start=-1.0) / diffusion.lifetime_asymptote(target)
        for beta in (10.0, 20.0, 60.0)
        for diffusion in [lf.overlap(stochastic(2, dim, beta=beta, query_key=None, mask="causal", sigma=0.8))]
    ]
    assert abs(ratios[-1] - 1) < min(1e-3, abs(ratios[0] - 1) + 1e-6)
    by_hand = (pi / 2 + asin(target)) * euler_beta(0.5, (dim - 1) / 2) / 8**0.5 * exp(20) / 0.64
    assert lf.overlap(stochastic(2, dim, beta=10.0, query_key=None, mask="causal", sigma=0.8)).lifetime_asymptote(
        target
    ) == pytest.approx(by_hand)


@pytest.mark.slow
def test_probability_in_three_dimensions_against_simulated_tokens():
    """P(antipodal) of the limit, also in coordinates; the probability of fixed queries is rejected."""
    for tau, method in ((1.0, "coordinates"), (2.0, "overlap"), (4.0, "overlap")):
        model = stochastic(2, 3, tau=tau)
        exact = float(lf.overlap(model).antipodal_probability(start=0.0))
        paths = lf.simulate(lf.limit(model), 0.0, samples=2000, seed=3, horizon=16.0, method=method, progress=False)
        share, error = (paths.overlap.values[:, -1] < 0).mean(), (exact * (1 - exact) / 2000) ** 0.5
        assert abs(share - exact) < STANDARD_ERRORS * error
    fixed = float(lf.overlap(stochastic(2, 3, beta=4.0, query_key=None)).antipodal_probability(start=0.0))
    assert abs(share - fixed) > STANDARD_ERRORS * error


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("dim", "layers", "horizon", "start"), [(3, 4, 5.0, 0.0), (5, 40, 1.0, -0.99)])
def test_steps_of_the_limit_average_the_drawn_attention(dim, layers, horizon, start):
    """At b = 12 a layer is far from the limit unless L is much larger than b²; steps of the limit are not."""
    model = stochastic(2, dim, tau=12.0, layers_per_unit_time=layers)
    law = lf.overlap(model).density([horizon], start=start)
    share = np.heaviside(-law.artanh_overlap.values, 0.5)  # of a cell that lies below 0
    below = float(law.below[0]) + float((law.density[0].values * share).sum()) * law.attrs["spacing"]
    options = {"samples": 2500, "seed": 2, "horizon": horizon, "record": [horizon], "progress": False}
    paths, chain = (lf.simulate(each, start, **options).overlap.values for each in (lf.limit(model), model))
    error = (below * (1 - below) / 2500) ** 0.5
    assert abs((paths < 0).mean() - below) < STANDARD_ERRORS * error
    assert abs((chain < 0).mean() - below) > STANDARD_ERRORS * error


def test_two_routes_of_the_limit_agree():
    """Averaged attention against attention drawn in steps that resolve it."""
    model = stochastic(2, 3, tau=3.0, head_dim=4)
    options = {"samples": 2500, "horizon": 1.5, "record": [1.5], "progress": False}
    averaged, drawn = (
        {"z": lf.simulate(lf.limit(model), -0.6, method=method, seed=3, **options).overlap.values.ravel()}
        for method in ("overlap", "coordinates")
    )
    other = lf.simulate(lf.limit(stochastic(2, 3, tau=1.0)), -0.6, seed=4, **options)
    assert_same_law(averaged, drawn, {"z": other.overlap.values.ravel()})


@pytest.mark.parametrize(
    ("fields", "clusters", "says"),
    [
        ({"attention": "unnormalized"}, None, "softmax attention only"),
        ({"mask": "causal", "tokens": 3}, (2, 1), "Behind a causal mask"),
    ],
)
def test_overlap_refuses_models_without_known_coefficients(fields, clusters, says):
    with pytest.raises(lf.NoLimitError, match=says):
        lf.overlap(stochastic(**fields), clusters)


def test_lifetime_asymptote_refuses_lifetimes_that_do_not_grow():
    with pytest.raises(lf.InputError, match="drawn queries"):
        lf.overlap(stochastic(3, 4), (2, 1)).lifetime_asymptote(0.5)
    with pytest.raises(lf.InputError, match="only for beta > 0"):
        lf.overlap(stochastic(2, 4, beta=-2.0, query_key=None, mask="causal")).lifetime_asymptote(0.5)
