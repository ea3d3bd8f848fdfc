"""The SDE of gradients: coefficients against one layer, one step against coefficients, and laws against the chain."""

import numpy as np
import pytest
from scipy.stats import ks_2samp

import limitformer as lf
from gradient_limit_naive import NaiveLimit
from gradient_steps import steps_of
from limitformer.base.errors import InputError
from limitformer_papers.beyond.gradient_coefficients import GradientCoefficients, correlations
from one_layer_back import Layer

V = np.array([[1.0, 0.3, -0.2], [0.3, 1.4, 0.5], [-0.2, 0.5, 0.8]])
M = np.array([[0.6, -0.4, 0.3], [0.1, 0.9, -0.2], [0.5, 0.2, -0.7]])
PSI = np.array([[0.9, 0.2, 0.1], [0.2, 0.6, -0.3], [0.1, -0.3, 0.7]])
PAIR = np.array([[1.0, 0.2], [0.2, 1.3]])
GAMMA, TAU0, C_PLUS, C_MINUS = 0.6, 0.7, 1.0, -1.0  # slopes whose mean is 1: errors are of order 1/n, not n^(−1/2)
ATTENTION = lf.ShapedAttention(tau0=TAU0)
RELU = lf.ShapedReLU(c_plus=C_PLUS, c_minus=C_MINUS)


def limit_of(**parts):
    return lf.limit(lf.Transformer(width=9, depth=9, gamma=GAMMA, **parts))


def coefficients(**parts):
    return GradientCoefficients(limit_of(**parts), V, M, PSI)


def layers(kind, width, samples, mask=None, batch=1000):
    """Yield a layer and the gradients below, in batches of samples."""
    seen = np.tril(np.ones((3, 3), bool)) if mask else None
    for first in range(0, samples, batch):
        layer = Layer(width, GAMMA, V, M, PSI, min(batch, samples - first), [width, first], seen)
        below = layer.attention(TAU0) if kind == "attention" else layer.feedforward(C_PLUS, C_MINUS)
        yield layer, below


def mean_and_error(values):
    return values.mean(0), values.std(0) / len(values) ** 0.5 + 1e-12


def measured_drift(kind, width, samples, mask=None):
    """n E[change] of M and Ψ with their standard errors."""
    drifts = [layer.drift(below) for layer, below in layers(kind, width, samples, mask)]
    return [mean_and_error(np.concatenate(each)) for each in zip(*drifts, strict=True)]


KINDS = [("attention", None), ("attention", "causal"), ("feedforward", None)]


@pytest.fixture(scope="module", params=KINDS, ids=["attention", "causal", "relu"])
def one_layer(request):
    """The coefficients, and the drift of one layer at widths 50 and 100."""
    kind, mask = request.param
    parts = {"attention": ATTENTION, "mask": mask} if kind == "attention" else {"feedforward": RELU}
    return coefficients(**parts), [measured_drift(kind, width, 20_000, mask) for width in (50, 100)]


def test_one_layer_has_the_drift_up_to_an_error_of_order_one_over_n(one_layer):
    expected, (narrow, wide) = one_layer
    for want, (first, error), (second, error2) in zip(expected.drift(), narrow, wide, strict=True):
        extrapolated, spread = 2 * second - first, np.hypot(2 * error2, error)
        assert (abs(extrapolated - want) < 4.5 * spread + 0.01 * abs(want).max()).all()  # the rest is of order n^(−2)
        assert (abs(second - want) < 4.5 * error2 + 3 / 100).all()


@pytest.mark.slow(keep=1)
def test_each_term_of_the_drift_is_needed(one_layer):
    """Wrong twins: without V⁻¹M in the drift of M, without the alignment's part of Ψ, and Ψ without the ReLU's."""
    right, (narrow, wide) = one_layer
    twin = GradientCoefficients(right.limit, V, M, PSI)
    twin.inverse = np.zeros_like(M)
    of_m, of_psi = (2 * second - first for (first, _), (second, _) in zip(narrow, wide, strict=True))
    error, error2 = (np.hypot(2 * second, first) for (_, first), (_, second) in zip(narrow, wide, strict=True))
    wrong = twin.drift()
    assert (abs(of_psi - wrong[1]) / error2).max() > 14
    assert (abs(of_m - wrong[0]) / error).max() > 5
    if right.constants.kink > 0:
        straight = right.drift()[1] + right.constants.kink * (2 / np.pi) * np.arccos(correlations(V)) * PSI
        assert (abs(of_psi - straight) / error2).max() > 5


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("kind", "mask"), KINDS)
def test_one_layer_has_the_noise(kind, mask):
    """The covariance of n^(1/2) times the change: what the logits add, and M's and Ψ's own noise."""
    parts = {"attention": ATTENTION, "mask": mask} if kind == "attention" else {"feedforward": RELU}
    right, width = coefficients(**parts), 400
    changes = [layer.change(below) for layer, below in layers(kind, width, 12_000, mask, batch=500)]
    samples = [np.sqrt(width) * np.concatenate(each).reshape(12_000, 9) for each in zip(*changes, strict=True)]
    own = right.covariance_given_path()
    responses = [right.response_to(y) for y in right.logits] if kind == "attention" else []
    for k, each in enumerate(samples):
        want = own[k] + sum((np.outer(r[k], r[k]) for r in responses), np.zeros((9, 9)))
        got, error = covariance_of(each)
        assert (abs(got - want) < 4.5 * error + 0.02 * abs(want).max()).all()
        for wrong in (own[k], want - own[k]) if responses else (0 * want,):  # twins without a part of the noise
            assert (abs(got - wrong) / error).max() > 5.5
    cross, error = covariance_of(*samples)
    want = sum((np.outer(*r) for r in responses), np.zeros((9, 9)))
    assert (abs(cross - want) < 4.5 * error + 0.02 * abs(own[0]).max()).all()


def covariance_of(x, y=None):
    products = (x - x.mean(0))[:, :, None] * ((x if y is None else y) - (x if y is None else y).mean(0))[:, None]
    return mean_and_error(products)


STEPS = [
    {"attention": lf.ShapedAttention(tau0=0.4)},
    {"attention": lf.ShapedAttention(tau0=0.4), "mask": "causal"},
    {"feedforward": lf.ShapedReLU(c_plus=1.0, c_minus=-2.0, hidden=4)},
    {"attention": lf.ShapedAttention(tau0=0.5), "feedforward": lf.ShapedReLU(c_plus=1.0, c_minus=-2.0)},
]


@pytest.mark.parametrize("parts", STEPS, ids=["attention", "causal", "relu", "both"])
def test_one_step_has_the_drift_and_noise(parts):
    """The step samples what `GradientCoefficients` computes in closed form."""
    limit = lf.limit(lf.Transformer(width=9, depth=9, gamma=0.7, **parts))
    dt, samples = 0.01, 400_000
    right = GradientCoefficients(limit, V, M, PSI)
    moved, spreads, logits = steps_of(limit, V, M, PSI, dt, samples, seed=3)
    responses = right.response_to(logits) if limit.tau0 else (0.0, 0.0)
    own = right.covariance_given_path()
    for k, (after, before, response) in enumerate(zip((moved, spreads), (M, PSI), responses, strict=True)):
        change = after - before - np.sqrt(dt) * response
        drift, error = mean_and_error(change / dt)
        want = right.drift()[k]
        assert (abs(drift - want) < 4.5 * error + 3 * dt * abs(want).max()).all()
        assert (abs(drift) / error).max() > 8
        noise, error = covariance_of(change.reshape(samples, 9) / np.sqrt(dt))
        assert (abs(noise - own[k]) < 4.5 * error + 6 * dt * max(abs(own[k]).max(), 1)).all()


LAWS = [
    {"gamma": 0.45, "attention": lf.ShapedAttention(tau0=1.0)},
    {"gamma": 0.6, "feedforward": lf.ShapedReLU(c_plus=0.0, c_minus=-1.5)},
    {"gamma": 0.4, "attention": lf.ShapedAttention(tau0=1.0), "feedforward": lf.ShapedReLU(c_plus=0.0, c_minus=-1.5)},
]


def network(width, depth_over_width=0.6, **parts):
    return lf.Transformer(width=width, depth=round(depth_over_width * width), **parts)


def norms_of(model, samples, seed):
    """|G| before the first layer over n, and the kernel over n³, of the chain."""
    run = lf.simulate(model, PAIR, samples=samples, seed=seed, gradients=True, record=[0], progress=False)
    run = run.fillna(np.inf)
    return run.stream_gradient.values[:, 0] / model.width, (run.weight_gradient.values**2).sum(1) / model.width**3


def limit_norms(model, samples, seed, **options):
    run = lf.simulate(lf.limit(model), PAIR, samples=samples, seed=seed, gradients=True, progress=False, **options)
    return run.fillna(np.inf)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("parts", LAWS, ids=["attention", "relu", "both"])
def test_norms_and_kernel_have_the_law_of_the_chain(parts):
    """The distance falls with the width, and the kernel of infinite width at the start's V is rejected."""
    limit = limit_norms(network(200, **parts), 20_000, 1, record=[0.0])
    stream, kernel = limit.stream_gradient.values[:, 0], limit.tangent_kernel.values
    distances = []
    for width, samples in ((20, 5000), (160, 5000)):
        chain = norms_of(network(width, **parts), samples, 2)
        distances.append([ks_2samp(*pair).statistic for pair in zip(chain, (stream, kernel), strict=True)])
    assert (np.array(distances[1]) < 1.95 * np.sqrt(1 / 5000 + 1 / 20_000)).all()  # p > 0.001
    assert distances[1][1] < distances[0][1] / 2


@pytest.mark.slow
@pytest.mark.parametrize("parts", LAWS, ids=["attention", "relu", "both"])
def test_laws_of_a_second_implementation(parts):
    model = network(200, **parts)
    naive = NaiveLimit(lf.limit(model), PAIR, 6000, seed=4, dt=0.005)
    limit = limit_norms(model, 20_000, 1, record=[0.0], dt=0.005)
    for got, want in ((naive.stream, limit.stream_gradient[:, 0]), (naive.kernel, limit.tangent_kernel)):
        assert ks_2samp(got, want).pvalue > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["alignment", "logits", "noise"])
def test_wrong_twins_without_one_term_are_rejected(missing):
    """Without all noise the kernel is frozen: V, M and Ψ move by their drifts alone."""
    model = network(160, gamma=0.5, attention=lf.ShapedAttention(tau0=0.75))
    twin = NaiveLimit(lf.limit(model), PAIR, 8000, seed=4, dt=0.01, missing=(missing,))
    stream, kernel = norms_of(model, 8000, 2)
    assert min(ks_2samp(twin.stream, stream).pvalue, ks_2samp(twin.kernel, kernel).pvalue) < 1e-6


@pytest.mark.parametrize("parts", LAWS[:2], ids=["attention", "relu"])
def test_nearly_equal_tokens(parts):
    """V⁻¹ is large there, from the first step on, and the gradients are not."""
    start = lf.equicorrelated(tokens=2, correlation=1 - 1e-7)
    model = network(160, **parts)
    chain, limit = (
        lf.simulate(each, start, samples=5000, seed=6, gradients=True, record=[0], progress=False).fillna(np.inf)
        for each in (model, lf.limit(model))
    )
    assert ks_2samp(chain.stream_gradient[:, 0] / 160, limit.stream_gradient[:, 0]).pvalue > 1e-3


def test_one_token_in_closed_form():
    """E |G|²/n² = V₀ (e^{4a²T} − e^{−2a²T})/3 at t = 0, from the equations dV = 2aV dB and dΨ = 2a²(M²/V − Ψ)dt + …"""
    limit = lf.limit(network(200, gamma=0.6, feedforward=lf.ShapedReLU(c_plus=0.0, c_minus=-1.0, hidden=100)))
    run = lf.simulate(limit, [[1.3]], samples=25_000, seed=2, gradients=True, dt=0.002, record=[0.0], progress=False)
    mean, error = mean_and_error(run.stream_gradient.values[:, 0] ** 2)
    rate = 2 * limit.constants().linear ** 2 * limit.horizon
    want = 1.3 * (np.exp(2 * rate) - np.exp(-rate)) / 3
    assert abs(mean - want) < 4 * error + 0.005 * want
    assert abs(mean - 1.3 * np.exp(2 * rate) / 3) > 10 * error  # wrong twin: Ψ = 0 at the top is forgotten


def simulate(limit, **options):
    settings = {"samples": 20, "seed": 3, "gradients": True, "progress": False}
    return lf.simulate(limit, PAIR, **settings | options)


def test_bits_depend_on_seed_and_replica_alone():
    """Neither threads, chunks, other replicas nor the recorded times matter, with short steps too."""
    hot = lf.limit(network(20, gamma=0.8, attention=lf.ShapedAttention(tau0=0.3)))
    whole = simulate(hot, samples=60, dt=0.05, threads=1)
    assert np.isfinite(whole.tangent_kernel).sum() > 10  # some leave the ball; the others need short steps
    parts = simulate(hot, samples=60, dt=0.05, threads=2, chunk=5)
    fewer = simulate(hot, samples=11, dt=0.05, record=[0.0, hot.horizon])
    for name in ("stream_gradient", "weight_gradient", "tangent_kernel", "covariance", "loss", "exit"):
        np.testing.assert_array_equal(whole[name], parts[name])
    np.testing.assert_array_equal(whole.stream_gradient[:11, [0, -1]], fewer.stream_gradient)
    np.testing.assert_array_equal(whole.tangent_kernel[:11], fewer.tangent_kernel)
    assert not np.array_equal(whole.tangent_kernel[:11], simulate(hot, samples=11, dt=0.05, seed=4).tangent_kernel)


def test_results_have_the_names_of_the_chain():
    model = network(20, **LAWS[2])
    limit, chain = simulate(lf.limit(model)), simulate(model)
    assert set(chain.data_vars) | {"tangent_kernel"} == set(limit.data_vars)
    assert limit.weight_gradient.dims == ("sample", "time", "weight")
    assert {name.split(".", 2)[2] for name in chain.weight.values} == set(limit.weight.values)
    np.testing.assert_allclose(limit.loss, np.trace(limit.covariance.values[:, -1], axis1=1, axis2=2) / 4, rtol=1e-12)
    assert (limit.stream_gradient[:, -1] == 0).all()
    values = limit.weight_gradient.sel(weight="attention.value") ** 2 * 3
    kernel = np.trapezoid(values.values, limit.time.values, axis=1)
    np.testing.assert_allclose(limit.tangent_kernel, kernel, rtol=1e-10)


def test_a_path_that_explodes_has_no_gradient():
    model = lf.Transformer(width=20, depth=10, gamma=0.4, attention=lf.ShapedAttention(tau0=0.4))
    run = lf.simulate(lf.limit(model), 3 * PAIR, samples=100, seed=0, gradients=True, progress=False)
    lost = run.exit_cause.values > 0
    assert 10 < lost.sum() < 90
    for name in ("loss", "tangent_kernel"):
        assert (np.isnan(run[name]) == lost).all()
    assert np.isnan(run.stream_gradient[lost]).all()
    assert np.isfinite(run.weight_gradient[~lost]).all()


REFUSED = [
    ({"step": "euler-maruyama"}, PAIR, "step"),
    ({}, np.ones((2, 2)), "linearly independent tokens"),
    ({"dt": 0.5}, PAIR, "dt must be below"),
    ({"radius": 50.0}, PAIR, "need a radius of at least .*; got 50"),
]


@pytest.mark.parametrize(("options", "start", "words"), REFUSED)
def test_refusals(options, start, words):
    limit = lf.limit(network(20, gamma=0.9, attention=ATTENTION, feedforward=RELU))
    with pytest.raises(InputError, match=words):
        lf.simulate(limit, start, **{"samples": 4, "seed": 1, "gradients": True, "progress": False, **options})


def test_one_matrix_and_the_flow_have_no_gradients():
    one = lf.limit(network(20, gamma=0.5, feedforward=lf.OneMatrix(activation=lf.ShapedReLU(c_plus=0.0, c_minus=-1.0))))
    with pytest.raises(InputError, match="OneMatrix"):
        simulate(one)
    flow = lf.limit(lf.Transformer(width=20, depth=4, gamma=0.5, lam=1.0, feedforward=lf.ReLU()))
    with pytest.raises(InputError, match="no option gradients"):
        simulate(flow)
