r"""Residual strengths γ and λ: one number for all sublayers, or numbers for each layer and each sublayer.

A sequence has one entry for each layer: a number, or a pair for its attention and its feed-forward sublayer. By default
λ = √(1 − γ²), sublayer by sublayer, and γ ≤ 1; with a given λ, γ is any number ≥ 0.
"""

from collections.abc import Sequence
from math import sqrt
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import require, require_real

Pair = tuple[float, float]
Strength = float | tuple[float | Pair, ...]
Given = float | Sequence[float | Sequence[float]]


def checked_strength(name: str, value: Any, depth: int, sublayers: int) -> Strength:
    """Return `value` as a float, or as a tuple of floats and pairs, one for each layer.

    Raises:
        InputError: `value` is neither a number nor a sequence of that length, or has pairs for single sublayers.

    >>> checked_strength("gamma", [0.5, (0.1, 0.2)], 2, 2)
    (0.5, (0.1, 0.2))
    """
    if isinstance(value, np.ndarray) and value.ndim > 0:
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        return require_real(name, value)
    require(len(value) == depth, f"{name} must be a number, or have one entry a layer, {depth}; got {len(value)}.")
    return tuple(checked_entry(f"{name}[{layer}]", entry, sublayers) for layer, entry in enumerate(value))


def checked_entry(name: str, entry: Any, sublayers: int) -> float | Pair:
    if isinstance(entry, Real) or not isinstance(entry, Sequence) or isinstance(entry, str | bytes | bytearray):
        return require_real(name, entry)
    pair = sublayers == 2 and len(entry) == 2
    wanted = "a number or a pair (attention, feed-forward)" if sublayers == 2 else "a number, for its only sublayer"
    require(pair, f"{name} must be {wanted}; got {entry!r}.")
    return require_real(name, entry[0]), require_real(name, entry[1])


def table_of(strength: Strength, sublayers: int) -> NDArray[np.float64]:
    """Return the strength of every sublayer, (depth, sublayers); (1, sublayers) if one number holds for all."""
    entries = strength if isinstance(strength, tuple) else (strength,)
    return np.array([entry if isinstance(entry, tuple) else (entry,) * sublayers for entry in entries], np.float64)


def check_strengths(gamma: Strength, lam: Strength | None, sublayers: int) -> None:
    """Raise `InputError` unless γ ≥ 0, λ ≥ 0, and γ ≤ 1 without a given λ."""
    g = table_of(gamma, sublayers)
    if lam is None:
        values = gamma if isinstance(gamma, float) else f"{g.min():g} to {g.max():g}"
        inside = bool((g >= 0).all() and (g <= 1).all())
        require(inside, f"gamma must lie in [0, 1]; got {values}. [ST] uses 1/sqrt(8); above 1 give lam too.")
        return
    require(bool((g >= 0).all()), f"gamma must be at least 0; got {g.min():g}.")
    least = lam if isinstance(lam, float) else table_of(lam, sublayers).min()
    require(bool(least >= 0), f"lam must be at least 0; got {least}.")


def strengths_of(gamma: Strength, lam: Strength | None, sublayers: int) -> NDArray[np.float64]:
    """Return λ and γ of every sublayer, (depth, sublayers, 2); one row if all layers have the same numbers."""
    g = table_of(gamma, sublayers)
    skips = np.array([[sqrt(1 - x**2) for x in row] for row in g.tolist()]) if lam is None else table_of(lam, sublayers)
    return np.stack(np.broadcast_arrays(skips, g), -1)
