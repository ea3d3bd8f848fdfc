"""Elementary functions: the stated precision on their whole domain, and exact values where they are needed."""

import re

import numba
import numpy as np
import pytest

import limitformer.numerics.elementary
from limitformer.numerics.elementary import (
    exponential,
    exponential_less_one,
    exponentials,
    logarithm,
    sine_cosine,
)
from limitformer.numerics.lanes import LANES, load, store

EPS = np.finfo(float).eps
LEAST, LARGEST = np.finfo(float).tiny, np.finfo(float).max

# As `kernels.strict_kernel`, but never cached: a cache beside the tests would outlive an edit of the functions.
compiled = numba.njit(error_model="numpy", fastmath={"contract"})


@compiled
def logarithms(u, out):
    for i in range(len(u)):
        out[i] = logarithm(u[i])


@compiled
def exponentials_of(x, out):
    for i in range(len(x)):
        out[i] = exponential(x[i])


@compiled
def exponentials_less_one(x, out):
    for i in range(len(x)):
        out[i] = exponential_less_one(x[i])


@compiled
def lanes_less_one(matrix):
    for i in range(matrix.shape[0]):
        store(matrix, i, 0, exponential_less_one(load(matrix, i, 0)))


@compiled
def sines_and_cosines(x, sine, cosine):
    for i in range(len(x)):
        sine[i], cosine[i] = sine_cosine(x[i])


def logarithm_of(u):
    u = np.asarray(u, float)
    out = np.full_like(u, np.nan)
    logarithms(u, out)
    return out


def exponential_of(x):
    x = np.asarray(x, float)
    out = np.full_like(x, np.nan)
    exponentials_of(x, out)
    return out


def sine_cosine_of(x):
    x = np.asarray(x, float)
    sine, cosine = np.full_like(x, np.nan), np.full_like(x, np.nan)
    sines_and_cosines(x, sine, cosine)
    return sine, cosine


def claimed_errors():
    """Return the relative errors that the module's docstring states."""
    claim = re.search(
        r"Relative errors: below (\S+) for\s+`logarithm` and `exponential`, below (\S+) for\s+`sine_cosine`",
        limitformer.numerics.elementary.__doc__,
    )
    first, second = map(float, claim.groups())
    assert max(first, second) < 1e-15
    return first, second


def worst(ours, exact):
    """Return the largest relative error against long doubles, whose error is 1e-19 on machines that have them."""
    return float(np.abs((ours - exact) / exact).max())


def uniform(low, high, size=300_000, seed=0):
    return np.random.default_rng(seed).uniform(low, high, size)


# --- logarithm ------------------------------------------------------------------------------------------------------

WORDS = np.concatenate([np.arange(1000), 2**32 - 1 - np.arange(1000), uniform(0, 2**32 - 1, seed=1).round()])
LOGARITHM_DOMAINS = {
    "uniforms (i + 1/2)/2³²": (WORDS + 0.5) / 2**32,
    "one octave": uniform(0.5, 2),
    "next to one": 1 + uniform(-1e-3, 1e-3),
    "next to one by a few roundings": np.concatenate([1 + EPS * np.arange(1, 1000), 1 - EPS / 2 * np.arange(1, 1000)]),
    "next to the ends of the reduction": 0.5**0.5
    * 2.0 ** np.repeat([0, 1, 2], 2001)
    * (1 + EPS * uniform(-99, 99, 6003)),
    "all normal numbers": 10 ** uniform(np.log10(LEAST), np.log10(LARGEST)),
    "their ends": np.array([LEAST, LEAST * (1 + EPS), LARGEST, LARGEST * (1 - EPS)]),
}


@pytest.mark.parametrize("u", LOGARITHM_DOMAINS.values(), ids=list(LOGARITHM_DOMAINS))
def test_logarithm_has_the_stated_precision(u):
    u = u[u != 1]
    assert worst(logarithm_of(u), np.log(u.astype(np.longdouble))) < claimed_errors()[0]


def test_logarithm_is_exact_at_powers_of_two():
    """m = 1, so the series is zero, and e log 2 is rounded once."""
    e = np.arange(-1022, 1024)
    np.testing.assert_array_equal(logarithm_of(2.0**e), e * np.log(2.0))
    assert logarithm_of([1.0])[0] == 0


# --- exponential ----------------------------------------------------------------------------------------------------

HALF_OCTAVES = np.arange(-1009, 1010) * (np.log(2.0) / 2)
EXPONENTIAL_DOMAINS = {
    "all of it": uniform(-700, 700),
    "moderate": uniform(-3, 3),
    "next to zero": uniform(-1e-3, 1e-3),
    "tiny": np.concatenate([np.geomspace(1e-300, 1e-3, 3000), -np.geomspace(1e-300, 1e-3, 3000)]),
    "next to the ends of the reduction": (HALF_OCTAVES[:, None] * (1 + EPS * np.arange(-9, 10))).ravel(),
    "its ends": np.array([-700.0, np.nextafter(-700, 0), 700.0, np.nextafter(700, 0)]),
}


@pytest.mark.parametrize("x", EXPONENTIAL_DOMAINS.values(), ids=list(EXPONENTIAL_DOMAINS))
def test_exponential_has_the_stated_precision(x):
    assert np.abs(x).max() <= 700
    assert worst(exponential_of(x), np.exp(x.astype(np.longdouble))) < claimed_errors()[0]


def test_exponential_of_zero_is_one():
    """It is exact, as the largest logit of a row and masked logits require."""
    np.testing.assert_array_equal(exponential_of([0.0, -0.0, 5e-324, -5e-324, 1e-17, -1e-17]), np.ones(6))


def test_exponential_is_constant_below_its_domain():
    """The constant exp(-700) is a normal number, so a sum of such values is never zero."""
    floor = exponential_of([-700.0])[0]
    assert abs(floor / np.exp(-700.0) - 1) < 2 * EPS
    below = [np.nextafter(-700, -800), -700.1, -708.0, -745.2, -1e4, -1e300, -LARGEST, -np.inf]
    np.testing.assert_array_equal(exponential_of(below), np.full(8, floor))
    assert LEAST < floor < 1e-303


def test_exponential_of_nan_is_nan():
    """A sample that has exploded must not become a number again; its neighbours do not change."""
    for place in range(8):
        x = np.linspace(-3, 3, 8)
        expected = exponential_of(x)
        x[place] = np.nan
        out = exponential_of(x)
        assert np.isnan(out[place])
        np.testing.assert_array_equal(np.delete(out, place), np.delete(expected, place))


def test_exponential_less_one_keeps_the_digits_of_small_numbers():
    """This includes 1e-300, where exp x − 1 (the wrong twin) has lost all digits, and zero."""
    x = np.concatenate([np.linspace(-0.1, 0.1, 2001), *np.outer([1, -1], 10.0 ** np.arange(-300, -1))])
    out = np.empty_like(x)
    exponentials_less_one(x, out)
    exact = np.expm1(x.astype(np.longdouble))
    np.testing.assert_array_equal(out[x == 0], 0)
    x, out, exact = x[x != 0], out[x != 0], exact[x != 0]
    assert worst(out, exact) < 2 * EPS
    assert worst(np.exp(x) - 1, exact) > 0.5


@pytest.mark.parametrize("columns", [0, 1, 3, 8, 25])
def test_exponentials_of_lanes_have_the_bits_of_numbers(columns):
    """This holds for both exponentials at any size, and for NaN and −∞ in one lane."""
    x = uniform(-720, 3, 5 * columns * LANES, seed=columns).reshape(5, columns, LANES)
    x[1::2, :1, 2], x[::2, :1, 5] = np.nan, -np.inf
    out = x.copy()
    exponentials(out)
    np.testing.assert_array_equal(out.ravel(), exponential_of(x.ravel()))
    small = uniform(-0.1, 0.1, columns * LANES, seed=columns)
    out, lanes = np.empty_like(small), small.reshape(columns, 1, LANES).copy()
    exponentials_less_one(small, out)
    lanes_less_one(lanes)
    np.testing.assert_array_equal(lanes.ravel(), out)


# --- sine and cosine ------------------------------------------------------------------------------------------------

ANGLES = {
    "all of it": np.linspace(-np.pi / 4, np.pi / 4, 200_000),
    "tiny": np.concatenate([np.geomspace(1e-300, 0.7, 3000), -np.geomspace(1e-300, 0.7, 3000)]),
    "its ends": np.pi / 4 * (1 - EPS * np.arange(100)),
    "the angles of Box-Muller": (uniform(-(2**29), 2**29 - 1).round() + 0.5) * (np.pi / 2 / 2**30),
}


@pytest.mark.parametrize("x", ANGLES.values(), ids=list(ANGLES))
def test_sine_and_cosine_have_the_stated_precision(x):
    assert (np.abs(x) <= np.pi / 4).all()
    sine, cosine = sine_cosine_of(x)
    exact = x.astype(np.longdouble)
    assert worst(sine, np.sin(exact)) < claimed_errors()[1]
    assert worst(cosine, np.cos(exact)) < claimed_errors()[1]
