"""Finite depth: chains that are exact in law."""

from limitformer.chains.gradients import GradientChain as GradientChain
from limitformer.chains.gradients import weights_of as weights_of
from limitformer.chains.one_matrix import OneMatrixChain as OneMatrixChain
from limitformer.chains.sphere import sphere_chain as sphere_chain
from limitformer.chains.transformer import TransformerChain as TransformerChain
