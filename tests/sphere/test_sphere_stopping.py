"""Certified stops: exponents equal those of the limit, Λ equals the mean over layers, and the bound holds."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import brentq

import limitformer as lf
from limitformer.simulation.processes import process_of
from limitformer.sphere.stopping.bound import ORDERS, exponent, hybrid_ratios, stochastic_ratios
from sphere_naive import draw, gaps_of, naive_layer, overlaps_of
from statistics_checks import ALPHA

END = {"+1": True, "-1": False}
LEVEL = 0.05


def model_of(dim, layers, beta=1.5, **more):
    kind = lf.HybridTransformer if "epsilon" in more else lf.StochasticTransformer
    return kind(tokens=2, dim=dim, beta=beta, layers_per_unit_time=layers, **more)


def constants_of(model):
    return process_of(model, None, None, {"horizon": 1.0}).pair_constants()


def ratios(model, positive, edge, order=ORDERS[-1]):
    """Return log(w′/w) (places, nodes) and weights of the quadrature."""
    of = hybrid_ratios if isinstance(model, lf.HybridTransformer) else stochastic_ratios
    return of(constants_of(model), positive, edge, order)


def stop_gaps(model, tolerance=1e-2, level=LEVEL):
    """Return the gaps at +1 and at −1 below which a replica stops, from the attributes of `simulate`."""
    options = {"samples": 1, "seed": 0, "horizon": 1.0, "record": [1.0], "tolerance": tolerance, "early_stop": level}
    return dict(zip(END, lf.simulate(model, **options).attrs["stop_gaps"], strict=True))


def w_of(gap):
    return gap / (2 - gap)


# --- exponents --------------------------------------------------------------------------------------------------------


def rate_of_the_limit(model, end):
    """Where two equal powers of w balance, drift against noise: −4 mean/variance of log(w′/w), as 1/L → 0.

    Attention is a + b on the sum and a − b on the difference: at −1 their quotient is tanh β, at +1 nothing is left
    of the difference's. Softmax: 1 − (d − 2)/cosh 2β at −1 and d − 1 at +1 [CT, App. C].
    """
    t = np.tanh(model.beta)
    if isinstance(model, lf.StochasticTransformer):
        return 1 - (model.dim - 2) / np.cosh(2 * model.beta) if end == "-1" else model.dim - 1
    scale = np.exp(model.beta) / 2 * np.array([1 + np.exp(-2 * model.beta), 2])  # a + b at −1 and at +1
    total = scale if model.attention == "unnormalized" else np.ones(2)
    small, big = (total[0], t * total[0]) if end == "-1" else (0.0, total[1])
    return (model.epsilon**2 * (small + big) - 2) / (model.epsilon**2 * (small - big))


RATES = {
    "dim 3": model_of(3, 10_000, beta=0.9),
    "dim 5, sigma 2": model_of(5, 40_000, sigma=2.0),
    "dim 9, unnormalized": model_of(9, 100_000, beta=1.8, sigma=0.5, attention="unnormalized"),
    "hybrid": model_of(3, 10_000, beta=1.0, epsilon=1.2),
    "hybrid, unnormalized": model_of(4, 10_000, beta=0.5, epsilon=1.3, attention="unnormalized", values="gaussian"),
}


@pytest.mark.parametrize("end", END)
@pytest.mark.parametrize("name", RATES)
def test_exponents_are_those_of_the_limit(name, end):
    """To 3e-3 at steps of a hundredth, closer than with twenty times fewer layers; 0 if the end repels."""
    model = RATES[name]
    exact = rate_of_the_limit(model, end)
    r = exponent(ratios(model, END[end], 1e-9))
    few = exponent(ratios(replace(model, layers_per_unit_time=model.layers_per_unit_time // 20), END[end], 1e-9))
    if exact < 0:
        assert (r, few) == (0, 0)
        return
    assert exact > 0.05
    assert r == pytest.approx(exact, rel=3e-3)
    assert abs(few - exact) > 2 * abs(r - exact)


@pytest.mark.parametrize(("end", "layers"), [("+1", 100), ("-1", 10_000)])
def test_in_two_dimensions_the_exponent_is_one(end, layers):
    """It is 1 to 1e-5 for any number of layers: log|z| is harmonic there, so powers of it balance exactly."""
    assert exponent(ratios(model_of(2, layers), END[end], 1e-9)) == pytest.approx(1, rel=1e-5)
    assert exponent(ratios(model_of(3, layers), END[end], 1e-9)) != pytest.approx(1, rel=1e-2)


@pytest.mark.parametrize(
    ("model", "ends"),
    [
        (model_of(12, 8000, beta=1.4, attention="unnormalized"), {"+1"}),  # cosh 2.8 = 8.25
        (model_of(12, 8000, beta=1.6, attention="unnormalized"), {"+1", "-1"}),  # cosh 3.2 = 12.3
        (model_of(3, 400, beta=1.0, epsilon=0.5), {"+1"}),  # ε² below 2/(1 + tanh β) = 1.135
        (model_of(3, 400, beta=1.0, epsilon=1.2), {"+1", "-1"}),
        (model_of(3, 400, beta=1.0, epsilon=1.5), {"-1"}),  # ε² above 2
        (model_of(3, 100, epsilon=0.0), {"+1"}),
    ],
    ids=lambda x: f"dim {x.dim}, β {x.beta}" if hasattr(x, "dim") else "",
)
def test_stops_exist_only_at_attracting_ends(model, ends):
    """None at −1 below the threshold of [CT, Theorem 2], nor beyond the thresholds of the hybrid."""
    gaps = stop_gaps(model)
    assert {end for end, gap in gaps.items() if gap > 0} == ends
    assert all(0 <= gap < 1e-2 for gap in gaps.values())


LAMBDA = {
    "dim 3": model_of(3, 60),
    "dim 6, unnormalized": model_of(6, 100, beta=1.4, attention="unnormalized", sigma=0.6),
    "hybrid, rademacher": model_of(3, 40, beta=1.0, epsilon=1.2, values="rademacher"),
    "hybrid, truncated normal": model_of(3, 40, beta=1.0, epsilon=1.2, values="truncated normal"),
    "hybrid, unnormalized": model_of(3, 40, beta=0.6, epsilon=1.3, values="rademacher", attention="unnormalized"),
}


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(
    ("model", "end"),
    [(model, end) for name, model in LAMBDA.items() for end in END if (name, end) != ("hybrid, unnormalized", "+1")],
    ids=[f"{name}, {end}" for name in LAMBDA for end in END if (name, end) != ("hybrid, unnormalized", "+1")],
)
def test_the_mean_of_the_quadrature_is_the_mean_over_layers(model, end):
    """Λ at the exponent, at every place, against vectors moved by the naive layer; half the exponent is rejected."""
    sign, edge, size = (1 if end == "+1" else -1), 0.02 / 1.98, 200_000
    logs, weights = ratios(model, END[end], edge)
    r = exponent((logs, weights))
    means = np.exp(0.5 * r * logs) @ weights
    assert means.max() == pytest.approx(1, abs=1e-9)
    rng = np.random.default_rng(1)
    stochastic = isinstance(model, lf.StochasticTransformer)
    value = draw(model.values, rng, (size, model.dim, model.dim) if stochastic else (size,))
    for place in (1, 3, 5):
        w = edge * (0.0, 0.01, 0.1, 0.35, 0.7, 1.0)[place]
        angle = 2 * np.arctan(w**0.5)
        x = np.zeros((2, model.dim))
        x[0, 0], x[1, 0], x[1, 1] = 1, sign * np.cos(angle), np.sin(angle)
        moved = naive_layer(np.broadcast_to(x, (size, 2, model.dim)), model, value)
        after = w_of(gaps_of(moved)[:, 0])
        y = np.where(np.sign(overlaps_of(moved)[:, 0]) == sign, after, 1 / after) / w
        for power, right in ((r, True), (0.5 * r, False)):
            sample = y ** (power / 2)
            near = abs(sample.mean() - means[place]) < 4.5 * sample.std() / size**0.5
            assert near == right


# --- exact exponents at long steps ------------------------------------------------------------------------------------


def exact_exponent_at_plus(dim, c):
    """Integrate for the r with E[(u/(u + c²h²)²)^{r/2}] = 1, u = |e₁ + c g|² in dim − 1 dimensions: w → 0 at +1."""
    length = np.exp(np.linspace(np.log(1e-9), np.log(1 + 12 * c), 1500))
    h = np.exp(np.linspace(np.log(1e-9), np.log(9), 800))
    chances = stats.ncx2(dim - 1, 1 / c**2).pdf(length**2 / c**2) * 2 * length**2 / c**2
    heights = 2 * stats.norm.pdf(h) * h
    log_ratio = np.log(length**2)[:, None] - 2 * np.log(length[:, None] ** 2 + c**2 * h**2)

    def excess(r):
        inner = np.trapezoid(np.exp(r / 2 * log_ratio) * heights, np.log(h), axis=1)
        return np.trapezoid(inner * chances, np.log(length)) - 1

    assert abs(excess(0.0)) < 1e-6
    return brentq(excess, 0.05, dim - 1e-3) if excess(dim - 1e-3) > 0 else dim - 1e-3


def claimed_exponent(model, end, tolerance=1e-6):
    """Return the exponent implied by the stop of `simulate` before its safety margin; 0 without a stop."""
    gap = stop_gaps(model, tolerance=tolerance)[end]
    return 0.0 if gap == 0 else 2 * np.log(LEVEL) / np.log(w_of(gap) / w_of(tolerance))


@pytest.mark.parametrize(("dim", "layers"), [(2, 1), (3, 4), (3, 100), (8, 10), (8, 30)])
def test_no_exponent_at_plus_one_is_above_the_true_one(dim, layers):
    """The layers include those whose tails a quadrature of few nodes misses.

    (u/Q²)^{r/2} has no mean for r ≥ dim, so no valid exponent is larger.
    """
    model = model_of(dim, layers)
    true, claimed = exact_exponent_at_plus(dim, layers**-0.5), claimed_exponent(model, "+1")
    assert claimed <= true
    if layers >= 100:
        assert claimed > 0.95 * true


@pytest.mark.parametrize(("dim", "layers"), [(2, 30), (3, 10), (3, 100), (8, 100)])
def test_no_exponent_at_minus_one_is_above_the_true_one(dim, layers):
    """Λ at the claimed exponent, over a million layers of vectors near −1, is at most 1 to four standard errors."""
    claimed = claimed_exponent(model_of(dim, layers), "-1")
    if claimed == 0:
        assert layers < 30
        return
    rng, size, c = np.random.default_rng(3), 1_000_000, layers**-0.5
    h, h_, g_ = rng.standard_normal((3, size))
    rho, chi = (rng.chisquare(dim - 2, size) if dim > 2 else 0.0 for _ in range(2))
    big = c * np.tanh(1.5)
    q = (1 + big * h) ** 2 + big**2 * (h_**2 + rho)
    along = big * h_ / np.sqrt(q)
    ratio = ((np.sqrt(((1 + big * h) ** 2 + big**2 * rho) / q) + c * g_) ** 2 + c * c * chi) / q
    assert (np.abs(along) <= 1 + 1e-12).all()
    sample = ratio ** (claimed / 2)
    assert sample.mean() < 1 + 4 * sample.std() / size**0.5


# --- the bound itself -------------------------------------------------------------------------------------------------

HONOURED = {
    "softmax, −1": (model_of(3, 50), "-1"),
    "softmax, +1": (model_of(3, 50), "+1"),
    "dim 2, −1": (model_of(2, 100, beta=0.5), "-1"),
    "unnormalized, −1": (model_of(3, 100, beta=1.0, sigma=0.6, attention="unnormalized"), "-1"),
    "hybrid, −1": (model_of(3, 50, beta=1.0, epsilon=2.0), "-1"),
    "hybrid, +1": (model_of(3, 50, beta=1.0, epsilon=1.0, values="rademacher"), "+1"),
    "one layer, +1": (model_of(3, 1), "+1"),
    "ten layers, −1": (model_of(3, 10), "-1"),
}
TOLERANCE, SAMPLES = 1e-2, 2_000


def returns(model, end, gap, layers=1500):
    """Count the replicas with this initial gap that ever leave the tolerance."""
    horizon = layers / model.layers_per_unit_time
    start = (1 if end == "+1" else -1) * (1 - gap)
    data = lf.simulate(
        model, start, samples=SAMPLES, seed=1, horizon=horizon, record=np.arange(layers + 1) * horizon / layers
    )
    z = data["overlap"].values[..., 0] * np.sign(start)
    assert np.median(data["gap"].values[:, -1]) < 1e-3 * gap  # the others are gone for good
    return int((z < 1 - TOLERANCE).any(1).sum())


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", HONOURED)
def test_bound_holds_in_simulations(name):
    """At most 5 % return from the edge of the stop; twice the exponent (the wrong twin) gives far more."""
    model, end = HONOURED[name]
    gap = stop_gaps(model)[end]
    if gap == 0:
        assert model.layers_per_unit_time <= 10  # no claim at such long steps, no harm
        return
    assert stats.binomtest(returns(model, end, gap), SAMPLES, LEVEL, alternative="greater").pvalue > ALPHA
    edge = w_of(TOLERANCE)
    w = (edge * w_of(gap)) ** 0.5
    twin = 2 * w / (1 + w)
    assert stats.binomtest(returns(model, end, twin), SAMPLES, LEVEL, alternative="greater").pvalue < ALPHA


@pytest.mark.parametrize(
    ("model", "keep"),
    [(model_of(4, 50, beta=1.2), "overlap"), (model_of(3, 50, beta=1.0, epsilon=0.5), "outcome")],
    ids=["stochastic", "hybrid"],
)
def test_probabilities_are_those_without_a_stop(model, keep):
    """The level is 1e-9: none of 2,000 replicas differs, and most have stopped."""
    run = {"samples": SAMPLES, "seed": 1, "horizon": 60.0, "record": [60.0], "tolerance": TOLERANCE, "keep": keep}
    free, stopped = lf.simulate(model, **run), lf.simulate(model, **run, early_stop=1e-9)
    assert np.isfinite(stopped["stopped"].values).mean() > 0.5
    for name in ("probability", "low", "high", "cluster_probability"):
        np.testing.assert_array_equal(lf.outcomes(free)[name], lf.outcomes(stopped)[name])
    if isinstance(model, lf.StochasticTransformer):  # both ends attract: who stops too boldly counts some wrongly
        bold = lf.simulate(model, **run, early_stop=0.9)
        assert (lf.outcomes(bold)["probability"] != lf.outcomes(free)["probability"]).any()


def test_a_limit_stops_by_its_own_step():
    """The bound uses steps of dt, as for a chain of 1/dt layers."""
    chain = stop_gaps(model_of(3, 50))
    options = {"samples": 1, "seed": 0, "horizon": 1.0, "tolerance": 1e-2, "early_stop": LEVEL}
    limit = lf.simulate(lf.limit(model_of(3, 7, values="rademacher")), **options, dt=1 / 50)
    np.testing.assert_allclose(limit.attrs["stop_gaps"], list(chain.values()), rtol=1e-9)
