"""[ST, Fig. 2]: gradients by finite differences, in more digits, and by the ordinary network; and inputs to refuse."""

from dataclasses import replace

import mpmath
import numpy as np
import pytest
import torch
import xarray as xr
from mpmath import mp

from limitformer.base.errors import InputError
from limitformer.models import (
    GELU,
    LayerNorm,
    ShapedAttention,
    ShapedReLU,
    SoftmaxAttention,
    Transformer,
)
from limitformer.nn import Network
from limitformer_papers.common.claims import FigureRun
from limitformer_papers.shaped_transformer import st_fig2
from limitformer_papers.shaped_transformer.differences_of_tokens import apart, check, run

SMALL = replace(st_fig2.quick(), width=16, depth=6, length=7, batch=3, vocabulary=300, documents=25, samples=3)
MODELS = st_fig2.models(SMALL)


@pytest.fixture(scope="module")
def sequences():
    return st_fig2.code(SMALL)


@pytest.fixture(scope="module")
def data():
    return st_fig2.compute(SMALL, FigureRun(seed=1, threads=1))


def network_of(model, seed=0):
    return Network(model, torch.Generator().manual_seed(seed)).double()


def normal(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_autograd(network, x):
    """Return the network's output and the gradient of a random functional of it by autograd."""
    network.zero_grad()
    output = network(x)
    (output * normal(*output.shape, seed=9)).sum().backward()
    return output.detach(), [parameter.grad.clone() for parameter in network.parameters()]


def by_differences(network, x):
    """Return output and gradients by leader and differences."""
    network.zero_grad()
    output = run(network, apart(x)).whole()
    (output * normal(*output.shape, seed=9)).sum().backward()
    return output.detach(), [parameter.grad.clone() for parameter in network.parameters()]


def distance(one, other):
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_leader_and_differences_equal_the_network(model):
    network, x = network_of(model), normal(3, 7, 16, seed=3)
    (expected, gradients), (output, others) = by_autograd(network, x), by_differences(network, x)
    assert distance([output], [expected]) < 1e-12
    assert distance(others, gradients) < 1e-11


def test_check_refuses_models_without_a_leader():
    for attention, feedforward in (
        (SoftmaxAttention(heads=2), None),
        (ShapedAttention(tau0=1.0, center=False), None),
        (None, GELU()),
    ):
        model = Transformer(width=8, depth=1, gamma=0.5, attention=attention, feedforward=feedforward)
        with pytest.raises(InputError, match="Leader and differences need"):
            check(Network(model))


# In 60 digits


def precise(matrix):
    return mpmath.matrix(matrix.tolist())


def precise_layer(x, weights, model):
    """Compute a Post-LN layer of one sequence, as the papers write it, in mpmath; x (m, n)."""
    m, n = x.rows, x.cols
    query, key, value, pre, post = weights
    scale = mp.sqrt(n)
    logits = (x * query / scale) * (x * key / scale).T / mp.sqrt(n)
    a = mpmath.zeros(m)
    for i in range(m):
        row = [mp.exp(logits[i, j]) for j in range(i + 1)]
        for j, entry in enumerate(row):
            a[i, j] = entry / sum(row)
    x = precise_norm(x + a * x * value / scale)
    positive, negative = map(mp.mpf, model.feedforward.slopes(n))
    hidden = (x * pre / scale).apply(lambda z: positive * z if z > 0 else negative * z)
    return precise_norm(x + mp.sqrt(mp.mpf(model.feedforward.gain_at(n))) * hidden * post / scale)


def precise_norm(x):
    for i in range(x.rows):
        row = [x[i, j] for j in range(x.cols)]
        mean = sum(row) / x.cols
        variance = sum((z - mean) ** 2 for z in row) / x.cols + mp.mpf(1e-5)
        for j, z in enumerate(row):
            x[i, j] = (z - mean) / mp.sqrt(variance)
    return x


def precise_value(x, layers, model, functional):
    for weights in layers:
        x = precise_layer(x, weights, model)
    return sum(functional[i, j] * x[i, j] for i in range(x.rows) for j in range(x.cols))


def test_collapsed_gradients_have_correct_digits():
    """Compare ∂/∂W_Q of a late layer with finite differences in 60 digits; the ordinary network has no correct
    digit.
    """
    n, depth = 6, 130
    feedforward = ShapedReLU(c_plus=0.0, c_minus=-1.0)
    model = Transformer(
        width=n,
        depth=depth,
        gamma=1.0,
        lam=1.0,
        mask="causal",
        attention=SoftmaxAttention(),
        feedforward=feedforward,
        norm=LayerNorm(placement="post"),
    )
    network, x = network_of(model, seed=4), normal(1, 3, n, seed=5)
    collapsed = network(x)
    assert (collapsed[0, 1:] - collapsed[0, :1]).abs().max() < 1e-12
    parameters, late = list(network.parameters()), 5 * (depth - 3)
    gradient, rounded = by_differences(network, x)[1][late], by_autograd(network, x)[1][late]
    assert parameters[late] is network.layers[depth - 3].attention.query
    row, column = divmod(int(gradient.abs().argmax()), n)
    with mp.workdps(60):
        layers = [[precise(p.detach()) for p in parameters[k : k + 5]] for k in range(0, len(parameters), 5)]
        functional, values = precise(normal(1, 3, n, seed=9)[0]), []
        for step in (mp.mpf(10) ** -20, -(mp.mpf(10) ** -20)):
            moved = [list(weights) for weights in layers]
            moved[depth - 3][0] = moved[depth - 3][0].copy()
            moved[depth - 3][0][row, column] += step
            values.append(precise_value(precise(x[0]), moved, model, functional))
        exact = float((values[0] - values[1]) / (2 * mp.mpf(10) ** -20))
    assert float(gradient[row, column]) == pytest.approx(exact, rel=1e-6)
    assert abs(float(rounded[row, column]) / exact - 1) > 0.5
    assert abs(exact) < 1e-14


# The figure's gradients


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("weight", st_fig2.WEIGHTS)
def test_gradients_equal_finite_differences(name, weight):
    model = MODELS[name]
    network, x, head = network_of(model), normal(2, 7, 16, seed=1), normal(16, 20, seed=2)
    targets = torch.randint(20, (2, 7), generator=torch.Generator().manual_seed(3))

    def loss():
        return st_fig2.loss(network, model, x, head, targets)

    loss().backward()
    matrix = getattr(network.layers[2].attention, weight)
    direction, step = normal(16, 16, seed=4), 1e-7  # so short that no ReLU turns
    values = []
    with torch.no_grad():
        for sign in (1, -2, 1):  # forward, back past the start, and to it again
            matrix += sign * step * direction
            values.append(float(loss()))
    slope = (values[0] - values[1]) / (2 * step)
    assert float((matrix.grad * direction).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-8)
    assert float((matrix.grad.T * direction).sum()) != pytest.approx(slope, rel=1e-2, abs=1e-8)


def test_data_are_reproducible_and_follow_the_seed(data):
    again = st_fig2.compute(SMALL, FigureRun(seed=1, threads=1))
    np.testing.assert_array_equal(again["norm"], data["norm"])
    other = st_fig2.compute(SMALL, FigureRun(seed=2, threads=1))
    assert (other["norm"] != data["norm"]).all()
    assert dict(data.sizes) == {"model": 4, "weight": 2, "sample": 3, "layer": 6}
    assert np.isfinite(data["norm"]).all()
    assert (data["norm"] > 0).all()


def test_typical_norm_is_the_geometric_mean(data):
    norms = data["norm"].sel(model="shaped", weight="value").values
    np.testing.assert_allclose(st_fig2.typical(data, "shaped", "value"), np.prod(norms, 0) ** (1 / 3), rtol=1e-12)
    layers = np.arange(1, 151)
    power = xr.DataArray(3 * layers**-0.7, dims="layer", coords={"layer": layers})
    assert st_fig2.slope(power) == pytest.approx(-0.7)
