"""Distances of tokens, which a factor resolves far below the rounding of V; and correlations of dead tokens."""

import re
import warnings

import numpy as np
import pytest

import limitformer as lf
from limitformer.base.errors import InputError

START = np.array([[1.0, -0.4, 0.1, 0.3], [-0.4, 2.0, 0.3, 0.0], [0.1, 0.3, 0.7, 0.2], [0.3, 0.0, 0.2, 1.5]])
SHAPED = {"attention": lf.ShapedAttention(tau0=1.0), "feedforward": lf.ShapedReLU(c_plus=0.2, c_minus=-1.0)}
MODEL = lf.Transformer(width=30, depth=12, gamma=0.5, **SHAPED)
CAUSAL = lf.Transformer(width=30, depth=12, gamma=0.5, mask="causal", **SHAPED)
FLOW = lf.Transformer(width=30, depth=12, gamma=12**-0.5, lam=1.0, feedforward=lf.ReLU())
EULER = {"step": "euler-maruyama"}
KINDS = {
    "chain": (MODEL, {}),
    "causal": (CAUSAL, {}),
    "one matrix": (lf.Transformer(width=30, depth=12, gamma=0.5, feedforward=lf.OneMatrix(activation=lf.ReLU())), {}),
    "limit": (lf.limit(MODEL), {}),
    "causal limit": (lf.limit(CAUSAL), {}),
    "limit, Euler-Maruyama": (lf.limit(MODEL), EULER),
    "flow": (lf.limit(FLOW), {}),
}
every_kind = pytest.mark.parametrize(("model", "options"), KINDS.values(), ids=list(KINDS))


def run(model, start=START, samples=11, **options):
    return lf.simulate(model, start, samples=samples, seed=4, threads=1, progress=False, **options)


def by_covariance(v, first, second):
    """V_αα + V_ββ − 2 V_αβ."""
    return v[..., first, first] + v[..., second, second] - 2 * v[..., first, second]


@every_kind
def test_pairs_agree_with_the_covariance(model, options):
    whole, pairs = run(model, **options), run(model, keep="pairs", **options)
    v, first, second = whole["covariance"].values, pairs["first"].values, pairs["second"].values
    size = v.max((-1, -2), keepdims=True)[..., 0]
    assert list(zip(first, second, strict=True)) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    np.testing.assert_allclose(pairs["variance"], np.diagonal(v, axis1=2, axis2=3), rtol=1e-13)
    assert (abs(pairs["pair_covariance"] - v[..., first, second]) <= 1e-13 * size).all()
    assert (abs(pairs["distance"] - by_covariance(v, first, second)) <= 1e-13 * size).all()
    np.testing.assert_allclose(lf.correlation(pairs), lf.correlation(whole).values[..., first, second], atol=1e-12)
    np.testing.assert_array_equal(pairs["exit"], whole["exit"])


@every_kind
def test_some_pairs_are_some_columns(model, options):
    every = run(model, keep="pairs", **options)
    some = run(model, keep="pairs", pairs=[(3, 1), (0, 2)], **options)
    for name in ("pair_covariance", "distance"):
        np.testing.assert_array_equal(some[name], every[name][..., [4, 1]])
    np.testing.assert_array_equal(some["variance"], every["variance"])


@pytest.mark.parametrize("model", [MODEL, lf.limit(FLOW)], ids=["chain", "flow"])
def test_float32_is_rounded_once(model):
    for keep in ("pairs", "covariance"):
        full, short = run(model, keep=keep), run(model, keep=keep, dtype="float32")
        for name in {"variance", "pair_covariance", "distance", "covariance"} & set(full):
            np.testing.assert_array_equal(short[name], full[name].values.astype(np.float32))


# --- below the rounding of V ------------------------------------------------------------------------------------------


def test_attention_shrinks_distances_by_lam_squared_down_to_their_floor():
    """It holds down to 1e-24 of the variance, where V (the wrong twin) has no digits left."""
    model = lf.Transformer(width=50, depth=220, gamma=0.5, attention=lf.SoftmaxAttention())
    data = run(model, START[:3, :3], samples=20, keep="pairs")
    variance, distance = data["variance"].values[..., 0], data["distance"].values[..., 0]
    fine = (distance[:, :-1] < 1e-16 * variance[:, :-1]) & (distance[:, 1:] > 1e-24 * variance[:, 1:])
    assert fine.sum() > 400
    np.testing.assert_allclose((distance[:, 1:] / distance[:, :-1])[fine], 1 - 0.25, rtol=1e-3)
    v = run(model, START[:3, :3], samples=20)["covariance"].values
    twin = by_covariance(v, 0, 1)
    assert (abs(twin[:, 1:] - 0.75 * twin[:, :-1]) < 1e-3 * twin[:, :-1])[fine].mean() < 0.01


def test_small_distances_move_alike_in_the_limit():
    """The ratio of a small distance to its start does not depend on the start, to first order."""
    model = lf.limit(lf.Transformer(width=50, depth=50, gamma=0.8, attention=lf.ShapedAttention(tau0=0.5)))
    near, far = (
        run(model, [[1.0, 1 - 2.0**k], [1 - 2.0**k, 1.0]], samples=8, keep="pairs", record=[0.0, 1.0])[
            "distance"
        ].values
        for k in (-46, -38)
    )
    assert (near[:, 0] == 2.0**-45).all()
    assert abs(near / far * 2.0**8 - 1).max() < 1e-4
    assert abs(np.log(near[:, 1] / near[:, 0])).min() > 1e-2


@pytest.mark.parametrize(("model", "options"), [(MODEL, {}), (lf.limit(MODEL), EULER)], ids=["factor", "values"])
def test_distance_floor_bounds_the_rounding(model, options):
    """The distance of two coinciding tokens after one layer or step is below it."""
    rows = np.random.default_rng(0).standard_normal((24, 30))
    rows[12:] = rows[:12]
    record = [0, 1] if model is MODEL else [0.0, 0.01]
    data = run(
        model, rows @ rows.T / 30, keep="pairs", pairs=[(k, k + 12) for k in range(12)], record=record, **options
    )
    relative = data["distance"].values[:, 1] / data["variance"].values[:, 1, :12]
    floor = data.attrs["distance_floor"]
    assert floor / 1e4 < relative.max() < floor


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "all"}, "keep must be"),
        ({"pairs": [(0, 1)]}, 'pairs has no effect with keep="covariance"'),
        ({"keep": "pairs", "pairs": [(0, 4)]}, "pairs must be of tokens 0 … 3; got 4."),
        ({"keep": "pairs", "pairs": [(1, 1)]}, "A pair is two tokens"),
        ({"keep": "pairs", "pairs": [(0, 1), (1, 0)]}, "is there twice"),
        ({"keep": "pairs", "start": [[1.0]]}, "One token makes no pair"),
        ({"dtype": "float16"}, "dtype must be"),
        ({"dtype": "float32", "radius": 1e90}, "radius must lie in (0, 3e+37] for float32"),
    ],
    ids=str,
)
def test_invalid_recordings_are_refused(options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        run(MODEL, **options)


# --- correlations of dead tokens --------------------------------------------------------------------------------------


def test_variances_below_float32_count_as_dead():
    """Variances of 1e-40 have lost digits; ρ would exceed 1."""
    model = lf.Transformer(width=20, depth=40, gamma=0.0, lam=0.1, attention=lf.SoftmaxAttention())
    rho = lf.correlation(run(model, START, dtype="float32")).values
    assert abs(rho).max() < 1 + 1e-6
    assert (rho[:, 20:] == 0).all()
    assert (rho[:, :18, 0, 0] > 0).all()


def test_dead_tokens_have_correlation_zero_and_no_warning():
    model = lf.Transformer(width=20, depth=200, gamma=0.0, lam=0.1, attention=lf.SoftmaxAttention())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rho = lf.correlation(run(model, START)).values
        of_pairs = lf.correlation(run(model, START, keep="pairs")).values
    assert (rho[:, -1] == 0).all()
    assert (of_pairs[:, -1] == 0).all()
    assert rho[:, 0, 0, 0] == pytest.approx(1)
