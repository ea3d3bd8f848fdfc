"""Chains on the sphere have the law of the layers of [CT], by every method; wrong models do not."""

from dataclasses import replace
from functools import cache

import numba
import numpy as np
import pytest
from scipy import stats

import limitformer as lf
from limitformer.numerics.random import box_muller, key, words_of
from limitformer.numerics.watch import new_watch
from limitformer.simulation.processes import process_of
from limitformer.sphere.methods import methods_of
from limitformer.sphere.pair.chain import advance_stochastic, open_pairs
from limitformer.sphere.pair.chi_squares import blocks_needed
from sphere_naive import gaps_of, naive_chain, normalised, overlaps_of, tokens_at
from statistics_checks import ALPHA, assert_same_law

SAMPLES = 20_000
LAYERS = 10
BASE = {"beta": 1.7, "layers_per_unit_time": LAYERS}
# One value counts for more where there are few layers: there the laws of the values differ.
FEW = {"beta": 1.7, "layers_per_unit_time": 2}


def stochastic(tokens, dim, **more):
    return lf.StochasticTransformer(**{**BASE, "tokens": tokens, "dim": dim, "sigma": 1.3, **more})


def hybrid(tokens, dim, **more):
    return lf.HybridTransformer(**{**BASE, "tokens": tokens, "dim": dim, "epsilon": 0.7, **more})


def query_key(dim, head_dim):
    rng = np.random.default_rng(dim + head_dim)
    return rng.standard_normal((2, head_dim, dim)) / dim**0.5


OTHER = {"attention": "unnormalized"}
MORE, LESS = {"sigma": 1.3 * 1.12}, {"sigma": 1.3 * 0.88}
EPSILON = {"epsilon": 0.7 * 1.15}
WIDER = {"dim": +1}

# Name → model, and what its wrong twins have instead.
CASES = {
    "2 in 2": (stochastic(2, 2), [MORE, LESS, OTHER, WIDER, {"beta": 0.3}]),
    "2 in 3": (stochastic(2, 3), [MORE, LESS, OTHER, WIDER, {"beta": 1.0}]),
    "2 in 4, unnormalized": (stochastic(2, 4, beta=0.6, **OTHER), [LESS, {"attention": "softmax"}, WIDER]),
    "2 in 12, unnormalized": (stochastic(2, 12, beta=0.6, **OTHER), [LESS, {"attention": "softmax"}]),
    "3 in 4": (stochastic(3, 4), [MORE, OTHER, WIDER, {"beta": 1.0}]),
    "5 in 3, unnormalized": (stochastic(5, 3, beta=0.6, **OTHER), [LESS, {"attention": "softmax"}, WIDER]),
    "6 in 6": (stochastic(6, 6), [MORE, OTHER, WIDER]),
    "3 in 4, Q and K": (
        stochastic(3, 4, query_key=2 * query_key(4, 2)),
        [MORE, {"query_key": None}, {"query_key": 2 * query_key(4, 2)[::-1]}],
    ),
    "2 in 4, β < 0": (stochastic(2, 4, beta=-0.9, **OTHER), [MORE, {"beta": 0.9}, {"attention": "softmax"}]),
    "2 in 5, Q and K, unnormalized": (
        stochastic(2, 5, query_key=query_key(5, 7), **OTHER),
        [LESS, {"attention": "softmax"}, {"query_key": query_key(5, 7)[::-1]}],
    ),
    "2 in 2, uniform": (stochastic(2, 2, **FEW, values="uniform"), [MORE, {"values": "gaussian"}, OTHER]),
    "5 in 3, rademacher": (stochastic(5, 3, **FEW, values="rademacher"), [MORE, {"values": "uniform"}]),
    "3 in 2, truncated normal": (stochastic(3, 2, **FEW, values="truncated normal"), [LESS, {"values": "uniform"}]),
    "hybrid, 2 in 2": (hybrid(2, 2), [EPSILON, OTHER, {"beta": 1.0}]),
    "hybrid, 2 in 5, rademacher": (hybrid(2, 5, **FEW, values="rademacher"), [EPSILON, {"values": "uniform"}]),
    "hybrid, 3 in 4, gaussian": (hybrid(3, 4, values="gaussian"), [EPSILON, OTHER, {"beta": 1.0}]),
    "hybrid, 5 in 3, truncated normal, unnormalized": (
        hybrid(5, 3, **{**FEW, "beta": 0.6}, values="truncated normal", **OTHER),
        [EPSILON, {"values": "uniform"}, {"attention": "softmax"}],
    ),
    "hybrid, 3 in 4, Q and K": (hybrid(3, 4, query_key=2 * query_key(4, 2)), [EPSILON, {"query_key": None}]),
}


def twin_of(model, change):
    """Return the model with other fields; `dim` is added to its dimension."""
    return replace(model, **{name: model.dim + value if name == "dim" else value for name, value in change.items()})


def start_of(model, dim):
    return np.pad(tokens_at(model.tokens, model.tokens, dim), ((0, 0), (0, model.dim - dim)))


def summary(overlap, gap):
    """Return statistics of pairs (samples, pairs): overlaps, a product, a difference, the log of the least gap.

    They are rounded, because laws with atoms (a few layers of Rademacher values) are compared too.
    """
    overlap = overlap.round(10)
    statistics = {f"z{k}": overlap[:, k] for k in {0, overlap.shape[1] // 2, overlap.shape[1] - 1}}
    if overlap.shape[1] > 1:
        statistics |= {"z0 z1": overlap[:, 0] * overlap[:, 1], "z0 − z2": overlap[:, 0] - overlap[:, 2]}
    return {**statistics, "log of the least gap": np.log(gap.min(1)).round(8)}


def positions(x):
    """Return statistics of tokens (samples, N, d) that a rotation would change."""
    x = x.round(10)
    return {
        "x00": x[:, 0, 0],
        "x11": x[:, 1, 1],
        "x00 x11": x[:, 0, 0] * x[:, 1, 1],
        "x01 − x10": x[:, 0, 1] - x[:, 1, 0],
    }


def simulated(model, start, keep="overlap", seed=1, samples=SAMPLES, **options):
    return lf.simulate(model, start, samples=samples, seed=seed, horizon=1.0, record=[1.0], keep=keep, **options)


def chain(model, start, **options):
    data = simulated(model, start, **options)
    return summary(data["overlap"].values[:, 0], data["gap"].values[:, 0])


@cache
def reference(name):
    """Return tokens (samples, N, d) after the naive layers."""
    model, _ = CASES[name]
    return naive_chain(model, start_of(model, model.dim), model.layers_per_unit_time, SAMPLES, seed=2)


def methods(model):
    return methods_of(model, model.values)


BY_METHOD = [(name, method) for name, (model, _) in CASES.items() for method in methods(model)]


@pytest.mark.parametrize(("name", "method"), BY_METHOD)
def test_chain_and_layers_share_one_law(name, method):
    model, twins = CASES[name]
    x = reference(name)
    right, layers = chain(model, start_of(model, model.dim), method=method), summary(overlaps_of(x), gaps_of(x))
    for change in twins:
        twin = twin_of(model, change)
        way = method if method in methods(twin) else None
        assert_same_law(right, layers, wrong=chain(twin, start_of(twin, model.dim), method=way))


def first_layer(model, start, seed=1):
    """Return tokens (samples, N, d) after one layer."""
    time = 1 / model.layers_per_unit_time
    data = lf.simulate(model, start, samples=SAMPLES, seed=seed, horizon=time, record=[time], keep="tokens")
    return data["tokens"].values[:, 0]


@pytest.mark.parametrize("name", CASES)
def test_tokens_themselves_share_one_law(name):
    """Positions after one layer, not only overlaps, which do not change if all tokens rotate."""
    model, _ = CASES[name]
    start = start_of(model, model.dim)
    layer = naive_chain(model, start, 1, SAMPLES, seed=7)
    turned = start @ np.linalg.qr(np.random.default_rng(8).standard_normal((model.dim,) * 2))[0]
    assert_same_law(
        positions(first_layer(model, start)), positions(layer), wrong=positions(first_layer(model, turned, seed=9))
    )


# --- other starts -----------------------------------------------------------------------------------------------------


def uniform_tokens(model, seed):
    return normalised(np.random.default_rng(seed).standard_normal((SAMPLES, model.tokens, model.dim)))


def at_overlap(model, z):
    """Return two tokens in R^dim with this overlap."""
    return np.pad([[1.0, 0.0], [z, (1 - z * z) ** 0.5]], ((0, 0), (0, model.dim - 2)))


UNIFORM_STARTS = [stochastic(2, 2), stochastic(3, 4)]


@pytest.mark.parametrize(
    ("model", "method"),
    [(m, method) for m in UNIFORM_STARTS for method in methods(m)],
    ids=lambda x: getattr(x, "dim", x),
)
def test_uniform_starts_have_the_law_of_uniform_tokens(model, method):
    """Overlaps at the start, and after the layers against the naive layers."""
    x, right = uniform_tokens(model, 3), simulated(model, None, method=method)
    first = lf.simulate(model, samples=SAMPLES, seed=1, horizon=1.0, record=[0.0], method=method)
    leaning = normalised(x + 0.1 * x[:, :1])
    assert_same_law(
        summary(first["overlap"].values[:, 0], first["gap"].values[:, 0]),
        summary(overlaps_of(x), gaps_of(x)),
        wrong=summary(overlaps_of(leaning), gaps_of(leaning)),
    )
    after = naive_chain(model, x, LAYERS, SAMPLES, seed=4)
    assert_same_law(
        summary(right["overlap"].values[:, 0], right["gap"].values[:, 0]),
        summary(overlaps_of(after), gaps_of(after)),
        wrong=chain(twin_of(model, MORE), None, method=method),
    )


@pytest.mark.parametrize("dim", [2, 8])
def test_uniform_tokens_are_uniform_on_the_sphere(dim):
    """Each coordinate x has (1 + x)/2 ~ Beta; the law in R^{dim + 1} (the wrong twin) is rejected."""
    x = lf.simulate(stochastic(3, dim), samples=SAMPLES, seed=1, horizon=1.0, record=[0.0], keep="tokens")
    half, wrong = (dim - 1) / 2, dim / 2
    for token, coordinate in ((0, 0), (1, dim - 1), (2, 1)):
        values = (1 + x["tokens"].values[:, 0, token, coordinate]) / 2
        assert stats.kstest(values, stats.beta(half, half).cdf).pvalue > ALPHA
        assert stats.kstest(values, stats.beta(wrong, wrong).cdf).pvalue < ALPHA


STARTS = [(stochastic(2, 2), -0.8), (stochastic(2, 4), 0.9), (hybrid(2, 3), -0.9)]


@pytest.mark.parametrize(
    ("model", "z", "method"),
    [(m, z, method) for m, z in STARTS for method in methods(m)],
    ids=lambda x: getattr(x, "dim", x),
)
def test_starts_at_an_overlap(model, z, method):
    x = naive_chain(model, at_overlap(model, z), LAYERS, SAMPLES, seed=5)
    layers = summary(overlaps_of(x), gaps_of(x))
    assert_same_law(chain(model, z, method=method), layers, wrong=chain(model, z + 0.06, method=method))
    assert_same_law(
        chain(model, at_overlap(model, z), method=method),
        layers,
        wrong=chain(model, at_overlap(model, -z), method=method),
    )
    first = lf.simulate(model, z, samples=20, seed=1, horizon=1.0, record=[0.0], method=method)
    np.testing.assert_allclose(first["overlap"].values, z, rtol=0, atol=2e-15)


@pytest.mark.parametrize("dim", [2, 5])
def test_tokens_at_an_overlap_have_a_uniform_position(dim):
    """Each of the two tokens is uniform on the sphere."""
    x = lf.simulate(stochastic(2, dim), 0.6, samples=SAMPLES, seed=1, horizon=1.0, record=[0.0], keep="tokens")
    half = stats.beta((dim - 1) / 2, (dim - 1) / 2)
    for token in range(2):
        for coordinate in range(2):
            assert stats.kstest((1 + x["tokens"].values[:, 0, token, coordinate]) / 2, half.cdf).pvalue > ALPHA
    np.testing.assert_allclose(overlaps_of(x["tokens"].values[:, 0]), 0.6, atol=1e-15)


@pytest.mark.parametrize("method", ["overlap", "gram", "coordinates"])
@pytest.mark.parametrize("z", [1.0, -1.0])
def test_tokens_that_coincide_stay(method, z):
    """Equal or opposite tokens stay so; rounding between them drifts but never becomes NaN."""
    data = lf.simulate(stochastic(2, 5), z, samples=50, seed=1, horizon=20.0, method=method)
    assert np.isfinite(data["overlap"].values).all()
    np.testing.assert_array_equal(data["overlap"].values, z)
    assert data["gap"].values.max() < (1e-280 if method == "overlap" else 1e-18)


@pytest.mark.parametrize("method", ["gram", "coordinates"])
def test_repeated_tokens_follow_the_naive_layers(method):
    """Two of four tokens are equal and one is opposite to the first: the Gram matrix is singular."""
    e = tokens_at(0, 3, 6)
    model = stochastic(4, 6)
    start = np.array([e[0], e[1], e[1], -e[0]])
    data = lf.simulate(model, start, samples=SAMPLES, seed=1, horizon=1.0, record=[1.0], method=method)
    z = data["overlap"].values[:, 0]  # 01, 02, 03, 12, 13, 23
    assert np.abs(z[:, 3] - 1).max() < 1e-13
    x = naive_chain(model, start, LAYERS, SAMPLES, seed=6)
    wrong = chain(model, np.array([e[0], e[1], e[2], -e[0]]), method=method)
    one = {"z01": z[:, 0], "z23": z[:, 5]}
    other = overlaps_of(x)
    assert_same_law(one, {"z01": other[:, 0], "z23": other[:, 5]}, wrong={"z01": wrong["z0"], "z23": wrong["z5"]})


# --- exact layers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        hybrid(2, 2, epsilon=0),
        hybrid(2, 5, epsilon=0, **OTHER, values="gaussian"),
        hybrid(3, 5, epsilon=0, values="rademacher"),
        hybrid(3, 4, epsilon=0, query_key=query_key(4, 6), values="truncated normal"),
    ],
    ids=lambda m: f"{m.tokens} in {m.dim}",
)
def test_without_noise_every_method_is_the_deterministic_flow(model):
    """Forty layers with ε = 0 agree to 1e-12 for every replica; one layer more (the wrong twin) does not."""
    model = replace(model, layers_per_unit_time=20)
    start = start_of(model, model.dim)
    x = naive_chain(model, start, 40, 1, seed=0)
    for method in methods(model):
        data = lf.simulate(model, start, samples=9, seed=1, horizon=2.0, record=[1.95, 2.0], method=method)
        error = np.abs(data["overlap"].values - overlaps_of(x)).max(axis=(0, 2))
        assert error[1] < 1e-12
        assert error[0] > 1e-6


def constants_of(model):
    return process_of(model, None, None, {"horizon": 1.0}).pair_constants()


@numba.njit
def normals_of(k0, k1, replicas, block, out):
    """Write h, h′, g, g′ of `move_pairs` for each replica to `out` (replicas, 4)."""
    for i in range(len(replicas)):
        w0, w1, w2, w3 = words_of(block, replicas[i], k0, k1)
        out[i, 0], out[i, 1] = box_muller(w0, w1)
        out[i, 2], out[i, 3] = box_muller(w2, w3)


def moved_by_hand(z, h, h_, g, g_, rho, chi, model):
    """Return z′ after one layer with vectors: V big and V small are written out in R⁴."""
    x = np.array([[1, 0, 0, 0], [z, (1 - z * z) ** 0.5, 0, 0]])
    weights = np.exp(model.beta * np.array([1, z]))
    a, b = weights / (weights.sum() if model.attention == "softmax" else 2)
    s, d = x[0] + x[1], x[0] - x[1]
    (big, c_big), (small, c_small) = sorted([(s, a + b), (d, a - b)], key=lambda pair: -pair[0] @ pair[0])
    scale = model.sigma / model.layers_per_unit_time**0.5
    e1, e2 = normalised(big), normalised(small)
    e3 = np.array([0, 0, 1.0, 0])
    big = big + scale * c_big * np.linalg.norm(big) * (h * e1 + h_ * e2 + rho**0.5 * e3)
    u = normalised(big)
    p = normalised(e2 - (e2 @ u) * u)
    basis = np.linalg.qr(np.array([u, p, e3, [0, 0, 0, 1.0]]).T)[0].T
    other = basis[2] if model.dim == 3 else basis[3]
    small = small + scale * c_small * np.linalg.norm(small) * (g * u + g_ * p + chi**0.5 * other)
    first, second = normalised(big + small), normalised(big - small)
    return first @ second * (1 if z >= 0 else -1)


@pytest.mark.parametrize(("dim", "attention"), [(2, "softmax"), (3, "unnormalized"), (11, "softmax")])
def test_layer_of_a_pair_equals_vectors_with_the_same_numbers(dim, attention):
    """z′ agrees to 1e-13; with g and g′ exchanged (the wrong twin) it does not."""
    model = stochastic(2, dim, layers_per_unit_time=3, attention=attention, beta=0.8)
    z = np.concatenate([np.linspace(-0.97, 0.97, 199), [0.0]])
    k0, k1 = map(np.uint64, key(4, "pairs"))
    pairs, layer = open_pairs(), np.uint64(5)
    pairs.running[0] = len(z)
    pairs.replica[: len(z)] = np.arange(len(z)) + 3
    pairs.w[: len(z)], pairs.sign[: len(z)] = (1 - abs(z)) / (1 + abs(z)), np.where(z >= 0, 1, -1)
    advance_stochastic(constants_of(model), k0, k1, layer, pairs)
    g = np.empty((len(z), 4))
    normals_of(k0, k1, pairs.replica[: len(z)], layer * np.uint64(1 + blocks_needed(dim - 2)), g)
    w = pairs.w[: len(z)]
    overlaps = pairs.sign[: len(z)] * (1 - w) / (1 + w)
    chis = pairs.first[: len(z)], pairs.second[: len(z)]
    right = [moved_by_hand(*row, model) for row in zip(z, *g.T, *chis, strict=True)]
    wrong = [moved_by_hand(*row, model) for row in zip(z, *g.T[[0, 1, 3, 2]], *chis, strict=True)]
    assert np.abs(overlaps - right).max() < 1e-13
    assert np.abs(overlaps - wrong).max() > 0.1
    assert (np.sign(overlaps) != np.sign(z)).any()


@pytest.mark.parametrize(("seed", "replica"), [(3, 178593), (11, 82523)])
def test_layer_that_nearly_cancels_the_longer_vector_keeps_its_digits(seed, replica):
    """Replicas, out of 10⁹ layers, with 1 + c_b h of about 1e-8 and m within rounding of 1.

    There √(1 − m²) is zero or NaN; the formula with 1 + c_b h and ρ has all its digits.
    """
    model = stochastic(2, 2, beta=1.0, sigma=3.0, layers_per_unit_time=1)
    process = process_of(model, 0.5, np.arange(21.0), {"horizon": 20.0})
    outputs = process.outputs(1)
    process.prepare(seed).run(replica, outputs, new_watch())
    gap = outputs["gap"][0, :, 0]
    assert np.isfinite(gap).all()
    assert (gap[1:] > 1e-30 * gap[:-1]).all()
