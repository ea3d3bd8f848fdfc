"""What a path writes down, and when it ends: at the exit from a ball, as in local convergence [ST, Def. 4.1].

A path is a factor R (m × r) of its covariance V = R Rᵀ. The stopped process V_{t ∧ T_r}, T_r = inf{t: |V_t| ≥ r} in
the Frobenius norm, keeps the value of its exit.
"""

import numpy as np

from limitformer.factor import gram
from limitformer.kernels import kernel

INSIDE, LEFT_BALL, LEFT_CONE = 0, 1, 2
CAUSES = ("inside", "left the ball", "left the cone of covariance matrices")

LARGEST_RADIUS = 1e100  # the default: beyond, a cubic drift overflows within a few steps
OVERFLOW_RADIUS = 1e120  # an exit beyond this is an artefact of the step: the path keeps the value before it


@kernel
def record(factor, layers, layer, written, covariance):
    """Write R Rᵀ if `layer` is the next that is asked for; the number of layers written so far."""
    if written < len(layers) and layers[written] == layer:
        gram(factor, covariance[written])
        return written + 1
    return written


@kernel
def hold(factor, written, covariance):
    """The stopped process: what remains to be recorded keeps its value at the exit."""
    for k in range(written, covariance.shape[0]):
        gram(factor, covariance[k])


@kernel
def outside_ball(factor, radius, v):
    """Whether |V| ≥ radius in the Frobenius norm, which the trace bounds."""
    trace = 0.0
    for i in range(factor.shape[0]):
        for k in range(factor.shape[1]):
            trace += factor[i, k] * factor[i, k]
    if trace < radius:
        return False
    gram(factor, v)
    squared = 0.0
    for i in range(v.shape[0]):
        for j in range(v.shape[1]):
            squared += v[i, j] * v[i, j]
    return not np.sqrt(squared) < radius  # NaN is outside
