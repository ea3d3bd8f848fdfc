"""The network of one matrix a layer [ST, eqs 3, 19]: network, chain and limit; two matrices are the wrong twin.

`test_chain_network` compares chain and network with a skip.
"""

from math import sqrt

import numpy as np
import pytest
import torch

import limitformer as lf
import own_parts_example as own
from statistics_checks import STANDARD_ERRORS, assert_same_law, covariance_standard_errors, standard_errors

V3 = np.array([[1.0, 0.3, -0.4], [0.3, 1.6, 0.2], [-0.4, 0.2, 0.7]])
PAIRS = np.triu_indices(3)
SHAPED = lf.ShapedReLU(c_plus=0.3, c_minus=-1.0)
KINK = lf.ShapedReLU(c_plus=1.5, c_minus=-1.5)


def one_matrix(activation=SHAPED, **changes):
    sizes = {"width": 16, "depth": 8, "gamma": 1.0}
    return lf.Transformer(**sizes | changes, feedforward=lf.OneMatrix(activation=activation))


def two_matrices(activation=SHAPED, **changes):
    sizes = {"width": 16, "depth": 8, "gamma": 1.0}
    return lf.Transformer(**sizes | changes, feedforward=activation)


def last(dataset):
    v, rho = dataset["covariance"].values[:, -1], lf.correlation(dataset).values[:, -1]
    return {"ρ_01": rho[:, 0, 1], "ρ_12": rho[:, 1, 2], "V_00": v[:, 0, 0], "V_02": v[:, 0, 2], "V_22": v[:, 2, 2]}


def simulated(process, start=V3, samples=4_000, seed=1, **options):
    return last(lf.simulate(process, start, samples=samples, seed=seed, progress=False, **options))


# ---------------------------------------------------------------- network and chain


def by_hand(model, samples, seed):
    """Return V after X ← σ(X) √(c/n) W [ST, eq. 19] as printed, from X₀ = √n R₀ Q, in NumPy."""
    rng, n = np.random.default_rng(seed), model.width
    positive, negative = 1 + SHAPED.c_plus / sqrt(n), 1 + SHAPED.c_minus / sqrt(n)
    c = 2 / (positive**2 + negative**2)
    q = np.linalg.qr(rng.standard_normal((samples, n, 3)))[0] * rng.choice([-1.0, 1.0], (samples, 1, 3))
    x = sqrt(n) * np.linalg.cholesky(V3) @ np.swapaxes(q, -1, -2)
    for _ in range(model.depth):
        activated = np.where(x > 0, positive, negative) * x
        x = activated @ (sqrt(c / n) * rng.standard_normal((samples, n, n)))
    return x @ np.swapaxes(x, -1, -2) / n


def test_mlp_is_the_equation_of_the_paper():
    """Chain and network at γ = 1 have the law of NumPy's; two matrices fluctuate about twice as much."""
    model = one_matrix()
    v = by_hand(model, 4_000, seed=3)
    deviation = np.sqrt(np.diagonal(v, axis1=1, axis2=2))
    rho = v / deviation[:, :, None] / deviation[:, None, :]
    truth = {"ρ_01": rho[:, 0, 1], "ρ_12": rho[:, 1, 2], "V_00": v[:, 0, 0], "V_02": v[:, 0, 2], "V_22": v[:, 2, 2]}
    network = last(lf.nn.simulate(model, V3, samples=4_000, seed=2, record=[8], progress=False))
    wrong = simulated(two_matrices(), record=[8])
    assert_same_law(simulated(model, record=[8]), truth, wrong)
    assert_same_law(network, truth, wrong)


@pytest.mark.parametrize("width", [1, 3])
def test_more_tokens_than_width(width):
    x = np.array([[1.0, 0.5, -0.2], [0.3, -1.0, 0.4], [-0.6, 0.8, 1.1]])[:, :width]
    start = x @ x.T / width
    model = one_matrix(lf.GELU(), width=width, depth=2, gamma=0.7)
    network = lf.nn.simulate(model, start, samples=4_000, seed=2, record=[2], dtype=torch.float64, progress=False)
    wrong = simulated(two_matrices(lf.GELU(), width=width, depth=3, gamma=0.7), start, record=[3])
    assert_same_law(simulated(model, start, record=[2]), last(network), wrong)


def test_bits_do_not_depend_on_threads_chunks_and_samples():
    """The first layer is the start, and another seed has other numbers."""
    model = one_matrix(width=70, depth=3)  # more than a tile of coordinates
    whole = lf.simulate(model, V3, samples=19, seed=4, threads=1)["covariance"].values
    parts = lf.simulate(model, V3, samples=19, seed=4, threads=2, chunk=3)["covariance"].values
    few = lf.simulate(model, V3, samples=3, seed=4)["covariance"].values
    np.testing.assert_array_equal(whole, parts)
    np.testing.assert_array_equal(whole[:3], few)
    assert np.abs(whole[:, 0] - V3).max() < 1e-12
    assert np.abs(whole[:, 1:] - lf.simulate(model, V3, samples=19, seed=5)["covariance"].values[:, 1:]).min() > 0


@pytest.mark.parametrize("activation", [SHAPED, lf.ShapedSmooth(own.tanh, scale=0.5)], ids=["ReLU", "tanh"])
def test_stack_that_trains_computes_the_layers_of_the_drawn_network(activation):
    """Both have the same weights; without the gain c the outputs differ."""
    model = one_matrix(activation, gamma=0.75, lam=0.5, depth=3)  # exact in single precision
    drawn = lf.nn.Network(model, torch.Generator().manual_seed(0)).double()
    stack = lf.nn.stack_of(model, torch.Generator().manual_seed(0)).double()
    x = torch.randn(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    deviation = sqrt(model.feedforward.gain_at(16) / 16)
    with torch.no_grad():
        for layer, block in zip(drawn.layers, stack.blocks, strict=True):
            block.feedforward.post.weight.copy_(deviation * layer.feedforward.post.mT)
        assert (stack(x) - drawn(x)).abs().max() < 1e-12
        for block in stack.blocks:
            block.feedforward.post.weight /= sqrt(model.feedforward.gain_at(16))
        assert (stack(x) - drawn(x)).abs().max() > 1e-3


# ---------------------------------------------------------------- limit


@pytest.mark.parametrize("gamma", [1.0, 0.6])
def test_one_layer_has_the_drift_and_covariance_of_the_limit(gamma):
    """Width 2000; γ = 1 is [ST, eq. 3]; b with its sign turned and Σ of two matrices are rejected."""
    chain = one_matrix(KINK, width=2000, depth=1, gamma=gamma)
    limit = lf.limit(chain)
    v = lf.simulate(chain, V3, samples=10_000, seed=4, record=[1])["covariance"].values[:, 0]
    moved = (v - V3)[:, PAIRS[0], PAIRS[1]]
    b, sigma = limit.drift(V3)[PAIRS], limit.diffusion(V3)
    wrong = lf.limit(two_matrices(KINK, width=2000, depth=1, gamma=gamma)).diffusion(V3)
    assert np.abs(standard_errors(2000 * moved, b)).max() < STANDARD_ERRORS
    assert np.abs(standard_errors(2000 * moved, -b)).max() > STANDARD_ERRORS
    assert np.abs(covariance_standard_errors(sqrt(2000) * moved, sigma)).max() < STANDARD_ERRORS
    assert np.abs(covariance_standard_errors(sqrt(2000) * moved, wrong)).max() > STANDARD_ERRORS


def test_limit_of_the_mlp_is_equation_3():
    """b_ReLU and Σ_lin; the network of two matrices has 2 Σ_lin."""
    limit, two = lf.limit(one_matrix(KINK)), lf.limit(two_matrices(KINK))
    (a, b), (d, o) = ((x[:, None] for x in PAIRS), (x[None] for x in PAIRS))
    linear = V3[a, d] * V3[b, o] + V3[a, o] * V3[b, d]
    np.testing.assert_allclose(limit.diffusion(V3), linear, rtol=1e-13)
    np.testing.assert_allclose(two.diffusion(V3), 2 * linear, rtol=1e-13)
    np.testing.assert_array_equal(limit.drift(V3), two.drift(V3))
    assert (limit.horizon, limit.hidden_ratio) == (0.5, None)


@pytest.mark.parametrize("gamma", [1.0, 0.6])
def test_a_deep_chain_has_the_law_of_the_limit(gamma):
    """Width 160, depth 80; the limit of two matrices is rejected."""
    chain = one_matrix(width=160, depth=80, gamma=gamma)
    limit, wrong = lf.limit(chain), lf.limit(two_matrices(width=160, depth=80, gamma=gamma))
    at_end = {"record": [0.5], "dt": 0.005}
    assert_same_law(simulated(chain, record=[80]), simulated(limit, **at_end), simulated(wrong, **at_end))


# ---------------------------------------------------------------- declaration


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"attention": lf.ShapedAttention(tau0=1.0)},
            "acts on the coordinates of the tokens: attention and norm must be None",
        ),
        ({"norm": "pre"}, "acts on the coordinates of the tokens: attention and norm must be None"),
    ],
    ids=str,
)
def test_transformer_refuses_other_parts_with_one_matrix(parts, message):
    with pytest.raises(lf.InputError, match=message):
        lf.Transformer(width=16, depth=2, gamma=0.5, feedforward=lf.OneMatrix(activation=SHAPED), **parts)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation": None}, "activation must be one of ShapedReLU, ReLU, GELU, Elementwise, ShapedSmooth; got None"),
        ({"activation": lf.ReLU(), "hidden": 9}, "has no hidden units, hidden must be None; got 9"),
    ],
    ids=str,
)
def test_one_matrix_refuses_bad_fields(fields, message):
    with pytest.raises(lf.InputError, match=message):
        lf.OneMatrix(**fields)
