r"""Streams of random numbers, for all chains and limits.

The k-th normal of replica j is a function only of (seed, purpose, j, k): it comes from Philox 4×32-10
[Salmon, Moraes, Dror, Shaw, *Parallel random numbers: as easy as 1, 2, 3*, SC 2011], a bijection of a counter
under a key. So the same seed gives the same bits for any number of threads and any chunking. The raw words are the same
on every machine; the last bits of the floating-point numbers depend on its instructions.

* key: 64 bits, hashed from (seed, purpose), so that a chain and a limit with one seed are independent;
* counter: (block, replica), 64 bits each; a block of 128 random bits makes four normals. Blocks from 2⁶³ on are for the
  second and later attempts of rejection methods, so that neighbouring replicas stay synchronous.

Normals come from the Box-Muller transform of 32-bit uniforms at the centres (i + 1/2)/2³², so |g| ≤ 6.76. A
normal beyond has probability 1.4e-11.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import require
from limitformer.numerics.elementary import (
    INTEGER_EXPONENT,
    ONE_BITS,
    TWO_52,
    U64,
    as_float,
    logarithm,
    sine_cosine,
)
from limitformer.numerics.kernels import allocator, driver, inlined, kernel, strict_kernel
from limitformer.numerics.lanes import LANES, everywhere, lane_matrix, load, square_root, store

LOW_32 = U64(0xFFFFFFFF)
SHIFT_32 = U64(32)
MULTIPLIER_0, MULTIPLIER_1 = U64(0xD2511F53), U64(0xCD9E8D57)
WEYL_0, WEYL_1 = U64(0x9E3779B9), U64(0xBB67AE85)
FIRST_RETRY = U64(1 << 63)

BUFFER = 128  # normals of each replica made at a time, which fit the first-level cache


class Stream(NamedTuple):
    """The random numbers of `LANES` neighbouring replicas."""

    words: np.ndarray  # (4,): two key words, the first replica, the next block
    position: np.ndarray  # (1,): place of the next normal in `buffer`
    retries: np.ndarray  # (LANES,): number of second attempts so far
    buffer: np.ndarray  # (BUFFER, 1, LANES)
    flat: np.ndarray  # the same memory in one row
    trial: np.ndarray  # (3, 1, LANES): scratch of a rejection method


def checked_seed(seed: object) -> int:
    """Return a seed as an int; raise `InputError` unless it is a whole number from 0 to 2⁶³ − 1."""
    whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool) and bool(0 <= seed < 2**63)
    require(whole, f"seed must be a whole number from 0 to 2**63 - 1; got {seed!r}.")
    return int(seed)  # type: ignore[call-overload]  # checked above


def key(seed: int, purpose: str) -> tuple[int, int]:
    """Return two 32-bit key words for `seed` (0 to 2⁶³ − 1) and the name of the purpose of the numbers."""
    low, high = np.random.SeedSequence([checked_seed(seed), *purpose.encode()]).generate_state(2, np.uint32)
    return int(low), int(high)


@inlined
def philox(c0, c1, c2, c3, k0, k1):
    """Return Philox 4×32-10 of the counter (c0 … c3) under the key (k0, k1), as 32-bit words in 64 bits.

    The words are cut to 32 bits only at the end and where they are multiplied, so that the compiler uses one
    instruction. Elsewhere their upper halves are arbitrary.
    """
    for _ in range(10):
        p0, p1 = MULTIPLIER_0 * (c0 & LOW_32), MULTIPLIER_1 * (c2 & LOW_32)
        c0, c1, c2, c3 = (p1 >> SHIFT_32) ^ c1 ^ k0, p1, (p0 >> SHIFT_32) ^ c3 ^ k1, p0
        k0, k1 = k0 + WEYL_0, k1 + WEYL_1
    return c0 & LOW_32, c1 & LOW_32, c2 & LOW_32, c3 & LOW_32


@inlined
def uniform(word):
    """Return a number in (0, 1) from a 32-bit word: the centre of the word's interval."""
    return (as_float(word | INTEGER_EXPONENT) - (TWO_52 - 0.5)) * 2.0**-32


@inlined
def words_of(block, replica, k0, k1):
    """Return the four 32-bit words of a block of a replica's numbers."""
    return philox(block & LOW_32, block >> SHIFT_32, replica & LOW_32, replica >> SHIFT_32, k0, k1)


@strict_kernel
def uniform_of(block, replica, k0, k1):
    """Return the number in (0, 1) of a block of a replica's numbers."""
    word, _, _, _ = words_of(block, replica, k0, k1)
    return uniform(word)


@inlined
def box_muller(a, b):
    """Return two independent normals from two 32-bit words: radius from `a`, angle from `b`."""
    radius = np.sqrt(-2.0 * logarithm(uniform(a)))
    # The two low bits choose the quadrant, the other thirty an angle in (−π/4, π/4).
    angle = (as_float((b >> U64(2)) | INTEGER_EXPONENT) - (TWO_52 + 2.0**29) + 0.5) * (np.pi / 2 * 2.0**-30)
    sine, cosine = sine_cosine(angle)
    swap = (b & U64(1)) != U64(0)
    sign = as_float(((b >> U64(1)) << U64(63)) | ONE_BITS)
    first = cosine if swap else sine
    second = sine if swap else cosine
    return sign * radius * first, sign * radius * second


@strict_kernel
def fill_normals(k0, k1, replica, block, flat):
    """Fill `flat`, rows of `LANES` replicas from `replica` on, with the normals of blocks `block`, `block` + 1, …

    The four normals of a block go to four runs rather than to four neighbours, so that all stores are contiguous.
    """
    run = len(flat) // 4
    a, b, c, d = flat[:run], flat[run : 2 * run], flat[2 * run : 3 * run], flat[3 * run :]
    for i in range(run):
        w0, w1, w2, w3 = words_of(block + U64(i // LANES), replica + U64(i % LANES), k0, k1)
        a[i], b[i] = box_muller(w0, w1)
        c[i], d[i] = box_muller(w2, w3)


@allocator
def open_stream():
    """Return a stream with its buffer; `rewind` it to a replica before use."""
    buffer = lane_matrix(BUFFER, 1)
    return Stream(
        np.zeros(4, np.uint64),
        np.zeros(1, np.int64),
        np.zeros(LANES, np.uint64),
        buffer,
        buffer.reshape(BUFFER * LANES),
        lane_matrix(3, 1),
    )


@kernel
def rewind(stream, key_words, replica):
    """Set `stream` to the first normals of `replica`, `replica` + 1, … under the key words (2,)."""
    stream.words[0] = key_words[0]
    stream.words[1] = key_words[1]
    stream.words[2] = replica
    stream.words[3] = 0
    stream.position[0] = BUFFER
    for lane in range(LANES):
        stream.retries[lane] = 0


@kernel
def seek(stream, block):
    """Set `stream` to the first normal of this block of its replicas."""
    stream.words[3] = block
    stream.position[0] = BUFFER


@kernel
def refill(stream):
    words = stream.words
    fill_normals(words[0], words[1], words[2], words[3], stream.flat)
    words[3] += U64(BUFFER // 4)
    stream.position[0] = 0


@kernel
def next_normal(stream):
    """Return the stream's next N(0, 1)."""
    if stream.position[0] == BUFFER:
        refill(stream)
    position = stream.position[0]
    stream.position[0] = position + 1
    return load(stream.buffer, position, 0)


@kernel
def draw_normals(stream, out):
    """Fill the matrix `out` (rows, columns, LANES), row by row, with the stream's next normals."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            store(out, i, j, next_normal(stream))


def replica_normals(key_words: tuple[int, int], replicas: int, count: int) -> NDArray[np.float64]:
    """Return the first `count` normals of the replicas 0, 1, …: (replicas, count)."""
    normals = np.empty((replicas, count))
    fill_replicas(np.array(key_words, np.uint64), normals)
    return normals


@driver
def fill_replicas(key_words, out):
    """Fill `out` (replicas, count) with the first normals of its replicas."""
    stream, normal = open_stream(), lane_matrix(1, 1)
    for begin in range(0, out.shape[0], LANES):
        rewind(stream, key_words, np.uint64(begin))
        fill_lanes(stream, normal, out[begin : begin + LANES])


@kernel
def fill_lanes(stream, normal, out):
    """Write the stream's next normals into the rows of `out` (replicas ≤ LANES, count)."""
    for k in range(out.shape[1]):
        store(normal, 0, 0, next_normal(stream))
        for lane in range(out.shape[0]):
            out[lane, k] = normal[0, 0, lane]


@kernel
def next_chi(stream, degrees):
    """Return the square root of a χ² with `degrees` ≥ 1 degrees of freedom.

    It is exact: a sum of squares up to 4 degrees, and above them the rejection method of Marsaglia and Tsang (ACM TOMS
    26, 2000), whose uniform U enters as −log U ~ Exp(1), half the squared length of a pair of normals.
    """
    if degrees <= 4:
        total = everywhere(0.0)
        for _ in range(degrees):
            g = next_normal(stream)
            total = total + g * g
        return square_root(total)
    d = 0.5 * degrees - 1.0 / 3.0
    c = 1.0 / np.sqrt(9.0 * d)
    x, a, b = next_normal(stream), next_normal(stream), next_normal(stream)
    v = 1.0 + c * x
    store(stream.trial, 0, 0, v * v * v)
    store(stream.trial, 1, 0, 0.5 * (a * a + b * b))
    store(stream.trial, 2, 0, 0.5 * (x * x))
    reject(stream, d, c)
    return square_root(2.0 * d * load(stream.trial, 0, 0))


@strict_kernel
def reject(stream, d, c):
    """Draw v (`trial` row 0) again unless −log U (row 1) > d (v − 1 − log v) − x²/2 (row 2)."""
    trial = stream.trial
    for lane in range(LANES):
        v = trial[0, 0, lane]
        trial[2, 0, lane] = d * (v - 1.0 - logarithm(v)) - trial[2, 0, lane]
    for lane in range(LANES):
        if not (trial[0, 0, lane] > 0.0 and trial[1, 0, lane] > trial[2, 0, lane]):
            trial[0, 0, lane] = try_again(stream, lane, d, c)


@strict_kernel
def try_again(stream, lane, d, c):
    """Return v of a further attempt of one replica, from the blocks that are reserved for them."""
    words, replica = stream.words, stream.words[2] + U64(lane)
    while True:
        block = FIRST_RETRY + stream.retries[lane]
        stream.retries[lane] += U64(1)
        w0, w1, w2, w3 = words_of(block, replica, words[0], words[1])
        x, a = box_muller(w0, w1)
        b, _ = box_muller(w2, w3)
        v = (1.0 + c * x) ** 3
        if v > 0.0 and 0.5 * (a * a + b * b) > d * (v - 1.0 - logarithm(v)) - 0.5 * x * x:
            return v
