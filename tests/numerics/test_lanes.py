"""Lanes: every operation against NumPy, and replicas that never mix."""

import operator

import numba
import numpy as np
import pytest

from limitformer.covariance.chain.transformer import TransformerChain, run_replicas
from limitformer.covariance.limit.euler import cholesky
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
from limitformer.numerics.factor import (
    copy,
    draw_bartlett,
    gram,
    multiply,
    multiply_into,
    multiply_transposed,
    trace_of_gram,
    triangularise,
)
from limitformer.numerics.lanes import (
    LANES,
    all_below,
    choose,
    everywhere,
    in_lanes,
    larger,
    load,
    magnitude,
    smaller,
    square_root,
    store,
    where_positive,
)
from limitformer.numerics.random import key, open_stream, rewind
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
def move(a, i, j, out, k, n):
    store(out, k, n, load(a, i, j))


@numba.njit
def store_number(out, i, j, number):
    store(out, i, j, number)


@numba.njit
def spread_number(number, out):
    store(out, 0, 0, everywhere(number))


@numba.njit
def select_positive(condition, value, out):
    store(out, 0, 0, where_positive(load(condition, 0, 0), load(value, 0, 0)))


@numba.njit
def select_either(condition, left, right, out):
    store(out, 0, 0, choose(load(condition, 0, 0), load(left, 0, 0), load(right, 0, 0)))


@numba.njit
def is_below(a, bound):
    return all_below(load(a, 0, 0), bound)


@numba.njit
def store_trace(a, out):
    store(out, 0, 0, trace_of_gram(a))


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


def random_lanes(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal((*shape, LANES))


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


@pytest.mark.parametrize("number", [3, np.float32(0.5), np.int32(-2), np.int64(7), True], ids=repr)
def test_numbers_of_any_kind_broadcast(number):
    as_double = float(number)
    np.testing.assert_array_equal(answer(ADD[1], A, number), A + as_double)
    np.testing.assert_array_equal(answer(SUBTRACT[2], number, B), as_double - B)
    np.testing.assert_array_equal(answer(MULTIPLY[1], A, number), A * as_double)
    np.testing.assert_allclose(answer(DIVIDE[2], number, B), as_double / B, rtol=3 * EPS)
    np.testing.assert_array_equal(answer(spread_number, number), [as_double] * LANES)
    np.testing.assert_array_equal(answer(LARGER[1], A, number), np.maximum(A, as_double))
    np.testing.assert_array_equal(answer(SMALLER[2], number, A), np.minimum(as_double, A))
    out = random_lanes(1, 1)
    store_number(out, 0, 0, number)
    np.testing.assert_array_equal(out[0, 0], [as_double] * LANES)


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


def test_division_by_zero_is_an_infinity_or_nan():
    quotient = answer(DIVIDE[0], [1.0, -1.0, 0.0, np.inf, np.nan, 1.0, 0.0, 2.0], [0.0] * 7 + [4.0])
    np.testing.assert_array_equal(np.abs(quotient), [np.inf, np.inf, np.nan, np.inf, np.nan, np.inf, np.nan, 0.5])


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


@numba.njit
def magnitude_of_entry(a, out):
    store(out, 0, 0, magnitude(load(a, 0, 0)))


def test_square_roots_agree_with_numpy():
    """They agree to the bit, because both are correctly rounded."""
    for values in (np.abs(A), np.abs(B), [0.0, 5e-324, np.inf, np.nan, 2.0, 4.0, 1e308, 1e-308]):
        np.testing.assert_array_equal(answer(root_of_entry, values), np.sqrt(values))
    assert np.isnan(answer(root_of_entry, [-1.0, -np.inf, -5e-324, -1e300] * 2)).all()


def test_magnitudes_agree_with_numpy():
    for values in (A, B, STRANGE):
        assert same_bits(answer(magnitude_of_entry, values), np.abs(values))


def test_larger_and_smaller_agree_with_numpy():
    np.testing.assert_array_equal(answer(LARGER[0], A, B), np.maximum(A, B))
    np.testing.assert_array_equal(answer(SMALLER[0], A, B), np.minimum(A, B))
    for number in (0.0, -1e-3, np.inf, -np.inf):
        np.testing.assert_array_equal(answer(LARGER[1], A, number), np.maximum(A, number))
        np.testing.assert_array_equal(answer(LARGER[2], number, A), np.maximum(A, number))
        np.testing.assert_array_equal(answer(SMALLER[1], A, number), np.minimum(A, number))
        np.testing.assert_array_equal(answer(SMALLER[2], number, A), np.minimum(A, number))


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
    for bad in BAD:
        expected = [bad, 0, 0, 0, 0, bad, 0, bad]
        np.testing.assert_array_equal(answer(select_positive, conditions, [bad] * LANES), expected)


def test_choose_takes_one_of_two_values():
    """It is like `where_positive`, and the value that is not chosen may be anything."""
    conditions = [1.0, 0.0, -0.0, -1.0, np.nan, np.inf, -np.inf, 5e-324]
    left, right = [2.0, *BAD, np.nan, 7.0, 8.0, 9.0], [np.nan, 3.0, 4.0, 5.0, 6.0, np.inf, -0.5, np.nan]
    np.testing.assert_array_equal(answer(select_either, conditions, left, right), [2, 3, 4, 5, 6, 7, -0.5, 9])


@pytest.mark.parametrize("lane", range(LANES))
def test_all_below_asks_every_lane(lane):
    values = entry([1.0, -2.0, 0.5, -np.inf, 1.9, 0.0, -5.0, 1.0])
    assert is_below(values, 2.0)
    assert is_below(values, np.inf)
    for bad in (2.0, 3.0, np.inf, np.nan):
        values[0, 0, lane] = bad
        assert not is_below(values, 2.0)
    values[0, 0, lane] = np.nan
    assert not is_below(values, np.inf)
    values[0, 0, lane] = 2 - EPS
    assert is_below(values, 2.0)
    assert not is_below(values, np.nan)


# --- entries --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (5, 3)], ids=str)
def test_load_and_store_reach_every_entry_and_no_other(shape):
    source = np.arange(np.prod(shape) * LANES, dtype=float).reshape(*shape, LANES)
    for i, j in np.ndindex(shape):
        for k, n in np.ndindex(shape):
            out = np.full((*shape, LANES), -1.0)
            expected = out.copy()
            expected[k, n] = source[i, j]
            move(source, i, j, out, k, n)
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("kind", [np.int32, np.uint8, np.int64])
def test_indices_may_be_integers_of_any_kind(kind):
    source, out = random_lanes(3, 4), np.zeros((2, 2, LANES))
    move(source, kind(2), kind(1), out, kind(0), kind(1))
    np.testing.assert_array_equal(out[0, 1], source[2, 1])
    assert not out[0, 0].any()
    assert not out[1].any()


def test_a_plain_matrix_stands_in_all_lanes():
    matrix = np.arange(12.0).reshape(3, 4)
    assert in_lanes(matrix).shape == (3, 4, LANES)
    for lane in range(LANES):
        np.testing.assert_array_equal(in_lanes(matrix)[:, :, lane], matrix)


def test_entries_may_be_parts_of_larger_arrays():
    """Rows and columns of any stride: the lanes are what must be neighbours."""
    source = random_lanes(6, 9)
    part = source[1::2, 2::3]
    for i, j in np.ndindex(part.shape[:2]):
        out = np.zeros((1, 1, LANES))
        move(part, i, j, out, 0, 0)
        np.testing.assert_array_equal(out[0, 0], part[i, j])
    target = np.zeros((4, 6, LANES))
    move(source, 5, 8, target[1:, 2::2], 2, 1)
    assert np.flatnonzero(target.any(-1)).tolist() == [3 * 6 + 4]


def test_entries_need_not_lie_on_a_boundary_of_the_machine():
    """Eight bytes past one is enough: NumPy promises no more."""
    memory = np.zeros(6 * LANES + 1)
    shifted = memory[1:].reshape(2, 3, LANES)
    source = random_lanes(2, 3)
    copy(source, shifted)
    np.testing.assert_array_equal(shifted, source)
    assert memory[0] == 0


# --- replicas never mix: kernels ------------------------------------------------------------------------------------


def gram_of(a, b):
    out = np.zeros((4, 4, LANES))
    gram(a, out)
    return out


def products(a, b):
    out = np.zeros((4, 6, LANES))
    multiply(a, b, out)
    return out


def products_into(a, b):
    out = np.zeros((4, 9, LANES))
    multiply_into(a, b, 5, out, 2)
    return out


def transposed_products(a, b):
    out = np.zeros((4, 4, LANES))
    multiply_transposed(a, a, out)
    return out


def traces(a, b):
    out = np.zeros((1, 1, LANES))
    store_trace(a, out)
    return out


def triangles(a, b):
    out = np.zeros((4, 5, LANES))
    triangularise(a.copy(), 1, 6, out, 1)
    return out


def roots(a, b):
    """Return the Cholesky factors of the Gram matrices, and the flag of failure (0 in every lane)."""
    v, out, failed = gram_of(a, b), np.zeros((4, 4, LANES)), np.zeros((1, 1, LANES))
    cholesky(v, out, failed)
    return np.concatenate([out, np.broadcast_to(failed, (1, 4, LANES))])


FACTOR_KERNELS = [gram_of, products, products_into, transposed_products, traces, triangles, roots]


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300, 0.0], ids=str)
@pytest.mark.parametrize("function", FACTOR_KERNELS, ids=lambda function: function.__name__)
def test_lane_does_not_change_the_bits_of_others(function, value):
    """This holds for any value in any lane."""
    a, b = random_lanes(4, 6, seed=1), random_lanes(6, 6, seed=2)
    clean = function(a, b)
    for lane in range(LANES):
        others = np.arange(LANES) != lane
        spoilt_a, spoilt_b = a.copy(), b.copy()
        spoilt_a[1:, :, lane] = value
        spoilt_b[:, 3:, lane] = value
        spoilt = function(spoilt_a, spoilt_b)
        assert same_bits(spoilt[..., others], clean[..., others])
        assert not same_bits(spoilt[..., lane], clean[..., lane])


@pytest.mark.parametrize("function", FACTOR_KERNELS, ids=lambda function: function.__name__)
def test_a_lane_has_the_same_bits_in_every_place(function):
    a, b = random_lanes(4, 6, seed=3), random_lanes(6, 6, seed=4)
    clean = function(a, b)
    for shift in range(1, LANES):
        turned = function(np.roll(a, shift, -1), np.roll(b, shift, -1))
        assert same_bits(np.roll(turned, -shift, -1), clean)
    assert len(np.unique(clean.reshape(-1, LANES), axis=1).T) == LANES


@numba.njit
def draw(stream, degrees, out):
    draw_bartlett(stream, degrees, out)


def test_draws_of_a_replica_do_not_depend_on_its_place():
    """Replica 7 as the eighth from 0, the first from 7 and so on, rejections among their draws."""
    words = np.array(key(1, "lanes"), np.uint64)
    drawn = {}
    for first in range(LANES):
        stream, out = open_stream(), np.empty((30, 30, LANES))
        rewind(stream, words, np.uint64(first))
        draw(stream, 34, out)
        drawn[first] = out
    for first in range(LANES):
        assert same_bits(drawn[first][..., LANES - 1 - first], drawn[0][..., LANES - 1])


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
VARIABLES = ("covariance", "exit", "exit_cause")


def run(model, samples, start=START, **options):
    return simulate(model, start, samples=samples, seed=11, threads=1, progress=False, **options)


@every_simulation
def test_the_number_of_samples_does_not_change_a_bit(model, options):
    """One, three, eight and thirteen replicas begin with the same ones."""
    whole = run(model, 24, **options)
    for samples in (1, 3, 7, 8, 9, 13, 16):
        part = run(model, samples, **options)
        for name in VARIABLES:
            assert same_bits(part[name].values, whole[name].values[:samples]), (name, samples)


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
    """The two tests above rely on finished paths next to unfinished ones."""
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


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e160], ids=str)
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
