"""Finite depth: chains that are exact in law.

Read `transformer` first: it has the letters, and a layer calls `attention` or `feedforward`, then `residual`, which
has the norm. `start` has the first factor, `own` calls user-defined functions, and `one_matrix` is the chain of layers
of one matrix.
"""

from limitformer.covariance.chain.one_matrix import OneMatrixChain as OneMatrixChain
from limitformer.covariance.chain.transformer import TransformerChain as TransformerChain
