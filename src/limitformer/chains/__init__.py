"""Finite depth: chains that are exact in law."""

from limitformer.chains.transformer import TransformerChain as TransformerChain
