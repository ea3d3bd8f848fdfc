"""Infinite depth: drift and noise of each SDE, its steps and its paths."""

from limitformer.limits.covariance import CovarianceLimit as CovarianceLimit
from limitformer.limits.flow import CovarianceFlow as CovarianceFlow
from limitformer.limits.flow import FlowPath as FlowPath
from limitformer.limits.limit import limit as limit
from limitformer.limits.path import CovariancePaths as CovariancePaths
from limitformer.limits.path import whole_steps as whole_steps
from limitformer.limits.token_paths import token_paths as token_paths
from limitformer.limits.tokens import TokenLimit as TokenLimit
