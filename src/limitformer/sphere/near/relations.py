r"""How near tokens must be to be carried as differences (`forest`), how often to look, and relations at the start.

* **Radius**: 1e-2, or so small that |β ⟨D, QᵀK x⟩| ≤ 0.05, half of what the series of eˣ − 1 in `differences` is for,
  as |D| may grow to twice the radius. The difference of coordinates at that distance has a relative error of 1e-14.
* **Looks**: a gap falls at a rate of (dim − 1) (step · Σ weights)² a layer at most, so that |D| becomes at most about
  e² times smaller from one look to the next and loses no digits that matter on the way.
"""

from math import exp, sqrt

import numpy as np
from numpy.typing import NDArray

from limitformer.models import SphereModel, StochasticTransformer

RADIUS = 1e-2
LARGEST_CHANGE = 0.05  # of a logit over the radius
LARGEST_LOGIT = 600.0  # beyond, Z̄ of `antipodes` could be zero beside Z
GAP_FLOOR = 1e-28  # what coordinates can tell of a gap, where no differences are carried
RAREST = 16
FALL = 4.0  # of the logarithm of a gap between two looks
CHANGE_FALL = 16.0  # and between two changes of parents, of one gap beside another

Rows = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]


def nearness(model: SphereModel, step: float, drift: float, coordinates: int) -> tuple[float, int, int]:
    """The square of the radius, and layers between two looks and between two changes of parents.

    The radius is 0, and no differences are carried, for logits beyond LARGEST_LOGIT unless QᵀK = I, and behind a causal
    mask: prefixes differ, and so does what tokens next to each other receive.
    """
    largest = abs(model.beta) * (drawn_norm(model, coordinates) if model.is_fresh else model.largest_bilinear)
    if model.is_causal or (largest > LARGEST_LOGIT and not model.is_isotropic):
        return 0.0, RAREST, RAREST
    radius = min(RADIUS, LARGEST_CHANGE / max(largest, 1e-300))
    weights = exp(min(largest, LARGEST_LOGIT)) if model.attention == "unnormalized" else 1.0
    rate = max(model.dim - 1, 4) * (step * weights) ** 2 + 2 * drift * weights
    look = int(min(max(FALL / max(rate, 1e-300), 1), RAREST))
    return radius**2, look, look * int(min(max(CHANGE_FALL / max(rate * look, 1e-300), 1), 1000))


def drawn_norm(model: SphereModel, coordinates: int) -> float:
    """What the norm of a drawn QᵀK (coordinates, coordinates) hardly exceeds: 2√r in the mean, with a margin of 6."""
    assert isinstance(model, StochasticTransformer)
    if model.head_dim is None:
        return model.tau * (2 * sqrt(coordinates) + 6)
    side = sqrt(coordinates) + sqrt(model.head_dim) + 4
    return model.tau * side * side / sqrt(model.head_dim)


def alone(rows: NDArray[np.float64]) -> Rows:
    """Tokens without relations."""
    return rows, np.full(len(rows), -1), np.zeros(len(rows))


def related(tokens: NDArray[np.float64], near: float) -> Rows:
    """Rows (N, d), parents (N,), −1 for none, and signs of tokens: each to the nearest earlier one within √`near`."""
    rows, parents, signs = alone(tokens.copy())
    for i in range(1, len(tokens)):
        apart = tokens[i] - np.stack([tokens[:i], -tokens[:i]])  # (2, i, d)
        square = (apart**2).sum(-1)
        mirrored, parent = np.unravel_index(square.argmin(), square.shape)
        if square[mirrored, parent] <= near:
            rows[i], parents[i], signs[i] = apart[mirrored, parent], parent, 1 - 2 * mirrored
    return rows, parents, signs


def related_pair(overlap: float, coordinates: int, near: float) -> Rows:
    """Two tokens of an overlap z: the second by what it has along and across the first."""
    sign = 1.0 if overlap >= 0 else -1.0
    gap = 1 - abs(overlap)
    rows, parents, signs = alone(np.zeros((2, coordinates)))
    rows[1, :2] = overlap, np.sqrt(gap * (1 + abs(overlap)))
    if 2 * gap <= near:
        rows[1, 0], parents[1], signs[1] = -sign * gap, 0, sign
    return rows, parents, signs
