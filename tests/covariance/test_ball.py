"""Exits of the limit's paths from a ball that is close to the start.

Antipodal tokens have |V| = d/2, so the formula of `explosion` is one for the ball. The wrong twin of every probability
sees the paths at the ends of steps only.
"""

from math import exp, log, sqrt

import numpy as np
import pytest
from scipy.special import ndtr

import limitformer as lf
from limitformer.covariance.limit.ball import variance_at
from limitformer.sampling.exits import INSIDE, LEFT_BALL

SHAPED = lf.ShapedAttention(tau0=0.6)
STRAIGHT = lf.ShapedReLU(c_plus=1.0, c_minus=1.0)  # no kink, so that V is a martingale without attention
V3 = np.array([[1.0, 0.4, -0.3], [0.4, 1.7, 0.5], [-0.3, 0.5, 0.8]])


def limit_of(gamma, horizon, **parts):
    return lf.limit(lf.Transformer(width=1000, depth=round(1000 * horizon), gamma=gamma, **parts))


def left_ball(limit, start, samples, **options):
    """Return whether each path left the ball, and its exit."""
    options = {"seed": 1, "record": [limit.horizon], "progress": False} | options
    paths = lf.simulate(limit, start, samples=samples, **options)
    assert np.isin(paths["exit_cause"].values, (INSIDE, LEFT_BALL)).all()
    return paths["exit_cause"].values == LEFT_BALL, paths["exit"].values


def seen_outside(limit, start, samples, radius):
    """Return whether |V| of each path reaches the radius at the end of any step."""
    paths = lf.simulate(limit, start, samples=samples, seed=1, radius=100 * radius, progress=False)
    return (np.linalg.norm(paths["covariance"].values, axis=(-2, -1)) >= radius).any(1)


def errors_from(outside, probability):
    """Return the deviation of a share from a probability, in standard errors."""
    return (outside.mean() - probability) / sqrt(probability * (1 - probability) / len(outside))


@pytest.mark.parametrize(
    "parts", [{}, {"feedforward": STRAIGHT}, {"mask": "causal"}], ids=["attention", "both", "mask"]
)
def test_variance_of_log_norm_is_that_of_the_dense_diffusion(parts):
    """σ² = ∇fᵀ Σ ∇f for f = log|V|; without the part of attention it is rejected."""
    limit = limit_of(0.8, 1.0, attention=SHAPED, **parts)
    rows, columns = np.triu_indices(3)
    gradient = np.where(rows == columns, 1, 2) * V3[rows, columns] / (V3**2).sum()
    dense = gradient @ limit.diffusion(V3) @ gradient
    assert variance_at(V3, limit.constants(), limit.mask_for(3)) == pytest.approx(dense, rel=1e-12)
    linear = limit.constants()._replace(mixing=0.0)
    assert variance_at(V3, linear, limit.mask_for(3)) != pytest.approx(dense, rel=0.02)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("gamma", "tau0", "variance", "ratio", "horizon", "samples"),
    [(0.3, 0.3, 1.0, 2.0, 0.3, 20_000), (0.83, 0.6, 1.0, 3.0, 0.5, 30_000), (1.0, 0.7, 0.5, 3.0, 1.0, 20_000)],
)
def test_paths_reach_a_close_ball_with_the_probability_of_the_formula(gamma, tau0, variance, ratio, horizon, samples):
    limit, start = (
        limit_of(gamma, horizon, attention=lf.ShapedAttention(tau0=tau0)),
        lf.equicorrelated(2, -1.0, variance),
    )
    radius = 2 * variance * ratio
    probability = limit.explosion_probability(start, time=horizon, radius=2 * radius)
    outside, _ = left_ball(limit, start, samples, radius=radius)
    assert abs(errors_from(outside, probability)) < 4
    assert errors_from(seen_outside(limit, start, samples, radius), probability) < -4


def reached_by(variance, level, time):
    """Return P(a Brownian motion with this variance and the drift −variance/2 reaches the level by the time)."""
    deviation, drift = sqrt(variance * time), -variance * time / 2
    return ndtr((drift - level) / deviation) + exp(-level) * ndtr((-level - drift) / deviation)


@pytest.mark.parametrize("step", ["factor", "euler-maruyama"])
def test_one_token_leaves_at_the_times_of_a_geometric_brownian_motion(step):
    """V of one token is one, with the variance 4a². Paths that are seen at the ends of steps leave too late."""
    limit = limit_of(0.8, 1.0, feedforward=STRAIGHT)
    variance, samples = 4 * limit.constants().linear ** 2, 20_000
    _, exits = left_ball(limit, [[1.0]], samples, radius=2.0, step=step)
    v = lf.simulate(limit, [[1.0]], samples=samples, seed=1, step=step, progress=False)["covariance"]
    for time in (0.1, 0.3, 1.0):
        probability = reached_by(variance, log(2.0), time)
        assert abs(errors_from(exits <= time + 1e-9, probability)) < 4
        seen = (v.sel(time=slice(0, time + 1e-9)).values >= 2.0).any((1, 2, 3))
        assert errors_from(seen, probability) < -4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "radius", "more"),
    [
        ([[2.0, 0.3], [0.3, 1.0]], 4.0, {}),
        (V3, 4.0, {"mask": "causal"}),
    ],
    ids=["attention", "mask"],
)
def test_a_wide_chain_leaves_a_ball_as_often_as_the_limit(start, radius, more):
    """Any start. A chain is seen at its layers alone, which moves the radius by exp(0.5826 σ/√n).

    σ² is the variance of log|V| [Broadie, Glasserman and Kou, Math. Finance 7, 1997].
    """
    width, samples = 1000, 8000
    net = lf.Transformer(width=width, depth=600, gamma=0.7, attention=lf.ShapedAttention(tau0=0.9), **more)
    limit, options = lf.limit(net), {"samples": samples, "seed": 1, "progress": False}
    first = lf.simulate(limit, start, radius=radius, record=[limit.horizon], **options)
    there = first["covariance"].values[first["exit_cause"].values == LEFT_BALL, 0]
    mask = limit.mask_for(len(start))
    deviation = np.mean([sqrt(variance_at(v, limit.constants(), mask)) for v in there[:500]])
    further = radius * exp(0.5826 * deviation / sqrt(width))
    share = left_ball(limit, start, samples, radius=further)[0].mean()
    chain = lf.simulate(net, start, radius=radius, record=[600], **options)["exit_cause"].values == LEFT_BALL
    seen = seen_outside(limit, start, samples, further).mean()
    error = sqrt(share * (1 - share) * 2 / samples)
    assert abs(chain.mean() - share) < 4 * error
    assert chain.mean() - seen > 4 * error


@pytest.mark.parametrize("step", ["factor", "euler-maruyama"])
def test_stopped_covariance_lies_on_the_ball_and_is_a_martingale(step):
    """Optional stopping: E V is V₀. A thirtieth more at the exit is rejected."""
    limit = limit_of(0.8, 0.5, feedforward=STRAIGHT)
    radius = 2 * np.linalg.norm(V3)
    paths = lf.simulate(limit, V3, samples=20_000, seed=1, record=[0.5], radius=radius, step=step, progress=False)
    v, outside = paths["covariance"].values[:, 0], paths["exit_cause"].values == LEFT_BALL
    assert 0.2 < outside.mean() < 0.8
    np.testing.assert_allclose(np.linalg.norm(v[outside], axis=(1, 2)), radius, rtol=1e-12)
    assert (np.linalg.norm(v[~outside], axis=(1, 2)) < radius).all()

    def deviation(v):
        return np.abs((v.mean(0) - V3) / (v.std(0) / sqrt(len(v)))).max()

    assert deviation(v) < 4
    assert deviation(v * np.where(outside, 1 + 1 / 30, 1)[:, None, None]) > 4


@pytest.mark.parametrize("step", ["factor", "euler-maruyama"])
def test_exits_do_not_depend_on_threads_or_neighbours(step):
    """Some of the paths take short steps; every other seed gives other exits."""
    limit = limit_of(0.83, 0.5, attention=SHAPED)

    def run(samples, seed=1, threads=1):
        options = {"radius": 5.0, "step": step, "seed": seed, "threads": threads, "progress": False}
        return lf.simulate(limit, V3, samples=samples, **options)

    whole = run(40)
    for other in (run(40, threads=2), run(13)):
        few = whole.isel(sample=slice(other.sizes["sample"]))
        for name in ("exit", "exit_cause", "covariance"):
            np.testing.assert_array_equal(few[name].values, other[name].values)
    assert np.isfinite(whole["exit"].values).sum() > 5
    assert (run(40, seed=2)["exit"].values != whole["exit"].values).any()
