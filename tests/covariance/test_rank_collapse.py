"""Singular covariances: collapse, repeated tokens, narrow layers."""

import numpy as np
import pytest
from scipy.stats import ks_2samp

from limitformer.models import (
    GELU,
    ReLU,
    RMSNorm,
    ShapedAttention,
    ShapedReLU,
    SoftmaxAttention,
    Transformer,
    equicorrelated,
    from_text,
    from_tokens,
)
from limitformer.results.datasets import correlation
from limitformer.simulation.processes import limit
from limitformer.simulation.simulate import simulate

SHAPED = {"attention": ShapedAttention(tau0=1.0), "feedforward": ShapedReLU(c_plus=0.2, c_minus=-1.0)}
BLOCKS = {
    "shaped": SHAPED,
    "softmax, ReLU": {"attention": SoftmaxAttention(), "feedforward": ReLU()},
    "heads, GELU": {"attention": SoftmaxAttention(heads=2, head_dim=2), "feedforward": GELU(hidden=7)},
    "shaped heads": {"attention": ShapedAttention(tau0=1.0, heads=3, head_dim=1)},
    "pre": {"attention": SoftmaxAttention(), "feedforward": ReLU(), "norm": "pre"},
    "post": {"attention": SoftmaxAttention(), "feedforward": ReLU(), "norm": "post"},
    "RMS": {**SHAPED, "norm": RMSNorm(placement="pre", eps=0.0)},
}
every_block = pytest.mark.parametrize("parts", BLOCKS.values(), ids=list(BLOCKS))
TEXT = from_text("a rose is a rose is a rose", width=24, seed=2)
STEPS = ["factor", "euler-maruyama"]


def covariances(model, start, samples=20, **settings):
    return simulate(model, start, samples=samples, seed=1, threads=1, **settings)["covariance"].values


def test_deep_softmax_networks_collapse_and_stay_finite():
    """1 - rho falls below 1e-12 for every pair in every sample, and later layers stay finite."""
    model = Transformer(width=50, depth=400, gamma=0.5, attention=SoftmaxAttention(), feedforward=ReLU())
    data = simulate(model, equicorrelated(5, 0.1), samples=20, seed=1, threads=1)
    gap = 1 - correlation(data).values
    assert np.isfinite(data["covariance"].values).all()
    assert np.isinf(data["exit"].values).all()
    assert gap[:, 0].max() > 0.8
    assert gap[:, -1].max() < 1e-12
    assert gap.min() > -1e-15 * 5


def assert_repetitions_stay_identical(v, labels):
    """Assert that rows of V of one word agree to 1e-12, and those of different words do not."""
    scale = v.max((-1, -2))
    assert np.isfinite(v).all()
    for i in range(len(labels)):
        for j in range(i):
            same = labels[i] == labels[j]
            assert same == ((np.abs(v[..., i, :] - v[..., j, :]).max(-1) / scale).max() < 1e-12)


@every_block
def test_repeated_tokens_stay_identical_in_a_chain(parts):
    model = Transformer(width=24, depth=30, gamma=0.4, **parts)
    assert_repetitions_stay_identical(covariances(model, TEXT), TEXT.labels)


@pytest.mark.parametrize("step", STEPS)
def test_repeated_tokens_stay_identical_in_a_limit(step):
    model = limit(Transformer(width=24, depth=24, gamma=0.4, **SHAPED))
    data = simulate(model, TEXT, samples=20, seed=1, threads=1, dt=0.02, step=step)
    assert (data["exit_cause"] == 0).mean() > 0.5
    assert_repetitions_stay_identical(data["covariance"].values, TEXT.labels)


def test_causal_mask_distinguishes_repeated_tokens():
    """A repetition sees more tokens than the first occurrence, so rows must differ: the wrong twin."""
    model = Transformer(width=24, depth=30, gamma=0.4, mask="causal", **SHAPED)
    v = covariances(model, TEXT)
    assert np.abs(v[:, -1, 0] - v[:, -1, 3]).min(-1).max() > 1e-3


@pytest.mark.parametrize("step", STEPS)
def test_opposite_tokens_stay_finite_in_a_limit(step):
    """rho = -1 exactly, where rounding may make 1 - rho² negative."""
    model = limit(Transformer(width=24, depth=24, gamma=0.4, **SHAPED))
    v = covariances(model, [[1.0, -2.0], [-2.0, 4.0]], dt=0.02, step=step)
    assert np.isfinite(v).all()
    assert (np.linalg.eigvalsh(v)[..., 0] > -1e-9 * v.max((-1, -2))).all()


@every_block
def test_more_tokens_than_width(parts):
    """Six tokens in two directions: V is finite and its rank at most the width."""
    width = 2
    start = from_tokens(np.random.default_rng(0).standard_normal((6, width)))
    for tokens in (start, start.covariance):  # with and without the tokens' means
        v = covariances(Transformer(width=width, depth=15, gamma=0.5, **parts), tokens)
        assert np.isfinite(v).all()
        np.testing.assert_allclose(v[:, 0], np.broadcast_to(start.covariance, v[:, 0].shape), atol=1e-13)
        scale = np.maximum(v.max((-1, -2)), 1e-300)
        assert (np.abs(np.linalg.eigvalsh(v)[..., : 6 - width]).max(-1) < 1e-12 * scale).all()


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        ("pre", 2.0 * 0.64 ** np.arange(7)),  # the branch is 0: V falls by lam² = 0.64 a layer
        ("post", [2.0, 0, 0, 0, 0, 0, 0]),
        (RMSNorm(placement="post", eps=0.0), [2.0, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_norm_of_one_coordinate_is_zero_or_a_sign(norm, expected):
    model = Transformer(width=1, depth=6, gamma=0.6, attention=SoftmaxAttention(), norm=norm)
    v = covariances(model, [[2.0]], samples=50)[..., 0, 0]
    np.testing.assert_allclose(v, np.broadcast_to(expected, v.shape), rtol=1e-13)


def test_one_token_of_width_one_moves_as_one_number():
    """x' = (lam + gamma w) x with w ~ N(0, 1), by KS at 1e-4; lam = gamma = 1/sqrt(2) is rejected."""
    model = Transformer(width=1, depth=1, gamma=0.6, attention=SoftmaxAttention())
    moved = np.sqrt(covariances(model, [[2.0]], samples=20_000)[:, 1, 0, 0] / 2)
    w = np.random.default_rng(0).standard_normal(20_000)
    assert ks_2samp(moved, np.abs(0.8 + 0.6 * w)).pvalue > 1e-4
    assert ks_2samp(moved, np.abs(0.5**0.5 * (1 + w))).pvalue < 1e-4
