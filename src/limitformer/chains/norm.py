r"""Normalisation of a factor's rows.

The factor's first `mean_columns` columns (0 or 1) belong to the direction of the vector of ones, e = 1/√n: the
entry there is the token's mean over its coordinates. LayerNorm sets it to zero; RMSNorm has no such column.
"""

import numpy as np

from limitformer.kernels import kernel


@kernel
def normalise(factor, mean_columns, eps, out):
    """out = rows of `factor` (m, r) without their mean, divided by √(variance + eps)."""
    for i in range(factor.shape[0]):
        variance = 0.0
        for k in range(mean_columns, factor.shape[1]):
            variance += factor[i, k] * factor[i, k]
        scale = 1.0 / np.sqrt(variance + eps)
        for k in range(factor.shape[1]):
            out[i, k] = scale * factor[i, k] if k >= mean_columns else 0.0
