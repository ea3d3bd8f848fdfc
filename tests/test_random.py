"""Streams: the published known answers, accurate elementary functions, and the laws of the draws."""

import re

import numba
import numpy as np
import pytest
from scipy import stats

import limitformer.random
from limitformer.errors import InputError
from limitformer.random import (
    BUFFER,
    draw_normals,
    fill_normals,
    key,
    logarithm,
    next_chi,
    next_exponential,
    next_normal,
    open_stream,
    philox,
    rewind,
    sine_cosine,
)

ALPHA = 1e-4
WORD = 0xFFFFFFFF

# Random123, kat_vectors, philox4x32 with 10 rounds: counter, key, answer.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def plain_philox(counter, key_words, rounds=10, multipliers=(0xD2511F53, 0xCD9E8D57)):
    """Philox 4x32 on Python integers, straight from the paper."""
    c0, c1, c2, c3 = counter
    k0, k1 = key_words
    for _ in range(rounds):
        p0, p1 = multipliers[0] * c0, multipliers[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & WORD, (p0 >> 32) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


@numba.njit
def compiled_philox(c0, c1, c2, c3, k0, k1):
    return philox(c0, c1, c2, c3, k0, k1)


@numba.njit
def logarithms(u, out):
    for i in range(len(u)):
        out[i] = logarithm(u[i])


@numba.njit
def sines_and_cosines(x, sine, cosine):
    for i in range(len(x)):
        sine[i], cosine[i] = sine_cosine(x[i])


@numba.njit
def chis(stream, degrees, out):
    for i in range(len(out)):
        out[i] = next_chi(stream, degrees)


@numba.njit
def exponentials(stream, out):
    for i in range(len(out)):
        out[i] = next_exponential(stream)


@numba.njit
def normals_one_by_one(stream, out):
    for i in range(len(out)):
        out[i] = next_normal(stream)


def stream_at(seed, purpose="test", replica=0):
    stream = open_stream()
    rewind(stream, np.array(key(seed, purpose), np.uint64), np.uint64(replica))
    return stream


def normals(count, seed, purpose="test", replica=0):
    out = np.empty(count)
    normals_one_by_one(stream_at(seed, purpose, replica), out)
    return out


def box_muller_reference(blocks, key_words, replica, first=0):
    """`fill_normals` from plain Philox and NumPy's logarithm, sine and cosine."""
    counters = range(first, first + blocks)
    words = np.array(
        [plain_philox((n & WORD, n >> 32, replica & WORD, replica >> 32), key_words) for n in counters],
        np.uint64,
    )
    out = []
    for a, b in ((words[:, 0], words[:, 1]), (words[:, 2], words[:, 3])):
        radius = np.sqrt(-2 * np.log((a + 0.5) / 2**32))
        angle = ((b >> np.uint64(2)) - 2.0**29 + 0.5) * (np.pi / 2 / 2**30)
        pair = np.stack([np.sin(angle), np.cos(angle)])
        first_one = np.where(b & np.uint64(1), pair[1], pair[0])
        second = np.where(b & np.uint64(1), pair[0], pair[1])
        sign = np.where(b & np.uint64(2), -1.0, 1.0)
        out += [sign * radius * first_one, sign * radius * second]
    return np.concatenate(out)


@pytest.mark.parametrize(("counter", "key_words", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key_words, answer):
    words = compiled_philox(*map(np.uint64, counter + key_words))
    assert tuple(map(int, words)) == answer
    assert plain_philox(counter, key_words) == answer


@pytest.mark.parametrize("wrong", [{"rounds": 9}, {"multipliers": (0xCD9E8D57, 0xD2511F53)}], ids=["9", "swapped"])
@pytest.mark.parametrize(("counter", "key_words", "answer"), KNOWN_ANSWERS)
def test_a_wrong_philox_misses_the_published_answers(counter, key_words, answer, wrong):
    assert plain_philox(counter, key_words, **wrong) != answer


@pytest.mark.parametrize(("replica", "first"), [(0, 0), (7, 3), (2**40 + 5, 2**32 - 10)])
def test_normals_are_box_muller_of_philox(replica, first):
    """|g| < 7, whose last place is 9e-16; both sides round a handful of times."""
    out = np.empty(4 * 500)
    key_words = key(3, "reference")
    fill_normals(*map(np.uint64, (*key_words, replica, first)), out)
    reference = box_muller_reference(500, key_words, replica, first)
    assert np.abs(out - reference).max() < 5e-15
    assert np.abs(out - box_muller_reference(500, key_words, replica + 1, first)).max() > 1


def claimed_errors():
    """The relative errors of logarithm and of sine and cosine that the module's documentation promises."""
    claim = re.search(r"relative error below (\S+) and (\S+)\)", limitformer.random.__doc__)
    logarithm_error, sine_error = map(float, claim.groups())
    assert max(logarithm_error, sine_error) < 1e-14
    return logarithm_error, sine_error


def test_logarithm_is_as_precise_as_it_says():
    """On the uniforms that occur, (i + 1/2)/2**32, both ends included."""
    ends = np.arange(1000)
    inside = np.random.default_rng(0).integers(0, 2**32, 200_000)
    words = np.concatenate([ends, 2**32 - 1 - ends, inside]).astype(np.float64)
    u = (words + 0.5) / 2**32
    out = np.empty_like(u)
    logarithms(u, out)
    exact = np.log(u.astype(np.longdouble))
    assert np.abs((out - exact) / exact).max() < claimed_errors()[0]


def test_sine_and_cosine_are_as_precise_as_they_say():
    """On [-pi/4, pi/4], tiny angles included."""
    x = np.concatenate([np.linspace(-np.pi / 4, np.pi / 4, 200_001), np.geomspace(1e-12, 0.7, 1000)])
    x = x[x != 0]
    sine, cosine = np.empty_like(x), np.empty_like(x)
    sines_and_cosines(x, sine, cosine)
    exact_sine, exact_cosine = np.sin(x.astype(np.longdouble)), np.cos(x.astype(np.longdouble))
    assert np.abs((sine - exact_sine) / exact_sine).max() < claimed_errors()[1]
    assert np.abs((cosine - exact_cosine) / exact_cosine).max() < claimed_errors()[1]


def test_normals_follow_the_normal_law():
    """KS at 1e-4; the wrong twin has 2 % too large a spread."""
    g = normals(400_000, seed=1)
    assert stats.kstest(g, "norm").pvalue > ALPHA
    assert stats.kstest(1.02 * g, "norm").pvalue < ALPHA


@pytest.mark.parametrize(
    ("power", "moment", "variance"), [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)]
)
def test_normals_have_the_normal_moments(power, moment, variance):
    g = normals(400_000, seed=2)
    assert abs((g**power).mean() - moment) < 4 * (variance / len(g)) ** 0.5
    assert np.abs(g).max() <= 6.77


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"replica": 0}, {"replica": 1}),
        ({"replica": 0}, {"replica": 2**32}),
        ({"purpose": "chain"}, {"purpose": "limit factor"}),
        ({"seed": 4}, {"seed": 5}),
        ({"seed": 4}, {"seed": 4 + 2**32}),
    ],
)
def test_streams_are_independent(one, other):
    """Correlation of values and of squares within four standard errors; a stream with itself has 450."""
    a, b = (normals(200_000, **{"seed": 4, **settings}) for settings in (one, other))
    for x, y in ((a, b), ((a**2 - 1) / 2**0.5, (b**2 - 1) / 2**0.5)):
        assert abs((x * y).mean()) * len(a) ** 0.5 < 4
        assert (x * x).mean() * len(a) ** 0.5 > 400


def test_normals_of_one_stream_are_uncorrelated():
    """Neighbours in the stream, in a run and in a block: the runs of a buffer are BUFFER/4 apart."""
    g = normals(200_000, seed=6)
    for lag in (1, 2, 3, BUFFER // 4, BUFFER // 2, 3 * BUFFER // 4, BUFFER):
        assert abs((g[lag:] * g[:-lag]).mean()) * (len(g) - lag) ** 0.5 < 4


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (1, BUFFER), (5, BUFFER + 1), (2, 3 * BUFFER), (0, 4), (4, 0)])
def test_a_matrix_holds_the_same_numbers_as_single_draws(shape):
    """Whatever was drawn before, from an odd position in the buffer as from the start."""
    expected = normals(5 + shape[0] * shape[1] + 2, seed=7)
    stream = stream_at(7)
    before = [next_normal(stream) for _ in range(5)]
    matrix = np.empty(shape)
    draw_normals(stream, matrix)
    after = [next_normal(stream) for _ in range(2)]
    np.testing.assert_array_equal(np.concatenate([before, matrix.ravel(), after]), expected)


def test_rewinding_starts_the_replica_anew():
    stream = stream_at(8, replica=3)
    drawn = [next_normal(stream) for _ in range(BUFFER + 3)]
    rewind(stream, np.array(key(8, "test"), np.uint64), np.uint64(3))
    assert [next_normal(stream) for _ in range(BUFFER + 3)] == drawn


@pytest.mark.parametrize("degrees", [1, 2, 4, 5, 7, 50, 200])
def test_chi_follows_its_law(degrees):
    """KS at 1e-4; one degree more shifts a chi by 1/(2 sqrt(degrees)) and is rejected."""
    out = np.empty(60_000)
    chis(stream_at(degrees, "chi"), degrees, out)
    assert stats.kstest(out, stats.chi(degrees).cdf).pvalue > ALPHA
    assert stats.kstest(out, stats.chi(degrees + 1).cdf).pvalue < ALPHA


@pytest.mark.parametrize("degrees", [5, 6, 9])
def test_chi_has_the_right_moments(degrees):
    """Three moments of its square; Marsaglia and Tsang without the rejection miss the third."""
    samples = 2_000_000
    out = np.empty(samples)
    chis(stream_at(degrees, "chi moments"), degrees, out)
    law = stats.chi2(degrees)
    for power in (1, 2, 3):
        mean, square = law.moment(power), law.moment(2 * power)
        error = ((square - mean**2) / samples) ** 0.5
        assert abs((out ** (2 * power)).mean() - mean) < 4 * error
    accepted_always = proposals(degrees, samples)
    mean, square = law.moment(3), law.moment(6)
    assert abs((accepted_always**3).mean() - mean) > 4 * ((square - mean**2) / samples) ** 0.5


def proposals(degrees, count):
    """Chi-square candidates of Marsaglia and Tsang before any is rejected: the wrong twin."""
    d = degrees / 2 - 1 / 3
    x = np.random.default_rng(0).standard_normal(2 * count)
    v = (1 + x / (9 * d) ** 0.5) ** 3
    return 2 * d * v[v > 0][:count]


def test_exponentials_follow_their_law():
    out = np.empty(100_000)
    exponentials(stream_at(9), out)
    assert stats.kstest(out, "expon").pvalue > ALPHA
    assert stats.kstest(1.03 * out, "expon").pvalue < ALPHA


def test_keys_differ_between_seeds_and_purposes():
    seeds = [0, 1, 2, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1]
    purposes = ["chain", "limit factor", "limit euler-maruyama", "network 0", "network 64"]
    keys = {key(seed, purpose) for seed in seeds for purpose in purposes}
    assert len(keys) == len(seeds) * len(purposes)
    assert all(0 <= word <= WORD for words in keys for word in words)


def test_numpy_seeds_are_seeds():
    assert key(np.int64(12), "chain") == key(12, "chain")


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, "1", None, float("nan")])
def test_a_seed_that_is_none_is_refused(seed):
    with pytest.raises(InputError, match=r"seed must be a whole number from 0 to 2\*\*63 - 1; got"):
        key(seed, "chain")
