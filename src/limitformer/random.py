r"""Streams of random numbers: the only place where chains and limits get theirs.

The k-th normal of replica j is a function of (seed, purpose, j, k) alone: it comes from Philox 4×32-10
[Salmon, Moraes, Dror, Shaw, *Parallel random numbers: as easy as 1, 2, 3*, SC 2011], a bijection of a counter
under a key. So the same seed gives the same bits for any number of threads and any chunking; the raw words are the
same on every machine, the floating-point numbers after them up to the last bits, which its instructions decide.

* key: 64 bits, hashed from (seed, purpose), so that a chain and a limit with one seed are independent;
* counter: (block, replica), 64 bits each; a block of 128 random bits makes four normals.

Normals come from the Box-Muller transform of 32-bit uniforms at the centres (i + 1/2)/2³², so |g| ≤ 6.76. A
normal beyond has probability 1.4e-11. The transform is written with its own logarithm, sine and cosine
(relative error below 3e-16 and 2e-15), so that the compiler vectorises the whole block.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from limitformer.errors import require
from limitformer.kernels import driver, inlined, kernel, strict_kernel

U64 = np.uint64
LOW_32 = U64(0xFFFFFFFF)
SHIFT_32 = U64(32)
MULTIPLIER_0, MULTIPLIER_1 = U64(0xD2511F53), U64(0xCD9E8D57)
WEYL_0, WEYL_1 = U64(0x9E3779B9), U64(0xBB67AE85)

# A double in [2⁵², 2⁵³) has spacing 1: its low mantissa bits are an integer.
INTEGER_EXPONENT = U64(0x4330000000000000)
TWO_52 = 2.0**52
SQRT_HALF_BITS = U64(0x3FE6A09E667F3BCD)
MANTISSA = U64(0x000FFFFFFFFFFFFF)
ONE_BITS = U64(0x3FF0000000000000)

BUFFER = 512  # normals made at a time: enough to vectorise, small enough to stay in the first cache


extension: Any = intrinsic


class Stream(NamedTuple):
    """One replica's random numbers: `words` (4,) are two key words, the replica and the next block."""

    words: np.ndarray
    position: np.ndarray  # (1,) of the next normal in `buffer`
    buffer: np.ndarray


def key(seed: int, purpose: str) -> tuple[int, int]:
    """Two 32-bit key words for `seed` (0 to 2⁶³ − 1) and the name of what the numbers are for."""
    whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    require(whole and 0 <= seed < 2**63, f"seed must be a whole number from 0 to 2**63 - 1; got {seed!r}.")
    low, high = np.random.SeedSequence([int(seed), *purpose.encode()]).generate_state(2, np.uint32)
    return int(low), int(high)


@extension
def as_float(typing_context: Any, bits: Any) -> Any:
    """The double whose IEEE 754 representation is `bits`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.uint64), generate


@extension
def as_bits(typing_context: Any, number: Any) -> Any:
    """The IEEE 754 representation of a double."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.uint64(types.float64), generate


@inlined
def philox(c0, c1, c2, c3, k0, k1):
    """Philox 4×32-10 of the counter (c0 … c3) under the key (k0, k1); 32-bit words held in 64 bits."""
    for _ in range(10):
        p0, p1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (p1 >> SHIFT_32) ^ c1 ^ k0, p1 & LOW_32, (p0 >> SHIFT_32) ^ c3 ^ k1, p0 & LOW_32
        k0, k1 = (k0 + WEYL_0) & LOW_32, (k1 + WEYL_1) & LOW_32
    return c0, c1, c2, c3


@inlined
def logarithm(u):
    """log u for normal positive u: u = 2ᵉ m with m in [√½, √2), log m = 2 artanh s, s = (m − 1)/(m + 1)."""
    shifted = as_bits(u) - SQRT_HALF_BITS
    exponent = np.int64(shifted) >> 52
    m = as_float((shifted & MANTISSA) + SQRT_HALF_BITS)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    # The series 1 + z/3 + z²/5 + …, with z ≤ 0.0295: what is left out is below 1e-17.
    p = 1 / 21
    p = p * z + 1 / 19
    p = p * z + 1 / 17
    p = p * z + 1 / 15
    p = p * z + 1 / 13
    p = p * z + 1 / 11
    p = p * z + 1 / 9
    p = p * z + 1 / 7
    p = p * z + 1 / 5
    p = p * z + 1 / 3
    p = p * z + 1.0
    # An integer to a double without a conversion instruction, which does not vectorise everywhere.
    e = as_float(U64(exponent + np.int64(1 << 51)) | INTEGER_EXPONENT) - (TWO_52 + 2.0**51)
    return e * 0.6931471805599453 + 2.0 * s * p


@inlined
def sine_cosine(x):
    """(sin x, cos x) for |x| ≤ π/4, by their Taylor series up to x¹⁷ and x¹⁶."""
    z = x * x
    s = 1 / 355687428096000
    s = s * z - 1 / 1307674368000
    s = s * z + 1 / 6227020800
    s = s * z - 1 / 39916800
    s = s * z + 1 / 362880
    s = s * z - 1 / 5040
    s = s * z + 1 / 120
    s = s * z - 1 / 6
    c = 1 / 20922789888000
    c = c * z - 1 / 87178291200
    c = c * z + 1 / 479001600
    c = c * z - 1 / 3628800
    c = c * z + 1 / 40320
    c = c * z - 1 / 720
    c = c * z + 1 / 24
    c = c * z - 1 / 2
    return x + x * z * s, 1.0 + c * z


@inlined
def box_muller(a, b):
    """Two independent normals from two 32-bit words: radius from `a`, angle from `b`."""
    radius = np.sqrt(-2.0 * logarithm((as_float(a | INTEGER_EXPONENT) - (TWO_52 - 0.5)) * 2.0**-32))
    # The two low bits choose the quadrant, the other thirty an angle in (−π/4, π/4).
    angle = (as_float((b >> U64(2)) | INTEGER_EXPONENT) - (TWO_52 + 2.0**29 - 0.5)) * (np.pi / 2 * 2.0**-30)
    sine, cosine = sine_cosine(angle)
    swap = (b & U64(1)) != U64(0)
    sign = as_float(((b >> U64(1)) << U64(63)) | ONE_BITS)
    first = cosine if swap else sine
    second = sine if swap else cosine
    return sign * radius * first, sign * radius * second


@strict_kernel
def fill_normals(k0, k1, replica, block, out):
    """Fill `out` (length a multiple of 4) with the normals of blocks `block`, `block` + 1, …"""
    blocks = len(out) // 4
    # Four runs rather than four neighbours, so that the stores are contiguous.
    a, b, c, d = out[:blocks], out[blocks : 2 * blocks], out[2 * blocks : 3 * blocks], out[3 * blocks :]
    replica_low, replica_high = replica & LOW_32, replica >> SHIFT_32
    for j in range(blocks):
        counter = block + U64(j)
        w0, w1, w2, w3 = philox(counter & LOW_32, counter >> SHIFT_32, replica_low, replica_high, k0, k1)
        a[j], b[j] = box_muller(w0, w1)
        c[j], d[j] = box_muller(w2, w3)


@driver
def open_stream():
    """A stream with its buffer; `rewind` it to a replica before use."""
    return Stream(np.zeros(4, np.uint64), np.zeros(1, np.int64), np.empty(BUFFER))


@kernel
def rewind(stream, key_words, replica):
    """Set `stream` to the first normal of `replica` under the key words (2,)."""
    stream.words[0] = key_words[0]
    stream.words[1] = key_words[1]
    stream.words[2] = replica
    stream.words[3] = 0
    stream.position[0] = BUFFER


@kernel
def refill(stream):
    words = stream.words
    fill_normals(words[0], words[1], words[2], words[3], stream.buffer)
    words[3] += U64(BUFFER // 4)
    stream.position[0] = 0


@kernel
def next_normal(stream):
    """The stream's next N(0, 1)."""
    if stream.position[0] == BUFFER:
        refill(stream)
    position = stream.position[0]
    stream.position[0] = position + 1
    return stream.buffer[position]


@kernel
def draw_normals(stream, out):
    """Fill the matrix `out` (rows, columns), row by row, with the stream's next normals."""
    for row in range(out.shape[0]):
        done = 0
        while done < out.shape[1]:
            if stream.position[0] == BUFFER:
                refill(stream)
            position = stream.position[0]
            count = min(out.shape[1] - done, BUFFER - position)
            for i in range(count):
                out[row, done + i] = stream.buffer[position + i]
            stream.position[0] = position + count
            done += count


@kernel
def next_exponential(stream):
    """The stream's next Exp(1): half the squared length of a normal pair."""
    a, b = next_normal(stream), next_normal(stream)
    return 0.5 * (a * a + b * b)


@kernel
def next_chi(stream, degrees):
    """The square root of a χ² with `degrees` ≥ 1 degrees of freedom.

    Exact: a sum of squares up to 4, and above the rejection method of Marsaglia and Tsang (ACM TOMS 26, 2000),
    whose uniform U enters as −log U ~ Exp(1).
    """
    if degrees <= 4:
        total = 0.0
        for _ in range(degrees):
            total += next_normal(stream) ** 2
        return np.sqrt(total)
    d = 0.5 * degrees - 1.0 / 3.0
    c = 1.0 / np.sqrt(9.0 * d)
    while True:
        x = next_normal(stream)
        v = (1.0 + c * x) ** 3
        e = next_exponential(stream)
        # Their squeeze U < 1 − 0.0331 x⁴ holds wherever e > t/(1 − t), t = 0.0331 x⁴: no logarithm needed.
        t = 0.0331 * x**4
        if v > 0.0 and (e * (1.0 - t) > t or e > d * (v - 1.0 - np.log(v)) - 0.5 * x * x):
            return np.sqrt(2.0 * d * v)
