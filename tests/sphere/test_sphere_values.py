"""Random values of the sphere models: their laws, moment by moment and as a whole, and pairs of χ² variables."""

import numba
import numpy as np
import pytest
from scipy import special, stats

from limitformer.numerics.lanes import LANES
from limitformer.numerics.random import key
from limitformer.sphere.pair.chi_squares import LARGEST_PRODUCT, blocks_needed, chi_squares
from limitformer.sphere.tokens.values import CUT_DEVIATION, CUT_MASS, LAWS, fill, fill_listed, quantile_above_half
from philox import plain_philox
from statistics_checks import ALPHA

EXACT = {
    "gaussian": stats.norm(),
    "uniform": stats.uniform(-(3**0.5), 2 * 3**0.5),
    "truncated normal": stats.truncnorm(-2, 2, scale=1 / stats.truncnorm(-2, 2).std()),
}
ROWS = 4 * 8_000


@numba.njit(error_model="numpy", fastmath={"contract"})
def quantiles(q, out):
    for i in range(len(q)):
        out[i] = quantile_above_half(q[i])


def words(seed, purpose):
    return tuple(np.uint64(word) for word in key(seed, purpose))


def values(law, replica=0, block=0, rows=ROWS):
    """Return (rows, LANES) values of neighbouring replicas."""
    out = np.full((rows, LANES), np.nan)
    fill(LAWS[law], *words(1, "values"), np.uint64(replica), np.uint64(block), out.reshape(-1))
    return out


def listed(law, replicas, block):
    """Return one value for each replica."""
    out = np.full(len(replicas), np.nan)
    fill_listed(LAWS[law], *words(1, "values"), np.array(replicas, np.uint64), np.uint64(block), len(out), out)
    return out


# --- laws of the values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", EXACT)
def test_values_have_their_law(law):
    x = values(law).ravel()
    for other, exact in EXACT.items():
        assert (stats.kstest(x, exact.cdf).pvalue > ALPHA) == (other == law)


@pytest.mark.parametrize("law", LAWS)
def test_value_depends_only_on_replica_and_block(law):
    """It has the same bits for any lane, list and length of run."""
    x = values(law, rows=12)
    np.testing.assert_array_equal(values(law, replica=3, rows=12)[:, :5], x[:, 3:])
    np.testing.assert_array_equal(values(law, block=1, rows=4), x[1::3])
    np.testing.assert_array_equal(listed(law, [5, 0, 7, 2], 2), x[2, [5, 0, 7, 2]])
    assert (listed(law, range(64), 2) != listed(law, range(64), 3)).any()


def test_values_are_functions_of_philox_words():
    """A value uses 32 bits: the centre of an interval of (0, 1), or the lowest bit."""
    k0, k1 = key(1, "values")
    block = np.array([plain_philox((5, 0, replica, 0), (k0, k1)) for replica in range(LANES)])
    u = (block + 0.5) / 2**32
    expected = {
        "uniform": (2 * u - 1) * 3**0.5,
        "rademacher": 2.0 * (block % 2) - 1,
        "truncated normal": stats.norm.ppf(0.5 + (u - 0.5) * CUT_MASS) / CUT_DEVIATION,
    }
    for law, x in expected.items():
        np.testing.assert_allclose(values(law, block=5, rows=4), x.T, rtol=1e-13, atol=1e-15)


def test_normal_quantile_equals_scipy():
    """To 1e-15, in both regions, at their border 0.425, and next to 0 and the ends."""
    q = np.concatenate(
        [
            np.linspace(-0.4999, 0.4999, 100_001),
            0.425 * (1 + 1e-12 * np.arange(-5, 6)),
            np.geomspace(1e-9, 0.4, 1000),
        ]
    )
    q = q[q != 0]
    quantiles_of_q = np.empty_like(q)
    quantiles(q, quantiles_of_q)
    # Φ⁻¹ of 1/2 + q loses the digits of a small q, so that the error function's inverse stands for it there.
    exact = np.where(np.abs(q) < 0.4, 2**0.5 * special.erfinv(2 * q), special.ndtri(0.5 + q))
    assert np.abs(quantiles_of_q / exact - 1).max() < 1e-15
    quantiles(np.zeros(1), quantiles_of_q[:1])
    assert quantiles_of_q[0] == 0


# --- pairs of χ² ------------------------------------------------------------------------------------------------------

REPLICAS = 40_000
DEGREES = [1, 2, 5, 9, 4094]  # products of uniforms up to eight, then rejection


def pairs(degrees, replicas=None, block=0, seed=2):
    """Return two χ² for each of some replicas."""
    replicas = np.arange(REPLICAS, dtype=np.uint64) if replicas is None else np.array(replicas, np.uint64)
    first, second = np.full((2, len(replicas)), np.nan)
    chi_squares(degrees, *words(seed, "chi"), replicas, np.uint64(block), len(replicas), first, second)
    return first, second


def test_zero_degrees_give_zero():
    np.testing.assert_array_equal(pairs(0, range(9)), np.zeros((2, 9)))
    assert blocks_needed(0) == 0


@pytest.mark.parametrize("degrees", DEGREES)
def test_chi_squares_have_their_law(degrees):
    """The wrong twin has one degree more, or a scale one percent larger if that is a small change."""
    exact, twin = stats.chi2(degrees), stats.chi2(degrees + 1 if degrees < 100 else 1.01 * degrees)
    for x in pairs(degrees):
        assert stats.kstest(x, exact.cdf).pvalue > ALPHA
        assert stats.kstest(x, twin.cdf).pvalue < ALPHA


@pytest.mark.parametrize("degrees", DEGREES)
def test_the_two_of_a_pair_are_independent(degrees):
    """They are independent, also of other blocks and replicas: ranks and a joint tail; a dependent twin fails."""
    first, second = pairs(degrees)
    later, _ = pairs(degrees, block=blocks_needed(degrees))
    u, v = stats.chi2(degrees).cdf((first, second))
    for a, b in ((first, second), (first, later), (first[1:], first[:-1])):
        assert stats.spearmanr(a, b).pvalue > ALPHA
    both = int(((u < 0.2) & (v > 0.7)).sum())
    assert stats.binomtest(both, REPLICAS, 0.06).pvalue > ALPHA
    assert stats.spearmanr(first, second + 0.05 * first).pvalue < ALPHA


@pytest.mark.parametrize("degrees", DEGREES)
def test_chi_square_depends_only_on_replica_and_block(degrees):
    """Neither neighbours in the list nor second attempts of others change it."""
    whole = np.array(pairs(degrees, range(3000), block=7))
    some = [2999, 0, 17, 1500]
    np.testing.assert_array_equal(pairs(degrees, some, block=7), whole[:, some])
    np.testing.assert_array_equal(pairs(degrees, [2**40, 5], block=7)[0][1], whole[0, 5])
    assert (np.array(pairs(degrees, range(3000), block=8)) != whole).all()


@pytest.mark.parametrize("degrees", DEGREES)
def test_blocks_do_not_overlap(degrees):
    """The blocks of a pair end at `blocks_needed`: the next pair shares no word with it, an earlier start does."""
    needed = int(blocks_needed(degrees))
    first = np.concatenate(pairs(degrees, range(4000)))
    after = np.concatenate(pairs(degrees, range(4000), block=needed))
    assert stats.spearmanr(first, after).pvalue > ALPHA
    if needed > 1:
        shared = np.concatenate(pairs(degrees, range(4000), block=needed - 1))
        assert stats.spearmanr(first, shared).pvalue < ALPHA


def test_products_of_uniforms_are_exact():
    """Up to eight degrees they are −2 log of a product of Philox words."""
    k = key(2, "chi")
    block = [(np.array(plain_philox((n, 0, 3, 0), k)) + 0.5) / 2**32 for n in (10, 11)]
    for degrees, uniforms in ((2, block[0][[0]]), (4, block[0][:2]), (6, [*block[0][:2], block[1][0]])):
        assert pairs(degrees, [3], block=10)[0][0] == pytest.approx(-2 * np.log(np.prod(uniforms)), rel=1e-14)
    assert LARGEST_PRODUCT == 8


def test_only_failed_first_attempts_are_replaced():
    """Nine degrees by Marsaglia and Tsang: accepted attempts are unchanged, rejected ones are replaced."""
    d = 9 / 2 - 1 / 3
    words_ = np.array([plain_philox((0, 0, replica, 0), key(2, "chi")) for replica in range(4000)])
    u, bits = (words_ + 0.5) / 2**32, words_[:, 1]
    angle = ((bits >> 2) - 2.0**29 + 0.5) * (np.pi / 2 / 2**30)
    x = np.where(bits & 2, -1, 1) * (-2 * np.log(u[:, 0])) ** 0.5 * np.where(bits & 1, np.cos(angle), np.sin(angle))
    v = (1 + x / (9 * d) ** 0.5) ** 3
    accepted = (v > 0) & (np.log(u[:, 2]) < x * x / 2 + d * (1 - v + np.log(np.maximum(v, 1e-300))))
    np.testing.assert_array_equal(np.isclose(pairs(9, range(4000))[0], 2 * d * v, rtol=1e-12, atol=0), accepted)
    assert 20 < (~accepted).sum() < 200
