"""What every process of covariances keeps of its paths: what `Recording` says, at its points, of its start's tokens."""

from typing import Any, Protocol

from numpy.typing import NDArray

from limitformer.models import Start
from limitformer.recording.records import Shapes
from limitformer.recording.writing import Outputs, Recording


class Described(Protocol):
    """Who keeps it."""

    @property
    def start(self) -> Start: ...
    @property
    def points(self) -> NDArray[Any]: ...
    @property
    def recording(self) -> Recording: ...
    @property
    def axis(self) -> str: ...


class Kept:
    """That part of a process (`running.engine.Process`)."""

    @property
    def tokens(self: Described) -> int:
        """m."""
        return self.start.tokens

    def shapes(self: Described, samples: int) -> Shapes:
        """Of what is kept of so many samples."""
        return self.recording.shapes(samples, len(self.points), self.start.tokens)

    @property
    def once(self: Described) -> Shapes:
        """Of what the results have once, whatever the samples."""
        return self.recording.once(len(self.points), self.start.tokens)

    def outputs(self: Described, samples: int) -> Outputs:
        """Arrays for the results of so many samples."""
        return self.recording.outputs(samples, len(self.points), self.start.tokens, self.axis)
