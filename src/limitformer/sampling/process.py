"""The interface of what `simulate` runs: a chain or a limit with its start and its recorded layers or times."""

from collections.abc import Sequence
from math import ceil
from typing import Annotated, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import require, require_real
from limitformer.base.memory import check_scratch
from limitformer.models import Transformer
from limitformer.numerics.watch import Watch
from limitformer.sampling.arrays import Outputs, Shapes

Record = Annotated[Sequence[float] | NDArray[Any], "points"] | None


def whole_steps(horizon: float, dt: float) -> int:
    """Return the least number of equal steps of at most `dt`, up to rounding, that make the horizon."""
    dt = require_real("dt", dt)
    require(dt > 0, f"dt must be positive; got {dt}.")
    require(horizon / dt <= 2**53, f"dt must be at least {horizon / 2**53:.3g} for this horizon; got {dt}.")
    return max(1, ceil(horizon / dt - 1e-9))


def recorded_layers(model: Transformer, record: Record) -> NDArray[np.int64]:
    """Return `record` as ascending layers of `model`; None means all of them, the start included."""
    if record is None:
        check_scratch(8 * (model.depth + 1), f"The list of all {model.depth + 1:,} depths", "give record")
        record = np.arange(model.depth + 1)
    layers = recorded_points("record", record)
    whole = bool((np.isfinite(layers) & (layers == np.rint(layers))).all())
    require(whole, f"Layers to record must be whole numbers; got {layers}.")
    in_range = bool((layers >= 0).all() and (layers <= model.depth).all())
    require(in_range, f"Layers to record must lie in 0 … {model.depth}; got {layers}.")
    return layers.astype(np.int64)


def recorded_points(name: str, record: Record) -> NDArray[Any]:
    """Return `record` as an ascending array."""
    points = np.asarray(record)
    numbers = points.ndim == 1 and points.size > 0 and points.dtype.kind in "iuf"
    require(numbers, f"{name} must be a list of layers or times; got {record!r}.")
    require(bool((points[1:] > points[:-1]).all()), f"{name} must be strictly ascending; got {record!r}.")
    return points


class Prepared(Protocol):
    """A process that is ready to run replicas, from any thread."""

    def run(self, first: int, outputs: Outputs, watch: Watch) -> None:
        """Fill the arrays with replicas `first`, `first` + 1, …, until the watch is set to halt."""


class Process(Protocol):
    """A chain or a limit with its start and its recording."""

    @property
    def description(self) -> str:
        """ "chain" or "limit"."""

    @property
    def tokens(self) -> int:
        """Number of tokens."""

    @property
    def points(self) -> NDArray[Any]:
        """The layers or times that are recorded."""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings stored with the result so that the run can be repeated."""

    def shapes(self, samples: int) -> Shapes:
        """Return shapes and types of the arrays for the results, (samples, …) each."""

    @property
    def shared_shapes(self) -> Shapes:
        """Shapes of the arrays that all samples share: coordinates and the start."""

    def outputs(self, samples: int) -> Outputs:
        """Return empty arrays for the results.

        Raises:
            InputError: they do not fit the memory.
        """

    def prepare(self, seed: int) -> Prepared:
        """Compute everything that all replicas share."""
