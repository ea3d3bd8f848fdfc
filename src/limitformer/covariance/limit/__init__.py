"""Infinite depth: the covariance SDE of [ST] and the covariance ODE of λ = 1, γ = 1/√depth.

`covariance` declares the SDE. Its drift is in `drift`, with the places where each term of the theorem is written; its
noise and the default step are in `factor_step`, the paper's step in `euler`, the length of steps in `short_steps`, and
the process that `simulate` runs in `path`. `flow` is the ODE; `explosion` has the probability of
an explosion in closed form.
"""

from limitformer.covariance.limit.covariance import CovarianceLimit as CovarianceLimit
from limitformer.covariance.limit.flow import CovarianceFlow as CovarianceFlow
from limitformer.covariance.limit.flow import FlowPath as FlowPath
from limitformer.covariance.limit.path import CovariancePaths as CovariancePaths
