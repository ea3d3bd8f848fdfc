"""The interface of what `simulate` runs: a chain or a limit with its start and what it records."""

from typing import Any, Protocol

from numpy.typing import NDArray

from limitformer.numerics.watch import Watch
from limitformer.paths.arrays import Shapes

Outputs = dict[str, NDArray[Any]]


class Prepared(Protocol):
    """A process that is ready to run replicas, from any thread."""

    def run(self, first: int, outputs: Outputs, watch: Watch) -> None:
        """Fill the arrays with replicas `first`, `first` + 1, …, unless the watch says halt."""


class Process(Protocol):
    """What can be simulated: a chain or a limit with its start and its recording."""

    @property
    def description(self) -> str:
        """ "chain" or "limit"."""

    @property
    def tokens(self) -> int:
        """How many there are."""

    @property
    def points(self) -> NDArray[Any]:
        """The layers or times that are recorded."""

    @property
    def settings(self) -> dict[str, Any]:
        """What else one needs to know to repeat it."""

    def shapes(self, samples: int) -> Shapes:
        """Shapes and types of the arrays for the results, (samples, …) each."""

    @property
    def once(self) -> Shapes:
        """Of what the results have beside them, once: coordinates and the start."""

    def outputs(self, samples: int) -> Outputs:
        """Arrays for the results, (samples, …) each; `InputError` if they do not fit the memory."""

    def prepare(self, seed: int) -> Prepared:
        """Everything that all replicas share."""
