"""Gradients of the chain have the law of gradients of networks: weightless ones, and drawn ones with autograd."""

import math
import threading
from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import beta, kstest

import limitformer as lf
from drawn_gradients import ACTIVATIONS, gradients_of
from limitformer.base import memory
from limitformer.models.activations import DERIVATIVES, derivative_of
from limitformer.numerics.watch import DONE, WHOLE, halt, new_watch
from limitformer.simulation.processes import process_of
from statistics_checks import ALPHA, least_p

SAMPLES, DRAWN, WEIGHTLESS = 12_000, 4_000, 256
V0 = np.array([[1.0, 0.3, -0.4], [0.3, 1.6, 0.2], [-0.4, 0.2, 0.7]])
TWINS = np.array([[1.0, 0.3, 1.0], [0.3, 1.6, 0.3], [1.0, 0.3, 1.0]])  # the first and the last token are equal
NEAR = TWINS + 1e-18 * np.diag([0, 0, 1.0])
SMALL = {"width": 12, "depth": 3, "gamma": 0.6}
SOFTMAX, SHAPED_RELU = lf.SoftmaxAttention(), lf.ShapedReLU(c_plus=0.2, c_minus=-1.0)


def small(**parts):
    return lf.Transformer(**{**SMALL, **parts})


def own_sine(x):
    return x + 0.5 * math.sin(x)


def post(kind):
    """Return a Post-norm with an ε so large that the loss is not constant."""
    return kind(placement="post", eps=0.4)


# Name → model, start.
CASES = {
    "causal": (small(attention=SOFTMAX, mask="causal"), V0),
    "both, shaped": (small(attention=lf.ShapedAttention(tau0=0.3), feedforward=SHAPED_RELU), V0),
    "sharp": (small(attention=lf.ShapedAttention(tau0=0.15)), V0),
    "heads": (small(attention=lf.SoftmaxAttention(heads=3), feedforward=lf.GELU()), V0),
    "one coordinate a head": (
        small(attention=lf.ShapedAttention(tau0=0.5, heads=2, head_dim=1, identity=False, center=False)),
        V0,
    ),
    "two tiles of ReLU": (small(feedforward=lf.ReLU(hidden=70), lam=0.9), V0),
    "fewer units than tokens": (small(feedforward=lf.ReLU(hidden=2)), V0),
    "Pre-LN, causal": (small(attention=SOFTMAX, feedforward=lf.GELU(), norm="pre", mask="causal"), V0),
    "Post-LN": (small(attention=lf.SoftmaxAttention(heads=2), feedforward=lf.ReLU(), norm=post(lf.LayerNorm)), V0),
    "Post-RMS": (small(attention=SOFTMAX, feedforward=lf.ReLU(), norm=post(lf.RMSNorm)), V0),
    "SwiGLU": (small(attention=SOFTMAX, feedforward=lf.SwiGLU(hidden=20)), V0),
    "two tiles of GeGLU": (small(feedforward=lf.GeGLU(hidden=70), lam=0.9), V0),
    "SquaredReLU": (small(attention=lf.SoftmaxAttention(heads=2), feedforward=lf.SquaredReLU(), mask="causal"), V0),
    "identical tokens": (small(attention=SOFTMAX, feedforward=lf.GELU()), TWINS),
    "nearly identical": (small(attention=lf.SoftmaxAttention(heads=2), feedforward=SHAPED_RELU, norm="pre"), NEAR),
}
TOKENS = np.array([[1.0, 0.5, -0.2, 0.3, 0.7], [0.3, -1.0, 0.4, 0.6, 0.1], [-0.6, 0.8, 1.1, -0.1, 0.3]])


def narrow(width, norm):
    """Return three tokens at a width that leaves few or no directions outside."""
    attention = lf.SoftmaxAttention(heads=1 if width % 2 else None)
    x = TOKENS[:, :width]
    return small(width=width, attention=attention, feedforward=lf.GELU(hidden=5), norm=norm), x @ x.T / width


CASES |= {
    f"width {width}, {norm}": narrow(width, norm) for width, norm in ((2, None), (2, "pre"), (3, None), (4, "pre"))
}
CASES["width 4, Post-LN"] = narrow(4, post(lf.LayerNorm))


def statistics(data, weights):
    """Return at least eight statistics: of states, the loss, the gradient at each layer, and each weight."""
    v, stream = np.asarray(data["covariance"]), np.asarray(data["stream_gradient"])
    summary = {f"|G_{layer}|": stream[:, layer] for layer in range(stream.shape[1])}
    summary |= {"V_00": v[:, -1, 0, 0], "V_12": v[:, -1, 1, 2], "loss": np.asarray(data["loss"])}
    return summary | {"|G_0|/|G_3|": stream[:, 0] / stream[:, -1]} | {f"∂ {name}": np.asarray(w) for name, w in weights}


def statistics_of_dataset(data):
    return statistics(data, [(name, data["weight_gradient"].sel(weight=name)) for name in data["weight"].values])


def statistics_of_drawn(*arguments, **options):
    gradients = gradients_of(*arguments, **options)
    return statistics(gradients, gradients["weight_gradient"].items())


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def chain():
    """Simulate a case with gradients, once for all tests."""
    return cache(lambda name: lf.simulate(*CASES[name], samples=SAMPLES, seed=1, gradients=True))


@pytest.mark.parametrize("name", CASES)
def test_chain_and_drawn_networks_share_one_law(name, chain):
    exact, drawn = statistics_of_dataset(chain(name)), statistics_of_drawn(*CASES[name], DRAWN, 5)
    assert exact.keys() == drawn.keys()
    assert len(exact) >= 8
    p, where = least_p(exact, drawn)
    assert p > ALPHA, f"{where}: p = {p:.2g}"


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["causal", "two tiles of ReLU", "Pre-LN, causal", "SwiGLU"])
def test_chain_and_weightless_networks_share_one_law_and_names(name, chain):
    weightless = lf.weightless.simulate(
        *CASES[name], samples=WEIGHTLESS, seed=2, gradients=True, dtype=torch.float64, progress=False
    ).rename(layer="depth")
    finite = chain(name)
    assert finite["weight"].values.tolist() == weightless["weight"].values.tolist()
    for variable in ("loss", "stream_gradient", "weight_gradient", "covariance"):
        assert finite[variable].dims == weightless[variable].dims
    p, where = least_p(statistics_of_dataset(finite), statistics_of_dataset(weightless))
    assert p > ALPHA, f"{where}: p = {p:.2g}"


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("causal", "value"),
        ("sharp", "query"),
        ("sharp", "key"),
        ("heads", "output"),
        ("two tiles of ReLU", "post"),
        ("Pre-LN, causal", "post"),
        ("SwiGLU", "gate"),
        ("Post-LN", "value"),
    ],
)
def test_wrong_twin_with_a_fresh_matrix_in_the_backward_pass_is_rejected(name, weight, chain):
    """The wrong twin draws one matrix anew for the backward pass.

    Cases where this has no visible effect are left out: after a nearly uniform softmax, and values under a Pre-norm.
    """
    p, _ = least_p(statistics_of_dataset(chain(name)), statistics_of_drawn(*CASES[name], DRAWN, 5, fresh=(weight,)))
    assert p < ALPHA


ROUNDED = ("identical tokens", "nearly identical", "width 2, pre")  # rounding decides a direction, or is normalised


def test_frame_outside_the_tokens_is_uniform_given_tokens_and_sizes():
    """The claim of docs/theory.md, by autograd: ⟨f, E₁⟩² is Beta, also given a large T; a frame of all of G is not."""
    generator, n = torch.Generator().manual_seed(3), 9
    x = torch.tensor(TOKENS[:, :4] @ np.eye(4, n)).expand(6000, 3, n).clone().requires_grad_(True)
    pre, post = (torch.randn(6000, n, n, generator=generator, dtype=torch.float64) for _ in range(2))
    out = x + torch.nn.functional.gelu(x @ pre) @ post / n
    out.square().sum().backward()
    outside = np.linalg.svd(TOKENS[:, :4] @ np.eye(4, n))[2][3:]  # an orthonormal basis of the directions outside Q
    gradient = x.grad.numpy()
    rest = gradient @ outside.T @ outside
    direction = outside.T @ [0.6, 0.8, *np.zeros(n - 5)]
    uniform = beta(0.5, (n - 4) / 2)
    squares, twin = ((each[:, 0] @ direction) ** 2 / (each[:, 0] ** 2).sum(1) for each in (rest, gradient))
    large = (rest**2).sum((1, 2)) > np.median((rest**2).sum((1, 2)))
    for part in (squares, squares[large], squares[~large]):
        assert kstest(part, uniform.cdf).pvalue > ALPHA
    assert kstest(twin, uniform.cdf).pvalue < ALPHA


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ROUNDED])
def test_states_equal_those_without_gradients(name, chain):
    """Both use the same random numbers, with another orthogonal factorisation."""
    expected = lf.simulate(*CASES[name], samples=40, seed=1)["covariance"].values
    v = chain(name)["covariance"].values[:40]
    np.testing.assert_allclose(v, expected, rtol=0, atol=1e-11 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["identical tokens", "nearly identical"])
def test_identical_tokens_stay_identical(name, chain):
    v = chain(name)["covariance"].values
    distance = v[..., 0, 0] + v[..., 2, 2] - 2 * v[..., 0, 2]
    assert np.abs(distance).max() < 1e-12 * v.max()


def test_the_loss_is_half_the_squared_length_of_the_last_tokens(chain):
    data = chain("heads")
    trace = np.trace(data["covariance"].values[:, -1], axis1=1, axis2=2)
    np.testing.assert_allclose(data["loss"], SMALL["width"] * trace / 6, rtol=1e-12)
    np.testing.assert_allclose(data["stream_gradient"][:, -1], np.sqrt(SMALL["width"] * trace) / 3, rtol=1e-12)


@pytest.mark.parametrize("kind", [lf.LayerNorm, lf.RMSNorm])
def test_a_norm_at_the_end_makes_the_loss_constant(kind):
    """|x|² = n for all tokens, so every gradient below the last norm is zero."""
    model = small(attention=SOFTMAX, feedforward=lf.ReLU(), norm=kind(placement="post", eps=0.0))
    data = lf.simulate(model, V0, samples=200, seed=0, gradients=True)
    np.testing.assert_allclose(data["loss"], SMALL["width"] / 2, rtol=1e-12)
    assert data["stream_gradient"][:, :-1].max() < 1e-12
    assert data["weight_gradient"].max() < 1e-12


@pytest.mark.parametrize("function", DERIVATIVES)
def test_derivatives_equal_those_of_autograd(function):
    x = torch.tensor([-800.0, -30.0, -3.0, -0.4, -1e-9, 0.0, 0.2, 1.7, 12.0, 800.0], dtype=torch.float64)
    x.requires_grad_(True)
    ACTIVATIONS[function.__name__](x).sum().backward()
    derivative = derivative_of(lf.Elementwise(function).function).compiled
    np.testing.assert_allclose([derivative(each) for each in x.tolist()], x.grad.numpy(), rtol=1e-12, atol=1e-14)


def test_gradient_without_branches_is_multiplied_by_lambda():
    model = small(attention=SOFTMAX, feedforward=lf.GELU(), gamma=0.0, lam=0.9)
    data = lf.simulate(model, V0, samples=16, seed=0, gradients=True)
    expected = 0.9 ** np.arange(12, 5, -2) * np.sqrt(SMALL["width"] * np.trace(V0)) / 3
    np.testing.assert_allclose(data["stream_gradient"], np.tile(expected, (16, 1)), rtol=1e-12)
    assert not data["weight_gradient"].any()


def test_bits_do_not_depend_on_threads_samples_and_layers(chain):
    name = "heads"
    options = {"seed": 1, "gradients": True}
    few = lf.simulate(*CASES[name], samples=21, threads=2, chunk=8, record=[0, 2], **options)
    whole = chain(name)
    np.testing.assert_array_equal(few["weight_gradient"], whole["weight_gradient"][:21])
    np.testing.assert_array_equal(few["stream_gradient"], whole["stream_gradient"][:21, [0, 2]])
    np.testing.assert_array_equal(few["loss"], whole["loss"][:21])
    assert not np.array_equal(few["loss"][:8], few["loss"][8:16])


def test_gradient_is_nan_for_paths_that_leave_the_ball():
    data = lf.simulate(CASES["causal"][0], V0, samples=400, seed=0, gradients=True, radius=2.5)
    left = np.isfinite(data["exit"].values)
    assert 0 < left.sum() < 400
    for name in ("loss", "stream_gradient", "weight_gradient"):
        assert (np.isnan(data[name].values.reshape(400, -1)).all(1) == left).all()
        assert np.isfinite(data[name].values[~left]).all()


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_halt_stops_the_forward_and_the_backward_pass(share):
    deep = lf.Transformer(width=8, depth=30_000, gamma=1e-6, attention=SOFTMAX)
    process = process_of(deep, V0, np.array([0]), {"gradients": True})
    prepared, outputs, watch = process.prepare(0), process.outputs(8), new_watch()
    prepared.run(0, process.outputs(0), new_watch())  # compile first
    runner = threading.Thread(target=prepared.run, args=(0, outputs, watch), daemon=True)
    runner.start()
    while watch[DONE] <= 8 * share and runner.is_alive():
        pass
    halt(watch)
    runner.join(timeout=60)
    assert not runner.is_alive()
    assert watch[WHOLE] == 0
    assert 8 * share < watch[DONE] < 8


@pytest.mark.parametrize(
    ("model", "start", "options", "message"),
    [
        (small(feedforward=lf.OneMatrix(activation=lf.ReLU())), V0, {}, "OneMatrix has no gradients.*nn.simulate"),
        (small(feedforward=lf.Gated(own_sine)), V0, {}, r"Gated\(.*own_sine\) has no gradients.*nn.simulate"),
        (lf.limit(lf.Transformer(width=9, depth=9, gamma=1 / 3, lam=1.0, feedforward=lf.ReLU())), V0, {}, "limit"),
        (lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=9), None, {"horizon": 1}, "sphere"),
        (CASES["causal"][0], V0, {"gradients": 1}, "True or False; got 1"),
    ],
    ids=["one matrix", "own function", "limit", "sphere", "not a bool"],
)
def test_simulate_refuses_gradients_where_there_are_none(model, start, options, message):
    with pytest.raises(lf.InputError, match=message):
        lf.simulate(model, start, samples=2, seed=0, **{"gradients": True, **options})


def test_simulate_refuses_gradients_that_exceed_the_memory(monkeypatch):
    """The recording is too large in the first case, the checkpoints of a thread in the second."""
    deep = lf.Transformer(width=8, depth=10**6, gamma=1e-6, attention=SOFTMAX)
    monkeypatch.setattr(memory, "available_memory", lambda: 2**27)
    lf.recording_size(deep, V0, samples=5, record=[0])
    with pytest.raises(lf.InputError, match=r"Nearest: .*gradients=False"):
        lf.simulate(deep, V0, samples=5, seed=0, record=[0], gradients=True)
    with pytest.raises(lf.InputError, match=r"The scratch memory of one thread takes .* fewer tokens or layers"):
        lf.simulate(deep, V0, samples=1, seed=0, record=[0], gradients=True)
