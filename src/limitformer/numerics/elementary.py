r"""Logarithm, exponential, sine, cosine and the quantile function of N(0, 1) as straight arithmetic, without calls.

The library's own functions are calls, one number at a time; the compiler vectorises loops over these. Each of the first
four is a reduction to a small interval and a series there. They work on the bits of a number, so they belong in a
`strict_kernel`. Relative errors: below 5e-16 for `logarithm` and `exponential`, below 2e-16 for `sine_cosine`.

The quantile function is that of Wichura, *Algorithm AS 241: the percentage points of the normal distribution*, Applied
Statistics 37, 1988. One rational function serves |p − ½| ≤ 0.425, another the tails beyond, down to exp(−25). The
relative error is below 1e-15.

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


CENTRAL = 0.425
LEAST_TAIL = 1.3887943864964021e-11  # exp(−25)


@inlined
def central_quantile(q):
    """Return numerator and denominator of the x with P(0 < g < x) = q, for |q| ≤ 0.425."""
    r = 0.180625 - q * q
    a = 2.5090809287301226727e3
    a = a * r + 3.3430575583588128105e4
    a = a * r + 6.7265770927008700853e4
    a = a * r + 4.5921953931549871457e4
    a = a * r + 1.3731693765509461125e4
    a = a * r + 1.9715909503065514427e3
    a = a * r + 1.3314166789178437745e2
    a = a * r + 3.3871328727963666080e0
    b = 5.2264952788528545610e3
    b = b * r + 2.8729085735721942674e4
    b = b * r + 3.9307895800092710610e4
    b = b * r + 2.1213794301586595867e4
    b = b * r + 5.3941960214247511077e3
    b = b * r + 6.8718700749205790830e2
    b = b * r + 4.2313330701600911252e1
    b = b * r + 1.0
    return q * a, b


@inlined
def tail_quantile(tail):
    """Return numerator and denominator of the x with P(g > x) = tail, for exp(−25) ≤ tail ≤ 0.075."""
    r = np.sqrt(-logarithm(tail)) - 1.6
    c = 7.74545014278341407640e-4
    c = c * r + 2.27238449892691845833e-2
    c = c * r + 2.41780725177450611770e-1
    c = c * r + 1.27045825245236838258e0
    c = c * r + 3.64784832476320460504e0
    c = c * r + 5.76949722146069140550e0
    c = c * r + 4.63033784615654529590e0
    c = c * r + 1.42343711074968357734e0
    d = 1.05075007164441684324e-9
    d = d * r + 5.47593808499534494600e-4
    d = d * r + 1.51986665636164571966e-2
    d = d * r + 1.48103976427480074590e-1
    d = d * r + 6.89767334985100004550e-1
    d = d * r + 1.67638483018380384940e0
    d = d * r + 2.05319162663775882187e0
    d = d * r + 1.0
    return c, d


@inlined
def normal_quantile(lower, upper):
    """Return the x with P(g < x) = lower and P(g > x) = upper; the smaller of the two is at least exp(−25).

    Both are arguments, because 1 − p has lost the digits of a small p.
    """
    tail = min(lower, upper)
    q = 0.5 - tail
    a, b = central_quantile(q)
    c, d = tail_quantile(tail)
    central = q <= CENTRAL
    size = (a if central else c) / (b if central else d)
    return size if upper < lower else -size
