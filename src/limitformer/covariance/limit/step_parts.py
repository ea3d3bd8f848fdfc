r"""What the steps of the covariance SDE share: scratch, and R (C + √dt A) and B R of the factor step (`steps`)."""

from typing import NamedTuple

import numpy as np

from limitformer.covariance.limit.coefficients import DriftWorkspace, drift_workspace
from limitformer.numerics.factor import multiply_by_lower, multiply_lower_by_lower
from limitformer.numerics.kernels import allocator, kernel
from limitformer.numerics.lanes import lane_matrix, load, square_root, store
from limitformer.numerics.random import next_normal


class StepWorkspace(NamedTuple):
    """Scratch of one thread; matrices are (m, m, LANES) but where said. Few of them, so that they stay in cache."""

    drift: DriftWorkspace
    pace: np.ndarray  # (2, 1, LANES): the pace, and P
    normals: np.ndarray  # C V C, then A, then G₂, then B
    turned: np.ndarray  # C R, then L G₂, then B R or B V
    moved: np.ndarray  # W times the first block; L G₁ Lᵀ
    variances: np.ndarray  # (m, 1, LANES): diag V
    column: np.ndarray  # (m, 1, LANES): s, then the normals of the kink
    sums: np.ndarray  # (m, 1, LANES)
    failed: np.ndarray  # (1, 1, LANES): positive where V has no root
    rows: np.ndarray  # the blocks of the factor step that there are: m columns, m more with a mask, one with a kink


@allocator
def step_workspace(tokens, constants, mask):
    masked = constants.mixing > 0.0 and not mask.full
    columns = tokens + (tokens if masked else 0) + (1 if constants.kink > 0.0 else 0)
    return StepWorkspace(
        drift_workspace(tokens),
        lane_matrix(2, 1),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, 1),
        lane_matrix(tokens, 1),
        lane_matrix(tokens, 1),
        lane_matrix(1, 1),
        lane_matrix(tokens, columns),
    )


@kernel
def rest_of_mixing(constants):
    """γ²λ²/τ₀² = γ²/τ₀² − (γ²/τ₀)²."""
    return max(0.0, constants.mixing_drift - constants.mixing**2)


@kernel
def draw_linear(stream, dt, constants, growth, factor, work):
    """R (C + √dt A) into the first block of `work.rows`; `growth` is added to C²."""
    m = factor.shape[0]
    diagonal, below = square_root(dt) * constants.linear, square_root(2.0 * dt) * constants.linear
    for i in range(m):
        for j in range(i):
            store(work.normals, i, j, below * next_normal(stream))
        lost = dt * (constants.kink + constants.linear**2 * (2 * i + 1))
        store(work.normals, i, i, square_root(growth + (1.0 - lost)) + diagonal * next_normal(stream))
        for j in range(i + 1, m):
            store(work.normals, i, j, 0.0)
            store(work.rows, i, j, 0.0)
    multiply_lower_by_lower(factor, work.normals, work.rows)


@kernel
def add_mixing(dt, constants, factor, work):
    """Add (γ²/τ₀)√dt B R to the first block of `work.rows`, B in `work.normals`; B R stays in `work.turned`."""
    m, scale = factor.shape[0], square_root(dt) * constants.mixing
    multiply_by_lower(work.normals, factor, work.turned)
    for i in range(m):
        for k in range(m):
            store(work.rows, i, k, load(work.rows, i, k) + scale * load(work.turned, i, k))
