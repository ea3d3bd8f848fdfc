r"""Laws of the random values: V of the stochastic and v of the hybrid Transformer, with mean 0 and variance 1.

* gaussian: Box-Muller, as in `random`;
* uniform: on (−√3, √3);
* rademacher: ±1;
* truncated normal: a normal truncated at ±2 and divided by its deviation 0.8796; by inversion, with the quantile
  function of Wichura's algorithm AS 241 [Applied Statistics 37, 1988], relative error 1e-16.

Numbers depend on (key, replica, block): one block gives four values. `fill` is for `LANES` neighbouring replicas,
`fill_listed` for a list of replicas, one value each.
"""

from limitformer.numerics.elementary import CENTRAL, U64, central_quantile, tail_quantile
from limitformer.numerics.kernels import inlined, kernel, strict_kernel
from limitformer.numerics.lanes import LANES
from limitformer.numerics.random import box_muller, fill_normals, uniform, words_of

GAUSSIAN, UNIFORM, RADEMACHER, TRUNCATED_NORMAL = 0, 1, 2, 3
LAWS = {"gaussian": GAUSSIAN, "uniform": UNIFORM, "rademacher": RADEMACHER, "truncated normal": TRUNCATED_NORMAL}

SQRT_3 = 1.7320508075688772
CUT_MASS = 0.9544997361036416  # probability of |g| < 2
CUT_DEVIATION = 0.8796256610342397  # √(1 − 4 φ(2)/CUT_MASS)


@inlined
def uniform_value(word):
    return (2.0 * uniform(word) - 1.0) * SQRT_3


@inlined
def rademacher_value(word):
    return 1.0 if (word & U64(1)) != U64(0) else -1.0


@inlined
def truncated_value(word):
    return quantile_above_half((uniform(word) - 0.5) * CUT_MASS) / CUT_DEVIATION


@inlined
def quantile_above_half(q):
    """Return Φ⁻¹(1/2 + q) for |q| < 0.4999."""
    a, b = central_quantile(q)
    c, d = tail_quantile(0.5 - abs(q))
    tail = c / d if q > 0.0 else -c / d
    return a / b if abs(q) <= CENTRAL else tail


@strict_kernel
def fill_uniform(k0, k1, replica, block, flat):
    run = len(flat) // 4
    a, b, c, d = flat[:run], flat[run : 2 * run], flat[2 * run : 3 * run], flat[3 * run :]
    for i in range(run):
        w0, w1, w2, w3 = words_of(block + U64(i // LANES), replica + U64(i % LANES), k0, k1)
        a[i], b[i], c[i], d[i] = uniform_value(w0), uniform_value(w1), uniform_value(w2), uniform_value(w3)


@strict_kernel
def fill_rademacher(k0, k1, replica, block, flat):
    run = len(flat) // 4
    a, b, c, d = flat[:run], flat[run : 2 * run], flat[2 * run : 3 * run], flat[3 * run :]
    for i in range(run):
        w0, w1, w2, w3 = words_of(block + U64(i // LANES), replica + U64(i % LANES), k0, k1)
        a[i], b[i], c[i], d[i] = rademacher_value(w0), rademacher_value(w1), rademacher_value(w2), rademacher_value(w3)


@strict_kernel
def fill_truncated(k0, k1, replica, block, flat):
    run = len(flat) // 4
    a, b, c, d = flat[:run], flat[run : 2 * run], flat[2 * run : 3 * run], flat[3 * run :]
    for i in range(run):
        w0, w1, w2, w3 = words_of(block + U64(i // LANES), replica + U64(i % LANES), k0, k1)
        a[i], b[i], c[i], d[i] = truncated_value(w0), truncated_value(w1), truncated_value(w2), truncated_value(w3)


@kernel
def fill(law, k0, k1, replica, block, flat):
    """Fill `flat`, rows of `LANES` replicas from `replica` on, a multiple of four rows, with values of the law."""
    if law == GAUSSIAN:
        fill_normals(k0, k1, replica, block, flat)
    elif law == UNIFORM:
        fill_uniform(k0, k1, replica, block, flat)
    elif law == RADEMACHER:
        fill_rademacher(k0, k1, replica, block, flat)
    else:
        fill_truncated(k0, k1, replica, block, flat)


@strict_kernel
def list_gaussian(k0, k1, replicas, block, count, out):
    for i in range(count):
        w0, w1, _, _ = words_of(block, replicas[i], k0, k1)
        out[i], _ = box_muller(w0, w1)


@strict_kernel
def list_uniform(k0, k1, replicas, block, count, out):
    for i in range(count):
        w0, _, _, _ = words_of(block, replicas[i], k0, k1)
        out[i] = uniform_value(w0)


@strict_kernel
def list_rademacher(k0, k1, replicas, block, count, out):
    for i in range(count):
        w0, _, _, _ = words_of(block, replicas[i], k0, k1)
        out[i] = rademacher_value(w0)


@strict_kernel
def list_truncated(k0, k1, replicas, block, count, out):
    for i in range(count):
        w0, _, _, _ = words_of(block, replicas[i], k0, k1)
        out[i] = truncated_value(w0)


@kernel
def fill_listed(law, k0, k1, replicas, block, count, out):
    """Fill `out` with the first value of the block for each of the first `count` of `replicas`."""
    if law == GAUSSIAN:
        list_gaussian(k0, k1, replicas, block, count, out)
    elif law == UNIFORM:
        list_uniform(k0, k1, replicas, block, count, out)
    elif law == RADEMACHER:
        list_rademacher(k0, k1, replicas, block, count, out)
    else:
        list_truncated(k0, k1, replicas, block, count, out)
