"""What paths write down: the tokens' covariance V, or of pairs of tokens their distance too.

For a pair are kept V_αβ and the distance |x_α − x_β|²/n, for a token V_αα. From the rows of a factor, V = R Rᵀ, the
distance is |R_α − R_β|², which does not cancel. V_αα + V_ββ − 2 V_αβ, all that V can tell, is rounding below
1e-15 |x|²/n; rows that are rounded to a few 1e-16 of their length leave distances down to some 1e-30 |x|²/n. Every
layer adds its rounding, which later layers move as they do any distance: `distance_floor` in the results is what one
layer can add.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import require, set_fields
from limitformer.models import Start
from limitformer.models.sphere import require_known
from limitformer.numerics.factor import FIRST, gram, inner
from limitformer.numerics.kernels import driver, kernel
from limitformer.numerics.lanes import LANES, everywhere, load, store
from limitformer.paths.arrays import (
    TILE,
    Dtype,
    Pairs,
    ResultArray,
    Shapes,
    as_result_array,
    checked_dtype,
    checked_pairs,
    coordinate_shapes,
    new_outputs,
    pairs_of,
    points_in,
    replicas_between,
    replicas_in,
    smaller_recordings,
    write_lane_row,
    write_number,
)
from limitformer.paths.exits import INSIDE, LARGEST_RADIUS, first_at

Keep = Literal["covariance", "pairs"]
Outputs = dict[str, NDArray[Any]]

FACTOR_FLOOR = 1e-27  # what the rounding of one layer or step can add to a distance, over the larger variance
VALUE_FLOOR = 1e-14  # the same where a distance comes from V
# What is written is at most this, and of distances four times as much: a tenth of the largest number of the type.
LARGEST: dict[str, float] = {"float64": np.inf, "float32": 3e37}


class RecordArrays(NamedTuple):
    """What is to be kept, and where; what is not has no points."""

    pairs: np.ndarray  # (pairs, 2)
    largest: float  # what the type can hold of a path that has left
    covariance: ResultArray  # m m entries: V
    variance: ResultArray  # m entries: diag V
    pair_covariance: ResultArray  # an entry a pair
    distance: ResultArray


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What is kept of paths of V.

    Attributes:
        keep: "covariance" for V; "pairs" for variances, covariances and distances of pairs of tokens.
        pairs: the pairs of tokens, such as [(0, 1), (0, 2)]; None: all of them.
        dtype: in which it is kept, "float64" or "float32", which has seven digits from 1e-38 to 3e38, fewer below and
            0 below 1e-45. The ball then has radius 3e37 if none is given, and of a path that has left it a V with
            larger entries is scaled down to 3e37, as a whole. Paths run in float64 whatever it is.

    Raises:
        InputError: a value out of range.
    """

    keep: Keep = "covariance"
    pairs: Pairs | None = None
    dtype: Dtype = "float64"

    def __post_init__(self) -> None:
        require_known("keep", self.keep, Keep)
        set_fields(self, pairs=checked_pairs(self.pairs), dtype=checked_dtype(self.dtype))
        idle = self.pairs is not None and self.keep == "covariance"
        require(not idle, 'pairs would change nothing beside keep="covariance", which is all of V; use keep="pairs".')

    def pairs_among(self, tokens: int) -> NDArray[np.int64]:
        """(pairs, 2), none if V is kept; `InputError` if a token is not among so many, or there is no pair."""
        if self.keep == "covariance":
            return np.zeros((0, 2), np.int64)
        require(tokens > 1, 'One token makes no pair. Nearest: keep="covariance".')
        return pairs_of(self.pairs, tokens)

    def shapes(self, samples: int, points: int, tokens: int) -> Shapes:
        """Of the arrays for the results; what is not kept has no points."""
        whole = points if self.keep == "covariance" else 0
        rest, pairs = points - whole, len(self.pairs_among(tokens))
        return {
            "covariance": ((samples, whole, tokens**2), self.dtype),
            "variance": ((samples, rest, tokens), self.dtype),
            "pair_covariance": ((samples, rest, pairs), self.dtype),
            "distance": ((samples, rest, pairs), self.dtype),
            "exits": ((samples,), np.float64),
            "causes": ((samples,), np.int8),
        }

    def once(self, points: int, tokens: int) -> Shapes:
        """Of what the results have once: coordinates, without the names of tokens, and V₀."""
        coordinates = coordinate_shapes(points, len(self.pairs_among(tokens)))
        return {**coordinates, "start_covariance": ((tokens, tokens), np.float64)}

    def outputs(self, samples: int, points: int, tokens: int, axis: str) -> Outputs:
        """Arrays for the results of so many samples; `InputError` if they do not fit the memory."""
        smaller = smaller_recordings(self.dtype, len(self.pairs_among(tokens)))
        if self.keep == "covariance" and tokens > 2:
            smaller.append('some pairs alone (keep="pairs", pairs=[(0, 1)])')
        shapes, once = self.shapes(samples, points, tokens), self.once(points, tokens)
        outputs = new_outputs(shapes, once, samples, points, axis, smaller)
        outputs["exits"].fill(np.inf)
        outputs["causes"].fill(INSIDE)
        return outputs

    def record(self, outputs: Outputs, tokens: int) -> "RecordArrays":
        """`outputs` as the kernels take them."""
        names = ("covariance", "variance", "pair_covariance", "distance")
        return RecordArrays(
            self.pairs_among(tokens), LARGEST[self.dtype], *(as_result_array(outputs[name]) for name in names)
        )

    def put(self, covariance: NDArray[np.float64], outputs: Outputs) -> None:
        """What is kept of one path V (points, m, m) to every sample of `outputs`."""
        m = covariance.shape[-1]
        if self.keep == "covariance":
            outputs["covariance"][:] = covariance.reshape(-1, m * m)
            return
        i, j = self.pairs_among(m).T
        variance, shared = np.diagonal(covariance, axis1=1, axis2=2), covariance[:, i, j]
        outputs["variance"][:], outputs["pair_covariance"][:] = variance, shared
        outputs["distance"][:] = np.maximum(variance[:, i] + variance[:, j] - 2 * shared, 0)

    @property
    def largest_radius(self) -> float:
        """The radius if none is asked for: what is inside has to fit the type."""
        return min(LARGEST_RADIUS, LARGEST[self.dtype])

    def settings(self, floor: float) -> dict[str, Any]:
        """What the results say of it; `floor` is that of distances, relative to the tokens' variance."""
        if self.keep == "covariance":
            return {"keep": self.keep, "dtype": self.dtype}
        pairs = "all" if self.pairs is None else json.dumps(self.pairs)
        return {"keep": self.keep, "dtype": self.dtype, "pairs": pairs, "distance_floor": floor}


ALL_OF_V = Recording()


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


@driver
def rows_of(record, begin):
    """The rows of the replicas that run side by side, from `begin` on."""
    end = begin + LANES
    return RecordArrays(
        record.pairs,
        record.largest,
        replicas_between(record.covariance, begin, end),
        replicas_between(record.variance, begin, end),
        replicas_between(record.pair_covariance, begin, end),
        replicas_between(record.distance, begin, end),
    )


@kernel
def replicas_of(record):
    """How many replicas are written down, at most LANES."""
    return replicas_in(record.covariance)


@kernel
def write(points, step, record, ledger):
    """Write V (`ledger.now`, or what was kept), or what it tells of pairs, where `points` asks for `step`."""
    k = first_at(points, step)
    while k < len(points) and points[k] == step:
        for lane in range(replicas_of(record)):
            if ledger.exits[lane] == np.inf:
                write_value(ledger.now, lane, 1.0, k, record)
            else:
                write_value(ledger.kept, lane, scale_of(ledger.kept, lane, record.largest), k, record)
        k += 1


@kernel
def scale_of(v, lane, largest):
    """What V of one path is multiplied by, so that no entry exceeds the largest number that can be written."""
    size = 0.0
    for i in range(v.shape[0]):
        size = max(size, v[i, i, lane])
    return 1.0 if size <= largest else largest / size


@kernel
def write_value(v, lane, scale, k, record):
    """V of one path, or its pairs, at point k."""
    if points_in(record.covariance) > 0:
        write_covariance(v, lane, scale, k, record.covariance)
    else:
        write_pairs(v, lane, scale, k, record)


@kernel
def write_covariance(v, lane, scale, k, kept):
    """V of one path at point k."""
    m = v.shape[0]
    for i in range(m):
        for j in range(m):
            write_number(kept, lane, k, i * m + j, scale * v[i, j, lane])


@kernel
def write_pairs(v, lane, scale, k, record):
    """Variances and pairs of one path, of V alone."""
    for i in range(v.shape[0]):
        write_number(record.variance, lane, k, i, scale * v[i, i, lane])
    for q in range(len(record.pairs)):
        i, j = record.pairs[q, 0], record.pairs[q, 1]
        write_number(record.pair_covariance, lane, k, q, scale * v[i, j, lane])
        squared = max(0.0, v[i, i, lane] + v[j, j, lane] - 2.0 * v[i, j, lane])
        write_number(record.distance, lane, k, q, scale * squared)


@kernel
def write_factor(factor, points, step, record, ledger):
    """As `write` for V = R Rᵀ, of which no more is formed than what is asked for."""
    k = first_at(points, step)
    if k == len(points) or points[k] != step:
        return
    if points_in(record.covariance) > 0:
        gram(factor, ledger.now)
        write(points, step, record, ledger)
    else:
        write_rows(factor, factor, False, points, step, record, ledger)


@kernel
def write_rows(tokens, rows, relative, points, step, record, ledger):
    """Variances and pairs of `tokens` (m, r, LANES); `rows` are they or, if `relative`, differences from the first."""
    k = first_at(points, step)
    while k < len(points) and points[k] == step:
        write_variances(tokens, k, record, ledger.tiles)
        write_pairs_of_rows(tokens, rows, relative, k, record, ledger.tiles)
        for lane in range(replicas_of(record)):
            if ledger.exits[lane] != np.inf:
                write_pairs(ledger.kept, lane, scale_of(ledger.kept, lane, record.largest), k, record)
        k += 1


@kernel
def write_variances(tokens, k, record, tiles):
    """|R_α|² of all tokens at point k."""
    for begin in range(0, tokens.shape[0], TILE):
        count = min(TILE, tokens.shape[0] - begin)
        for q in range(count):
            i = begin + q
            store(tiles, 0, q, inner(tokens, i, tokens, i, FIRST, tokens.shape[1]))
        write_lane_row(tiles, 0, count, begin, k, record.variance)


@kernel
def write_pairs_of_rows(tokens, rows, relative, k, record, tiles):
    """⟨R_α, R_β⟩ and |R_α − R_β|² of the pairs at point k."""
    for begin in range(0, len(record.pairs), TILE):
        count = min(TILE, len(record.pairs) - begin)
        for q in range(count):
            i, j = record.pairs[begin + q, 0], record.pairs[begin + q, 1]
            store(tiles, 0, q, inner(tokens, i, tokens, j, FIRST, tokens.shape[1]))
            store(tiles, 1, q, apart(rows, i, j, 0.0 if relative and i == 0 else 1.0))
        write_lane_row(tiles, 0, count, begin, k, record.pair_covariance)
        write_lane_row(tiles, 1, count, begin, k, record.distance)


@kernel
def apart(rows, i, j, weight):
    """|weight · R_i − R_j|²."""
    squared = everywhere(0.0)
    for k in range(rows.shape[1]):
        difference = weight * load(rows, i, k) - load(rows, j, k)
        squared = squared + difference * difference
    return squared
