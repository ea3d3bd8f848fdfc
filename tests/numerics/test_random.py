"""Streams: the published known answers, one replica a lane, and the laws of the draws."""

import numba
import numpy as np
import pytest
from scipy import stats

from limitformer.numerics.lanes import LANES, store
from limitformer.numerics.random import (
    BUFFER,
    FIRST_RETRY,
    draw_normals,
    fill_normals,
    key,
    next_chi,
    next_normal,
    open_stream,
    philox,
    replica_normals,
    rewind,
)
from philox import plain_philox

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


@numba.njit
def compiled_philox(c0, c1, c2, c3, k0, k1):
    return philox(c0, c1, c2, c3, k0, k1)


@numba.njit
def chis(stream, degrees, out, retries):
    """Chis one after another into `out` (count, LANES), and how many second attempts there were before each."""
    for i in range(len(out)):
        retries[i] = stream.retries
        store(out.reshape(len(out), 1, LANES), i, 0, next_chi(stream, degrees))


@numba.njit
def normals_one_by_one(stream, out):
    for i in range(len(out)):
        store(out.reshape(len(out), 1, LANES), i, 0, next_normal(stream))


def stream_at(seed, purpose="test", replica=0):
    stream = open_stream()
    rewind(stream, np.array(key(seed, purpose), np.uint64), np.uint64(replica))
    return stream


def normals_of_lanes(count, seed, purpose="test", replica=0):
    """The first normals (count, LANES) of `replica` and its neighbours."""
    out = np.empty((count, LANES))
    normals_one_by_one(stream_at(seed, purpose, replica), out)
    return out


def normals(count, seed, purpose="test", replica=0):
    """The first normals (count,) of one replica, which is the first of its lanes."""
    return normals_of_lanes(count, seed, purpose, replica)[:, 0]


def chis_of_lanes(count, degrees, purpose="chi", replica=0, seed=None):
    """The first chis (count, LANES), and the second attempts before each (count + 1, LANES)."""
    out, retries = np.empty((count, LANES)), np.empty((count + 1, LANES), np.uint64)
    stream = stream_at(degrees if seed is None else seed, purpose, replica)
    chis(stream, degrees, out, retries)
    retries[count] = stream.retries
    return out, retries.astype(np.int64)


def pair_reference(a, b):
    """Box-Muller of arrays of words, with NumPy's logarithm, sine and cosine."""
    radius = np.sqrt(-2 * np.log((a + 0.5) / 2**32))
    angle = ((b >> np.uint64(2)) - 2.0**29 + 0.5) * (np.pi / 2 / 2**30)
    pair = np.stack([np.sin(angle), np.cos(angle)])
    first_one = np.where(b & np.uint64(1), pair[1], pair[0])
    second = np.where(b & np.uint64(1), pair[0], pair[1])
    sign = np.where(b & np.uint64(2), -1.0, 1.0)
    return sign * radius * first_one, sign * radius * second


def blocks_reference(blocks, key_words, replica):
    """The four normals (4, blocks) of each of some blocks, from plain Philox."""
    words = np.array(
        [plain_philox((n & WORD, n >> 32, replica & WORD, replica >> 32), key_words) for n in blocks],
        np.uint64,
    ).reshape(-1, 4)
    return np.stack([*pair_reference(words[:, 0], words[:, 1]), *pair_reference(words[:, 2], words[:, 3])])


def box_muller_reference(blocks, key_words, replica, first=0):
    """Return the normals of `fill_normals` for one replica."""
    return blocks_reference(range(first, first + blocks), key_words, replica).ravel()


def stream_reference(count, key_words, replica):
    """The first `count` normals of a replica: buffer after buffer."""
    run = BUFFER // 4
    buffers = -(-count // BUFFER)
    parts = [box_muller_reference(run, key_words, replica, run * k) for k in range(buffers)]
    return np.concatenate(parts)[:count]


def chi_reference(count, degrees, key_words, replica):
    """`next_chi` above 4 degrees for one replica, straight from Marsaglia and Tsang; and its second attempts."""
    d = degrees / 2 - 1 / 3
    c = 1 / (9 * d) ** 0.5
    first = stream_reference(3 * count, key_words, replica)
    out, retries = [], [0]
    again = blocks_reference(range(2**63, 2**63 + count), key_words, replica)
    for x, a, b in first.reshape(count, 3):
        attempt, used = (x, a, b), retries[-1]
        while True:
            x, a, b = attempt
            v = (1 + c * x) ** 3
            if v > 0 and (a * a + b * b) / 2 > d * (v - 1 - np.log(v)) - x * x / 2:
                break
            attempt, used = again[:3, used], used + 1
        out.append((2 * d * v) ** 0.5)
        retries.append(used)
    return np.array(out), np.array(retries)


@pytest.mark.parametrize(("counter", "key_words", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key_words, answer):
    words = compiled_philox(*map(np.uint64, counter + key_words))
    assert tuple(map(int, words)) == answer
    assert plain_philox(counter, key_words) == answer


@pytest.mark.parametrize("wrong", [{"rounds": 9}, {"multipliers": (0xCD9E8D57, 0xD2511F53)}], ids=["9", "swapped"])
@pytest.mark.parametrize(("counter", "key_words", "answer"), KNOWN_ANSWERS)
def test_a_wrong_philox_misses_the_published_answers(counter, key_words, answer, wrong):
    assert plain_philox(counter, key_words, **wrong) != answer


@pytest.mark.parametrize(("replica", "first"), [(0, 0), (7, 3), (2**32 - 3, 1), (2**40 + 5, 2**32 - 10)])
def test_normals_are_box_muller_of_philox(replica, first):
    """The last place of |g| < 7 is 9e-16, and both sides round a few times. Each lane is another replica."""
    out = np.empty((4 * 500, LANES))
    key_words = key(3, "reference")
    fill_normals(*map(np.uint64, (*key_words, replica, first)), out.reshape(-1))
    for lane in range(LANES):
        reference = box_muller_reference(500, key_words, replica + lane, first)
        assert np.abs(out[:, lane] - reference).max() < 5e-15
        assert np.abs(out[:, lane] - box_muller_reference(500, key_words, replica + lane + 1, first)).max() > 1


@pytest.mark.parametrize("shift", [1, 7, LANES])
def test_a_replica_has_the_same_bits_in_every_lane(shift):
    here, there = (normals_of_lanes(2 * BUFFER + 3, seed=4, replica=first) for first in (20, 20 + shift))
    np.testing.assert_array_equal(here[:, shift:], there[:, : LANES - shift])
    assert (here[:, 0] != there[:, 0]).all()


def test_normals_follow_the_normal_law():
    """KS at 1e-4; the wrong twin has 2 % too large a spread."""
    g = normals(400_000, seed=1)
    assert stats.kstest(g, "norm").pvalue > ALPHA
    assert stats.kstest(1.02 * g, "norm").pvalue < ALPHA


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


def test_the_lanes_of_a_stream_are_independent():
    """Correlations of values and of squares, each of 28 pairs within 4.5 standard errors; with itself, 450."""
    g = normals_of_lanes(200_000, seed=6)
    for x in (g, (g**2 - 1) / 2**0.5):
        scores = x.T @ x / len(x) ** 0.5
        assert np.abs(scores[np.triu_indices(LANES, 1)]).max() < 4.5
        assert scores.diagonal().min() > 400


@pytest.mark.parametrize("shape", [(3, 7), (5, BUFFER + 1), (0, 4)])
def test_a_matrix_holds_the_same_numbers_as_single_draws(shape):
    """This holds from the start and from an odd position in the buffer."""
    expected = normals_of_lanes(5 + shape[0] * shape[1] + 2, seed=7)
    stream = stream_at(7)
    before, matrix, after = np.empty((5, LANES)), np.empty((*shape, LANES)), np.empty((2, LANES))
    normals_one_by_one(stream, before)
    draw_normals(stream, matrix)
    normals_one_by_one(stream, after)
    np.testing.assert_array_equal(np.concatenate([before, matrix.reshape(-1, LANES), after]), expected)


def test_normals_of_many_replicas_are_those_of_their_streams():
    """This holds for any number of replicas and more than a buffer of normals; neighbours differ."""
    drawn = replica_normals(key(7, "test"), 11, 2 * BUFFER + 3)
    for replica in (0, 7, 8, 10):
        np.testing.assert_array_equal(drawn[replica], normals(2 * BUFFER + 3, 7, "test", replica))
    np.testing.assert_array_equal(replica_normals(key(7, "test"), 3, 5), drawn[:3, :5])
    assert np.abs(np.diff(drawn, axis=0)).min() > 0


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("degrees", [2, 5, 50, 1, 4, 7, 200])
def test_chi_follows_its_law(degrees):
    """KS at 1e-4; one degree more shifts a chi by 1/(2 sqrt(degrees)) and is rejected."""
    out = chis_of_lanes(7500, degrees)[0].ravel()
    assert stats.kstest(out, stats.chi(degrees).cdf).pvalue > ALPHA
    assert stats.kstest(out, stats.chi(degrees + 1).cdf).pvalue < ALPHA


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("degrees", "replica"), [(5, 0), (5, 2**32 - 4), (6, 1000), (40, 3)])
def test_chi_is_marsaglia_and_tsang_replica_by_replica(degrees, replica):
    """Every number and every second attempt of eight replicas, against plain Philox one replica at a time."""
    count = 2000
    ours, retries = chis_of_lanes(count, degrees, replica=replica)
    key_words = key(degrees, "chi")
    for lane in range(LANES):
        reference, attempts = chi_reference(count, degrees, key_words, replica + lane)
        np.testing.assert_array_equal(retries[:, lane], attempts)
        np.testing.assert_allclose(ours[:, lane], reference, rtol=5e-14)
        assert attempts[-1] > 0
    assert int(FIRST_RETRY) == 2**63


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("degrees", [1, 2, 3, 4])
def test_few_degrees_are_sums_of_squares(degrees):
    """The sum has as many of the stream's next normals as there are degrees, and needs no second attempt."""
    ours, retries = chis_of_lanes(1000, degrees)
    g = normals_of_lanes(1000 * degrees, degrees, "chi").reshape(1000, degrees, LANES)
    np.testing.assert_allclose(ours, np.sqrt((g**2).sum(1)), rtol=1e-15 * 4)
    assert not retries.any()


def test_keys_differ_between_seeds_and_purposes():
    seeds = [0, 1, 2, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1]
    purposes = ["chain", "limit factor", "limit euler-maruyama", "network 0", "network 64"]
    keys = {key(seed, purpose) for seed in seeds for purpose in purposes}
    assert len(keys) == len(seeds) * len(purposes)
    assert all(0 <= word <= WORD for words in keys for word in words)
