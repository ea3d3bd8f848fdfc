"""Early stops of many tokens: merged tokens stay merged, two clusters continue as two points, with the same law."""

import importlib

import numpy as np
import pytest
from scipy import stats

import limitformer as lf
from limitformer.simulation.processes import process_of
from limitformer.sphere.pair.chain import open_pairs
from limitformer.sphere.stopping.bound import MARGIN, ORDERS
from limitformer.sphere.stopping.merging import SHARES, TRANSIT, TURN, Merging, walk_exponent
from limitformer.sphere.stopping.two_clusters import TwoClusters, advance_clusters
from sphere_naive import naive_attention, naive_layer, normalised, overlaps_of
from statistics_checks import ALPHA, STANDARD_ERRORS, assert_same_law

LEVEL = 0.05
TOLERANCE = 1e-2
NAMES = ("clusters", "largest_cluster", "antipodal_pairs", "unresolved_pairs")


def model_of(tokens, dim, layers=50, beta=1.5, **more):
    return lf.StochasticTransformer(tokens=tokens, dim=dim, beta=beta, layers_per_unit_time=layers, **more)


def process_with(model, level=LEVEL, tolerance=TOLERANCE, keep="outcome"):
    options = {"horizon": 1.0, "early_stop": level, "tolerance": tolerance, "keep": keep}
    return process_of(model, None, None, options)


# --- the step of two clusters -----------------------------------------------------------------------------------------


def moved(model, p, z, samples):
    """Return overlaps after one layer of p tokens at X¹ and the others at X², by the kernel."""
    constants, overlaps = process_with(model).pair_constants(), np.empty(samples)
    for begin in range(0, samples, 256):
        pairs, count = open_pairs(), min(256, samples - begin)
        pairs.running[0] = count
        pairs.replica[:] = np.arange(begin, begin + 256)
        pairs.w[:], pairs.sign[:] = (1 - abs(z)) / (1 + abs(z)), np.sign(z)
        two = TwoClusters(pairs, np.full(256, float(p)))
        advance_clusters(constants, model.tokens, np.uint64(3), np.uint64(4), np.uint64(1), two)
        overlaps[begin : begin + count] = (pairs.sign * (1 - pairs.w) / (1 + pairs.w))[:count]
    return overlaps


@pytest.mark.parametrize(
    ("p", "q", "dim", "beta", "z"),
    [(1, 2, 4, 1.0, -0.999), (3, 3, 3, 0.7, 0.4), (5, 1, 2, 2.0, -0.4)],
)
def test_a_layer_of_two_clusters_is_a_layer_of_their_tokens(p, q, dim, beta, z):
    """Every token and every matrix of the naive layer; clusters of other sizes (the wrong twin) are rejected."""
    model = model_of(p + q, dim, layers=4, beta=beta)
    x = np.zeros((p + q, dim))
    x[:p, 0], x[p:, 0], x[p:, 1] = 1.0, z, (1 - z * z) ** 0.5
    value = np.random.default_rng(0).standard_normal((20_000, dim, dim))
    naive = overlaps_of(naive_layer(x, model, value)[:, [0, -1]])[:, 0]
    other = model_of(p + q + 6, dim, layers=4, beta=beta)
    assert_same_law({"z": moved(model, p, z, 20_000)}, {"z": naive}, {"z": moved(other, p + 6, z, 20_000)})


def test_only_unequal_clusters_leave_antipodes():
    """One layer moves w = 0 to 1 + z = c²(T₁ − T₂)²(…)/2 for p ≠ q, and to 0 for p = q."""
    model = model_of(3, 4, beta=2.0)
    e, c = np.exp(-2 * model.beta), model.layers_per_unit_time**-0.5
    drive = 3 * e / ((2 + e) * (1 + 2 * e))  # θ
    gaps = 1 + moved(model, 2, -1 + 1e-14, 4000)
    wanted = 3 * (2 * c * drive) ** 2 / 2  # three directions across, |d| = 2
    assert gaps.mean() == pytest.approx(wanted, rel=0.15)
    assert (1 + moved(model_of(4, 4, beta=2.0), 2, -1 + 1e-14, 4000)).max() < 1e-12


def test_lifetime_of_two_against_one_equals_the_formula():
    """β = 2, d = 4: 32.66 to z = 0.9."""
    model = model_of(3, 4, layers=100, beta=2.0)
    start = np.array([[1.0, 0, 0, 0], [1, 0, 0, 0], [-1, 0, 0, 0]])
    times = np.arange(0, 400.25, 0.25)
    run = {"samples": 1600, "seed": 1, "horizon": 400.0, "record": times, "progress": False, "tolerance": 0.1}
    data = lf.simulate(model, start, keep="outcome", early_stop=1e-9, **run)
    assert np.isfinite(data["stopped"].values).all()
    alone = data["clusters"].values == 1
    lives = times[alone.argmax(1)] - 0.125
    exact = lf.overlap(model, clusters=(2, 1)).mean_hitting_time(0.9, start=-1.0)
    assert abs(lives.mean() - exact) < 3 * lives.std() / 40
    assert abs(lives.mean() - 17.19) > 10 * lives.std() / 40  # three against one


# --- outcomes ---------------------------------------------------------------------------------------------------------

LAWS = {
    "coordinates, N = 4": (model_of(4, 4, beta=2.0), {"horizon": 48.0}),
    "limit": (lf.limit(model_of(3, 5, 7, 2.5)), {"horizon": 48.0, "dt": 0.02}),
    "gram, N = 3": (model_of(3, 4, beta=3.0), {"horizon": 64.0}),
    "dim 2, N = 5": (model_of(5, 2, layers=25, beta=1.0), {"horizon": 100.0}),
}


def kinds(data):
    """Count the samples with each outcome, at each time."""
    return np.stack([data[name].values for name in NAMES], -1)


def least_p(one, other):
    """Return the least p-value of chi-square tests of the outcomes at each time; rare outcomes are pooled."""
    ps = []
    for x, y in zip(np.swapaxes(kinds(one), 0, 1), np.swapaxes(kinds(other), 0, 1), strict=True):
        _, which = np.unique(np.concatenate([x, y]), axis=0, return_inverse=True)
        table = np.stack([np.bincount(part, minlength=which.max() + 1) for part in np.split(which.ravel(), 2)])
        often = table.sum(0) >= 20
        table = np.concatenate([table[:, often], table[:, ~often].sum(1, keepdims=True)], 1)
        table = table[:, table.sum(0) > 0]
        ps.append(stats.chi2_contingency(table).pvalue if table.shape[1] > 1 else 1.0)
    return min(ps)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", LAWS)
def test_outcomes_have_the_law_of_those_without_a_stop(name, monkeypatch):
    """Bounds that stop two clusters on their way (the wrong twin) are rejected."""
    model, options = LAWS[name]
    times = [options["horizon"] * share for share in (0.25, 0.5, 1.0)]
    run = {"record": times, "keep": "outcome", "tolerance": TOLERANCE, "progress": False, **options}
    free = lf.simulate(model, samples=3000, seed=0, **run)
    stopped = lf.simulate(model, samples=3000, seed=1, early_stop=1e-9, **run)
    assert np.isfinite(stopped["stopped"].values).mean() > 0.2
    assert least_p(free, stopped) > ALPHA
    module = importlib.import_module("limitformer.sphere.tokens.process")
    monkeypatch.setattr(module, "merging_bounds", lambda *_: Merging(1e-6, 1e-6, 1.0, 0.3, 0.3))
    bold = lf.simulate(model, samples=3000, seed=2, early_stop=1e-9, **run)
    assert least_p(free, bold) < ALPHA


@pytest.mark.parametrize(
    ("model", "start", "outcome"),
    [
        (model_of(3, 4), [[1.0, 0, 0, 0]] * 3, (1, 3, 0, 0)),
        (model_of(4, 3), [[1.0, 0, 0], [1, 0, 0], [-1, 0, 0], [-1, 0, 0]], (2, 2, 4, 0)),
    ],
)
def test_tokens_that_coincide_from_the_start_stop_at_once(model, start, outcome):
    """All recorded times have the outcome of the start."""
    run = {"horizon": 2.0, "samples": 9, "seed": 0, "keep": "outcome", "progress": False}
    data = lf.simulate(model, np.array(start), early_stop=1e-6, method="coordinates", **run)
    assert (data["stopped"].values == 0).all()
    assert (kinds(data) == outcome).all()


NO_STOPS = {
    "overlaps": (model_of(3, 4), {"keep": "overlap"}),
    "causal": (model_of(3, 4, mask="causal"), {}),
    "Q and K": (model_of(3, 4, query_key=np.random.default_rng(0).standard_normal((2, 4, 4))), {}),
    "unnormalized": (model_of(3, 4, beta=0.3, attention="unnormalized"), {}),
    "hybrid": (lf.HybridTransformer(tokens=3, dim=4, beta=1.0, layers_per_unit_time=50, epsilon=0.5), {}),
    "long steps": (model_of(3, 4, layers=10), {}),
    "negative β": (model_of(3, 4, beta=-1.0), {}),
}


@pytest.mark.parametrize("name", NO_STOPS)
def test_early_stop_changes_nothing_without_a_bound(name):
    model, options = NO_STOPS[name]
    run = {"horizon": 3.0, "samples": 9, "seed": 0, "keep": "outcome", "tolerance": 0.1, "progress": False} | options
    free, stopped = lf.simulate(model, **run), lf.simulate(model, early_stop=0.5, **run)
    assert stopped.attrs["stop_gaps"] == [0.0, 0.0]
    assert np.isinf(stopped["stopped"].values).all()
    for variable in free.data_vars:
        np.testing.assert_array_equal(free[variable], stopped[variable])


# --- the bounds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [2, 9])
@pytest.mark.parametrize("share", SHARES)
def test_distances_in_a_cluster_fall_by_the_exponent_of_the_bound(dim, share):
    """E (|D′|/|D|)^r = 1 at r near dim − 1 for every |A|, by vectors; the exponent of the library is not above it."""
    c = 0.1 * share
    g = np.random.default_rng(5).standard_normal((400_000, dim))
    y = np.eye(dim)[0] + c * g  # xᵖ + c V A
    length = np.linalg.norm(y, axis=1)
    along = y[:, 1] / length  # D along the second axis
    ratio = np.sqrt(1 - along**2) / length
    r = walk_exponent(process_with(model_of(3, dim, layers=100)).pair_constants(), 1e-9, ORDERS[-1])
    assert r == pytest.approx(dim - 1, rel=0.05)
    mean, error = (ratio**r).mean(), (ratio**r).std() / len(ratio) ** 0.5
    assert mean < 1 + STANDARD_ERRORS * error
    assert (ratio ** (1.5 * r)).mean() > 1


@pytest.mark.parametrize(("dim", "layers"), [(3, 25), (5, 16), (6, 25), (7, 20), (8, 30)])
def test_no_exponent_of_long_steps_is_above_the_true_one(dim, layers):
    """E (|D′|/|D|)^r by an integral over length and direction of xᵖ + cVA, at the exponent of the library.

    At c = 0.25 quadratures of both orders agree on exponents that are too large.
    """
    c, edge = layers**-0.5, TOLERANCE / (2 - TOLERANCE)
    model = model_of(3, dim, layers, beta=0.1)
    w = process_with(model).merging.stop_plus
    if w == 0:
        return
    assert layers >= 25
    r = 2 * np.log(LEVEL / 3) / np.log(w / min(edge, TURN**2))
    assert integral(dim, c, r) < 1
    assert integral(dim, c, 1.2 * r) > 1


def integral(dim, c, r):
    """Integrate |y|^{−r} (1 − ⟨y/|y|, e₂⟩²)^{r/2} over y = e₁ + cg: y₂ by Gauss-Hermite, the rest as χ²."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()
    others, of_others = (np.zeros(1), np.ones(1))
    if dim > 2:
        q = (np.arange(1000) + 0.5) / 1000
        others, of_others = stats.chi2(dim - 2).ppf(q), np.full(1000, 1 / 1000)
    first, second, rest = np.meshgrid(1 + c * nodes, c * nodes, c * c * others, indexing="ij", sparse=True)
    square = first**2 + second**2 + rest
    values = square ** (-r / 2) * (1 - second**2 / square) ** (r / 2)
    return np.einsum("abc,a,b,c", values, weights, weights, of_others)


def test_gap_near_the_least_double_opens_as_without_a_stop():
    """A layer may multiply w by any factor here; 1 + z must grow from 1e-292 to 1 in 81 layers."""
    layers = 40
    model = model_of(4, 100_000, layers, beta=0.0, sigma=0.199 * layers**0.5)
    start = np.zeros((4, model.dim))
    start[:, 0], start[2:, 1] = [1, 1, -1, -1], 1e-146
    run = {"horizon": 4.0, "samples": 24, "record": np.arange(161) / 40, "keep": "outcome", "progress": False}
    opened = [
        (lf.simulate(model, start, seed=1, method="gram", **run, **more)["antipodal_pairs"].values == 0).argmax(1)
        for more in ({}, {"early_stop": 1e-9})
    ]
    assert abs(opened[0].mean() - opened[1].mean()) < 2
    assert opened[0].mean() > 60


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("tokens", "dim"), [(3, 2), (5, 3), (3, 4)])
def test_one_cluster_stays_one(tokens, dim):
    """At most 5 % ever leave the tolerance from the edge of the bound; twice the exponent (the wrong twin) fails."""
    model = model_of(tokens, dim)
    w = process_with(model).merging.stop_plus
    edge = TOLERANCE / (2 - TOLERANCE)
    r = 2 * np.log(LEVEL / tokens) / np.log(w / min(edge, (TURN / 3) ** 2)) / MARGIN
    assert 0.8 * (dim - 1) < r < dim - 1 + 0.3
    assert share_that_parts(model, w) < LEVEL
    assert share_that_parts(model, 0.2 * edge) > LEVEL


def share_that_parts(model, w):
    """Return the share of replicas, with tokens at this distance from the first, that ever leave the tolerance."""
    direction = np.zeros((model.tokens, model.dim))
    direction[1:] = np.random.default_rng(0).standard_normal((model.tokens - 1, model.dim))
    direction[:, 0] = 0.0
    length = np.linalg.norm(direction, axis=1, keepdims=True)
    start = np.eye(model.dim)[0] + 2 * w**0.5 * direction / np.where(length > 0, length, 1)
    run = {"samples": 2000, "seed": 1, "horizon": 20.0, "keep": "outcome", "tolerance": TOLERANCE, "progress": False}
    data = lf.simulate(model, normalised(start), record=np.arange(1001) / 50, **run)
    return float((data["clusters"].values > 1).any(1).mean())


@pytest.mark.slow
def test_distances_in_a_cluster_grow_far_less_than_transit_allows():
    """Two tokens of a cluster move from antipodes to one point with one across; |D| to first order.

    `TRANSIT` allows a growth of 1e20.
    """
    growths = [growth(beta, larger) for beta in (0.5, 2.0, 6.0) for larger in (2, 12)]
    assert 2 < max(growths) < 100
    assert TRANSIT == 1e-20


def growth(beta, larger, samples=200, seconds=30):
    """Return the largest |D| of all times and samples over that at z = −0.9; D is kept at 1e-8 of its size."""
    model = model_of(larger + 1, 4, layers=50, beta=beta)
    rng = np.random.default_rng(2)
    x = np.zeros((samples, larger + 1, 4))
    x[:, :larger, 0], x[:, larger, 0], x[:, larger, 1] = 1.0, -0.9, 0.19**0.5
    logs, largest = np.zeros(samples), np.zeros(samples)
    d = normalised(rng.standard_normal((samples, 4)) * [0, 1, 1, 1]) * 1e-8
    for _ in range(50 * seconds):
        x[:, larger - 1] = x[:, 0] + d
        value = rng.standard_normal((samples, 4, 4))
        a = naive_attention(x, model)
        y = x + 50**-0.5 * a @ np.swapaxes(value, -1, -2)
        length = np.linalg.norm(y[:, 0], axis=-1, keepdims=True)
        u, difference = y[:, 0] / length, y[:, larger - 1] - y[:, 0]
        d = (difference - (difference * u).sum(-1, keepdims=True) * u) / length
        x = normalised(y)
        size = np.linalg.norm(d, axis=-1)
        logs += np.log(size / 1e-8)
        d *= (1e-8 / size)[:, None]
        largest = np.maximum(largest, logs)
    return float(np.exp(largest.max()))
