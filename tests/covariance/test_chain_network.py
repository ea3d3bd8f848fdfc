"""The chain of every model of the registry has the law of the network; half the width does not."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
import torch

import limitformer as lf
from registry import HALF_WIDTH, MODELS, SHAPED_RELU, SOFTMAX
from statistics_checks import assert_same_law

NETWORKS = 20_000
BATCH = 1000  # networks at a time: the weights of a layer fit the processor's cache
CHAINS = 60_000  # a chain costs a tenth of a network; the power is that of twice 30,000
V0 = np.array([[1.0, 0.3, -0.4], [0.3, 1.6, 0.2], [-0.4, 0.2, 0.7]])


def summary(dataset, log_determinant=True):
    """Return two correlations, two variances, a covariance and log det V at the last layer, (samples,) each."""
    v, rho = dataset["covariance"].values[:, -1], lf.correlation(dataset).values[:, -1]
    entries = {
        "ρ_01": rho[:, 0, 1],
        "ρ_12": rho[:, 1, 2],
        "V_00": v[:, 0, 0],
        "V_22": v[:, 2, 2],
        "V_02": v[:, 0, 2],
    }
    return {**entries, "log det V": np.linalg.slogdet(v)[1]} if log_determinant else entries


def chain(model, start, **options):
    return summary(lf.simulate(model, start, samples=CHAINS, seed=1, record=[model.depth]), **options)


def needs_double(model):
    """Return whether |ρ| is 1, or a Post-norm keeps V at 1 − 1e-5, which single precision cannot resolve."""
    after = model.normalisation is not None and model.normalisation.placement == "post"
    return after or model.width < 8


@torch.no_grad()
def draw_in_single(module, generator):
    """Draw normals in single precision, at a quarter of the cost, for weights in double precision."""
    for parameter in module.parameters():
        parameter.copy_(torch.empty(parameter.shape).normal_(generator=generator))


def network(model, start, **options):
    dtype = torch.float64 if needs_double(model) else torch.float32
    drawing = patch("limitformer.nn.drawn.simulate.draw_weights", draw_in_single)
    settings = {"samples": NETWORKS, "seed": 2, "batch": BATCH, "record": [model.depth], "progress": False}
    with drawing if needs_double(model) else nullcontext():
        dataset = lf.nn.simulate(model, start, dtype=dtype, **settings)
    return summary(dataset, **options)


def shallow(model):
    """Return a model of five layers, with the γ² d of the eight layers in the registry."""
    return replace(model, depth=5, gamma=model.gamma * (model.depth / 5) ** 0.5)


@cache
def network_named(name):
    return network(shallow(MODELS[name]), V0)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", MODELS)
def test_chain_and_network_share_one_law(name):
    model, wrong = shallow(MODELS[name]), shallow(HALF_WIDTH[name])
    assert_same_law(chain(model, V0), network_named(name), wrong=chain(wrong, V0))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("part", ["identity", "center", "temperature"])
def test_intervention_changes_the_law(part):
    """The wrong twin is the model without the intervention, at the same width."""
    name = {"identity": "no identity", "center": "no centring", "temperature": "standard temperature"}[part]
    assert_same_law(chain(shallow(MODELS[name]), V0), network_named(name), wrong=chain(shallow(MODELS["both"]), V0))


@pytest.mark.parametrize(("width", "norm"), [(1, None), (2, "post"), (4, "pre")], ids=str)
def test_more_tokens_than_width(width, norm):
    """Three tokens leave no or one direction outside; det V is 0 below width 3."""
    model = lf.Transformer(width=width, depth=3, gamma=0.5, attention=SOFTMAX, feedforward=SHAPED_RELU, norm=norm)
    wrong = lf.Transformer(width=width, depth=4, gamma=0.6, attention=SOFTMAX, feedforward=SHAPED_RELU, norm=norm)
    x = np.array([[1.0, 0.5, -0.2, 0.3], [0.3, -1.0, 0.4, 0.6], [-0.6, 0.8, 1.1, -0.1]])[:, :width]
    start = x @ x.T / width
    assert_same_law(
        chain(model, start, log_determinant=False),
        network(model, start, log_determinant=False),
        wrong=chain(wrong, start, log_determinant=False),
    )


def test_layer_norm_uses_the_means_of_known_tokens():
    """The means are far from 0; a start without them is the wrong twin."""
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((3, 16)) + np.array([[1.5], [-1.0], [0.2]])
    start = lf.from_tokens(tokens)
    model = lf.Transformer(width=16, depth=2, gamma=0.7, attention=SOFTMAX, feedforward=SHAPED_RELU, norm="pre")
    assert_same_law(chain(model, start), network(model, start), wrong=chain(model, start.covariance))


@pytest.mark.slow
def test_repeated_tokens_of_a_text():
    """The start is singular: the second and the last word are one token."""
    start = lf.from_text("to be or be", width=16, seed=3)
    model = MODELS["Pre-LN"]
    finite = lf.simulate(model, start, samples=2_000, seed=1)["covariance"].values
    real = lf.nn.simulate(model, start, samples=64, seed=1, dtype=torch.float64)["covariance"].values
    for v in (finite, real):
        assert np.abs(v[..., 1, :] - v[..., 3, :]).max() < 1e-12 * np.abs(v).max()
    assert_same_law(
        chain(model, start, log_determinant=False),
        network(model, start, log_determinant=False),
        wrong=chain(HALF_WIDTH["Pre-LN"], start.covariance, log_determinant=False),
    )


@pytest.mark.slow
def test_inner_layer_has_the_law_of_the_network():
    """The layer is at a quarter of the depth; the wrong twin is the layer before it."""
    model = MODELS["unshaped"]
    finite = lf.simulate(model, V0, samples=CHAINS, seed=1, record=[2, 3])
    real = lf.nn.simulate(model, V0, samples=NETWORKS, seed=2, batch=BATCH, record=[3], progress=False)
    assert_same_law(summary(finite), summary(real), wrong=summary(finite.isel(depth=[0])))
