"""Infinite depth: drift and noise of each SDE, its steps and its paths."""

from limitformer.limits.covariance import CovarianceLimit as CovarianceLimit
from limitformer.limits.covariance import limit as limit
from limitformer.limits.path import CovariancePaths as CovariancePaths
from limitformer.limits.path import whole_steps as whole_steps
