r"""Logarithm, exponential, sine and cosine as straight arithmetic, so that the compiler vectorises loops over them.

The library's own functions are calls, one number at a time. Each of these is a reduction to a small interval and a
series there. They work on the bits of a number, so they belong in a `strict_kernel`. Relative errors: below 5e-16 for
`logarithm` and `exponential`, below 2e-16 for `sine_cosine`.

The exponentials also take `lanes`. With AVX-512 lanes fill a register, but the compiler fills only half of one when it
vectorises a loop over numbers.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from limitformer.numerics.kernels import inlined, strict_kernel
from limitformer.numerics.lanes import LANES, lanes, larger, load, store

U64 = np.uint64

# A double in [2⁵², 2⁵³) has spacing 1: its low mantissa bits are an integer.
INTEGER_EXPONENT = U64(0x4330000000000000)
TWO_52 = 2.0**52
ROUND_TO_INTEGER = 1.5 * TWO_52
SQRT_HALF_BITS = U64(0x3FE6A09E667F3BCD)
MANTISSA = U64(0x000FFFFFFFFFFFFF)
MANTISSA_BITS = U64(52)
ONE_BITS = U64(0x3FF0000000000000)

LOG_2 = 0.6931471805599453
LOG_2_HIGH, LOG_2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # their sum is log 2 to 1e-26
LEAST_EXPONENT = -700.0  # exp of anything below is 1e-304

# Numba passes the typing context first, which its annotations leave out.
extension: Any = intrinsic


@extension
def as_float(typing_context: Any, bits: Any) -> Any:
    """Return the double whose IEEE 754 representation is `bits`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.uint64), generate


@extension
def as_bits(typing_context: Any, number: Any) -> Any:
    """Return the IEEE 754 representation of a double."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.uint64(types.float64), generate


@extension
def power_of_two(typing_context: Any, shifted: Any) -> Any:
    """Return 2ᵏ, given ROUND_TO_INTEGER + k, for a number or for lanes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        integer = ir.VectorType(ir.IntType(64), LANES) if shifted is lanes else ir.IntType(64)
        by, one = (
            ir.Constant(integer, [int(number)] * LANES if shifted is lanes else int(number))
            for number in (MANTISSA_BITS, ONE_BITS)
        )
        bits = builder.add(builder.shl(builder.bitcast(arguments[0], integer), by), one)
        return builder.bitcast(bits, context.get_value_type(shifted))

    return shifted(shifted), generate


@inlined
def logarithm(u):
    """Return log u for normal positive u: u = 2ᵉ m with m in [√½, √2), log m = 2 artanh s, s = (m − 1)/(m + 1)."""
    shifted = as_bits(u) - SQRT_HALF_BITS
    exponent = np.int64(shifted) >> 52
    m = as_float((shifted & MANTISSA) + SQRT_HALF_BITS)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    # The series 1 + z/3 + z²/5 + …, with z ≤ 0.0295: the omitted terms are below 1e-17.
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
    return e * LOG_2 + 2.0 * s * p


@inlined
def exponential(x):
    """Return exp x for x ≤ 700: x = k log 2 + r with |r| ≤ (log 2)/2; exp(−700) below −700."""
    x = larger(LEAST_EXPONENT, x)  # in this order NaN is kept
    shifted = x * (1 / LOG_2) + ROUND_TO_INTEGER
    k = shifted - ROUND_TO_INTEGER
    r = (x - k * LOG_2_HIGH) - k * LOG_2_LOW
    p = 1 / 6227020800
    p = p * r + 1 / 479001600
    p = p * r + 1 / 39916800
    p = p * r + 1 / 3628800
    p = p * r + 1 / 362880
    p = p * r + 1 / 40320
    p = p * r + 1 / 5040
    p = p * r + 1 / 720
    p = p * r + 1 / 120
    p = p * r + 1 / 24
    p = p * r + 1 / 6
    p = p * r + 1 / 2
    p = p * r + 1.0
    p = p * r + 1.0
    return p * power_of_two(shifted)


@inlined
def exponential_less_one(x):
    """Return exp x − 1 for |x| ≤ 0.1 by its series, without cancellation; the omitted terms are below 1e-17 x."""
    p = 1 / 3628800
    p = p * x + 1 / 362880
    p = p * x + 1 / 40320
    p = p * x + 1 / 5040
    p = p * x + 1 / 720
    p = p * x + 1 / 120
    p = p * x + 1 / 24
    p = p * x + 1 / 6
    p = p * x + 1 / 2
    p = p * x + 1.0
    return p * x


@inlined
def sine_cosine(x):
    """Return (sin x, cos x) for |x| ≤ π/4, by their Taylor series up to x¹⁷ and x¹⁶."""
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


@strict_kernel
def exponentials(matrix):
    """Replace every entry of `matrix` (rows, columns, LANES) by its exponential."""
    for i in range(matrix.shape[0]):
        for j in range(matrix.shape[1]):
            store(matrix, i, j, exponential(load(matrix, i, j)))
