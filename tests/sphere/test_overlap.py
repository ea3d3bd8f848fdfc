"""The overlap diffusion: its coefficients against layers of tokens, its probabilities against quadrature."""

import json
from math import acosh, asin, exp, log, pi, sqrt

import numpy as np
import pytest
from scipy.special import betainc

from limitformer.base.errors import InputError, NoLimitError
from limitformer.models.sphere import HybridTransformer, StochasticTransformer
from limitformer.sphere.overlap import overlap

pytestmark = pytest.mark.fast

STANDARD_ERRORS = 4.0
LAYERS = 1e6


def stochastic(tokens=2, dim=4, beta=1.0, **more) -> StochasticTransformer:
    return StochasticTransformer(tokens=tokens, dim=dim, beta=beta, layers_per_unit_time=100, **more)


def hybrid(tokens=2, dim=4, beta=1.0, epsilon=0.5, **more) -> HybridTransformer:
    return HybridTransformer(tokens=tokens, dim=dim, beta=beta, epsilon=epsilon, layers_per_unit_time=100, **more)


# One layer of N tokens, written down as the paper does.


def tokens_at(z: float, sizes: tuple[int, int], dim: int) -> np.ndarray:
    """(p + q, dim): p tokens at e₁, q at an overlap z with it."""
    first, second = np.eye(dim)[0], z * np.eye(dim)[0] + sqrt(1 - z * z) * np.eye(dim)[1]
    return np.array([first] * sizes[0] + [second] * sizes[1])


def attention(x: np.ndarray, beta: float, form: str) -> np.ndarray:
    """Return A(X) (N, dim) (`limitformer.sphere.tokens.attention`)."""
    weights = np.exp(beta * x @ x.T)
    return weights @ x / (weights.sum(1, keepdims=True) if form == "softmax" else len(x))


def overlap_after(x: np.ndarray, move: np.ndarray) -> np.ndarray:
    """Overlap of the first and the last token of normalised(x + move), move (n, N, dim)."""
    moved = x + move
    moved = moved / np.linalg.norm(moved, axis=-1, keepdims=True)
    return np.einsum("nd,nd->n", moved[:, 0], moved[:, -1])


CASES = [
    ((2, 2), 4, 0.7, "unnormalized"),
    ((3, 2), 4, 0.8, "softmax"),
    ((2, 1), 2, 0.6, "softmax"),
    ((3, 1), 4, -0.5, "unnormalized"),
]


@pytest.mark.parametrize(("sizes", "dim", "beta", "form"), CASES)
@pytest.mark.parametrize("z", [-0.95, -0.3, 0.6])
def test_stochastic_coefficients_are_the_moments_of_a_layer(sizes, dim, beta, form, z):
    sigma, n = 1.4, 20_000
    model = stochastic(sum(sizes), dim, beta, attention=form, sigma=sigma)
    diffusion = overlap(model, sizes)
    x = tokens_at(z, sizes, dim)
    values = np.random.default_rng(5).normal(0, sigma, (n, dim, dim)) / sqrt(LAYERS)
    move = np.einsum("nkl,il->nik", values, attention(x, beta, form))
    ahead, behind = overlap_after(x, move) - z, overlap_after(x, -move) - z
    even, square = (ahead + behind) / 2 * LAYERS, ((ahead - behind) / 2) ** 2 * LAYERS
    drift, variance = float(diffusion.drift(z)), float(diffusion.diffusion(z)) ** 2

    def errors(samples, exact):
        return abs(samples.mean() - exact) / (samples.std() / sqrt(n))

    assert errors(even, drift) < STANDARD_ERRORS
    assert errors(square, variance) < STANDARD_ERRORS
    # The wrong twins: dim − 1 in the place of dim − 2 in front of κ; two clusters as if of equal size.
    a = attention(x, beta, form)
    twin = drift + sigma**2 * a[0] @ a[-1]
    if z == 0.6:  # κ is large
        assert errors(even, twin) > 2 * STANDARD_ERRORS
    if z == -0.95 and sizes[0] != sizes[1]:  # the clusters move differently
        equal = overlap(stochastic(2, dim, beta, attention=form, sigma=sigma))
        assert errors(square, float(equal.diffusion(z)) ** 2) > 2 * STANDARD_ERRORS


@pytest.mark.parametrize(("sizes", "dim", "beta", "form"), CASES)
@pytest.mark.parametrize("z", [-0.95, -0.3, 0.6])
def test_hybrid_coefficients_are_the_moments_of_a_layer(sizes, dim, beta, form, z):
    epsilon = 0.9
    diffusion = overlap(hybrid(sum(sizes), dim, beta, epsilon, attention=form), sizes)
    x = tokens_at(z, sizes, dim)
    # v = −√3, 0, √3 with probabilities 1/6, 2/3, 1/6: mean 0, variance 1, and the moments of a normal up to the fifth.
    noise, weight = np.array([-sqrt(3), 0, sqrt(3)]), np.array([1, 4, 1]) / 6
    strength = 1 / LAYERS + epsilon * noise / sqrt(LAYERS)
    change = overlap_after(x, strength[:, None, None] * attention(x, beta, form)) - z
    assert LAYERS * weight @ change == pytest.approx(float(diffusion.drift(z)), rel=1e-4, abs=1e-4)
    assert LAYERS * weight @ change**2 == pytest.approx(float(diffusion.diffusion(z)) ** 2, rel=1e-4)


@pytest.mark.parametrize("z", [-0.999, -0.4, 0.2, 0.98])
def test_two_tokens_follow_the_equations_of_the_paper(z):
    beta, dim, sigma, epsilon = 1.7, 5, 0.8, 0.6
    e, ez = exp(beta), exp(beta * z)
    bracket, squares = 2 * (dim - 2) * e * ez - z * (e**2 + ez**2), e**2 + ez**2
    # [CT, eqs. 20 and 21]; as printed, the noise of (21) lacks the √2 without which 2μ/g² is not the same for both.
    for form, unit in (("unnormalized", 2.0), ("softmax", e + ez)):
        pair = overlap(stochastic(2, dim, beta, attention=form, sigma=sigma))
        noise = sigma * (1 - z * z) * sqrt(squares) / unit
        assert float(pair.drift(z)) == pytest.approx(sigma**2 * (1 - z * z) * bracket / unit**2, rel=1e-12)
        assert float(pair.diffusion(z)) == pytest.approx(sqrt(2) * noise, rel=1e-12)
    pair = overlap(hybrid(2, dim, beta, epsilon, attention="unnormalized"))  # [CT, eq. 26]
    drift = ez * (z * z - 1) * (epsilon**2 * e / 2 + z * epsilon**2 * ez - 1)
    assert float(pair.drift(z)) == pytest.approx(drift, rel=1e-12)
    assert float(pair.diffusion(z)) == pytest.approx(epsilon * ez * (1 - z * z), rel=1e-12)


@pytest.mark.parametrize("model", [stochastic(5, 4, 1.2), hybrid(5, 4, 1.2, attention="unnormalized")])
def test_both_variables_agree(model):
    """Itô's formula: the drift of artanh z is μ/(1 − z²) + z g²/(1 − z²)²."""
    diffusion, z = overlap(model, (3, 2)), np.array([-0.99, -0.2, 0.7])
    u, metric = np.arctanh(z), 1 - z**2
    drift, noise = diffusion.drift(z), diffusion.diffusion(z)
    np.testing.assert_allclose(diffusion.artanh_drift(u), drift / metric + z * (noise / metric) ** 2, rtol=1e-11)
    np.testing.assert_allclose(diffusion.artanh_diffusion(u), noise / metric, rtol=1e-11)


@pytest.mark.parametrize("form", ["softmax", "unnormalized"])
def test_unequal_clusters_leave_minus_one_as_a_squared_bessel_process(form):
    beta, dim = 1.1, 5
    diffusion = overlap(stochastic(3, dim, beta, attention=form), (2, 1))
    near = attention(tokens_at(-1.0, (2, 1), dim), beta, form)
    delta = np.linalg.norm(near[0] + near[-1])
    assert float(diffusion.drift(-1.0)) == pytest.approx(delta**2 * (dim - 1) / 2, rel=1e-12)
    assert float(diffusion.diffusion(-1 + 1e-9)) ** 2 == pytest.approx(2 * delta**2 * 1e-9, rel=1e-6)
    assert diffusion.boundaries.minus.kind == "entrance"
    assert overlap(stochastic(3, 2, beta, attention=form), (2, 1)).boundaries.minus.kind == "reflecting"
    assert float(overlap(stochastic(4, dim, beta, attention=form), (2, 2)).drift(-1.0)) == 0


# Where it goes.


def stochastic_slope(dim, beta):
    """Return (log s)′ in u from the scale density of [CT, Lemma 5]."""
    return lambda u: -np.tanh(u) - (dim - 2) / np.cosh(2 * beta / (1 + np.exp(2 * u)))


def hybrid_slope(beta, epsilon):
    """Return (log s)′ = −2μ/g² in u for softmax: dU = 2b(1 − ε²a) dt + 2bε dB."""

    def slope(u):
        a = 1 / (1 + np.exp(-2 * beta / (1 + np.exp(2 * u))))
        return -(1 - epsilon**2 * a) / ((1 - a) * epsilon**2)

    return slope


def plain_scale(slope, start, ends, step):
    """Return log s on a fine grid through u = `start`, integrated from there by Gauss-Legendre, cell by cell."""
    points, weights = np.polynomial.legendre.leggauss(6)
    low, high = (4 * int(np.ceil((end - start) / (4 * step))) for end in ends)
    u = start + step * np.arange(low, high + 1)
    nodes = u[:-1, None] + step / 2 * (1 + points)
    rise = step / 2 * slope(nodes) @ weights
    height = np.concatenate([[0.0], np.cumsum(rise)])
    return u, height - height[-low], -low


def boole(values, step):
    weights = np.tile([28.0, 64, 24, 64], len(values) // 4 + 1)[: len(values)]
    weights[[0, -1]] = 14
    return weights @ values * step / 45


def plain_log_probability(slope, tails, z, ends=(-22.0, 20.0), step=0.01):
    """Return log P(Z → −1 | z) by Boole's rule; beyond `ends` log s has the slopes `tails`."""
    _, height, middle = plain_scale(slope, np.arctanh(z), ends, step)
    top = height.max()
    s = np.exp(height - top)
    mass_below = boole(s[: middle + 1], step) + s[0] / tails[0]
    # The right side may be e^{−1000} of the left one: it has its own scale.
    top_right = height[middle:].max()
    s = np.exp(height[middle:] - top_right)
    right = boole(s, step) + s[-1] / -tails[1]
    return log(right) + top_right - np.logaddexp(log(mass_below) + top, log(right) + top_right)


def plain_uniform(slope, tails, dim, step=0.01):
    """Return P(Z → −1) from a uniform start: E[S(1) − S(z₀)] integrates s times the distribution function of z₀."""
    u, height, _ = plain_scale(slope, 0.0, (-22.0, 20.0), step)
    s = np.exp(height - height.max())
    below = betainc((dim - 1) / 2, (dim - 1) / 2, 1 / (1 + np.exp(-2 * u)))
    # Left of the grid no start is, to speak of; right of it every one was.
    tail_below, right = s[0] / tails[0], s[-1] / -tails[1]
    return (boole(s * below, step) + right) / (boole(s, step) + tail_below + right)


PLACES = [
    *((dim, beta) for dim, beta in [(2, 0.0), (3, 0.6), (4, 2.0), (5, 5.0), (10, 9.0), (64, 20.0), (512, 20.0)]),
    # next to the threshold
    *((dim, acosh(dim - 2) / 2 + off) for dim, off in [(3, 1e-3), (5, -1e-3), (64, 1e-3), (4096, 1e-3), (4096, -1e-3)]),
]


@pytest.mark.parametrize(("dim", "beta"), PLACES)
def test_probability_equals_quadrature(dim, beta):
    pair = overlap(stochastic(2, dim, beta))
    assert pair.critical_beta == pytest.approx(acosh(max(dim, 3) - 2) / 2)
    if not dim - 2 < np.cosh(2 * beta):
        assert pair.boundaries.minus.kind == "non-attracting"
        assert pair.antipodal_probability() == 0
        assert pair.antipodal_probability([-0.9, 0.5]).tolist() == [0, 0]
        return
    assert pair.boundaries.minus.kind == "attracting"
    slope, tails = stochastic_slope(dim, beta), (1 - (dim - 2) / np.cosh(2 * beta), 1.0 - dim)
    step = min(0.01, 0.4 / dim)
    starts = np.array([-0.8, 0.0, 0.3])
    expected = [plain_log_probability(slope, tails, z, step=step) for z in starts]
    np.testing.assert_allclose(pair.log_antipodal_probability(starts), expected, rtol=0, atol=2e-8)
    np.testing.assert_allclose(pair.antipodal_probability(starts), np.exp(expected), rtol=2e-8)
    assert float(pair.antipodal_probability()) == pytest.approx(plain_uniform(slope, tails, dim, step), rel=1e-7)


def test_probabilities_of_the_paper_and_their_wrong_twins():
    four = overlap(stochastic())
    assert float(four.antipodal_probability()) == pytest.approx(0.1199, abs=5e-5)
    assert float(four.antipodal_probability(start=0.0)) == pytest.approx(0.0844, abs=5e-5)
    assert float(overlap(stochastic(beta=2.0)).antipodal_probability(0.0)) == pytest.approx(0.2474, abs=5e-5)
    # dim − 1 instead of dim − 2; the prefactor sech u of s left out.
    one_more = plain_log_probability(stochastic_slope(5, 1.0), (1 - 3 / np.cosh(2), -4.0), 0.0)
    assert abs(exp(one_more) - 0.0844) > 0.01


@pytest.mark.parametrize("beta", [0.0, 3.0, 300.0])
def test_in_the_plane_the_probability_is_an_angle(beta):
    """In dim 2, s = sech u, so P = 1/2 − arcsin(z)/π for every β."""
    z = np.array([-1.0, -1 + 1e-12, -0.4, 0.0, 0.9, 1 - 1e-12, 1.0])
    pair = overlap(stochastic(2, 2, beta))
    exact = [0.5 - asin(x) / pi for x in z]
    np.testing.assert_allclose(pair.antipodal_probability(z), exact, rtol=1e-9, atol=1e-14)
    assert float(pair.antipodal_probability()) == pytest.approx(0.5, rel=1e-12)


def test_fate_depends_neither_on_the_form_nor_on_sigma_nor_on_the_size_of_equal_clusters():
    z = np.array([-0.5, 0.1])
    expected = overlap(stochastic(beta=1.5)).antipodal_probability(z)
    for other in (
        overlap(stochastic(beta=1.5, attention="unnormalized")),
        overlap(stochastic(beta=1.5, sigma=3.0)),
        overlap(stochastic(8, beta=1.5), (4, 4)),
    ):
        np.testing.assert_allclose(other.antipodal_probability(z), expected, rtol=1e-11)


@pytest.mark.parametrize(("beta", "epsilon"), [(0.5, 1.3), (2.0, 1.1), (4.0, 1.02)])
def test_hybrid_softmax_has_a_regime_in_which_both_ends_attract(beta, epsilon):
    pair = overlap(hybrid(2, 4, beta, epsilon))
    slope = hybrid_slope(beta, epsilon)
    tails = float(slope(-40.0)), float(slope(40.0))
    assert pair.boundaries.minus.exponent == pytest.approx(tails[0], rel=1e-12)
    assert pair.boundaries.plus.exponent == pytest.approx(tails[1], rel=1e-12)
    # Where h rises steeply the plain grid must not go too far: e^{−100} is left out.
    low = -22.0 if tails[0] < 50 else -2.0
    for z in (-0.3, 0.4):
        expected = plain_log_probability(slope, tails, z, ends=(low, 20.0), step=0.002)
        assert float(pair.log_antipodal_probability(z)) == pytest.approx(expected, rel=1e-8)
    twin = plain_log_probability(hybrid_slope(beta, 1.05 * epsilon), tails, 0.4, ends=(low, 20.0), step=0.002)
    assert twin != pytest.approx(float(pair.log_antipodal_probability(0.4)), rel=1e-2)


def test_hybrid_thresholds():
    softmax = overlap(hybrid(beta=2.0))
    assert softmax.critical_epsilon == pytest.approx(sqrt(1 + exp(-4)))
    assert softmax.certain_epsilon == pytest.approx(sqrt(2))
    unnormalized = overlap(hybrid(beta=2.0, attention="unnormalized"))
    assert unnormalized.critical_epsilon == pytest.approx(sqrt(2 * exp(-2)))
    assert unnormalized.certain_epsilon == pytest.approx(sqrt(2 * exp(-2)))
    for sizes in ((1, 1), (3, 2), (9, 1)):
        for epsilon, fate in ((0.98, (0, 1)), (1.5, (1, 0))):
            diffusion = overlap(hybrid(sum(sizes), beta=2.0, epsilon=epsilon), sizes)
            assert (diffusion.antipodal_probability(), diffusion.single_cluster_probability()) == fate
        edge = overlap(hybrid(sum(sizes), beta=2.0), sizes).critical_epsilon
        below, above = (overlap(hybrid(sum(sizes), beta=2.0, epsilon=edge + x), sizes) for x in (-1e-6, 1e-6))
        assert below.antipodal_probability() == 0 < above.antipodal_probability() < 1


@pytest.mark.parametrize("form", ["softmax", "unnormalized"])
def test_critical_beta_of_the_hybrid_model_is_where_minus_one_begins_to_attract(form):
    epsilon = 1.2
    critical = overlap(hybrid(epsilon=epsilon, attention=form)).critical_beta
    kinds = [
        overlap(hybrid(beta=critical + x, epsilon=epsilon, attention=form)).boundaries.minus.kind for x in (-1e-6, 1e-6)
    ]
    assert kinds == ["non-attracting", "attracting"]
    assert overlap(hybrid(epsilon=0.9)).critical_beta == np.inf
    # ε² > 2: at β = 0 too, and at a negative one.
    low = overlap(hybrid(epsilon=1.5, attention=form)).critical_beta
    assert low == pytest.approx(-log(1.25) / 2 if form == "softmax" else log(2 / 2.25))
    kinds = [overlap(hybrid(beta=low + x, epsilon=1.5, attention=form)).boundaries.minus.kind for x in (-1e-6, 1e-6)]
    assert kinds == ["non-attracting", "attracting"]


def test_neither_end_attracts_very_unequal_clusters_of_the_unnormalized_hybrid_model():
    model = hybrid(50, beta=3.0, epsilon=0.6, attention="unnormalized")
    diffusion = overlap(model, (49, 1))
    assert sqrt(2 * exp(-3)) < 0.6 < diffusion.critical_epsilon == diffusion.certain_epsilon
    assert {end.kind for end in diffusion.boundaries} == {"non-attracting"}
    assert diffusion.antipodal_probability(0.3) == diffusion.single_cluster_probability(0.3) == 0
    assert diffusion.return_probability(-0.5, 0.9) == 1
    assert diffusion.mean_hitting_time(-0.5, 0.9) < np.inf


@pytest.mark.parametrize("sizes", [(1, 1), (3, 2)])
def test_neither_end_attracts_the_hybrid_model_at_negative_beta_between_its_thresholds(sizes):
    """2 < ε² < 1 + e^{2|β|}: for β > 0, where 1 + e^{−2β} < ε² < 2, both do."""
    for beta, epsilon, kind in ((-1.0, 1.5, "non-attracting"), (1.0, 1.3, "attracting")):
        diffusion = overlap(hybrid(sum(sizes), beta=beta, epsilon=epsilon), sizes)
        assert {end.kind for end in diffusion.boundaries} == {kind}
        certain = bool(diffusion.return_probability(0.3, -0.9) == diffusion.return_probability(-0.3, 0.9) == 1)
        assert certain is (beta < 0)
        assert np.isfinite(diffusion.mean_hitting_time(0.9, -0.9)) == (beta < 0)


@pytest.mark.parametrize(("sizes", "form"), [((1, 1), "softmax"), ((3, 2), "unnormalized")])
def test_sign_of_beta_changes_only_the_clock_of_the_stochastic_model(sizes, form):
    """A₊ and A₋ change places; without normalisation both are also multiplied by e^{−β(1 + z)}."""
    beta, z = 1.4, np.array([-1.0, -0.9, 0.1, 0.8])
    up, down = (overlap(stochastic(sum(sizes), 5, sign * beta, attention=form), sizes) for sign in (1, -1))
    clock = 1.0 if form == "softmax" else np.exp(-2 * beta * (1 + z))
    np.testing.assert_allclose(down.drift(z), up.drift(z) * clock, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(down.diffusion(z) ** 2, up.diffusion(z) ** 2 * clock, rtol=1e-12, atol=1e-15)
    assert down.boundaries == up.boundaries
    assert down.critical_beta == up.critical_beta
    np.testing.assert_allclose(down.antipodal_probability(z), up.antipodal_probability(z), rtol=1e-12)
    if sizes == (1, 1):
        assert float(down.antipodal_probability()) == pytest.approx(float(up.antipodal_probability()), rel=1e-12)
        assert float(down.antipodal_probability()) > 0.05
    # The wrong twin: the hybrid model has a direction.
    up, down = (overlap(hybrid(sum(sizes), 5, sign * beta, attention=form), sizes) for sign in (1, -1))
    assert (np.abs(down.drift(z[1:]) / (up.drift(z[1:]) * np.broadcast_to(clock, 4)[1:]) - 1) > 0.1).all()


def test_without_noise_the_overlap_rises():
    flow = overlap(hybrid(epsilon=0.0))
    assert flow.antipodal_probability([-1.0, -0.99, 1.0]).tolist() == [1, 0, 0]
    assert flow.antipodal_probability() == 0
    assert flow.return_probability([0.0, 0.0], [0.5, -0.5]).tolist() == [0, 1]
    assert flow.rates.plus == pytest.approx(2.0)
    assert flow.mean_hitting_time(-0.5, 0.5) == np.inf


def test_return_probability_is_a_ratio_of_probabilities():
    """A path from beyond a level ends antipodal only through the level: P(x) = P(return) P(level)."""
    pair = overlap(stochastic(dim=5, beta=1.5))
    levels, starts = np.array([0.2, 0.9, 0.5, 0.99]), np.array([0.9, 0.2, 0.5, 1.0])
    p = pair.antipodal_probability
    single = pair.single_cluster_probability
    expected = [p(0.9) / p(0.2), 1 - (p(0.2) - p(0.9)) / (1 - p(0.9)), 1.0, 0.0]
    np.testing.assert_allclose(expected[1], single(0.2) / single(0.9), rtol=1e-12)
    np.testing.assert_allclose(pair.return_probability(levels, starts), expected, rtol=1e-10)
    far = overlap(stochastic()).return_probability(0.9, 1 - 1e-12)
    # s ~ e^{−(d−1)u}, and e^{−2u} ~ (1 − z)/2.
    assert 0 < far < 3 * (1e-12 / 0.1) ** 1.5
    assert overlap(stochastic(dim=64, beta=0.5)).return_probability(-0.5, -0.999) == 1


def test_scale_density_equals_that_of_the_paper():
    beta, dim, z = 1.3, 6, np.array([-0.97, -0.2, 0.0, 0.8])
    pair = overlap(stochastic(dim=dim, beta=beta))
    step = 1e-5
    log_slope = (np.log(pair.scale_density(z + step)) - np.log(pair.scale_density(z - step))) / (2 * step)
    np.testing.assert_allclose(log_slope, -2 * pair.drift(z) / pair.diffusion(z) ** 2, rtol=1e-4)
    assert pair.scale_density(0.0) == 1
    np.testing.assert_allclose(overlap(stochastic(dim=2)).scale_density(z), (1 - z**2) ** -0.5, rtol=1e-12)


# Refusals.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: overlap(3), "overlap needs a StochasticTransformer or HybridTransformer; got int."),
        (lambda: overlap(stochastic(3)), r"The overlap of 3 tokens is not a diffusion; give clusters=\(p, q\)"),
        (lambda: overlap(stochastic(3), (2, 2)), r"clusters must add up to tokens = 3; got 2 \+ 2 = 4."),
        (lambda: overlap(stochastic(3), (3, 0)), "A cluster must be at least 1; got 0."),
        (lambda: overlap(stochastic(3), (1, 1, 1)), r"clusters must be two whole numbers \(p, q\); got \(1, 1, 1\)."),
        (lambda: overlap(hybrid(beta=-200.0)), r"the hybrid model need \|beta\| <= 150 here; got -200."),
        (lambda: overlap(stochastic()).antipodal_probability([0.0, np.nan]), r"start must lie in \[-1, 1\]; got nan."),
        (lambda: overlap(stochastic()).return_probability(1.0, 0.5), "level must lie strictly between -1 and 1"),
        (lambda: overlap(stochastic()).scale_density(1.0), "z must lie strictly between -1 and 1"),
        (lambda: overlap(stochastic()).critical_epsilon, "critical_epsilon belongs to the HybridTransformer"),
        (lambda: overlap(hybrid(3), (2, 1)).critical_beta, "known for equal clusters only; use critical_epsilon."),
        (lambda: overlap(hybrid(epsilon=0.0)).scale_density(0.5), "epsilon must be positive."),
        (lambda: overlap(hybrid(epsilon=1e-3)).return_probability(0.0, 0.5), "The scale function is too steep"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(InputError, match=message):
        make()


TURN = np.linalg.qr(np.random.default_rng(4).standard_normal((4, 4)))[0]


@pytest.mark.parametrize(
    ("factor", "make", "tokens", "clusters"),
    [(2.5, stochastic, 2, None), (-0.7, hybrid, 3, (2, 1)), (0.0, stochastic, 3, (2, 1))],
)
def test_a_multiple_of_the_identity_multiplies_beta(factor, make, tokens, clusters):
    scaled = overlap(make(tokens, beta=1.3, query_key=(TURN, factor * TURN)), clusters)
    identity = overlap(make(tokens, beta=1.3 * factor), clusters)
    assert scaled.beta == pytest.approx(1.3 * factor)
    z = np.array([-0.9, 0.2, 0.7])
    for name in ("drift", "diffusion", "antipodal_probability"):
        np.testing.assert_allclose(getattr(scaled, name)(z), getattr(identity, name)(z), rtol=1e-10)
    # The wrong twin: β itself.
    unscaled = overlap(make(tokens, beta=1.3), clusters)
    assert (np.abs(scaled.drift(z) / unscaled.drift(z) - 1) > 0.01).all()


@pytest.mark.parametrize("off", [np.diag([1e-6, 0, 0, 0]), 1e-6 * (TURN - TURN.T), 0.5 * TURN])
def test_other_keys_have_no_closed_overlap(off):
    with pytest.raises(NoLimitError, match="needs Q\\^T K = c times the identity"):
        overlap(stochastic(query_key=(np.eye(4), 2 * np.eye(4) + off)))


@pytest.mark.parametrize(
    ("model", "clusters"),
    [(stochastic(), None), (stochastic(3, beta=2.0), (2, 1)), (hybrid(epsilon=0.0), None), (hybrid(3), (1, 2))],
)
def test_summary_goes_to_json(model, clusters):
    diffusion = overlap(model, clusters)
    record = json.loads(json.dumps(diffusion.summary(), allow_nan=False))
    assert record["antipodal_probability"]["uniform"] == float(diffusion.antipodal_probability())
    assert (record["metastable"] is None) == (clusters != (2, 1))
    if clusters == (2, 1):
        assert record["critical_beta"] == "inf"
        assert record["metastable"]["mean_lifetime"] == pytest.approx(32.66, abs=0.01)
