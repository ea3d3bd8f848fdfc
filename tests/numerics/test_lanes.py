"""Lanes: every operation against NumPy, and replicas that never mix."""

import operator

import numba
import numpy as np
import pytest

from limitformer.covariance.chain.transformer import TransformerChain, run_replicas
from limitformer.models import (
    GELU,
    LayerNorm,
    ReLU,
    RMSNorm,
    ShapedAttention,
    ShapedReLU,
    SoftmaxAttention,
    Transformer,
    as_start,
)
from limitformer.numerics.lanes import (
    LANES,
    all_below,
    choose,
    larger,
    load,
    smaller,
    square_root,
    store,
    where_positive,
)
from limitformer.numerics.watch import new_watch
from limitformer.simulation.limit import limit
from limitformer.simulation.processes import process_of
from limitformer.simulation.simulate import simulate

EPS = np.finfo(float).eps
BAD = [np.nan, np.inf, -np.inf]
A = np.array([1.5, -2.0, 0.0, 3e200, -7e-300, 1 / 3, -1e-3, 12345.678])
B = np.array([-0.7, 3.0, 5.0, 1e100, 3e-200, 7.0, -1e-3, -0.1])
STRANGE = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 5e-324, 1.0, -1.0])


@numba.njit
def select_positive(condition, value, out):
    store(out, 0, 0, where_positive(load(condition, 0, 0), load(value, 0, 0)))


@numba.njit
def select_either(condition, left, right, out):
    store(out, 0, 0, choose(load(condition, 0, 0), load(left, 0, 0), load(right, 0, 0)))


@numba.njit
def is_below(a, bound):
    return all_below(load(a, 0, 0), bound)


def both_ways(function):
    """Three kernels: both values with lanes, a number on the right, a number on the left."""

    @numba.njit
    def of_lanes(a, b, out):
        store(out, 0, 0, function(load(a, 0, 0), load(b, 0, 0)))

    @numba.njit
    def of_number_right(a, number, out):
        store(out, 0, 0, function(load(a, 0, 0), number))

    @numba.njit
    def of_number_left(number, b, out):
        store(out, 0, 0, function(number, load(b, 0, 0)))

    return of_lanes, of_number_right, of_number_left


ADD, SUBTRACT = both_ways(numba.njit(lambda x, y: x + y)), both_ways(numba.njit(lambda x, y: x - y))
MULTIPLY, DIVIDE = both_ways(numba.njit(lambda x, y: x * y)), both_ways(numba.njit(lambda x, y: x / y))
LARGER, SMALLER = both_ways(numba.njit(lambda x, y: larger(x, y))), both_ways(numba.njit(lambda x, y: smaller(x, y)))


def entry(values):
    """One entry (1, 1, LANES)."""
    return np.array(values, float).reshape(1, 1, LANES).copy()


def answer(kernel, *arguments):
    """The lanes that `kernel` stores, into an entry that was not clean; lists and arrays become entries."""
    out = entry([np.nan] * LANES)
    kernel(*(entry(x) if np.ndim(x) else x for x in arguments), out)
    return out[0, 0]


def same_bits(one, other):
    return np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()


# --- operations -----------------------------------------------------------------------------------------------------

EXACT = {"+": (ADD, operator.add), "-": (SUBTRACT, operator.sub), "*": (MULTIPLY, operator.mul)}


@pytest.mark.parametrize(("kernels", "reference"), EXACT.values(), ids=list(EXACT))
def test_sums_and_products_agree_with_numpy(kernels, reference):
    """They agree to the bit in every lane; lanes that are rotated by one, the wrong twin, do not."""
    expected = reference(A, B)
    np.testing.assert_array_equal(answer(kernels[0], A, B), expected)
    assert (answer(kernels[0], np.roll(A, 1), B) != expected).any()
    for number in (2.5, -1e-3, 0.0):
        np.testing.assert_array_equal(answer(kernels[1], A, number), reference(A, number))
        np.testing.assert_array_equal(answer(kernels[2], number, B), reference(number, B))


def test_quotients_agree_with_numpy():
    """They agree to three roundings, because a quotient may be computed as a product with the reciprocal."""
    np.testing.assert_allclose(answer(DIVIDE[0], A, B), A / B, rtol=3 * EPS)
    for number in (2.5, -1e-3, 3.0):
        np.testing.assert_allclose(answer(DIVIDE[1], A, number), A / number, rtol=3 * EPS)
        np.testing.assert_allclose(answer(DIVIDE[2], number, B), number / B, rtol=3 * EPS)


@pytest.mark.parametrize(
    ("kernels", "reference"),
    [(ADD, operator.add), (SUBTRACT, operator.sub), (MULTIPLY, operator.mul), (DIVIDE, operator.truediv)],
    ids="+-*/",
)
def test_infinities_and_nan_keep_their_meaning(kernels, reference):
    """The sign of a zero may be lost, so no divisor is zero here."""
    others = np.array([1.0, -2.0, np.inf, -np.inf, np.nan, 3.0, 0.5, np.inf])
    with np.errstate(invalid="ignore", over="ignore"):
        for shift in range(LANES):
            x = np.roll(STRANGE, shift)
            np.testing.assert_array_equal(answer(kernels[0], x, others), reference(x, others))
        for number in (np.nan, np.inf, 2.0):
            np.testing.assert_array_equal(answer(kernels[1], STRANGE, number), reference(STRANGE, number))
            np.testing.assert_array_equal(answer(kernels[2], number, others), reference(number, others))


@numba.njit
def times_nothing(a, out):
    store(out, 0, 0, load(a, 0, 0) * 0.0)


@numba.njit
def less_itself(a, out):
    x = load(a, 0, 0)
    store(out, 0, 0, x - x)


@numba.njit
def by_itself(a, out):
    x = load(a, 0, 0)
    store(out, 0, 0, x / x)


@numba.njit
def is_a_number(a):
    """Whether every lane of a result, not of an entry, is below infinity."""
    x = load(a, 0, 0)
    return all_below(x * x + 1.0, np.inf)


def test_compiler_keeps_infinities_and_nan():
    """For infinite or NaN x, x·0 and x − x are not 0, and x/x is not 1; explosions are detected by this."""
    zero = np.where(np.isfinite(STRANGE), 0, np.nan)
    np.testing.assert_array_equal(answer(times_nothing, STRANGE), zero)
    np.testing.assert_array_equal(answer(less_itself, STRANGE), zero)
    np.testing.assert_array_equal(
        answer(by_itself, STRANGE[[0, 1, 2, 6, 7, 3, 4, 6]]), [np.nan] * 3 + [1, 1, np.nan, np.nan, 1]
    )
    assert is_a_number(entry(B))
    for bad in BAD:
        assert not is_a_number(entry([1.0] * 6 + [bad, 1.0]))


@numba.njit
def root_of_entry(a, out):
    store(out, 0, 0, square_root(load(a, 0, 0)))


def test_square_roots_agree_with_numpy():
    """They agree to the bit, because both are correctly rounded."""
    for values in (np.abs(A), np.abs(B), [0.0, 5e-324, np.inf, np.nan, 2.0, 4.0, 1e308, 1e-308]):
        np.testing.assert_array_equal(answer(root_of_entry, values), np.sqrt(values))
    assert np.isnan(answer(root_of_entry, [-1.0, -np.inf, -5e-324, -1e300] * 2)).all()


@pytest.mark.parametrize(("kernels", "comparison"), [(LARGER, operator.gt), (SMALLER, operator.lt)], ids=["max", "min"])
def test_the_left_value_is_taken_only_where_the_comparison_holds(kernels, comparison):
    """With NaN on either side it does not hold: the right value comes, not NumPy's NaN."""
    for shift in range(LANES):
        left, right = STRANGE, np.roll(STRANGE, shift)
        expected = np.where(comparison(left, right), left, right)
        np.testing.assert_array_equal(answer(kernels[0], left, right), expected)
    np.testing.assert_array_equal(answer(kernels[1], [np.nan] * LANES, 2.0), [2.0] * LANES)
    np.testing.assert_array_equal(answer(kernels[2], 2.0, [np.nan] * LANES), [np.nan] * LANES)


def test_where_positive_takes_the_value_or_zero():
    """Zero, negative numbers and NaN are not positive; the smallest double and infinity are."""
    conditions = [1.0, 0.0, -0.0, -1.0, np.nan, np.inf, -np.inf, 5e-324]
    values = [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    np.testing.assert_array_equal(answer(select_positive, conditions, values), [2, 0, 0, 0, 0, 7, 0, 9])


def test_choose_takes_one_of_two_values():
    """It is like `where_positive`, and the value that is not chosen may be anything."""
    conditions = [1.0, 0.0, -0.0, -1.0, np.nan, np.inf, -np.inf, 5e-324]
    left, right = [2.0, *BAD, np.nan, 7.0, 8.0, 9.0], [np.nan, 3.0, 4.0, 5.0, 6.0, np.inf, -0.5, np.nan]
    np.testing.assert_array_equal(answer(select_either, conditions, left, right), [2, 3, 4, 5, 6, 7, -0.5, 9])


def test_all_below_asks_every_lane():
    for lane in range(LANES):
        values = entry([1.0, -2.0, 0.5, -np.inf, 1.9, 0.0, -5.0, 1.0])
        assert is_below(values, 2.0)
        for bad in (2.0, 3.0, np.inf, np.nan):
            values[0, 0, lane] = bad
            assert not is_below(values, 2.0)
        assert not is_below(values, np.inf)


# --- replicas never mix: chains and limits --------------------------------------------------------------------------

START = np.array([[1.0, 0.3, -0.2], [0.3, 2.0, 0.1], [-0.2, 0.1, 0.5]])
SHAPED = Transformer(
    width=40,
    depth=12,
    gamma=0.5,
    attention=ShapedAttention(tau0=1.0),
    feedforward=ShapedReLU(c_plus=0.0, c_minus=-1.0),
)
CHAINS = {
    "shaped": SHAPED,
    "pre, heads, GELU": Transformer(
        width=40, depth=6, gamma=0.5, attention=SoftmaxAttention(heads=2), feedforward=GELU(hidden=70), norm="pre"
    ),
    "post, causal": Transformer(
        width=3, depth=6, gamma=0.5, feedforward=ReLU(), norm=LayerNorm(placement="post"), mask="causal"
    ),
    "RMS": Transformer(
        width=5,
        depth=6,
        gamma=0.5,
        attention=SoftmaxAttention(),
        feedforward=ReLU(hidden=3),
        norm=RMSNorm(placement="pre"),
    ),
}
SIMULATIONS = {
    **{name: (model, {}) for name, model in CHAINS.items()},
    "limit": (limit(SHAPED), {"dt": 0.02}),
    "limit, Euler-Maruyama": (limit(SHAPED), {"dt": 0.02, "step": "euler-maruyama"}),
    "limit that explodes": (limit(SHAPED), {"dt": 0.02, "start": 15 * START}),
    "limit that leaves the cone": (
        limit(Transformer(width=20, depth=20, gamma=1.0, attention=ShapedAttention(tau0=0.7))),
        {"dt": 0.25, "step": "euler-maruyama", "start": 0.5 * START},
    ),
}
every_simulation = pytest.mark.parametrize(("model", "options"), SIMULATIONS.values(), ids=list(SIMULATIONS))


def run(model, samples, start=START, **options):
    return simulate(model, start, samples=samples, seed=11, threads=1, progress=False, **options)


@every_simulation
def test_the_place_of_a_replica_does_not_change_a_bit(model, options):
    """Replica j is alone or in a batch that begins anywhere, as the first or the eighth."""
    whole = run(model, 24, **options)
    options = dict(options)
    process = process_of(model, options.pop("start", START), None, options)
    prepared = process.prepare(11)
    for first, count in ((0, 1), (1, 1), (3, 8), (5, 13), (7, 2), (8, 3), (11, 9), (15, 9), (23, 1)):
        outputs = process.outputs(count)
        prepared.run(first, outputs, new_watch())
        for ours, name in (("covariance", "covariance"), ("exits", "exit"), ("causes", "exit_cause")):
            theirs = whole[name].values[first : first + count]
            assert same_bits(outputs[ours].reshape(theirs.shape), theirs), (name, first, count)


def test_ending_simulations_end_at_different_times():
    """The test above relies on finished paths next to unfinished ones."""
    for name in ("limit that explodes", "limit that leaves the cone"):
        model, options = SIMULATIONS[name]
        exits = run(model, 24, **options)["exit"].values
        assert min(len(np.unique(batch)) for batch in exits.reshape(3, LANES)) > 2, name


def chain_paths(model):
    """Return a function from a change of the start (m, r, LANES) to all records of its eight replicas."""
    chain = TransformerChain(model=model, start=as_start(START), points=np.arange(model.depth + 1), radius=1e100)
    prepared = chain.prepare(2)

    def paths(spoil):
        start, outputs = prepared.factor.copy(), chain.outputs(LANES)
        spoil(start)
        share = chain.share(outputs, 0, prepared.key_words, chain.points)
        arguments = (prepared.turned, prepared.constants, prepared.sublayers, prepared.visible)
        run_replicas(start, *arguments, share, new_watch())
        return outputs["covariance"], outputs["exits"], outputs["causes"]

    return paths


def limit_paths(step):
    process = process_of(limit(SHAPED), START, None, {"dt": 0.02, "step": step})
    prepared = process.prepare(2)
    arguments = (
        process.model.constants(),
        process.model.mask_for(3),
        process.actual_dt,
        prepared.resolution,
        process.steps,
    )

    def paths(spoil):
        start, outputs = prepared.factor.copy(), process.outputs(LANES)
        spoil(start)
        share = process.share(outputs, 0, prepared.key_words, process.step_numbers)
        prepared.kernel(start, *arguments, share, new_watch())
        return outputs["covariance"], outputs["exits"], outputs["causes"]

    return paths


PATHS = {
    **{name: chain_paths(model) for name, model in CHAINS.items()},
    "limit": limit_paths("factor"),
    "limit, Euler-Maruyama": limit_paths("euler-maruyama"),
}


@pytest.mark.parametrize("value", [np.nan, 1e160], ids=str)
@pytest.mark.parametrize("paths", PATHS.values(), ids=list(PATHS))
def test_lost_replica_does_not_change_the_others(paths, value):
    """A replica is lost from the start on; the seven others have the bits of an untouched run, and no exit."""
    clean = paths(lambda factor: None)
    assert np.isinf(clean[1]).all()
    assert len(np.unique(clean[0][:, -1, 3])) == LANES
    for lane in range(LANES):
        others = np.arange(LANES) != lane

        def spoil(factor, lane=lane):
            factor[0, :, lane] = value

        spoilt = paths(spoil)
        for ours, theirs in zip(spoilt, clean, strict=True):
            assert same_bits(ours[others], theirs[others])
        assert spoilt[1][lane] == 0
