"""The chain up and then down: gradients that are exact in law."""

from limitformer.covariance.gradients.chain import GradientChain as GradientChain
from limitformer.covariance.gradients.chain import weights_of as weights_of
