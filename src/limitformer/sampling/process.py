"""The interface of what `simulate` runs: a chain or a limit with its start and the quantities that it records."""

from typing import Any, Protocol

from numpy.typing import NDArray

from limitformer.numerics.watch import Watch
from limitformer.sampling.arrays import Outputs, Shapes


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
