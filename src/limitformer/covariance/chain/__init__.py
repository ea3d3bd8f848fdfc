"""Finite depth: chains that are exact in law."""

from limitformer.covariance.chain.one_matrix import OneMatrixChain as OneMatrixChain
from limitformer.covariance.chain.transformer import TransformerChain as TransformerChain
