"""Outputs given V, against read-outs of drawn networks and against the moments of a mixture of Gaussians."""

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp

import limitformer as lf
from limitformer.nn.drawn.network import Layer, draw_weights
from limitformer.nn.drawn.simulate import TokenLaw
from statistics_checks import assert_same_law

V2 = np.array([[1.0, 0.3], [0.3, 1.6]])
SAMPLES, UNITS = 4_000, 2
MODEL = lf.Transformer(
    width=8, depth=6, gamma=0.6, attention=lf.ShapedAttention(tau0=2.0), feedforward=lf.ShapedReLU(c_plus=0, c_minus=-1)
)


@pytest.fixture(scope="module")
def paths():
    return lf.simulate(MODEL, V2, samples=SAMPLES, seed=1, record=[0, 6])


@torch.no_grad()
def network_outputs(model, samples, units, seed):
    """Compute X W_out/√n of drawn networks: (samples, tokens, units)."""
    generator = torch.Generator().manual_seed(seed)
    x = TokenLaw(lf.from_covariance(V2), model).tokens(samples, generator)
    layer = Layer(model, (samples,)).double()
    for _ in range(model.depth):
        draw_weights(layer, generator)
        x = layer(x)
    out = torch.randn(samples, model.width, units, generator=generator, dtype=torch.float64)
    return (x @ out / model.width**0.5).numpy()


def statistics(y):
    """Return statistics of outputs (samples, 2, units): entries, products of tokens and of units, and a length."""
    return {
        "one": y[:, 0, 0],
        "other": y[:, 1, 1],
        "tokens": y[:, 0, 0] * y[:, 1, 0],
        "units": y[:, 1, 0] * y[:, 1, 1],
        "length": (y**2).sum((1, 2)),
    }


def test_outputs_have_the_law_of_the_networks_read_out(paths):
    """The chain is exact at width 8. Wrong twins: Gaussian outputs with the mean of V, and outputs of the start."""
    found = lf.outputs(paths, units=UNITS, seed=1).values
    real = network_outputs(MODEL, SAMPLES, UNITS, seed=2)
    mean = paths.assign(covariance=paths["covariance"] * 0 + paths["covariance"].mean("sample"))
    gaussian = lf.outputs(mean, units=UNITS, seed=1).values
    assert_same_law(statistics(found), statistics(real), statistics(gaussian))
    at_start = lf.outputs(paths, units=UNITS, seed=1, at=0).values
    assert_same_law(statistics(found), statistics(real), statistics(at_start))


def test_units_of_one_sample_share_their_covariance(paths):
    """Given V they are independent, E x²x′² = E V²; without a common V it would be (E V)²."""
    y = lf.outputs(paths, units=16, seed=3).values[:, 0]
    v = paths["covariance"].values[:, -1, 0, 0]
    per_sample = (y[:, :8] ** 2 * y[:, 8:] ** 2).mean(1) - v**2  # mean 0 given V
    error = per_sample.std() / SAMPLES**0.5
    assert abs(per_sample.mean()) < 4 * error
    assert (v**2).mean() - v.mean() ** 2 > 8 * error


def test_outputs_of_the_start_are_gaussian(paths):
    y = lf.outputs(paths, units=4, seed=5, at=0.0).values
    whitened = np.linalg.solve(np.linalg.cholesky(V2), y).ravel()
    assert ks_2samp(whitened, np.random.default_rng(0).standard_normal(200_000)).pvalue > 1e-4
    assert ks_2samp(1.05 * whitened, np.random.default_rng(0).standard_normal(200_000)).pvalue < 1e-4


def test_a_sample_has_its_own_numbers(paths):
    """They depend on its index and the seed only."""
    all_, few = (lf.outputs(part, units=3, seed=2).values for part in (paths, paths.isel(sample=slice(0, 11))))
    np.testing.assert_array_equal(all_[:11], few)
    assert np.abs(all_ - lf.outputs(paths, units=3, seed=3).values).min() > 0
    assert ks_2samp(all_[:, 0, 0], all_[:, 0, 1]).pvalue > 1e-4


def test_a_deterministic_limit_is_a_gaussian_process():
    """[ST, Sec. 2]: at infinite width V is a number; correlations of outputs are those of V, in 4 standard errors."""
    flow = lf.limit(lf.Transformer(width=8, depth=4, gamma=0.5, lam=1.0, feedforward=lf.ReLU()))
    y = lf.outputs(lf.simulate(flow, V2, samples=4_000, seed=0, record=[1.0]), units=8, seed=0).values
    products = (y[:, 0] * y[:, 1]).ravel()
    v = flow.solve(V2)[0]
    assert abs(products.mean() - v[0, 1]) < 4 * products.std() / len(products) ** 0.5
    assert abs(products.mean() - V2[0, 1]) > 4 * products.std() / len(products) ** 0.5


def test_names_and_refusals(paths):
    found = lf.outputs(paths, units=3, seed=2)
    assert found.dims == ("sample", "token", "unit")
    assert found.attrs["model"] == paths.attrs["model"]
    with pytest.raises(lf.InputError, match=r"The depth 5 was not recorded. Nearest: 6\."):
        lf.outputs(paths, units=3, seed=2, at=5)
    with pytest.raises(lf.InputError, match="units must be at least 1; got 0"):
        lf.outputs(paths, units=0, seed=2)
    with pytest.raises(lf.InputError, match="outputs needs the covariances"):
        lf.outputs(paths["covariance"], units=1, seed=2)
    with pytest.raises(lf.InputError, match="seed must be"):
        lf.outputs(paths, units=1, seed=-2)
