r"""Points of (−1, 1), stored as z, 1 − z and 1 + z.

Near z = ±1 a double z does not resolve 1 ∓ z; u = artanh z gives both to full precision: 1 ∓ z = 2/(1 + e^{±2u}).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from limitformer.base.errors import require

Array = NDArray[np.float64]

FARTHEST = 350.0  # 1 − |z| is a double at this |u|


@dataclass(frozen=True)
class Position:
    """Overlaps: z, and its distances `below` = 1 − z and `above` = 1 + z from the ends; one shape."""

    z: Array
    below: Array
    above: Array


def at_artanh(u: ArrayLike) -> Position:
    near = np.clip(np.asarray(u, float), -FARTHEST, FARTHEST)
    return Position(np.tanh(near), 2 * expit(-2 * near), 2 * expit(2 * near))


def at_overlap(z: ArrayLike) -> Position:
    z = np.asarray(z, float)
    return Position(z, 1 - z, 1 + z)


def artanh(z: ArrayLike) -> Array:
    """Return artanh z, or ±`FARTHEST` at z = ±1."""
    z = np.asarray(z, float)
    inside = np.abs(z) < 1
    return np.where(inside, np.arctanh(np.where(inside, z, 0.0)), np.sign(z) * FARTHEST)


def log_cosh(u: ArrayLike) -> Array:
    """Return log cosh u without overflow."""
    size = np.abs(np.asarray(u, float))
    return np.asarray(size + np.log1p(np.exp(-2 * size)) - np.log(2.0))


def require_overlaps(name: str, values: ArrayLike) -> Array:
    """Return `values` as an array; raise `InputError` unless they lie in [−1, 1]."""
    try:
        z = np.asarray(values, float)
    except (TypeError, ValueError):
        z = np.array(np.nan)
    wrong = z[~(np.abs(z) <= 1)]
    text = f"{wrong.flat[0]:g}" if wrong.size and np.ndim(values) else repr(values)
    require(wrong.size == 0, f"{name} must lie in [-1, 1]; got {text}.")
    return z


def require_overlap(name: str, value: object) -> float:
    """Return `value` as a float; raise `InputError` unless it is one number in [−1, 1]."""
    z = require_overlaps(name, value)  # type: ignore[arg-type]
    require(z.ndim == 0, f"{name} must be one number; got an array of shape {z.shape}.")
    return float(z)


def require_inside(name: str, value: object) -> float:
    """Return `value` as a float; raise `InputError` unless it is one number in (−1, 1)."""
    z = require_overlap(name, value)
    require(abs(z) < 1, f"{name} must lie strictly between -1 and 1; got {z:g}.")
    return z
