"""The theorems of docs/equal-clusters.md: checks of the exponents and maps of their proofs, then the chain itself."""

from itertools import combinations

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import digamma, exp1

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.sphere.overlap.thresholds import critical_beta, exponents, exponents_of
from sphere_naive import naive_attention, naive_layer, normalised, tokens_at
from statistics_checks import STANDARD_ERRORS

CASES = [(3, 0.5, 1, "softmax"), (2, 0.3, 0.1, "softmax"), (4, 0.7, 10, "unnormalized")]


def model_of(tokens, beta, dim=4, layers=1, attention="softmax"):
    return lf.StochasticTransformer(tokens=tokens, dim=dim, beta=beta, layers_per_unit_time=layers, attention=attention)


def coefficients(beta, attention="softmax"):
    """Return a and b of the page."""
    return (np.tanh(beta), 1.0) if attention == "softmax" else (np.sinh(beta), np.cosh(beta))


def leading(dim, beta, layers, attention):
    """Return the leading term of Λ for many layers."""
    a, b = coefficients(beta, attention)
    return ((dim - 3) * b * b - (dim - 1) * a * a) / (2 * layers)


def halves(tokens, dim):
    """Return N/2 tokens at e₁ and N/2 at −e₁ (N, d)."""
    return np.repeat([1.0, -1.0], tokens // 2)[:, None] * np.eye(dim)[0]


def near_halves(tokens, dim, spread, seed=0):
    noise = np.random.default_rng(seed).standard_normal((tokens, dim))
    return normalised(halves(tokens, dim) + spread * noise)


# Lemma 1.


@pytest.mark.parametrize(("dim", "beta", "layers", "attention"), CASES)
def test_exponents_are_means_over_drawn_layers(dim, beta, layers, attention):
    """The maps Δ → PΔ/|Y|, g → P(g + bsVg)/|Y| as they are written; the leading term is rejected where L is small."""
    rng, n, step = np.random.default_rng(1), 400_000, layers**-0.5
    a, b = coefficients(beta, attention)
    y, g = a * step * rng.standard_normal((n, dim)), b * step * rng.standard_normal((n, dim))
    y[:, 0] += 1
    g[:, 1] += 1
    squared = (y * y).sum(1)
    within = np.log(1 - y[:, 1] ** 2 / squared) / 2 - np.log(squared) / 2
    between = np.log((g * g).sum(1) - (g * y).sum(1) ** 2 / squared) / 2 - np.log(squared) / 2
    exact = exponents(dim, beta, step, attention)
    for drawn, value in ((within, exact.within), (between, exact.between)):
        assert abs(drawn.mean() - value) < STANDARD_ERRORS * drawn.std() / n**0.5
    if layers <= 10:
        wrong = leading(dim, beta, layers, attention)
        assert abs(between.mean() - wrong) > STANDARD_ERRORS * between.std() / n**0.5


def test_exponents_in_three_dimensions_are_integrals_over_the_long_vector():
    """E log|v + sη| = log|v| + ½E₁(|v|²/(2s²)) in the plane orthogonal to Y, and Gauss–Hermite nodes for Y."""
    beta, step = 0.6, 0.3
    a = np.tanh(beta)
    nodes, weights = np.polynomial.hermite_e.hermegauss(70)
    along, across, third = np.meshgrid(1 + a * step * nodes, a * step * nodes, a * step * nodes, indexing="ij")
    mass = np.multiply.outer(np.multiply.outer(weights, weights), weights) / weights.sum() ** 3
    squared = along**2 + across**2 + third**2
    q = 1 - across**2 / squared
    exact = exponents(3, beta, step)
    assert exact.within == pytest.approx((mass * np.log(q / squared)).sum() / 2, abs=1e-7)
    between = (mass * (np.log(q / squared) + exp1(q / (2 * step**2)))).sum() / 2
    assert exact.between == pytest.approx(between, abs=1e-7)


@pytest.mark.parametrize(
    ("dim", "beta", "attention"), [(4, 0.6, "softmax"), (4, 0.8, "unnormalized"), (2, 0.1, "softmax")]
)
def test_many_layers_have_the_threshold_of_the_limit(dim, beta, attention):
    """LΛ → ½[(d − 3)b² − (d − 1)a²], with the sign of d − 2 − cosh 2β; λ₀ → −½(d − 1)a²."""
    layers, (a, _) = 100_000, coefficients(beta, attention)
    within, between = exponents(dim, beta, layers**-0.5, attention)
    assert between == pytest.approx(leading(dim, beta, layers, attention), rel=2e-3)
    assert (between < 0) == (dim - 2 < np.cosh(2 * beta))
    assert within == pytest.approx(-(dim - 1) * a * a / (2 * layers), rel=1e-3)


def test_long_steps_have_the_exponent_of_noise_alone():
    """Λ → log(b/a) + ½(ψ((d − 1)/2) − ψ(d/2)), in the plane log(coth(β)/2)."""
    assert exponents(2, 0.7, 1e4).between == pytest.approx(-np.log(2 * np.tanh(0.7)), abs=1e-4)
    value = np.log(1 / np.tanh(0.7)) + (digamma(2.5) - digamma(3)) / 2
    assert exponents(6, 0.7, 1e4).between == pytest.approx(value, abs=1e-4)


def test_small_beta_repels_but_in_the_plane():
    """β → 0: Λ → E log|e + sη| in R^{d−1}, which is ½E₁(1/(2s²)) for d = 3; for d = 2 it is positive for s > 1.556."""
    for step in (0.3, 1.0):
        assert exponents(3, 1e-4, step).between == pytest.approx(exp1(1 / (2 * step**2)) / 2, rel=1e-4)
    turn = brentq(lambda step: exponents(2, 1e-4, step).between, 1, 2)
    assert turn == pytest.approx(1.556, abs=5e-4)
    assert 1 / turn**2 == pytest.approx(0.413, abs=5e-4)
    assert critical_beta(2, 1.5) == 0 < critical_beta(2, 1.6)


def test_both_other_exponents_are_negative_and_softmax_falls_with_beta():
    betas = np.linspace(0.05, 3, 12)
    for dim, step in ((2, 2.0), (2, 0.3), (3, 1.0), (5, 0.7), (9, 3.0)):
        values = np.array([exponents(dim, beta, step) for beta in betas])
        assert (values[:, 0] < 0).all()
        assert (np.diff(values[:, 1]) < 0).all()
        assert max(exponents_of(dim, a * step, a * step).between for a in np.tanh(betas)) < 0  # λ_a


THRESHOLDS = {3: (0.7370, 0.3347, 0.0760), 4: (1.0405, 0.8250, 0.7108), 8: (1.5726, 1.4581, 1.3584)}


@pytest.mark.parametrize("dim", THRESHOLDS)
def test_few_layers_have_a_higher_threshold(dim):
    """The table of the page; Λ changes its sign there, and each threshold is above that of the limit."""
    limit = np.arccosh(dim - 2) / 2
    for layers, printed in zip((1, 4, 10), THRESHOLDS[dim], strict=True):
        beta = critical_beta(dim, layers**-0.5)
        assert beta == pytest.approx(printed, abs=6e-5)
        assert beta > limit + 0.03
        assert exponents(dim, beta - 0.01, layers**-0.5).between > 0 > exponents(dim, beta + 0.01, layers**-0.5).between
    assert critical_beta(dim, 0.003) == pytest.approx(limit, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((1, 1.0, 1.0), "dim must be at least 2"),
        ((4, 1.0, -1.0), "step, σ/√L, must be positive"),
        ((4, 1.0, 1.0, "linear"), "softmax or unnormalized; got 'linear'. Nearest: softmax"),
    ],
)
def test_exponents_refuse_models_without_them(arguments, says):
    with pytest.raises(InputError, match=says):
        exponents(*arguments)


# Lemmas 4 and 5.


def flipped(x):
    """Return the tokens xⁱ of the page (…, N, d): those of the second half with the opposite sign."""
    return x * np.repeat([1.0, -1.0], x.shape[-2] // 2)[:, None]


def linear_map(y, factor, v, values, step):
    """Return M_c v of values (n, d, d), for one unit vector y and one vector v ⟂ y."""
    a, c = factor
    long, vector = y + a * step * values @ y, v + c * step * values @ v
    squared = (long * long).sum(-1, keepdims=True)
    return (vector - (vector * long).sum(-1, keepdims=True) / squared * long) / squared**0.5


@pytest.mark.parametrize("attention", ["softmax", "unnormalized"])
def test_linear_maps_move_differences_next_to_two_halves(attention):
    """Errors of Δ′, g′ and G′ fall as the square of the spread; with b = a the gap is wrong by a constant factor."""
    tokens, dim, beta, step = 6, 3, 0.8, 0.5
    model = model_of(tokens, beta, dim, 4, attention)
    a, b = coefficients(beta, attention)
    values = np.random.default_rng(3).standard_normal((200, dim, dim))
    errors, wrong = [], []
    for spread in (1e-3, 1e-4):
        one = near_halves(tokens, dim, spread)
        one[[1, 2, 4, 5]] = normalised(one[[0, 0, 3, 3]] + spread**2 * tokens_at(5, 4, dim))  # |Δ| is of the order |g|²
        other = one.copy()
        angle = spread / 3
        turn = np.eye(dim)
        turn[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
        other[3:] = one[3:] @ turn.T
        x, bar = flipped(one), flipped(other)
        after, bar_after = (flipped(naive_layer(start, model, values)) for start in (one, other))
        y = x[0]
        pairs = [
            (x[1] - x[0], after[:, 1] - after[:, 0], 0.0),
            (x[0] - x[3], after[:, 0] - after[:, 3], b),
            (
                x[0] - x[3] - bar[0] + bar[3],
                after[:, 0] - after[:, 3] - bar_after[:, 0] + bar_after[:, 3],
                b,
            ),
        ]
        row = []
        for before, exact, c in pairs:
            v = before - (before @ y) * y
            row.append(np.median(np.linalg.norm(exact - linear_map(y, (a, c), v, values, step), axis=1)))
            row[-1] /= np.linalg.norm(v)
        errors.append(row)
        gap, exact, _ = pairs[1]
        naive = linear_map(y, (a, a), gap - (gap @ y) * y, values, step)
        wrong.append(np.median(np.linalg.norm(exact - naive, axis=1)) / np.linalg.norm(gap))
    ratio = np.array(errors[0]) / errors[1]
    assert (ratio > 5).all()
    assert max(errors[1]) < 1e-3
    assert min(wrong) > 0.05


# Lemmas 6 and 7.


def symmetric(pairs, dim, seed=0):
    """Return a state of 𝒜 (2 pairs, d)."""
    x = tokens_at(seed, pairs, dim)
    return np.concatenate([x, -x])


def test_a_layer_with_one_direction_leads_to_two_halves_or_one_cluster():
    """V = λe wᵀ: p tokens to e, q to −e; from p ≠ q two more layers lead to one cluster."""
    model, x, rng = model_of(4, 0.8, 3), tokens_at(7, 4, 3), np.random.default_rng(8)
    e, f, _ = np.linalg.qr(rng.standard_normal((3, 3)))[0].T
    a, seen = naive_attention(x, model), set()
    for w in rng.standard_normal((200, 3)):
        p = int((a @ w > 0).sum())
        end = naive_layer(x, model, 1e10 * np.outer(e, w))
        np.testing.assert_allclose(np.sort(end @ e), np.repeat([-1.0, 1.0], [4 - p, p]), atol=1e-6)
        if p in (1, 3) and p not in seen:
            end = naive_layer(end, model, 2 * np.outer(f, e))
            middle = normalised(end[0]) + normalised(end[np.argmin(end @ end[0])])
            end = naive_layer(end, model, 1e10 * np.outer(e, middle))
            assert (end @ end.T).min() > 1 - 1e-6
        seen.add(p)
    assert {1, 2, 3} <= seen


# The chain.


@pytest.mark.parametrize(("dim", "beta", "layers"), [(4, 1.0, 25), (3, 0.5, 1)])
def test_chain_has_these_exponents_next_to_two_halves(dim, beta, layers):
    """Four tokens, gaps of 1e-7; where L = 1 the exponent of the limit, of the other sign, is rejected."""
    count, samples, exact = 20, 3000, exponents(dim, beta, layers**-0.5)
    options = {"samples": samples, "horizon": count / layers, "record": [0.0, count / layers], "progress": False}
    pairs = list(combinations(range(4), 2))
    gap = near_halves(4, dim, 1e-7)[[0, 0, 2, 2]]
    for start, pair, value in ((gap, (0, 2), exact.between), (near_halves(4, dim, 1e-7), (0, 1), exact.within)):
        data = lf.simulate(model_of(4, beta, dim, layers), start, seed=6, **options)
        logs = np.log(data["gap"].values[..., pairs.index(pair)])
        change = (logs[:, 1] - logs[:, 0]) / (2 * count)
        error = change.std() / samples**0.5
        assert abs(change.mean() - value) < STANDARD_ERRORS * error
        if layers == 1 and pair == (0, 2):
            assert abs(change.mean() - leading(dim, beta, layers, "softmax")) > STANDARD_ERRORS * error


def ends(model, start, horizon, samples=1500, seed=3):
    """Return the shares of one cluster and of two halves at `horizon`."""
    options = {"samples": samples, "seed": seed, "keep": "outcome", "tolerance": 0.01, "progress": False}
    data = lf.simulate(model, start, horizon=horizon, record=[horizon], **options)
    unresolved, antipodal = (data[name].values[:, -1] for name in ("unresolved_pairs", "antipodal_pairs"))
    one = (unresolved == 0) & (antipodal == 0)
    two = (unresolved == 0) & (antipodal == (model.tokens // 2) ** 2)
    return one.mean(), two.mean()


@pytest.mark.parametrize("tokens", [4, 8])
def test_even_numbers_end_in_one_cluster_or_two_halves(tokens):
    """d = 4, L = 1, β* = 1.0405: no halves at β = 0.8, where the limit's threshold, 0.6585, promises them."""
    one, two = ends(model_of(tokens, 0.8), None, 300.0)
    assert (one, two) == (1.0, 0.0)
    one, two = ends(model_of(tokens, 1.5), None, 300.0)
    assert one + two > 0.998
    assert 0.02 < two < 0.1


def test_named_starts_have_one_end():
    """𝒜 ends in halves although Λ > 0, exact groups of 3 + 1 in one cluster although Λ < 0."""
    x, rng, model = np.tile(symmetric(2, 4), (100, 1, 1)), np.random.default_rng(2), model_of(4, 0.5)
    for values in rng.standard_normal((150, 100, 4, 4)):
        x = naive_layer(x, model, values)
        x[:, 2:] = -x[:, :2]  # rounding leaves 𝒜, and Λ > 0 makes it grow
    assert np.abs((x[:, 0] * x[:, 1]).sum(-1)).min() > 1 - 1e-6
    assert exponents(4, 0.5, 1.0).between > 0
    assert ends(model, symmetric(2, 4), 200.0, samples=200)[0] > 0.5  # by rounding
    groups = normalised(np.array([[1.0, 0.3, 0, 0]] * 3 + [[-1.0, 0, 0, 0]]))
    assert ends(model_of(4, 1.2), groups, 600.0, samples=200) == (1.0, 0.0)
    assert exponents(4, 1.2, 1.0).between < 0


def test_two_halves_are_left_slowly_at_the_threshold():
    """At Λ = 0 the share that stays falls like t^{−1/2}; away from it, it falls at once or stays."""
    start, shares = near_halves(4, 4, 0.02), {}
    for beta in (0.9, critical_beta(4, 1.0), 1.2):
        for horizon in (250.0, 1000.0):
            shares[beta, horizon] = ends(model_of(4, beta), start, horizon, samples=1200)[1]
    (low, early), (_, late), (middle, early_middle), (_, late_middle), (high, _), (_, _) = [
        (beta, share) for (beta, _), share in shares.items()
    ]
    assert late < 0.01 <= early + 0.01
    assert 1.5 < early_middle / late_middle < 2.7
    assert shares[high, 1000.0] > 0.95 * shares[high, 250.0] > 0.6
    assert low < middle < high


# What `lf.overlap` says about few layers.


@pytest.mark.parametrize(("dim", "layers", "sigma"), [(5, 2, 1.5), (3, 1, 1.0)])
def test_threshold_of_few_layers_is_where_drawn_layers_keep_the_gap(dim, layers, sigma):
    """Mean change of log |g| by 400,000 drawn layers: zero at the threshold, and not at that of many layers."""
    model = lf.StochasticTransformer(tokens=2, dim=dim, beta=1.0, layers_per_unit_time=layers, sigma=sigma)
    pair = lf.overlap(model)
    assert pair.critical_beta_of_layers(layers) == pair.critical_beta_of_layers()
    step = sigma / layers**0.5

    def mean_change(beta):
        rng, n = np.random.default_rng(3), 400_000
        a, b = coefficients(beta)
        y, g = a * step * rng.standard_normal((n, dim)), b * step * rng.standard_normal((n, dim))
        y[:, 0] += 1
        g[:, 1] += 1
        long = (y * y).sum(1)
        apart = g - (g * y).sum(1)[:, None] / long[:, None] * y
        change = np.log((apart * apart).sum(1) / long) / 2
        return change.mean(), change.std() / n**0.5

    mean, error = mean_change(pair.critical_beta_of_layers())
    assert abs(mean) < STANDARD_ERRORS * error
    mean, error = mean_change(max(pair.critical_beta, 1e-3))
    assert mean > 10 * error


def test_threshold_of_few_layers_falls_to_that_of_the_limit():
    pair = lf.overlap(model_of(2, 1.0, dim=5))
    thresholds = [pair.critical_beta_of_layers(layers) for layers in (1, 10, 100, 100_000)]
    assert thresholds == sorted(thresholds, reverse=True)
    assert thresholds[-1] == pytest.approx(pair.critical_beta, abs=1e-4)
    assert lf.overlap(model_of(4, 1.0, dim=5), (2, 2)).critical_beta_of_layers() == thresholds[0]


UNKNOWN = [
    (lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=1, mask="causal"), None),
    (lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=1, query_key="gaussian"), None),
    (model_of(2, 1.0, attention="unnormalized"), None),
    (model_of(3, 1.0), (2, 1)),
    (lf.HybridTransformer(tokens=2, dim=4, beta=1.0, epsilon=1.2, layers_per_unit_time=1), None),
]


@pytest.mark.parametrize(("model", "clusters"), UNKNOWN)
def test_threshold_of_few_layers_is_refused_where_it_is_not_known(model, clusters):
    pair = lf.overlap(model, clusters)
    with pytest.raises(InputError, match=r"threshold of few layers is known for two tokens.*Nearest: critical_beta"):
        pair.critical_beta_of_layers()
    summary = pair.summary()
    assert summary["critical_beta_of_layers"] == {"1": None, "10": None}
