"""Explosion of the covariance SDE: formulas against other routes, paths against formulas.

Antipodal tokens x, −x stay antipodal and have |V| = d/2, so the formula for d is one for the ball of `simulate`. The
wrong twin of every simulation is a step of fixed length, which invents explosions.
"""

from math import asinh, erf, inf, log, sqrt

import numpy as np
import pytest
import torch
from scipy.integrate import simpson
from scipy.linalg import solve_banded
from scipy.special import betainc

import limitformer as lf
from limitformer.covariance.limit.explosion import PairDistance
from limitformer.sampling.exits import INSIDE, LEFT_BALL, LOST

CRITICAL = sqrt(0.5)


def limit_of(gamma, tau0, horizon, **more):
    attention = lf.ShapedAttention(tau0=tau0)
    return lf.limit(lf.Transformer(width=1000, depth=round(1000 * horizon), gamma=gamma, attention=attention, **more))


def causes_of(limit, start, samples, **options):
    paths = lf.simulate(limit, start, samples=samples, seed=1, record=[limit.horizon], progress=False, **options)
    return paths["exit_cause"].values


def standard_errors_from(causes, probability):
    """Return the deviation of the share of paths that left the ball, in standard errors."""
    assert not (causes == LOST).any()
    error = sqrt(probability * (1 - probability) / len(causes))
    return ((causes == LEFT_BALL).mean() - probability) / error


# ---------------------------------------------------------------- the formulas


def ever_by_quadrature(gamma, tau0, distance, radius, exponent=4.0):
    """Return ∫f/∫f by Simpson's rule in log x, f = (1 + x²/K²)^(−1/(4γ²)); another exponent is the wrong twin."""
    squared = 8 * tau0**2 * (2 - gamma**2) / gamma**2

    def scale(end):
        x = np.linspace(-40, log(end), 200_001)
        return simpson(np.exp(x - np.logaddexp(0, 2 * x - log(squared)) / (exponent * gamma**2)), x=x)

    return scale(distance) / scale(radius)


@pytest.mark.parametrize(
    ("gamma", "tau0", "distance", "radius"),
    [
        (0.6, 1.0, 0.03, 1e6),
        (CRITICAL, 1.0, 3.0, 1e9),
        (1.0, 0.7, 2.0, 9.0),
    ],
)
def test_probability_of_reaching_a_radius(gamma, tau0, distance, radius):
    probability = PairDistance(gamma=gamma, tau0=tau0).ever(distance, radius)
    assert probability == pytest.approx(ever_by_quadrature(gamma, tau0, distance, radius), rel=1e-9)
    assert probability != pytest.approx(ever_by_quadrature(gamma, tau0, distance, radius, exponent=2.0), rel=1e-2)


def test_two_tokens_explode_only_if_gamma_squared_is_below_a_half():
    start = lf.equicorrelated(2, 0.2, 300.0)
    for gamma in (CRITICAL, 0.8, 1.0):
        assert limit_of(gamma, 0.5, 1.0).explosion_probability(start) == 0.0
        assert limit_of(gamma, 0.5, 1.0).explosion_probability(start, time=2.0) == 0.0
    for gamma in (0.3, 0.6, 0.7, 0.707):
        closed = limit_of(gamma, 0.5, 1.0).explosion_probability(start)
        assert 0 < closed < 1
        far = 1e280 if gamma > 0.69 else 1e30
        assert closed <= ever_by_quadrature(gamma, 0.5, 480.0, far) * (1 + 1e-9)
    at_the_threshold = limit_of(CRITICAL, 1.0, 1.0).explosion_probability([[1.5, 0.0], [0.0, 1.5]], radius=1e100)
    k = sqrt(8 * 1.5 / 0.5)
    assert at_the_threshold == pytest.approx(asinh(3 / k) / asinh(1e100 / k), rel=1e-9)


def by_finite_differences(gamma, tau0, distance, time):
    """Return P(d explodes by `time`): w_t = b w' + σ²w''/2 in x = log d, backward Euler, Richardson extrapolation."""

    def solve(cells, steps):
        x = np.linspace(log(1e-6), log(300.0), cells)
        h, d = x[1] - x[0], np.exp(x)
        relative = 2 * gamma**2 * (2 - gamma**2) + gamma**4 * d**2 / (4 * tau0**2)
        drift = gamma**2 * d**2 / (16 * tau0**2) - relative / 2
        up, down = relative / (2 * h * h) + drift / (2 * h), relative / (2 * h * h) - drift / (2 * h)
        up[[0, -1]] = down[[0, -1]] = 0  # both ends are absorbing
        dt = time / steps
        bands = np.array([np.append(0, -dt * up[:-1]), 1 + dt * (up + down), np.append(-dt * down[1:], 0)])
        w = np.zeros(cells)
        w[-1] = 1.0  # beyond the grid P(ever) is 1 to 1e-4, in no time
        for _ in range(steps):
            w = solve_banded((1, 1), bands, w)
        return np.interp(log(distance), x, w)

    return 2 * solve(1601, 1600) - solve(1601, 800)


def generator_and_covariance(limit, v, functions):
    """Return Lf = b·∇f + ½Σ:∇²f (functions,) and ∇f Σ ∇g (functions, functions) at V, by automatic differentiation."""
    rows, columns = np.triu_indices(len(v))
    drift, noise = limit.drift(v)[rows, columns], limit.diffusion(v)
    at = torch.tensor(v[rows, columns])
    gradients = np.array([torch.autograd.functional.jacobian(f, at).numpy() for f in functions])
    hessians = np.array([torch.autograd.functional.hessian(f, at).numpy() for f in functions])
    return gradients @ drift + 0.5 * np.einsum("fab,ab->f", hessians, noise), gradients @ noise @ gradients.T


def of_mean_token(pairs):
    """Return d, c∥ and |c⊥|² of V₀₀, V₀₁, V₁₁."""
    distance = pairs[0] + pairs[2] - 2 * pairs[1]
    along = (pairs[0] - pairs[2]) / 2 / distance.sqrt()
    return distance, along, (pairs[0] + pairs[2] + 2 * pairs[1]) / 4 - along**2


@pytest.mark.parametrize("gamma", [0.4, 0.83])
def test_mean_token_is_carried_along(gamma):
    """log|c⊥|² and ϱ = c∥/|c⊥| as docs/theory.md derives them, from b and Σ; a drift of λ²/(2γ²) is rejected."""
    tau0, skip = 0.9, 1 - gamma**2
    limit = limit_of(gamma, tau0, 1.0)
    squared = 8 * tau0**2 * (2 - gamma**2) / gamma**2  # K²

    def log_across(pairs):
        return of_mean_token(pairs)[2].log()

    def ratio(pairs):
        return of_mean_token(pairs)[1] / of_mean_token(pairs)[2].sqrt()

    for scale in (1.0, 1e4):
        v = scale * np.array([[2.0, 0.3], [0.3, 1.1]])
        d, along, across = (float(each) for each in of_mean_token(torch.tensor(v[np.triu_indices(2)])))
        clock = gamma**4 * d**2 / (4 * tau0**2)  # dΘ/dt
        (growth, drift), noise = generator_and_covariance(limit, v, (log_across, ratio))
        assert growth / clock == pytest.approx(skip / (4 * gamma**2) - squared / d**2, rel=1e-9)
        assert growth / clock != pytest.approx(skip / (2 * gamma**2) - squared / d**2, rel=1e-2)
        assert noise[0, 0] / clock == pytest.approx(squared / d**2, rel=1e-9)
        rho = along / across**0.5
        assert abs(drift) / clock < 1e-9 + 2 * squared / d**2 * abs(rho) * (1 + rho**2)
        if scale > 1:
            assert noise[1, 1] / clock == pytest.approx((1 + rho**2) / 4, rel=1e-6)


def test_probability_by_a_time():
    """At γ = 0.4 1 − P(ever) is small at the end of the grid; a time that is a tenth longer is rejected."""
    pair = PairDistance(gamma=0.4, tau0=0.5)
    expected = by_finite_differences(0.4, 0.5, 4.0, 1.0)
    assert 1 - pair.ever(300.0, inf) < 2e-4
    assert pair.by(1.0, 4.0, inf) == pytest.approx(expected, rel=2e-3)
    assert pair.by(1.1, 4.0, inf) != pytest.approx(expected, rel=2e-2)
    assert pair.by(1e6, 4.0, inf) == pytest.approx(pair.ever(4.0, inf), rel=1e-9)
    assert pair.by(1e6, 4.0, 50.0) == pytest.approx(pair.ever(4.0, 50.0), rel=1e-9)


def test_explosion_probability_refuses_limits_without_a_formula():
    relu = lf.ShapedReLU(c_plus=0.0, c_minus=-1.0)
    for limit, start, reason in (
        (limit_of(0.5, 1.0, 1.0), np.eye(3), "known for two tokens; got 3"),
        (limit_of(0.5, 1.0, 1.0, mask="causal"), np.eye(2), 'got mask="causal"'),
        (limit_of(0.5, 1.0, 1.0, feedforward=relu), np.eye(2), "got a feed-forward layer"),
        (lf.limit(lf.Transformer(width=9, depth=9, gamma=0.5, feedforward=relu)), np.eye(2), "feed-forward"),
    ):
        with pytest.raises(lf.InputError, match=reason):
            limit.explosion_probability(start)
    for bad in ({"time": 0.0}, {"time": -1.0}, {"radius": 0.0}, {"time": np.nan}, {"radius": np.nan}):
        with pytest.raises(lf.InputError, match=r"radius|time"):
            limit_of(0.5, 1.0, 1.0).explosion_probability(np.eye(2), **bad)


def test_explosion_probability_at_the_ends_of_its_range():
    limit = limit_of(0.6, 1.0, 1.0)
    assert limit.explosion_probability(np.ones((2, 2))) == 0.0
    assert limit.explosion_probability(np.eye(2), radius=2.0) == 1.0
    assert limit.explosion_probability(np.eye(2), radius=2.0, time=1e-9) == 1.0
    still = lf.limit(lf.Transformer(width=9, depth=9, gamma=0.0, attention=lf.ShapedAttention(tau0=1.0)))
    assert still.explosion_probability(np.eye(2)) == 0.0


# ---------------------------------------------------------------- the paths


def share_by_fixed_steps(gamma, tau0, distance, horizon, radius, samples=4000, dt=0.01):
    """Return the share of paths beyond the radius if d moves by steps of fixed length."""
    rng, d = np.random.default_rng(0), np.full(samples, distance)
    out = np.zeros(samples, bool)
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(round(horizon / dt)):
            x = gamma**4 * d**2 * dt / (16 * tau0**2)
            growth = 1 + (1 / gamma**2 - 1) * x
            linear = 1 + sqrt(2 * gamma**2 * (2 - gamma**2) * dt) * rng.standard_normal(samples)
            d = d * np.abs(linear) * (np.sqrt(growth) + np.sqrt(x) * rng.standard_normal(samples)) ** 2
            out |= ~(d < radius)
    return out.mean()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("gamma", "tau0", "start", "horizon", "samples"),
    [
        (0.4, 0.5, lf.equicorrelated(2, -0.4, 3.0), 0.5, 3000),
        (0.6, 1.0, lf.from_covariance([[9.0, -1.0], [-1.0, 4.0]]), 0.5, 3000),
    ],
)
def test_paths_explode_with_the_probability_of_the_formula(gamma, tau0, start, horizon, samples):
    limit = limit_of(gamma, tau0, horizon)
    causes = causes_of(limit, start, samples, radius=1e30)
    probability = limit.explosion_probability(start, time=horizon)
    assert abs(standard_errors_from(causes, probability)) < 4
    v = start.covariance
    wrong = share_by_fixed_steps(gamma, tau0, v[0, 0] + v[1, 1] - 2 * v[0, 1], horizon, 1e30)
    assert abs(wrong - probability) > 4 * sqrt(probability * (1 - probability) / samples)


@pytest.mark.parametrize(
    ("gamma", "tau0", "variance", "radius", "samples"),
    [(CRITICAL, 1.0, 0.5, 1e6, 8000), (1.0, 0.7, 2.0, 50.0, 4000)],
)
def test_antipodal_paths_leave_a_ball_with_the_probability_of_the_formula(gamma, tau0, variance, radius, samples):
    """At γ² ≥ ½, by the end of the horizon; the probability of a larger ball is rejected."""
    limit = limit_of(gamma, tau0, 2.0)
    start = lf.equicorrelated(2, -1.0, variance)
    causes = causes_of(limit, start, samples, radius=radius)
    probability = limit.explosion_probability(start, time=2.0, radius=2 * radius)
    assert abs(standard_errors_from(causes, probability)) < 4
    further = limit.explosion_probability(start, time=2.0, radius=2e6 * radius)
    assert abs(standard_errors_from(causes, further)) > 4


def test_antipodes_stay_antipodes():
    """At any distance. Tokens that miss it by 1e-13 of V, about the rounding, are the wrong twin."""
    limit, errors = limit_of(0.45, 1.0, 1.0), []
    for error in (0.0, 1e-13):
        start = lf.from_covariance([[1.5, error - 1.5], [error - 1.5, 1.5]])
        paths = lf.simulate(limit, start, samples=64, seed=1, record=[0.5, 1.0], progress=False)
        v = paths["covariance"].values
        errors.append(float((np.abs(v[..., 0, 1] + v[..., 0, 0]) / v[..., 0, 0]).max()))
        assert (paths["exit_cause"] == LEFT_BALL).any()
    assert errors[0] == 0.0
    assert errors[1] > 1e-6


def test_no_path_explodes_at_a_large_gamma():
    """γ = 0.8 from variance 300; with a fixed step nearly all paths explode."""
    limit = limit_of(0.8, 0.5, 2.0)
    causes = causes_of(limit, lf.equicorrelated(2, 0.2, 300.0), 1000)
    assert (causes == INSIDE).all()
    assert share_by_fixed_steps(0.8, 0.5, 480.0, 2.0, 1e30) > 0.9


def test_aligned_tokens_leave_a_ball_before_their_distance_does():
    """At γ² = ½ u = asinh(d/K) is a Brownian motion in the time Θ of V ∝ exp(Θ/2), stopped at 0."""
    limit = limit_of(CRITICAL, 1.0, 2.0)
    start = lf.equicorrelated(2, 0.2, 300.0)
    causes = causes_of(limit, start, 1000)
    u, needed = asinh(480.0 / sqrt(24.0)), 2 * log(1e100 / 360.0)
    least, most = (erf(u / sqrt(2 * (needed + slack))) for slack in (20.0, -20.0))
    assert standard_errors_from(causes, least) > -4
    assert standard_errors_from(causes, most) < 4
    assert standard_errors_from(causes, limit.explosion_probability(start, radius=1e100)) > 4


@pytest.mark.slow
def test_euler_maruyama_does_not_hide_explosions():
    """The paths that leave the ball or lose resolution are as many as explode; they do not leave the cone."""
    limit = limit_of(0.4, 0.5, 0.5)
    start = lf.equicorrelated(2, -0.4, 3.0)
    causes = causes_of(limit, start, 1000, step="euler-maruyama", radius=1e30)
    probability = limit.explosion_probability(start, time=0.5)
    share = np.isin(causes, (LEFT_BALL, LOST)).mean()
    assert abs(share - probability) < 4 * sqrt(probability * (1 - probability) / 1000)


@pytest.mark.parametrize(("gamma", "size"), [(1e-3, 1.0), (0.05, 1e-100), (0.6, 30.0), (1.0, 1e120)])
def test_explosion_probability_rises_with_time(gamma, size):
    """Times from 1e-12 to 1e6, tiny and enormous starts; a probability below 1e-10 is 0."""
    model = lf.limit(lf.Transformer(width=20, depth=20, gamma=gamma, attention=lf.ShapedAttention(tau0=1.0)))
    by = [model.explosion_probability(np.eye(2) * size, time=t) for t in (1e-12, 1e-6, 1e-3, 1.0, 50.0, 1e6)]
    assert (np.diff([0.0, *by, model.explosion_probability(np.eye(2) * size)]) > -1e-8).all()
    assert all(p == 0 or p >= 1e-10 for p in by)


# ---------------------------------------------------------------- three and more tokens


def kappas(tokens):
    """Return κ₂ and κ₃ of docs/theory.md."""
    return (tokens - 1) / tokens**2, (tokens - 1) * (tokens - 2) / tokens**3


def one_longer_token(tokens, size, ratio, seed):
    """Return a covariance whose first token has the square `size`; the others' are of the order `ratio` times that."""
    x = np.random.default_rng(seed).standard_normal((tokens, tokens))
    x[1:] *= sqrt(ratio)
    x[0] /= np.linalg.norm(x[0])
    return size * x @ x.T


def matrix_of_pairs(tokens):
    """Return the function that makes V of its entries α ≤ β."""
    rows, columns = (torch.tensor(each) for each in np.triu_indices(tokens))

    def matrix(pairs):
        v = torch.zeros(tokens, tokens, dtype=pairs.dtype)
        return v.index_put((rows, columns), pairs).index_put((columns, rows), pairs)

    return matrix


def of_longer_token(tokens):
    """Return functions of the pairs of V: log v, the sum Y of the others' squares over v, and S."""
    matrix = matrix_of_pairs(tokens)

    def size(pairs):
        return pairs[0].log()

    def others(pairs):
        return matrix(pairs).diagonal()[1:].sum() / pairs[0]

    def across(pairs):
        v = matrix(pairs)
        return others(pairs) - (v[0, 1:] ** 2).sum() / pairs[0] ** 2

    return size, others, across


@pytest.mark.parametrize(("tokens", "gamma"), [(3, 0.5), (7, 1.0)])
def test_rates_of_a_token_that_is_longer_than_the_others(tokens, gamma):
    """Step 1 of the theorem in docs/theory.md, by b and Σ; κ₃ = 0, as for two tokens, is rejected."""
    tau0, (second, third) = 0.9, kappas(tokens)
    v = one_longer_token(tokens, 1e6, 1e-8, seed=tokens)
    size, others, across = of_longer_token(tokens)
    limit, clock = limit_of(gamma, tau0, 1.0), v[0, 0] ** 2 / tau0**2
    functions = (size, others, lambda pairs: across(pairs).log())
    drift, noise = (each / clock for each in generator_and_covariance(limit, v, functions))
    pairs = torch.tensor(v[np.triu_indices(tokens)])
    y, s = float(others(pairs)), float(across(pairs))
    g2, g4 = gamma**2, gamma**4
    assert drift[0] == pytest.approx(g2 * (second**2 + third) - 2 * g4 * second**2, rel=0.01)
    assert drift[0] != pytest.approx(g2 * second**2 - 2 * g4 * second**2, rel=0.1)
    assert drift[1] == pytest.approx(-g2 * third * y + 4 * g4 * second**2 * s, abs=0.002 * y)
    assert drift[2] == pytest.approx(-g2 * third + g4 * second**2, rel=0.01)
    assert drift[2] != pytest.approx(g4 * second**2, rel=0.1)
    bracket = 4 * g4 * second**2
    assert noise[0, 0] == pytest.approx(bracket, rel=0.01)
    assert noise[2, 2] == pytest.approx(bracket, rel=0.01)
    assert noise[0, 2] == pytest.approx(-bracket, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "gamma", "size"), [(3, 1.0, 10.0), (3, 0.6, 3.0), (5, 1.0, 3.0)])
def test_one_token_among_zeros_explodes_with_its_probability(tokens, gamma, size):
    """The others are 1e-12 of it. The same formula without κ₃, and no explosion at γ = 1, are rejected."""
    tau0, (second, third) = 1.0, kappas(tokens)
    start = np.diag([size] + [1e-12 * size] * (tokens - 1))
    causes = causes_of(limit_of(gamma, tau0, 20.0), start, 2000, dt=0.02)
    squared = tau0**2 * (2 - gamma**2) / (2 * gamma**2 * second**2)  # K²

    def probability(growth):
        power = growth / (2 * gamma**2 * second**2)
        return betainc(0.5, (power - 1) / 2, size**2 / (size**2 + squared)) if power > 1 else 1e-9

    assert abs(standard_errors_from(causes, probability(second**2 + third))) < 4
    assert abs(standard_errors_from(causes, probability(second**2))) > 4
