"""The ODE of λ = 1, γ = 1/√depth: its right-hand side, its solution, and the chains that converge to it.

The tests compare kernels with quadrature, F with one layer of the chain, the solution with a one-dimensional integral,
and the flow with chains of growing width and depth.
"""

from math import acos, cos, pi

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import ndtr

import limitformer as lf
from limitformer.covariance.limit.flow import dual_kernel, gaussian_error, piecewise_linear
from limitformer.models.feedforward import GELU_SECOND_MOMENT
from statistics_checks import STANDARD_ERRORS, standard_errors

V3 = np.array([[1.0, 0.3, -0.4], [0.3, 1.6, 0.2], [-0.4, 0.2, 0.7]])
ALL_MIXED = lf.ShapedAttention(tau0=1.0, identity=False, center=False)

PARTS = {
    "ReLU": {"feedforward": lf.ReLU()},
    "GELU": {"feedforward": lf.GELU()},
    "one matrix": {"feedforward": lf.OneMatrix(activation=lf.ReLU())},
    "attention": {"attention": ALL_MIXED},
    "attention, causal": {"attention": lf.ShapedAttention(tau0=1.0, center=False), "mask": "causal"},
    "heads": {"attention": lf.ShapedAttention(tau0=1.0, identity=False, center=False, heads=2)},
    "shaped": {"attention": lf.ShapedAttention(tau0=1.0), "feedforward": lf.ShapedReLU(c_plus=0.0, c_minus=-1.0)},
}


def model(name, width=64, depth=16):
    return lf.Transformer(width=width, depth=depth, gamma=depth**-0.5, lam=1.0, **PARTS[name])


# ---------------------------------------------------------------- the right-hand side


def mean_of_products(activation, v, i, j, nodes=400):
    """Return E σ(h_i) σ(h_j), h ~ N(0, V), in polar coordinates, where a homogeneous σ has no kink along a ray."""
    root = np.linalg.cholesky(v[np.ix_([i, j], [i, j])] if i != j else np.diag([v[i, i], 1.0]))
    angle = (np.arange(nodes) + 0.5) * 2 * pi / nodes
    x, w = np.polynomial.laguerre.laggauss(60)  # r²/2 ~ Exp(1)
    unit = np.stack([np.cos(angle), np.sin(angle)])
    h = np.einsum("ij,jk,l->ikl", root, unit, np.sqrt(2 * x))
    first, second = activation(h[0]), activation(h[1] if i != j else h[0])
    return float((first * second * w).sum(1).mean())


@pytest.mark.parametrize(
    ("kernel_of", "activation", "gain", "error"),
    [
        (lambda v: piecewise_linear(v, 1.0, 0.0), lambda h: np.maximum(h, 0), 2.0, 1e-4),
        (lambda v: piecewise_linear(v, 1.3, 0.4), lambda h: np.where(h > 0, 1.3, 0.4) * h, 2 / (1.69 + 0.16), 1e-4),
        (gaussian_error, lambda h: h * ndtr(h), 1 / GELU_SECOND_MOMENT, 1e-9),
    ],
    ids=["ReLU", "other slopes", "GELU"],
)
def test_dual_kernels_are_means_over_the_plane(kernel_of, activation, gain, error):
    """The means are quadratures; another sign of a correlation gives another kernel."""
    kernel = kernel_of(V3)
    for i, j in zip(*np.triu_indices(3), strict=True):
        assert kernel[i, j] == pytest.approx(gain * mean_of_products(activation, V3, i, j), abs=error)
        assert kernel[j, i] == pytest.approx(kernel[i, j], rel=1e-14)
    turned = kernel_of(V3 * [[1, -1, 1], [-1, 1, 1], [1, 1, 1]])
    assert abs(turned[0, 1] - kernel[0, 1]) > 0.1


def test_dual_kernels_preserve_a_variance_of_one():
    """c normalises them; at a variance of 2 the kernel of GELU, which is not homogeneous, does not preserve it."""
    for part in (lf.ReLU(), lf.GELU(), lf.ShapedReLU(c_plus=1.0, c_minus=-1.0), lf.OneMatrix(activation=lf.GELU())):
        np.testing.assert_allclose(dual_kernel(part, np.ones((2, 2))), 1.0, rtol=1e-14)
    assert abs(dual_kernel(lf.GELU(), np.array([[2.0]]))[0, 0] - 2) > 0.1


TWINS = {
    "ReLU": "GELU",
    "GELU": "ReLU",
    "attention": "attention, causal",
    "attention, causal": "attention",
    "heads": "attention, causal",
}


@pytest.mark.parametrize("name", TWINS)
def test_one_layer_adds_the_drift_over_depth(name):
    """d·E(V₁ − V₀) of the chain is F(V₀), for two matrices at any width, for attention at a large one.

    Seven percent more and the F of another part are rejected.
    """
    net = model(name, width=4_000 if "attention" in PARTS[name] else 12)
    v = lf.simulate(net, V3, samples=50_000, seed=3, record=[1])["covariance"].values[:, 0]
    rows = np.triu_indices(3)
    moved = 16 * (v - V3)[:, rows[0], rows[1]]
    exact, other = (lf.limit(model(one)).drift(V3)[rows] for one in (name, TWINS[name]))
    assert np.abs(standard_errors(moved, exact)).max() < STANDARD_ERRORS
    assert np.abs(standard_errors(moved, 1.07 * exact)).max() > STANDARD_ERRORS
    assert np.abs(standard_errors(moved, other)).max() > STANDARD_ERRORS


def test_shaped_parts_become_linear():
    """Logits vanish and slopes meet: each sublayer adds V, so V(1) = e² V₀; a ReLU of fixed slopes differs."""
    flow = lf.limit(model("shaped"))
    np.testing.assert_allclose(flow.drift(V3), 2 * V3, rtol=1e-15)
    np.testing.assert_allclose(flow.solve(V3)[0], np.exp(2) * V3, rtol=1e-9)
    relu = lf.limit(model("ReLU")).solve(V3)[0]
    assert np.abs(relu / V3 - np.e).max() > 0.1


# ---------------------------------------------------------------- the solution


def correlation_by_quadrature(rho, time):
    """Return ρ = cos θ of a ReLU: dθ/dt = −(1 − θ cot θ)/π, so t/π = ∫ dθ/(1 − θ cot θ) from θ(t) to θ(0)."""
    begin = acos(rho)

    def elapsed(end):
        return pi * quad(lambda theta: 1 / (1 - theta / np.tan(theta)), end, begin, epsabs=1e-12)[0]

    return cos(brentq(lambda end: elapsed(end) - time, 0.05, begin, xtol=1e-13))


@pytest.mark.parametrize("name", ["ReLU", "one matrix"])
def test_solution_of_a_relu_is_an_integral(name):
    """Variances are e^t, correlations quadratures; those at a tenth more time are rejected."""
    times = [0.0, 0.3, 1.0]
    solution = lf.limit(model(name)).solve(V3, times)
    deviation = np.sqrt(np.diagonal(solution, axis1=1, axis2=2))
    rho = solution / deviation[:, :, None] / deviation[:, None, :]
    for k, time in enumerate(times):
        np.testing.assert_allclose(deviation[k] ** 2, np.exp(time) * np.diagonal(V3), rtol=1e-9)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        start = V3[i, j] / np.sqrt(V3[i, i] * V3[j, j])
        assert rho[2, i, j] == pytest.approx(correlation_by_quadrature(start, 1.0), abs=1e-9)
        assert rho[1, i, j] == pytest.approx(correlation_by_quadrature(start, 0.3), abs=1e-9)
        assert abs(rho[2, i, j] - correlation_by_quadrature(start, 1.1)) > 1e-3


def distance(net, samples, truth):
    """Return the root mean squared error of V at the last layer, relative to the largest entry of the truth."""
    v = lf.simulate(net, V3, samples=samples, seed=7, record=[net.depth], progress=False)["covariance"].values[:, 0]
    return float(np.sqrt(((v - truth) ** 2).mean(0)).max() / np.abs(truth).max())


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["ReLU", "one matrix", "attention"])
def test_chains_converge_to_the_flow(name):
    """Four times the width and depth give half the error, which at width 1024 is 0.06 to 0.15.

    The wrong twin is the flow at another time.
    """
    sizes = ((64, 16, 500), (256, 64, 400), (1024, 256, 40))
    nets = [(model(name, width, depth), samples) for width, depth, samples in sizes]
    truth, wrong = lf.limit(nets[0][0]).solve(V3, [0.5, 1.0])[::-1]
    errors = [distance(*one, truth) for one in nets]
    assert 1.6 < errors[0] / errors[1] < 2.4
    assert 1.5 < errors[1] / errors[2] < 2.7
    assert errors[2] < 0.15
    assert distance(*nets[2], wrong) > 2 * errors[2]


def spread(net, samples):
    """Return the standard deviation of log V₀₀ at the last layer."""
    v = lf.simulate(net, V3, samples=samples, seed=8, record=[net.depth], progress=False)["covariance"].values
    return float(np.log(v[:, 0, 0, 0]).std())


def test_width_and_depth_commute():
    """Far more width than depth and the reverse have one limit and one fluctuation [Hayou and Yang 2023].

    At λ² + γ² = 1 they have not: the fluctuation is that of depth/width.
    """
    truth = lf.limit(model("ReLU")).solve(V3)[0]
    wide, deep = model("ReLU", 512, 64), model("ReLU", 512, 2048)
    assert distance(wide, 100, truth) < 0.13
    assert distance(deep, 40, truth) < 0.13
    assert 0.6 < spread(deep, 40) / spread(wide, 100) < 1.6
    fixed = [lf.Transformer(width=512, depth=d, gamma=0.5, feedforward=lf.ReLU()) for d in (64, 2048)]
    assert spread(fixed[1], 40) / spread(fixed[0], 100) > 3


# ---------------------------------------------------------------- as a limit among others


def test_simulate_returns_the_solution_in_every_sample():
    flow = lf.limit(model("GELU"))
    dataset = lf.simulate(flow, V3, samples=3, seed=0, record=[0.25, 1.0])
    np.testing.assert_array_equal(dataset["covariance"], np.stack([flow.solve(V3, [0.25, 1.0])] * 3))
    assert dataset["time"].attrs["units"] == "layer/depth"
    assert lf.from_json(dataset.attrs["model"]) == flow
    every = lf.simulate(flow, V3, samples=1, seed=0)
    np.testing.assert_allclose(every["time"], np.arange(17) / 16)
    with pytest.raises(lf.InputError, match="A deterministic limit has no option dt; it has keep, pairs, dtype"):
        lf.simulate(flow, V3, samples=1, seed=0, dt=0.1)
    with pytest.raises(lf.InputError, match="seed must be"):
        lf.simulate(flow, V3, samples=1, seed=-1)


@pytest.mark.parametrize("times", [[], [0.5, 0.2], [1.1], 0.5], ids=str)
def test_times_must_ascend_within_the_horizon(times):
    with pytest.raises(lf.InputError, match=r"times must ascend within \[0, 1\]"):
        lf.limit(model("ReLU")).solve(V3, times)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "pre"}, "normalisation layers"),
        (
            {"attention": lf.SoftmaxAttention()},
            'softmax attention, has no limit at lam=1.*because.*needs temperature="shaped"',
        ),
        ({"gamma": 0.3}, r"lam\*\*2 \+ gamma\*\*2 must be 1.*gamma=1/sqrt\(depth\)=0\.25, whose limit is an ODE"),
        ({"lam": 0.9}, r"lam\*\*2 \+ gamma\*\*2 must be 1"),
    ],
    ids=str,
)
def test_limit_refuses_models_without_a_flow(changes, message):
    common = {"width": 8, "depth": 16, "gamma": 0.25, "lam": 1.0, "feedforward": lf.ReLU()}
    with pytest.raises(lf.NoLimitError, match=message):
        lf.limit(lf.Transformer(**common | changes))


def test_flow_refuses_a_model_of_other_strengths():
    with pytest.raises(lf.InputError, match="model must be a Transformer with lam=1"):
        lf.CovarianceFlow(model=lf.Transformer(width=8, depth=16, gamma=0.25, feedforward=lf.ReLU()))
