"""Plots by depth: mean and band of correlations and sizes, from datasets like those of `simulate`."""

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

import limitformer as lf
from limitformer.models import to_json

NET = lf.Transformer(width=8, depth=4, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0))
SAMPLES, TOKENS = 40, 3


def covariances(seed, points):
    """(SAMPLES, points, TOKENS, TOKENS), positive definite."""
    x = np.random.default_rng(seed).standard_normal((SAMPLES, points, TOKENS, 8))
    return x @ x.swapaxes(-1, -2) / 8


@pytest.fixture
def chain():
    return xr.Dataset(
        {"covariance": (("sample", "depth", "token", "token_"), covariances(1, 5))},
        {"depth": np.arange(5)},
        {"model": to_json(NET), "description": "chain"},
    )


@pytest.fixture
def limit():
    data = {"covariance": (("sample", "time", "token", "token_"), covariances(2, 3))}
    time = ("time", [0.0, 0.25, 0.5], {"units": "depth/width"})
    return xr.Dataset(data, {"time": time}, {"model": to_json(lf.limit(NET)), "description": "limit"})


@pytest.fixture
def sphere():
    z = np.tanh(np.random.default_rng(3).standard_normal((SAMPLES, 4, 3)))
    units = {"units": "layers/layers_per_unit_time"}
    return xr.Dataset(
        {"overlap": (("sample", "time", "pair"), z)},
        {"time": ("time", np.arange(4.0), units)},
        {"description": "chain"},
    )


@pytest.fixture
def ax():
    return Figure().subplots()


def band(axes, which=0):
    """Return lower and upper edge of a filled band."""
    points = axes.collections[which].get_paths()[0].vertices
    at = np.unique(points[:, 0])
    return np.array([[points[points[:, 0] == x, 1].min(), points[points[:, 0] == x, 1].max()] for x in at]).T


def means(axes):
    """Return the lines of means; the edges of bands have no label."""
    return [line for line in axes.lines if not line.get_label().startswith("_")]


def by_loops(dataset, of):
    """Compute means and quantiles of `of(V)` one matrix at a time."""
    v = dataset["covariance"].values
    rows = [np.concatenate([of(one) for one in v[:, k]]) for k in range(v.shape[1])]
    return [np.mean(row) for row in rows], [np.quantile(row, [0.05, 0.95]) for row in rows]


def pairs_of(v):
    return [v[a, b] / np.sqrt(v[a, a] * v[b, b]) for a in range(TOKENS) for b in range(a)]


def signs_lost(v):
    return np.abs(pairs_of(v))


def test_correlation_is_mean_and_band_over_samples_and_pairs(chain, ax):
    assert lf.plot.correlation(chain, ax=ax) is ax
    mean, edges = by_loops(chain, pairs_of)
    np.testing.assert_allclose(means(ax)[0].get_ydata(), mean, rtol=1e-12)
    np.testing.assert_allclose(band(ax), np.transpose(edges), rtol=1e-12)
    assert not np.allclose(by_loops(chain, signs_lost)[0], mean, atol=0.01)  # the wrong twin, |ρ|
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("layer", "correlation of two tokens")
    assert ax.get_legend() is None


def test_spread_is_mean_and_band_over_samples_of_the_mean_size(chain, ax):
    lf.plot.spread(chain, ax=ax)
    mean, edges = by_loops(chain, lambda v: [np.trace(v) / TOKENS])
    np.testing.assert_allclose(means(ax)[0].get_ydata(), mean, rtol=1e-12)
    np.testing.assert_allclose(band(ax), np.transpose(edges), rtol=1e-12)
    assert not np.allclose(
        np.transpose(by_loops(chain, np.diag)[1]), band(ax), rtol=0.01
    )  # the wrong twin, a band over tokens
    assert ax.get_yscale() == "linear"


def test_a_chain_beside_a_limit_is_drawn_over_its_time(chain, limit, ax):
    lf.plot.correlation({"network": chain, "SDE": limit}, ax=ax)
    network, sde = means(ax)
    np.testing.assert_allclose(network.get_xdata(), np.arange(5) / NET.width)
    np.testing.assert_allclose(sde.get_xdata(), limit.time)
    assert ax.get_xlabel() == "time, depth/width"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["network", "SDE"]
    assert network.get_linestyle() != sde.get_linestyle()  # in grey
    assert network.get_color() != sde.get_color()


def test_overlaps_are_the_correlations_on_the_sphere(sphere, ax):
    lf.plot.correlation(sphere, ax=ax)
    np.testing.assert_allclose(means(ax)[0].get_ydata(), sphere.overlap.mean(("sample", "pair")))
    assert ax.get_xlabel() == "time, layers/layers_per_unit_time"


def refused(draw, results, message, ax):
    with pytest.raises(lf.InputError, match=message):
        draw(results, ax=ax)
    assert not ax.has_data()


def test_plots_refuse_other_data_in_one_line(chain, limit, sphere, ax):
    curves = lf.plot.correlation
    refused(curves, 3, "dict or list of results; got int", ax)
    refused(curves, "run.nc", "dict or list of results; got str", ax)
    with pytest.raises(lf.InputError, match=r"ax must be Axes of matplotlib, or None; got 3\."):
        lf.plot.spread(chain, ax=3)
    refused(curves, [], "got none", ax)
    refused(curves, {"a": chain["covariance"]}, "got one of DataArray", ax)
    counts = sphere.rename(overlap="clusters")
    refused(
        curves, counts, "got a result with clusters. Nearest: a result of lf.simulate, on the sphere with keep=", ax
    )
    refused(curves, [chain, sphere], "do not share an axis: layer and layers/layers_per_unit_time", ax)
    refused(curves, [chain.drop_attrs(), limit], "lack its model's width", ax)
    refused(curves, chain.isel(token=[0], token_=[0]), "two tokens; got 40 samples, 0 pairs", ax)
    refused(curves, chain.isel(sample=[]), "need a sample", ax)
    refused(curves, chain.isel(depth=[]), "has no points", ax)
    refused(lf.plot.spread, sphere, "size 1 at every depth. Nearest: lf.plot.correlation", ax)
