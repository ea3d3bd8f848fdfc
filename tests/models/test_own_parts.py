"""Parts made of user functions outside the package: chain and network have one law, a wrong twin does not."""

from dataclasses import replace
from math import erf, pi, sqrt

import numpy as np
import pytest
import torch
from scipy.special import roots_hermitenorm
from scipy.stats import norm

import limitformer as lf
import own_parts_example as own
from limitformer.covariance.chain.own import mixing_address
from limitformer.models import activations
from limitformer.models.feedforward import PIECES, quadrature
from limitformer.models.functions import freeze, function_of
from limitformer.nn.drawn.own import torch_elementwise, torch_mixing
from statistics_checks import assert_same_law

SAMPLES = 6_000
V0 = np.array([[1.0, 0.3, -0.4], [0.3, 1.6, 0.2], [-0.4, 0.2, 0.7]])
SIZE = {"width": 12, "depth": 3, "gamma": 0.8}

SILU = lf.Elementwise(own.silu)
X_TANH = lf.Elementwise(own.x_tanh, torch=own.torch_x_tanh)
BENT = lf.Elementwise(own.bent, hidden=70)  # more than a tile of units, and another after it
SWIGLU = lf.Gated(own.silu, hidden=70)
SIGMOID = lf.Mixing(own.sigmoid_attention, tau0=0.3, torch=own.torch_sigmoid_attention)
SMOOTH = lf.ShapedSmooth(own.shifted_tanh, scale=0.7, hidden=20, torch=own.torch_shifted_tanh)
LINEAR = lf.Mixing(own.linear_attention, tau0=0.5, heads=2, torch=own.torch_linear_attention)
BOUNDED = lf.RadialNorm(own.bounded, placement="pre", torch=own.torch_bounded)

# Each with a twin that differs in its own part alone.
PAIRS = {
    "not of mean zero": ({"feedforward": BENT}, {"feedforward": replace(BENT, gain=1.0)}),
    "shaped smooth": ({"feedforward": SMOOTH}, {"feedforward": replace(SMOOTH, scale=0.3)}),
    "gated": ({"feedforward": SWIGLU}, {"feedforward": replace(SILU, hidden=70)}),
    "sigmoid attention": ({"attention": SIGMOID, "mask": "causal"}, {"attention": SIGMOID}),
    "linear attention, heads": (
        {"attention": LINEAR, "feedforward": SILU, "norm": "pre"},
        {"attention": replace(LINEAR, tau0=2.0), "feedforward": SILU, "norm": "pre"},
    ),
    "bounded norm": (
        {"attention": lf.SoftmaxAttention(), "feedforward": lf.ReLU(), "norm": BOUNDED},
        {"attention": lf.SoftmaxAttention(), "feedforward": lf.ReLU(), "norm": lf.RMSNorm(placement="pre")},
    ),
}


def summary(dataset):
    """Correlations, variances and log det V at the last layer: (samples,) each."""
    v, rho = dataset["covariance"].values[:, -1], lf.correlation(dataset).values[:, -1]
    summaries = {f"ρ_{a}{b}": rho[:, a, b] for a, b in ((0, 1), (1, 2))} | {f"V_{a}": v[:, a, a] for a in (0, 2)}
    return {**summaries, "log det V": np.linalg.slogdet(v)[1]}


def chain(model):
    return summary(lf.simulate(model, V0, samples=SAMPLES, seed=1, record=[model.depth], progress=False))


def network(model):
    dataset = lf.nn.simulate(
        model, V0, samples=SAMPLES, seed=2, record=[model.depth], dtype=torch.float64, device="cpu", progress=False
    )
    return summary(dataset)


@pytest.mark.parametrize("name", PAIRS)
def test_chain_and_network_share_one_law(name):
    right, wrong = (lf.Transformer(**SIZE, **parts) for parts in PAIRS[name])
    assert_same_law(chain(right), network(right), wrong=chain(wrong))


# --- strengths ------------------------------------------------------------------------------------------------------

BOTH = {"width": 12, "depth": 3, "attention": lf.ShapedAttention(tau0=0.5), "feedforward": lf.ReLU()}
GAMMAS, LAMS = [(0.2, 0.9), 0.7, (0.8, 0.1)], [1.0, (0.5, 1.3), (1.1, 0.2)]


def test_strengths_of_each_layer_and_sublayer():
    """The twin has the strengths of the layers in reverse order."""
    right = lf.Transformer(**BOTH, gamma=GAMMAS, lam=LAMS)
    assert_same_law(chain(right), network(right), wrong=chain(replace(right, gamma=GAMMAS[::-1], lam=LAMS[::-1])))


def test_equal_strengths_written_out_are_the_same_bits():
    options = {"samples": 9, "seed": 3, "gradients": True, "progress": False}
    numbers = lf.simulate(lf.Transformer(**BOTH, gamma=0.6), V0, **options)
    written = lf.simulate(lf.Transformer(**BOTH, gamma=np.full((3, 2), 0.6)), V0, **options)
    for name in numbers.data_vars:
        np.testing.assert_array_equal(numbers[name], written[name])


def test_gradients_with_strengths_of_each_place():
    """The chain has the law of drawn networks differentiated by autograd, for every weight's gradient."""
    model = lf.Transformer(**BOTH, gamma=GAMMAS, lam=LAMS)
    options = {"samples": 1500, "gradients": True, "progress": False}
    finite = lf.simulate(model, V0, seed=1, **options)["weight_gradient"].values
    real = lf.nn.simulate(model, V0, seed=2, dtype=torch.float64, **options)["weight_gradient"].values
    wrong = lf.simulate(replace(model, gamma=GAMMAS[::-1]), V0, seed=1, **options)["weight_gradient"].values
    x, y, twin = ({str(k): values[:, k] for k in range(values.shape[1])} for values in (finite, real, wrong))
    assert_same_law(x, y, wrong=twin)


def test_a_network_that_trains_has_the_strengths_of_its_places():
    model = replace(lf.Transformer(**BOTH, gamma=GAMMAS, lam=LAMS), attention=lf.SoftmaxAttention(heads=2))
    blocks = lf.nn.stack_of(model).blocks
    pairs = [[(r.lam.item(), r.gamma.item()) for r in block.residual.values()] for block in blocks]
    np.testing.assert_allclose(pairs, model.strengths, rtol=1e-7)


# --- gains ----------------------------------------------------------------------------------------------------------

CLOSED = {
    "squared ReLU": (activations.squared_relu, 2 / 3),
    "GELU": (activations.gelu, lf.GELU().gain_at(1)),
    "step off 0": (lambda x: 1.0 if x > 0.37 else 0.0, 2 / (1 - erf(0.37 / sqrt(2)))),
    "|x + ½| − x/4": (own.bent, None),
    "tanh": (activations.hyperbolic_tangent, None),
    "SiLU": (own.silu, None),
}


@pytest.mark.parametrize("name", CLOSED)
def test_gains_agree_with_closed_forms_and_gauss_hermite(name):
    """Without a closed form it is Gauss-Hermite, split at a kink by |x + ½|² = (x + ½)²."""
    function, exact = CLOSED[name]
    if name.startswith("|"):
        shifted = exp_absolute_times(0.5)
        exact = 1 / (1 + 0.25 + 1 / 16 - 0.5 * shifted)
    if exact is None:
        nodes, weights = roots_hermitenorm(180)
        exact = sqrt(2 * pi) / (weights @ np.array([function(float(x)) ** 2 for x in nodes]))
    gain = lf.Elementwise(function).gain_at(64)
    assert gain == pytest.approx(exact, rel=1e-9)
    assert gain != pytest.approx(exact * (1 + 1e-6), rel=1e-9)


def peak(x):
    return 1.0 if 0.5 < x < 0.51 else 0.1 * x


def test_gain_includes_a_narrow_peak():
    """The gain has the closed form; the twin is a quadrature that misses the peak."""
    (low, high), (at_low, at_high) = norm.cdf([0.5, 0.51]), norm.pdf([0.5, 0.51])
    squares_inside = high - low - (0.51 * at_high - 0.5 * at_low)
    exact = 1 / (high - low + 0.01 * (1 - squares_inside))
    assert lf.Elementwise(peak).gain_at(64) == pytest.approx(exact, rel=1e-9)
    assert 1 / quadrature(freeze(peak), PIECES)[0] > 1.3 * exact


def exp_absolute_times(a):
    """E |g + a| g = 2Φ(a) − 1 by Stein's identity, because the derivative of |x + a| is its sign."""
    return erf(a / sqrt(2))


# --- three functions that are one -----------------------------------------------------------------------------------

POINTS = np.linspace(-6, 6, 41)
LAYERS = [SILU, X_TANH, BENT, *(getattr(lf, name)() for name in activations.__all__)]


@pytest.mark.parametrize("part", LAYERS, ids=repr)
def test_python_numba_and_torch_agree(part):
    wanted = [part.function(float(x)) for x in POINTS]
    np.testing.assert_allclose([function_of(part).compiled(x) for x in POINTS], wanted, rtol=1e-9, atol=1e-12)
    on_tensors = torch_elementwise(part)(torch.tensor(POINTS))
    np.testing.assert_allclose(on_tensors, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("part", [SIGMOID, LINEAR], ids=repr)
def test_rules_on_tensors_agree_for_batches_of_matrices(part):
    logits = np.random.default_rng(3).standard_normal((2, 5, 3, 3))
    seen = np.tril(np.ones((3, 3), bool))
    on_tensors = torch_mixing(part)(torch.tensor(logits), torch.tensor(seen))
    wanted = [[function_of(part)(y, seen) for y in batch] for batch in logits]
    np.testing.assert_allclose(on_tensors, wanted, rtol=1e-9, atol=1e-12)
    assert mixing_address(function_of(part)) == mixing_address(function_of(part))  # compiled once


# --- as any other chain ---------------------------------------------------------------------------------------------

OWN_ALL = lf.Transformer(**SIZE, attention=SIGMOID, feedforward=SWIGLU, norm=BOUNDED)


def test_threads_do_not_change_the_bits():
    one, two = (lf.simulate(OWN_ALL, V0, samples=70, seed=5, threads=k, progress=False) for k in (1, 2))
    np.testing.assert_array_equal(one["covariance"], two["covariance"])


def test_networks_with_own_parts_have_gradients():
    """Autograd differentiates a user function on tensors."""
    found = lf.nn.simulate(OWN_ALL, V0, samples=4, seed=1, gradients=True, dtype=torch.float64, progress=False)
    assert np.isfinite(found["weight_gradient"]).all()
    names = {str(name).split(".", 2)[2] for name in found["weight"].values}
    assert {"feedforward.gate", "attention.value"} <= names
