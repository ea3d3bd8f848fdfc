"""Many tokens have no floor of rounding: gaps keep their digits, by layers in eighty digits and by other methods."""

from decimal import Decimal, getcontext
from functools import cache

import numpy as np
import pytest

import limitformer as lf
from limitformer.numerics.lanes import LANES
from limitformer.numerics.random import key
from limitformer.sphere.near.near_tree import GAP_FLOOR
from limitformer.sphere.tokens.values import LAWS, fill
from sphere_naive import gaps_of, naive_chain, naive_layer, near_plus
from statistics_checks import STANDARD_ERRORS, assert_same_law

exactly = np.vectorize(Decimal, otypes=[object])
exponential = np.vectorize(Decimal.exp, otypes=[object])


# --- layer by layer, in eighty digits ---------------------------------------------------------------------------------


def exact_attention(x, model):
    """Return A(Xⁱ) (N, d) in Decimals."""
    query, key_ = (np.eye(model.dim),) * 2 if model.query_key is None else map(np.array, model.query_key)
    weights = exponential(Decimal(model.beta) * ((x @ exactly(query).T) @ (x @ exactly(key_).T).T))
    divisor = weights.sum(1, keepdims=True) if model.attention == "softmax" else model.tokens
    return (weights / divisor) @ x


def exact_layer(x, model, step, drift, value):
    """Return X_{n+1} (N, d) from V (d, d) or v, with the step and the drift of `naive_layer`."""
    a = exact_attention(x, model)
    y = x + (drift + step * value) * a if np.ndim(value) == 0 else x + step * (a @ value.T)
    return y / np.array([[row.dot(row).sqrt()] for row in y])


def exact_gaps(x):
    """Return 1 − |z| (pairs,), i < j; these keep their digits as doubles."""
    first, second = np.triu_indices(len(x), 1)
    minus, plus = (((x[first] - s * x[second]) ** 2).sum(1) / 2 for s in (1, -1))
    return np.minimum(minus, plus).astype(float)


def values_of(model, seed, replica, layer):
    """Return the V (d, d), or v (), that the kernel draws for a layer of a replica."""
    size = model.dim**2 if isinstance(model, lf.StochasticTransformer) else 1
    blocks = (size + 3) // 4
    flat = np.empty(4 * blocks * LANES)
    words = map(np.uint64, key(seed, "chain coordinates"))
    fill(LAWS[model.values], *words, np.uint64(replica), np.uint64(layer * blocks), flat)
    drawn = flat.reshape(-1, LANES)[:size, 0]
    return drawn.reshape(model.dim, model.dim) if size > 1 else drawn[0]


def tight(*rows):
    """Return tokens of length 1 to rounding, from signs and their components across the axis."""
    return np.array(rows, float)


SHAPE = {"dim": 3, "beta": 1.3, "layers_per_unit_time": 9, "values": "uniform"}
QUERY_KEY = np.random.default_rng(4).standard_normal((2, 2, 3))
PAIRS = tight((1, 0, 0), (1, 1e-9, 3e-20), (-1, 2e-12, -1e-11), (-1, 2e-12, -1e-11 + 1e-25))
NESTED = tight((1, 0, 0), (-1, 0, 1e-7), (1, 1e-30, 0), (1, 1e-30, 2e-45), (-1, 1e-40, 1e-7))
THREE_AND_ONE = tight((1, 0, 0), (1, 1e-60, 3e-60), (1, 1e-5, 1e-5 + 1e-18), (0.6, 0.8, 0))
# One tree with all differences far below rounding: `gathered`, from the second layer on.
TIGHTER = tight((1, 0, 0), (-1, 3e-30, 1e-31), (1, 1e-25, 2e-25), (-1, 3e-30, 2e-31))
UNEQUAL = tight((1, 0, 0), (-1, 3e-30, 1e-31), (1, 1e-25, 2e-25), (-1, 3e-30, 2e-31), (1, 1e-25, 2e-25 + 1e-40))
COLD = {**SHAPE, "beta": 50.0}  # unequal clusters part at a speed of e^{−2β} = 1e-43
CASES = {
    "gathered": (lf.StochasticTransformer(tokens=4, **SHAPE), TIGHTER),
    "gathered, unequal": (lf.StochasticTransformer(tokens=5, **COLD, sigma=0.3), UNEQUAL),
    "gathered, hybrid": (lf.HybridTransformer(tokens=5, **COLD, epsilon=0.3), UNEQUAL),
    "two and two": (lf.StochasticTransformer(tokens=4, **SHAPE), PAIRS),
    "three and two": (lf.StochasticTransformer(tokens=5, **SHAPE, sigma=0.7), NESTED),
    "one apart": (lf.StochasticTransformer(tokens=4, **{**SHAPE, "values": "rademacher"}), THREE_AND_ONE),
    "unnormalized, nested": (lf.StochasticTransformer(tokens=5, **SHAPE, attention="unnormalized", sigma=0.3), NESTED),
    "Q and K, nested": (lf.StochasticTransformer(tokens=5, **SHAPE, query_key=QUERY_KEY), NESTED),
    "Q and K, unnormalized": (
        lf.StochasticTransformer(tokens=4, **SHAPE, query_key=QUERY_KEY, attention="unnormalized", sigma=0.5),
        PAIRS,
    ),
    "hybrid, nested": (lf.HybridTransformer(tokens=5, **SHAPE, epsilon=0.6), NESTED),
}


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("name", CASES)
def test_gaps_equal_those_of_layers_in_eighty_digits(name):
    """Eighteen layers with different neighbours: 1 − |z| of all pairs to 1e-8; doubles (the wrong twin) fail."""
    getcontext().prec = 80
    model, start = CASES[name]
    seed, replica, layers = 3, 5, 18
    run = {"samples": 9, "seed": seed, "horizon": layers / 9, "record": np.arange(layers + 1) / 9, "threads": 1}
    gaps = lf.simulate(model, start, **run, method="coordinates")["gap"].values[replica]
    stochastic = isinstance(model, lf.StochasticTransformer)
    step, drift = (model.sigma / 3, 0.0) if stochastic else (model.epsilon / 3, 1 / 9)
    x, y = exactly(start), start
    x = x / np.array([[row.dot(row).sqrt()] for row in x])
    for layer in range(layers + 1):
        if layer > 0:
            value = values_of(model, seed, replica, layer)
            x = exact_layer(x, model, Decimal(step), Decimal(drift), exactly(value)[()])
            y = naive_layer(y, model, value)
        np.testing.assert_allclose(gaps[layer], exact_gaps(x), rtol=1e-8)
    assert (abs(gaps_of(y) / exact_gaps(x) - 1) > 1e-2).any()


# --- in law, by other methods -----------------------------------------------------------------------------------------

# Few layers a unit of time, so that long times are cheap; the overlap method has no floor at any number of layers.
METHODS = ["gram", "coordinates"]
MEETING = lf.StochasticTransformer(tokens=3, dim=6, beta=1.0, layers_per_unit_time=20)
TIME = 25.0


@cache
def meeting(rounded):
    """Return log of the last over the first gap of two tokens near +1, to first order; or by a chain in coordinates."""
    layers, rng = round(TIME * 20), np.random.default_rng(2)
    if not rounded:
        return near_plus(MEETING, layers, rng)
    start = np.eye(3, 6) * 1e-4 + np.array([1.0, 0, 0, 0, 0, 0])
    start /= np.linalg.norm(start, axis=1, keepdims=True)
    gaps = gaps_of(naive_chain(MEETING, start, layers, 300, seed=3))[:, 1]
    return np.log(np.maximum(gaps, 1e-40)) - np.log(gaps_of(start)[1])


@pytest.mark.parametrize("method", METHODS)
def test_gaps_fall_at_their_rate_far_below_rounding(method):
    """All pairs of three tokens, down to 1e-60, against independent factors; coordinates stop at 1e-32."""
    start = np.eye(3, 6) * 1e-4 + np.array([1.0, 0, 0, 0, 0, 0])
    run = {"samples": 3000, "seed": 1, "horizon": TIME, "record": [0.0, TIME], "method": method, "progress": False}
    gap = lf.simulate(MEETING, start / np.linalg.norm(start, axis=1, keepdims=True), **run)["gap"].values
    assert np.median(gap[:, 1]) < 1e-55
    fall = np.log(gap[:, 1] / gap[:, 0])
    for pair in range(3):
        assert_same_law({"fall": fall[:, pair]}, {"fall": meeting(False)}, wrong={"fall": meeting(True)})
    rate, error = -fall[:, 1].mean() / TIME, fall[:, 1].std() / TIME / 3000**0.5
    infinitely_many = (MEETING.dim - 1) * MEETING.sigma**2
    assert abs(rate / infinitely_many - 1) < 0.1
    assert abs(rate + meeting(False).mean() / TIME) < STANDARD_ERRORS * 2**0.5 * error


def twofold(dim, z):
    """Return two tokens at each end of an overlap z, and two tokens of overlap z."""
    pair = np.zeros((2, dim))
    pair[0, 0] = 1
    pair[1, :2] = z, (1 - z * z) ** 0.5
    return pair[[0, 1, 0, 1]], pair


TWOFOLD = {"beta": 1.1, "layers_per_unit_time": 5, "sigma": 0.5}
RUN = {"seed": 1, "horizon": 30.0, "record": [30.0], "progress": False}


@cache
def one_and_one(dim, attention, sigma):
    two = lf.StochasticTransformer(tokens=2, dim=dim, **{**TWOFOLD, "sigma": sigma}, attention=attention)
    return lf.simulate(two, twofold(dim, -0.999)[1], samples=8000, **RUN, method="overlap")["gap"].values[:, 0, 0]


@pytest.mark.parametrize(
    ("method", "dim", "attention"),
    [("gram", 5, "softmax"), ("coordinates", 5, "unnormalized"), ("coordinates", 4, "softmax")],
)
def test_tokens_that_coincide_move_as_one(method, dim, attention):
    """Two and two have the law of one and one, whose method has no floor; slightly less noise is rejected."""
    four = lf.StochasticTransformer(tokens=4, dim=dim, **TWOFOLD, attention=attention)
    data = lf.simulate(four, twofold(dim, -0.999)[0], samples=3000, **RUN, method=method)
    gap, exact, wrong = data["gap"].values[:, 0], one_and_one(dim, attention, 0.5), one_and_one(dim, attention, 0.46)
    np.testing.assert_array_equal(gap[:, [1, 4]], 0)  # tokens 0 and 2, 1 and 3
    np.testing.assert_array_equal(gap[:, [0, 0, 0]], gap[:, [2, 3, 5]])
    assert gap[:, 0].min() > 0
    assert_same_law({"gap": np.log(gap[:, 0])}, {"gap": np.log(exact)}, wrong={"gap": np.log(wrong)})


@pytest.mark.parametrize("method", METHODS)
def test_differences_stay_above_their_least_length(method):
    """|D| stays at 1e-150 and tokens stay on the sphere; a gap of zero stays zero."""
    model = lf.StochasticTransformer(tokens=3, dim=5, beta=1.0, layers_per_unit_time=5)
    start = np.eye(5)[[0, 0, 0]]
    start[2, 1] = 1e-5
    run = {"samples": 20, "seed": 1, "horizon": 400.0, "record": [400.0], "method": method, "progress": False}
    gap = lf.simulate(model, start, **run)["gap"].values[:, 0]
    np.testing.assert_array_equal(gap[:, 0], 0)
    assert 4.99e-301 < gap[:, 1:].min() < 5.01e-301
    assert gap[:, 1:].max() < 1e-296


# --- what the floor did -----------------------------------------------------------------------------------------------

LEAVING = {"dim": 4, "beta": 0.8, "layers_per_unit_time": 2}
LEFT = {"seed": 1, "horizon": 600.0, "record": [600.0], "progress": False}
FAR = np.array([[1.0, 0, 0, 0], [-1.0, 1e-30, 0, 0], [1.0, 1e-60, 0, 0], [-1.0, 1e-30, 1e-60, 0]])


def share_left(overlap):
    """Return the share of replicas (samples,) still at −1, and its standard error."""
    stays = overlap < -0.5
    return stays.mean(), stays.std() / len(stays) ** 0.5


@cache
def right_share():
    """Return the share by the two-token chain, which has no floor."""
    two = lf.StochasticTransformer(tokens=2, **LEAVING)
    return share_left(lf.simulate(two, FAR[:2], samples=10_000, **LEFT, method="overlap")["overlap"].values[:, 0, 0])


@cache
def share_in_doubles():
    """Return the share by naive layers, whose coordinates round."""
    two = lf.StochasticTransformer(tokens=2, **LEAVING)
    x = naive_chain(two, FAR[:2], 1200, 400, seed=5)
    return share_left((x[:, 0] * x[:, 1]).sum(-1))


@pytest.mark.parametrize(("tokens", "method"), [(2, "gram"), (2, "coordinates"), (4, "coordinates")])
def test_rounding_moves_no_tokens_away_from_antipodes(tokens, method):
    """Near a threshold, from 1 + z = 5e-61, the share at −1 after 1,200 layers is right; in doubles it is too small."""
    model = lf.StochasticTransformer(tokens=tokens, **LEAVING)
    overlaps = lf.simulate(model, FAR[:tokens], samples=1000, **LEFT, method=method)["overlap"].values[:, 0, 0]
    assert deviation(share_left(overlaps), right_share()) < STANDARD_ERRORS
    assert deviation(share_in_doubles(), right_share()) > STANDARD_ERRORS


def deviation(one, other):
    return abs(one[0] - other[0]) / np.hypot(one[1], other[1])


def test_gap_floor_is_recorded_only_without_differences():
    """Q and K with large logits have a floor; other models have none."""
    run = {"samples": 2, "seed": 0, "horizon": 1.0}
    for beta, floor in ((1.0, None), (1e4, GAP_FLOOR)):
        model = lf.StochasticTransformer(tokens=4, **{**SHAPE, "beta": beta}, query_key=QUERY_KEY)
        assert lf.simulate(model, **run).attrs.get("gap_floor") == floor
    model = lf.StochasticTransformer(tokens=3, dim=5, beta=1e4, layers_per_unit_time=9)
    assert "gap_floor" not in lf.simulate(model, **run).attrs
