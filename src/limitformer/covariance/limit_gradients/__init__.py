"""Gradients of the infinite-depth limit: the covariance SDE forward, and the SDE of the gradients backward.

The equation and its letters are in `backward`, one step of it in `step_back`, and the process that `simulate` runs in
`paths`. The derivation is on the page docs/gradient-limit.md.
"""

from limitformer.covariance.limit_gradients.paths import GradientPaths as GradientPaths
from limitformer.covariance.limit_gradients.paths import weight_kinds as weight_kinds
