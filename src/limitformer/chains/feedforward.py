r"""The feed-forward sublayer's output factor: U Uᵀ = (c/n_h) Σⱼ σ(hⱼ) σ(hⱼ)ᵀ.

The columns hⱼ of the pre-activation X W_pre/√n = R (Q W_pre) are i.i.d. N(0, R Rᵀ), one for each of the n_h hidden
units; what follows them is Gaussian, so only the lower triangular factor of √(c/n_h) σ(h) (m × n_h) matters.
"""

from math import erf
from typing import NamedTuple

import numpy as np

from limitformer.factor import multiply, triangularise
from limitformer.kernels import driver, kernel
from limitformer.random import draw_normals

PIECEWISE_LINEAR, GAUSSIAN_ERROR = 0, 1


class FeedforwardConstants(NamedTuple):
    """What the kernels need to know of a feed-forward layer: √(c/n_h), the activation, and its slopes s₊, s₋."""

    hidden: int
    gain: float
    activation: int
    positive: float
    negative: float


class FeedforwardWorkspace(NamedTuple):
    """Scratch matrices: normals (r, n_h) and hidden units (m, n_h)."""

    normals: np.ndarray
    units: np.ndarray


@driver
def feedforward_workspace(tokens, rank, constants):
    return FeedforwardWorkspace(np.empty((rank, constants.hidden)), np.empty((tokens, constants.hidden)))


@kernel
def piecewise_linear(units, positive, negative, gain):
    """gain·(s₊ max(x, 0) + s₋ min(x, 0)), in place."""
    for i in range(units.shape[0]):
        for j in range(units.shape[1]):
            x = units[i, j]
            units[i, j] = gain * (positive * max(x, 0.0) + negative * min(x, 0.0))


@kernel
def gaussian_error(units, gain):
    """gain·x Φ(x), in place."""
    for i in range(units.shape[0]):
        for j in range(units.shape[1]):
            x = units[i, j]
            units[i, j] = gain * x * 0.5 * (1.0 + erf(x * 0.7071067811865476))


@kernel
def hidden_units(stream, factor, constants, work, out):
    """The lower triangular factor of √(c/n_h) σ(h) into `out` (m, m)."""
    draw_normals(stream, work.normals)
    multiply(factor, work.normals, work.units)
    if constants.activation == GAUSSIAN_ERROR:
        gaussian_error(work.units, constants.gain)
    else:
        piecewise_linear(work.units, constants.positive, constants.negative, constants.gain)
    triangularise(work.units, 0, out)
