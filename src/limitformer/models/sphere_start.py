"""Starts on the sphere: uniform tokens, given tokens, or two tokens at a given overlap."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from limitformer.base.errors import require, require_real
from limitformer.models.kinds import require_exact_kind
from limitformer.models.sphere import SphereModel
from limitformer.models.start import real_array

OFF_SPHERE = 1e-9  # largest distance of a given token's length from 1


@dataclass(frozen=True, kw_only=True, eq=False)
class SphereStart:
    """The first tokens.

    Attributes:
        tokens: (tokens, dim) unit vectors; None if they are random.
        overlap: overlap of two tokens in a uniformly random position, or None.
    """

    tokens: NDArray[np.float64] | None = None
    overlap: float | None = None

    def __post_init__(self) -> None:
        require_exact_kind(self, SphereStart)

    @property
    def is_uniform(self) -> bool:
        """Whether the tokens are drawn uniformly on the sphere."""
        return self.tokens is None and self.overlap is None

    @property
    def description(self) -> str:
        """A text that is stored with the results."""
        if self.tokens is not None:
            return f"tokens {self.tokens.shape}"
        return "uniform" if self.overlap is None else f"overlap {self.overlap!r}"


def as_sphere_start(start: Any, model: SphereModel) -> SphereStart:
    """Return the start of None (uniform), a number (the overlap of two tokens) or an array (the tokens).

    Raises:
        InputError: tokens of a wrong shape or off the sphere, an overlap outside [−1, 1], or an overlap for a model
            that does not have two tokens.
    """
    if isinstance(start, SphereStart):
        start = start.overlap if start.tokens is None else start.tokens
    if start is None:
        return SphereStart()
    if getattr(start, "ndim", None) == 0:  # of NumPy or torch
        start = start.item()
    return at_overlap(start, model) if np.isscalar(start) else start_at_tokens(start, model)


def at_overlap(value: Any, model: SphereModel) -> SphereStart:
    overlap = require_real("the start's overlap", value)
    require(-1 <= overlap <= 1, f"The start's overlap must lie in [-1, 1]; got {overlap}.")
    require(
        model.tokens == 2,
        f"A number as the start is the overlap of two tokens, and the model has {model.tokens}. "
        f"Nearest: an array of unit vectors (tokens, dim) = ({model.tokens}, {model.dim}).",
    )
    return SphereStart(overlap=overlap)


def start_at_tokens(value: ArrayLike, model: SphereModel) -> SphereStart:
    """Return these tokens, rescaled to length 1."""
    x = real_array("The start", value, 2)
    shape = (model.tokens, model.dim)
    require(x.shape == shape, f"The start must be (tokens, dim) = {shape}; got {x.shape}.")
    lengths = np.linalg.norm(x, axis=1)
    worst = lengths[np.abs(lengths - 1).argmax()]
    require(
        abs(worst - 1) <= OFF_SPHERE,
        f"Tokens must lie on the unit sphere; one has length {worst:.12g}. Repair: X / norm(X, axis=1, keepdims=True).",
    )
    return SphereStart(tokens=x / lengths[:, None])
