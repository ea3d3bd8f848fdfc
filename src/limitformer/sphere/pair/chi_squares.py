r"""Pairs of χ² variables with equal degrees of freedom, for a list of replicas side by side.

* up to 8 degrees: χ²_ν = −2 log(U₁ … U_k) + [ν odd] g², k = ⌊ν/2⌋, exact and without rejection;
* above: Marsaglia and Tsang's rejection method (ACM TOMS 26, 2000). Attempts after the first use separate blocks of
  random numbers, so no replica waits for another.

The numbers of a replica come from blocks `block`, `block` + 1, … of its stream; `blocks_needed` returns their number.
"""

import numpy as np

from limitformer.numerics.elementary import U64, logarithm
from limitformer.numerics.kernels import inlined, kernel, strict_kernel
from limitformer.numerics.random import FIRST_RETRY, box_muller, uniform, words_of

LARGEST_PRODUCT = 8
MOST_RETRIES = U64(64)  # blocks reserved for the retries of one variable; an attempt fails with probability below 0.05


@kernel
def blocks_needed(degrees):
    """Return the number of blocks that one pair uses."""
    if degrees > LARGEST_PRODUCT:
        return 1
    factors = degrees // 2
    return factors // 2 + factors % 2 + degrees % 2


@kernel
def chi_squares(degrees, k0, k1, replicas, block, count, first, second):
    """Draw χ² with `degrees` ≥ 0 into `first` and `second`, for the first `count` of `replicas`."""
    if degrees > LARGEST_PRODUCT:
        gamma_pairs(degrees, k0, k1, replicas, block, count, first, second)
        return
    factors = degrees // 2
    begin_products(count, first, second)
    for _ in range(factors // 2):
        multiply_by_four(k0, k1, replicas, block, count, first, second)
        block += U64(1)
    if factors % 2 == 1:
        multiply_by_two(k0, k1, replicas, block, count, first, second)
        block += U64(1)
    take_logarithms(count, first, second)
    if degrees % 2 == 1:
        add_squares(k0, k1, replicas, block, count, first, second)


@strict_kernel
def begin_products(count, first, second):
    for i in range(count):
        first[i] = 1.0
        second[i] = 1.0


@strict_kernel
def multiply_by_four(k0, k1, replicas, block, count, first, second):
    for i in range(count):
        w0, w1, w2, w3 = words_of(block, replicas[i], k0, k1)
        first[i] *= uniform(w0) * uniform(w1)
        second[i] *= uniform(w2) * uniform(w3)


@strict_kernel
def multiply_by_two(k0, k1, replicas, block, count, first, second):
    for i in range(count):
        w0, w1, _, _ = words_of(block, replicas[i], k0, k1)
        first[i] *= uniform(w0)
        second[i] *= uniform(w1)


@strict_kernel
def take_logarithms(count, first, second):
    for i in range(count):
        first[i] = -2.0 * logarithm(first[i])
        second[i] = -2.0 * logarithm(second[i])


@strict_kernel
def add_squares(k0, k1, replicas, block, count, first, second):
    for i in range(count):
        w0, w1, _, _ = words_of(block, replicas[i], k0, k1)
        g, h = box_muller(w0, w1)
        first[i] += g * g
        second[i] += h * h


@inlined
def attempt(x, u, d, c):
    """Return half a χ² with 2d + 2/3 degrees from a normal and a uniform number, or −1 on rejection."""
    v = 1.0 + c * x
    v = v * v * v
    positive = v if v > 0.0 else 1.0
    accepted = logarithm(u) < 0.5 * x * x + d * (1.0 - positive + logarithm(positive))
    return d * v if (v > 0.0 and accepted) else -1.0


@strict_kernel
def gamma_pairs(degrees, k0, k1, replicas, block, count, first, second):
    d = 0.5 * degrees - 1.0 / 3.0
    c = 1.0 / np.sqrt(9.0 * d)
    for i in range(count):
        w0, w1, w2, w3 = words_of(block, replicas[i], k0, k1)
        x, y = box_muller(w0, w1)
        first[i] = 2.0 * attempt(x, uniform(w2), d, c)
        second[i] = 2.0 * attempt(y, uniform(w3), d, c)
    for i in range(count):
        if first[i] < 0.0:
            first[i] = retry(U64(0), k0, k1, replicas[i], block, d, c)
        if second[i] < 0.0:
            second[i] = retry(U64(1), k0, k1, replicas[i], block, d, c)


@strict_kernel
def retry(which, k0, k1, replica, block, d, c):
    """Return the first accepted retry; the two variables of a pair have separate blocks."""
    at = FIRST_RETRY + (U64(2) * block + which) * MOST_RETRIES
    while True:
        w0, w1, w2, _ = words_of(at, replica, k0, k1)
        x, _ = box_muller(w0, w1)
        half = attempt(x, uniform(w2), d, c)
        if half >= 0.0:
            return 2.0 * half
        at += U64(1)
