r"""The quantile function of N(0, 1), as straight arithmetic.

Wichura, *Algorithm AS 241: the percentage points of the normal distribution*, Applied Statistics 37, 1988. One rational
function serves |p − ½| ≤ 0.425, another the tails beyond, down to exp(−25). The relative error is below 1e-15.
"""

import numpy as np

from limitformer.numerics.elementary import logarithm
from limitformer.numerics.kernels import inlined

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
