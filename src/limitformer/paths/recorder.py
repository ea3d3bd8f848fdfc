"""What every process of covariances keeps of its paths: what `Recording` says, at its points, of its start's tokens."""

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from limitformer.models import Start
from limitformer.paths.arrays import Shapes
from limitformer.paths.recording import Outputs, RecordArrays, Recording


class ReplicaSlice(NamedTuple):
    """What a driver is told of the replicas that it runs, of which it writes down exits and causes too."""

    first: int
    key_words: np.ndarray
    points: np.ndarray  # layers or steps to record, ascending
    radius: float  # of the ball; who leaves it stops
    record: RecordArrays
    exits: np.ndarray
    causes: np.ndarray


class HasRecording(Protocol):
    """Who keeps it."""

    @property
    def start(self) -> Start: ...
    @property
    def points(self) -> NDArray[Any]: ...
    @property
    def recording(self) -> Recording: ...
    @property
    def axis(self) -> str: ...


class HasBall(HasRecording, Protocol):
    """Who has a ball beside."""

    @property
    def radius(self) -> float: ...


class Recorder:
    """That part of a process (`paths.process.Process`)."""

    @property
    def tokens(self: HasRecording) -> int:
        """m."""
        return self.start.tokens

    def shapes(self: HasRecording, samples: int) -> Shapes:
        """Of what is kept of so many samples."""
        return self.recording.shapes(samples, len(self.points), self.start.tokens)

    @property
    def once(self: HasRecording) -> Shapes:
        """Of what the results have once, whatever the samples."""
        return self.recording.once(len(self.points), self.start.tokens)

    def outputs(self: HasRecording, samples: int) -> Outputs:
        """Arrays for the results of so many samples."""
        return self.recording.outputs(samples, len(self.points), self.start.tokens, self.axis)

    def share(
        self: HasBall, outputs: Outputs, first: int, key_words: NDArray[np.uint64], points: NDArray[Any]
    ) -> ReplicaSlice:
        """Replicas `first` …, as many as `outputs` have room for."""
        record = self.recording.record(outputs, self.start.tokens)
        return ReplicaSlice(first, key_words, points, self.radius, record, outputs["exits"], outputs["causes"])
