"""Smooth shaped activations: derivatives, drift, chain against limit, small distances, explosion."""

from dataclasses import replace
from math import exp, log1p, sin, sqrt, tanh

import numpy as np
import pytest
from numpy.polynomial.hermite_e import hermegauss
from scipy.special import gammainc

import limitformer as lf
import own_parts_example as own
from limitformer.numerics.lanes import in_lanes
from limitformer.numerics.watch import new_watch
from limitformer.sampling.exits import INSIDE, LEFT_BALL
from limitformer.simulation.processes import covariance_paths
from statistics_checks import STANDARD_ERRORS, assert_same_law

V3 = np.array([[1.0, 0.3, -0.4], [0.3, 1.6, 0.2], [-0.4, 0.2, 0.7]])
GAMMA, SCALE = 0.8, 0.7
SMOOTH = lf.ShapedSmooth(own.shifted_tanh, scale=SCALE, torch=own.torch_shifted_tanh)
SECOND, THIRD = -2 * tanh(0.4), 6 * tanh(0.4) ** 2 - 2  # derivatives of order 2 and 3 at 0


def of_softplus(x):
    return 2 * log1p(exp(x)) - 1.3862943611198906


def of_sine(x):
    return x + sin(40 * x) / 64000 - x / 1600


def model(part, width=1000, depth=1000, gamma=GAMMA, **more):
    return lf.Transformer(width=width, depth=depth, gamma=gamma, feedforward=part, **more)


# ---------------------------------------------------------------- declaration


@pytest.mark.parametrize(
    ("function", "derivatives"),
    [
        (own.shifted_tanh, (SECOND, THIRD)),
        (lf.Tanh().function, (0.0, -2.0)),
        (of_softplus, (0.5, 0.0)),
        (of_sine, (0.0, -1.0)),
    ],
)
def test_derivatives_at_zero(function, derivatives):
    """They are those of calculus; another third derivative by a millionth is rejected."""
    part = lf.ShapedSmooth(function, scale=1.0)
    assert part.derivatives == pytest.approx(derivatives, abs=1e-7)
    assert part.derivatives != pytest.approx((derivatives[0], derivatives[1] + 1e-6), abs=1e-7)


@pytest.mark.parametrize(
    ("function", "scale", "message"),
    [
        (
            own.silu,
            1.0,
            r"0 with slope 1 at 0; .*:silu is 0 with slope 0\.5\. Nearest: \(function\(x\) - 0\)/0\.5",
        ),
        (lambda x: x * x, 1.0, "with slope 0. Nearest: tanh"),
        (lambda x: x + x * abs(x), 1.0, "must have three derivatives at 0; .* Nearest: Elementwise, or"),
        (lambda x: max(x, 0.0), 1.0, "must have three derivatives at 0"),
        (own.shifted_tanh, 0.0, r"scale must be positive; got 0\.0"),
    ],
)
def test_other_activations_are_refused(function, scale, message):
    with pytest.raises(lf.InputError, match=message):
        lf.ShapedSmooth(function, scale=scale)


def test_gradients_and_contradictions_are_refused():
    net = model(SMOOTH, width=12, depth=6)
    for process in (net, lf.limit(net)):
        with pytest.raises(lf.InputError, match=r"with ShapedSmooth.* has no gradients\. Nearest: lf\.nn\.simulate"):
            lf.simulate(process, V3, samples=8, seed=0, gradients=True)
    with pytest.raises(lf.InputError, match=r"which has kink=0; got kink=1\.0"):
        replace(lf.limit(net), kink=1.0)


def test_antipodes_stay_opposite_only_without_a_second_derivative():
    antipodes = lf.from_covariance([[1.0, -1.0], [-1.0, 1.0]])
    limits = [lf.limit(model(part)) for part in (SMOOTH, lf.ShapedSmooth(own.tanh, scale=1.0))]
    assert [limit.mask_from(antipodes).opposite for limit in limits] == [False, True]


# ---------------------------------------------------------------- drift


def layer_drift(width):
    """Return n (λ²V + γ² E σ_n(h) σ_n(h)ᵀ/E σ_n(g)² − V), by Gauss-Hermite."""
    nodes, weights = hermegauss(40)
    weights = weights / weights.sum()
    s = SCALE * sqrt(width)

    def expectation(f, v, a, b):
        x, y = nodes[:, None], v[a, b] / v[a, a] * nodes[:, None]
        y = y * sqrt(v[a, a]) + sqrt(max(v[b, b] - v[a, b] ** 2 / v[a, a], 0.0)) * nodes
        return weights @ (f(x * sqrt(v[a, a])) * f(y)) @ weights

    def activation(x):
        return s * np.vectorize(own.shifted_tanh)(x / s)

    gain = 1 / expectation(activation, np.eye(1), 0, 0)
    assert SMOOTH.gain_at(width) == pytest.approx(gain, rel=1e-12)
    kernel = [[gain * expectation(activation, V3, a, b) for b in range(3)] for a in range(3)]
    return width * GAMMA**2 * (np.array(kernel) - V3)


def test_drift_is_the_limit_of_expectations():
    """Richardson extrapolates in the width; a term that is off by a thousandth is rejected."""
    exact = 2 * layer_drift(32_000) - layer_drift(16_000)
    limit = lf.limit(model(SMOOTH))
    np.testing.assert_allclose(limit.drift(V3), exact, atol=1e-5)
    for change in ({"second": 1.001 * limit.second}, {"third": 1.001 * limit.third}):
        assert np.abs(replace(limit, **change).drift(V3) - exact).max() > 1e-4


# ---------------------------------------------------------------- paths


def last(process, record, samples):
    data = lf.simulate(process, V3, samples=samples, seed=3, record=[record], progress=False)
    v, rho = data["covariance"].values[:, -1], lf.correlation(data).values[:, -1]
    return {"ρ_01": rho[:, 0, 1], "ρ_12": rho[:, 1, 2], "V_00": v[:, 0, 0], "V_11": v[:, 1, 1]}


@pytest.mark.parametrize(
    ("net", "change"),
    [
        (model(SMOOTH, 200, 100, attention=lf.ShapedAttention(tau0=1.0), mask="causal"), {"second": 0.0}),
        (model(lf.OneMatrix(activation=lf.ShapedSmooth(own.tanh, scale=0.7)), 200, 100, gamma=1.0), {"third": 0.0}),
    ],
    ids=["causal attention", "one matrix, tanh"],
)
def test_a_deep_chain_has_the_law_of_the_limit(net, change):
    """The twin lacks one term of the drift."""
    limit = lf.limit(net)
    wrong = last(replace(limit, **change), 0.5, 10_000)
    assert_same_law(last(net, 100, 2_000), last(limit, 0.5, 10_000), wrong)


def test_small_differences_keep_their_relative_precision():
    """The ratio of a small distance to its start does not depend on the start, to first order."""
    process = covariance_paths(lf.limit(model(SMOOTH)), np.eye(2), [0.0, 1.0], keep="pairs")
    moved = []
    for length in (2.0**-50, 2.0**-20):
        prepared, outputs = process.prepare(1), process.outputs(8)
        prepared.factor = in_lanes(np.array([[1.0, 0.0], [1.0, length]]))
        prepared.run(0, outputs, new_watch())
        moved.append(outputs["distance"][:, 1, 0] / length**2)
    assert np.abs(moved[0] / moved[1] - 1).max() < 1e-4
    assert np.abs(np.log(moved[0])).min() > 1e-2


@pytest.mark.parametrize("matrices", [1, 2])
def test_one_token_explodes_with_the_probability_of_the_formula(matrices):
    """P is P(Gamma(1 + c₀/matrices) < c₀V₀/matrices) (docs/theory.md), here with c₀ = ¾σ″²/q².

    The other number of matrices a layer is the twin. No path of tanh, whose c₀ is negative, explodes.
    """
    c0, start, samples = 0.75, [[2.0]], 4_000

    def causes(part, gamma):
        layer = lf.OneMatrix(activation=part) if matrices == 1 else part
        limit = lf.limit(model(layer, depth=8000, gamma=gamma))
        return lf.simulate(limit, start, samples=samples, seed=1, record=[8.0], progress=False)["exit_cause"].values

    gamma = 1.0 if matrices == 1 else GAMMA
    share = (causes(lf.ShapedSmooth(of_softplus, scale=0.5), gamma) == LEFT_BALL).mean()
    for count in (1, 2):
        chance = gammainc(1 + c0 / count, 2.0 * c0 / count)
        error = sqrt(chance * (1 - chance) / samples)
        assert (abs(share - chance) < STANDARD_ERRORS * error) == (count == matrices)
    assert (causes(lf.ShapedSmooth(own.tanh, scale=0.5), gamma) == INSIDE).all()
