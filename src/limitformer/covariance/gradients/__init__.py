"""Gradients of the chain, exact in law.

The algorithm and its letters are in `backward`. Read it first, then `residual` (a sum, forward and backward),
`attention` and `feedforward` (the branches). `matrices` has their operations and buffers, and
`chain` is the process that `simulate` runs.
"""

from limitformer.covariance.gradients.chain import GradientChain as GradientChain
from limitformer.covariance.gradients.chain import has_gradients as has_gradients
from limitformer.covariance.gradients.chain import weights_of as weights_of
