r"""Radius within which tokens are linked (`near_tree`), number of layers between updates, and links at the start.

* **Radius**: 1e-2, or less so that |β ⟨D, QᵀK x⟩| ≤ 0.05. That is half the range of the series of eˣ − 1 in
  `differences`, because |D| may grow to twice the radius. A difference of coordinates has a relative error of 1e-14
  there.
* **Updates**: a gap falls at a rate of at most (dim − 1) (step · Σ weights)² per layer. So |D| becomes at most about e²
  times smaller between two updates and loses no significant digits.
"""

from math import exp, sqrt

import numpy as np
from numpy.typing import NDArray

from limitformer.models import SphereModel, StochasticTransformer

RADIUS = 1e-2
LARGEST_CHANGE = 0.05  # of a logit over the radius
LARGEST_LOGIT = 600.0  # beyond it Z̄ of `antipodes` could underflow relative to Z
GAP_FLOOR = 1e-28  # least gap that coordinates resolve without differences
RAREST = 16
FALL = 4.0  # largest fall of the logarithm of a gap between two updates
CHANGE_FALL = 16.0  # and of one gap relative to another between two updates that change parents

Rows = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]


def nearness(model: SphereModel, step: float, drift: float, coordinates: int) -> tuple[float, int, int]:
    """Return the squared radius, and the layers between two updates and between two changes of parents.

    The radius is 0, and no differences are stored, for logits beyond LARGEST_LOGIT unless QᵀK = I, and for a causal
    mask, where nearby tokens attend to different prefixes.
    """
    largest = abs(model.beta) * (drawn_norm(model, coordinates) if model.is_fresh else model.largest_bilinear)
    if model.is_causal or (largest > LARGEST_LOGIT and not model.is_isotropic):
        return 0.0, RAREST, RAREST
    radius = min(RADIUS, LARGEST_CHANGE / max(largest, 1e-300))
    weights = exp(min(largest, LARGEST_LOGIT)) if model.attention == "unnormalized" else 1.0
    rate = max(model.dim - 1, 4) * (step * weights) ** 2 + 2 * drift * weights
    every = int(min(max(FALL / max(rate, 1e-300), 1), RAREST))
    return radius**2, every, every * int(min(max(CHANGE_FALL / max(rate * every, 1e-300), 1), 1000))


def drawn_norm(model: SphereModel, coordinates: int) -> float:
    """Return a bound on the norm of a drawn QᵀK (coordinates, coordinates).

    A layer exceeds it with a probability below 1e-3, and below 1e-7 for normal entries [Davidson and Szarek, 2001].
    """
    assert isinstance(model, StochasticTransformer)
    if model.head_dim is None:
        return model.tau * (2 * sqrt(coordinates) + 6)
    side = sqrt(coordinates) + sqrt(model.head_dim) + 4
    return model.tau * side * side / sqrt(model.head_dim)


def alone(rows: NDArray[np.float64]) -> Rows:
    """Return the rows with no parents and zero signs."""
    return rows, np.full(len(rows), -1), np.zeros(len(rows))


def related(tokens: NDArray[np.float64], near: float) -> Rows:
    """Link each token to the nearest earlier one within √`near`; return rows (N, d), parents (−1: none), signs (N,)."""
    rows, parents, signs = alone(tokens.copy())
    for i in range(1, len(tokens)):
        apart = tokens[i] - np.stack([tokens[:i], -tokens[:i]])  # (2, i, d)
        square = (apart**2).sum(-1)
        mirrored, parent = np.unravel_index(square.argmin(), square.shape)
        if square[mirrored, parent] <= near:
            rows[i], parents[i], signs[i] = apart[mirrored, parent], parent, 1 - 2 * mirrored
    return rows, parents, signs


def related_pair(overlap: float, coordinates: int, near: float) -> Rows:
    """Return two tokens of overlap z; row 1 holds the components of the second along and across the first."""
    sign = 1.0 if overlap >= 0 else -1.0
    gap = 1 - abs(overlap)
    rows, parents, signs = alone(np.zeros((2, coordinates)))
    rows[1, :2] = overlap, np.sqrt(gap * (1 + abs(overlap)))
    if 2 * gap <= near:
        rows[1, 0], parents[1], signs[1] = -sign * gap, 0, sign
    return rows, parents, signs
