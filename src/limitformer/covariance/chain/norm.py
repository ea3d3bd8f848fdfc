r"""Normalisation of a factor's rows.

The factor's first `mean_columns` columns (0 or 1) belong to the direction of the vector of ones, e = 1/√n: the
entry there is the token's mean over its coordinates. LayerNorm sets it to zero; RMSNorm has no such column. A
user-defined norm multiplies by s(variance + eps), s at `address` (`own`), instead of 1/√(variance + eps).
"""

from limitformer.covariance.chain.own import NOTHING, call_elementwise
from limitformer.numerics.factor import inner
from limitformer.numerics.kernels import kernel
from limitformer.numerics.lanes import load, square_root, store


@kernel
def scale_of(factor, i, mean_columns, eps):
    """Return 1/√(variance + eps) of token i."""
    return 1.0 / square_root(inner(factor, i, factor, i, mean_columns, factor.shape[1]) + eps)


@kernel
def normalise(factor, mean_columns, eps, address, out):
    """out = rows of `factor` (m, r) minus their mean, divided by √(variance + eps) or times s."""
    columns = factor.shape[1]
    for i in range(factor.shape[0]):
        if address == NOTHING:
            scale = scale_of(factor, i, mean_columns, eps)
        else:
            store(out, i, 0, inner(factor, i, factor, i, mean_columns, columns) + eps)
            call_elementwise(address, out, i, 0, 1, 1.0)
            scale = load(out, i, 0)
        for k in range(mean_columns):
            store(out, i, k, 0.0)
        for k in range(mean_columns, columns):
            store(out, i, k, scale * load(factor, i, k))


@kernel
def backward_norm(factor, mean_columns, eps, inside, outside):
    """Gradient of the output of `normalise` to that of its input, the factor R, in place.

    With y = s (x − x̄), s = 1/√(variance + eps): ∂x = s (∂y − y ⟨y, ∂y⟩/n), without its mean. `inside` (m, r) has the
    coordinates of ∂y in the directions of R, `outside` (m, any) is a factor of ∂y outside them.
    """
    columns = factor.shape[1]
    for i in range(factor.shape[0]):
        scale = scale_of(factor, i, mean_columns, eps)
        share = scale * scale * inner(factor, i, inside, i, mean_columns, columns)
        for k in range(mean_columns):
            store(inside, i, k, 0.0)
        for k in range(mean_columns, columns):
            store(inside, i, k, scale * (load(inside, i, k) - share * load(factor, i, k)))
        for k in range(outside.shape[1]):
            store(outside, i, k, scale * load(outside, i, k))
