"""Infinite depth: drift and noise of the covariance SDE, its steps and its paths."""

from limitformer.covariance.limit.covariance import CovarianceLimit as CovarianceLimit
from limitformer.covariance.limit.flow import CovarianceFlow as CovarianceFlow
from limitformer.covariance.limit.flow import FlowPath as FlowPath
from limitformer.covariance.limit.path import CovariancePaths as CovariancePaths
