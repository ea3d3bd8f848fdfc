r"""**Euler-Maruyama**, the paper's step of the covariance SDE: V ← V + b dt + N + Nᵀ, with N drawn from a root of V.

It can leave the cone of covariance matrices; the root of V then does not exist and the path ends there.
"""

import numpy as np

from limitformer.covariance.limit.drift import drift
from limitformer.covariance.limit.factor_step import draw_mixing
from limitformer.numerics.factor import multiply, multiply_by_lower_transposed, multiply_lower
from limitformer.numerics.kernels import kernel
from limitformer.numerics.lanes import everywhere, load, magnitude, square_root, store, where_positive
from limitformer.numerics.random import draw_normals

CONE_ROUNDING = 1e-10  # how negative a pivot may be, relative to the trace, and still count as rounding


@kernel
def euler_maruyama_step(stream, dt, constants, mask, v, factor, work):
    """Move `v` by dt as in the paper, given its root in `factor`."""
    m, long = factor.shape[0], square_root(dt)
    draw_normals(stream, work.normals)
    multiply_lower(factor, work.normals, work.turned)
    multiply_by_lower_transposed(work.turned, factor, work.moved)
    if constants.mixing > 0.0:
        draw_mixing(stream, factor, mask, work)
        multiply(work.normals, v, work.turned)
    for i in range(m):
        for k in range(m):
            noise = constants.linear * load(work.moved, i, k)
            if constants.mixing > 0.0:
                noise = noise + constants.mixing * load(work.turned, i, k)
            store(work.moved, i, k, noise)
    drift(v, constants, mask, work.drift, work.turned)
    for i in range(m):
        for k in range(m):
            noise = long * (load(work.moved, i, k) + load(work.moved, k, i))
            store(v, i, k, load(v, i, k) + dt * load(work.turned, i, k) + noise)


@kernel
def cholesky(v, out, failed):
    """Lower triangular L with L Lᵀ = V into `out`; `failed` is positive where V is not positive semi-definite."""
    m = v.shape[0]
    rounding, wrong = everywhere(0.0), everywhere(0.0)
    for i in range(m):
        rounding = rounding + CONE_ROUNDING * load(v, i, i)
    loose = rounding / np.sqrt(CONE_ROUNDING)
    for j in range(m):
        pivot = remainder(v, out, j, j)
        wrong = wrong + where_positive(-1.0 * rounding - pivot, everywhere(1.0))
        wrong = wrong + where_positive(-1.0 * load(v, j, j), everywhere(1.0))
        inverse = where_positive(pivot - rounding, 1.0 / square_root(pivot))
        for i in range(m):
            if i < j:
                store(out, i, j, 0.0)
            else:
                rest = remainder(v, out, i, j)
                store(out, i, j, rest * inverse)
                # Next to a pivot of zero everything must be zero too, up to rounding.
                excess = where_positive(magnitude(rest) - loose, everywhere(1.0))
                wrong = wrong + where_positive(rounding - pivot, excess)
    store(failed, 0, 0, wrong)


@kernel
def remainder(v, root, i, j):
    """Return V_ij minus the part that the columns of the root before j explain."""
    rest = load(v, i, j)
    for k in range(j):
        rest = rest - load(root, i, k) * load(root, j, k)
    return rest
