"""Drawn networks beyond their law: repeatable, trainable, with gradients and clear refusals."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp

import limitformer as lf
from drawn_gradients import gradients_of
from limitformer.base import memory

nn_simulate = import_module("limitformer.nn.drawn.simulate")  # the package has a function of this name

ATTENTION = lf.ShapedAttention(tau0=1.0)
MODEL = lf.Transformer(
    width=12, depth=3, gamma=0.5, attention=ATTENTION, feedforward=lf.ShapedReLU(c_plus=0.0, c_minus=-1.0)
)
V0 = np.array([[1.0, 0.3, -0.2], [0.3, 1.5, 0.1], [-0.2, 0.1, 0.7]])


def covariances(model=MODEL, start=V0, **options):
    settings = {"samples": 20, "seed": 3, "progress": False, **options}
    return lf.nn.simulate(model, start, **settings)["covariance"].values


def test_the_same_seed_and_batch_give_the_same_numbers():
    np.testing.assert_array_equal(covariances(batch=7), covariances(batch=7))
    assert np.abs(covariances(batch=7) - covariances(batch=7, seed=4))[:, 1:].max() > 0.1


@pytest.mark.parametrize("norm", [None, "pre"])
def test_tokens_have_the_covariance_and_means_of_the_start(norm):
    """Known means matter only to a LayerNorm; without one they must not reduce the directions of the tokens."""
    tokens = np.random.default_rng(0).standard_normal((10, 16)) + 1.0
    model = lf.Transformer(width=11, depth=1, gamma=0.5, attention=ATTENTION, norm=norm)
    start = lf.from_tokens(tokens)
    if norm is None:
        model = lf.Transformer(width=10, depth=1, gamma=0.5, attention=ATTENTION)
    found = covariances(model, start, record=[0], dtype=torch.float64)
    np.testing.assert_allclose(found[:, 0], np.broadcast_to(start.covariance, found[:, 0].shape), atol=1e-12)


def test_too_many_directions_for_the_width_are_refused():
    with pytest.raises(lf.InputError, match="more than width=2 has"):
        covariances(lf.Transformer(width=2, depth=1, gamma=0.5, attention=ATTENTION))


def test_a_network_that_leaves_single_precision_keeps_its_last_covariance():
    found = lf.nn.simulate(MODEL, 1e37 * V0, samples=6, seed=0, progress=False)
    assert np.isfinite(found["covariance"].values).all()
    assert found["exit_cause"].any()
    left_at = found["exit"].values
    for sample in np.flatnonzero(np.isfinite(left_at)):
        left = int(left_at[sample])
        v = found["covariance"].values[sample]
        assert (v[left:] == v[max(left - 1, 0)]).all()


def test_a_network_that_left_does_not_come_back():
    """Pre-LN makes every branch finite again; the recorded covariance does not change."""
    model = lf.Transformer(width=12, depth=4, gamma=1.0, attention=lf.SoftmaxAttention(), norm="pre")
    found = lf.nn.simulate(model, 1e40 * V0, samples=4, seed=0, progress=False)
    assert (found["exit"] == 0).all()
    assert (found["covariance"] == found["covariance"][:, :1].values).all()


WITH_GRADIENTS = {
    "causal, both": {"attention": ATTENTION, "feedforward": lf.ReLU(hidden=7), "mask": "causal"},
    "heads, Pre-LN": {"attention": lf.SoftmaxAttention(heads=3), "feedforward": lf.GELU(), "norm": "pre"},
}


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_have_the_law_of_networks_written_out(name):
    model = lf.Transformer(width=12, depth=2, gamma=0.6, **WITH_GRADIENTS[name])
    options = {"samples": 1500, "gradients": True, "dtype": torch.float64, "progress": False}
    found = lf.nn.simulate(model, V0, seed=0, **options)
    twin = lf.nn.simulate(replace(model, gamma=0.7), V0, seed=0, **options)
    second_route = gradients_of(model, V0, 1500, 1)
    names = list(second_route["weight_gradient"])
    assert sorted(found["weight"].values) == sorted(names)

    def least(data):
        of_weights = [
            (data["weight_gradient"].sel(weight=name), second_route["weight_gradient"][name]) for name in names
        ]
        of_stream = zip(data["stream_gradient"].values.T, second_route["stream_gradient"].T, strict=True)
        pairs = [*of_weights, *of_stream, (data["loss"], second_route["loss"])]
        return len(pairs) * min(ks_2samp(x, y).pvalue for x, y in pairs)

    assert least(found) > 1e-4
    assert least(twin) < 1e-8


def test_networks_that_left_have_no_gradients():
    found = lf.nn.simulate(MODEL, 1e37 * V0, samples=12, seed=0, gradients=True, progress=False)
    left = np.isfinite(found["exit"].values)
    assert 0 < left.sum() < 12
    for name in ("loss", "stream_gradient", "weight_gradient"):
        lost = np.isnan(found[name].values).reshape(12, -1)
        assert lost[left].all()
        assert not lost[~left].any()


def test_gradients_that_do_not_fit_are_refused_at_once():
    model = lf.Transformer(width=4096, depth=10**5, gamma=0.5, attention=ATTENTION)
    with pytest.raises(lf.InputError, match=r"^Differentiating 100,000 layers of width 4,096 takes"):
        lf.nn.simulate(model, V0, samples=1, seed=0, record=[0], gradients=True)


def test_a_causal_network_does_not_look_ahead():
    model = lf.Transformer(width=12, depth=3, gamma=0.5, attention=ATTENTION, mask="causal")
    network = lf.nn.Network(model, torch.Generator().manual_seed(0))
    x = torch.randn(5, 12)
    changed = x.clone()
    changed[3:] += 1.0
    before, after = network(x), network(changed)
    assert torch.equal(before[:3], after[:3])
    assert not torch.equal(before[3:], after[3:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch must be at least 1; got 0."),
        ({"batch": "many"}, "batch must be a whole number; got 'many'."),
        ({"samples": 0}, "samples must be at least 1; got 0."),
        ({"device": "abacus"}, "device must be one that torch can use here"),
        ({"record": [1.5]}, "must be whole numbers"),
        ({"record": [4]}, "must lie in 0 … 3"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"samples": 10**400}, "samples must be below 2⁶³; got more."),
        ({"device": "meta"}, "device must be one that holds numbers; got 'meta'"),
        ({"dtype": torch.int64}, "dtype must be a real one of torch with 16 bits or more, .*; got torch.int64"),
        ({"dtype": "float32"}, "dtype must be a real one"),
        ({"gradients": "all"}, "gradients must be True or False; got 'all'."),
        ({"model": lf.limit(MODEL)}, "drawn of a Transformer; got CovarianceLimit. Nearest: lf.simulate."),
        ({"model": None}, "drawn of a Transformer; got NoneType"),
        ({"start": np.ma.masked_array(V0, V0 < 0)}, "must have no masked entries"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_used(options, message):
    with pytest.raises(lf.InputError, match=message):
        covariances(**options)


@pytest.mark.parametrize(("gradients", "batches"), [(True, 0), (False, 2)])
def test_ctrl_c_keeps_the_batches_that_are_finished(monkeypatch, batches, gradients):
    """Ctrl-C in the middle of a batch keeps those before it, with the bits of an uninterrupted run."""
    whole = covariances(batch=6)
    drawn, draws = [], nn_simulate.draw_weights

    def draw(layer, generator):
        drawn.append(None)
        if len(drawn) == batches * MODEL.depth + 2:  # of the second layer
            raise KeyboardInterrupt
        draws(layer, generator)

    monkeypatch.setattr(nn_simulate, "draw_weights", draw)
    with pytest.raises(lf.Interrupted, match=f"^interrupted after {6 * batches} samples$") as caught:
        covariances(batch=6, gradients=gradients)
    partial = caught.value.partial
    assert partial.sizes["sample"] == partial.attrs["samples"] == 6 * batches
    np.testing.assert_array_equal(partial["covariance"], whole[: 6 * batches])


def test_a_recording_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(lf.InputError, match="1000 bytes are free"):
        covariances()


def test_a_layer_that_does_not_fit_is_refused_at_once():
    model = lf.Transformer(width=10**6, depth=1, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0))
    with pytest.raises(
        lf.InputError, match=r"^A layer of width 1,000,000 takes .* GiB, more than is free\. Nearest: a sma"
    ):
        lf.nn.simulate(model, [[1.0]], samples=1, seed=0)
