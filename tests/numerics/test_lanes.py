"""Lanes: every operation against NumPy, also of infinities and NaN."""

import operator

import numba
import numpy as np
import pytest

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


# --- operations -----------------------------------------------------------------------------------------------------


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
    """Explosions are detected by this: x·0 and x − x are not 0 and x/x is not 1 for infinite or NaN x."""
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
    """A comparison with NaN does not hold: the right value comes, not NumPy's NaN."""
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
