"""Recordings of covariances: V of all tokens, or variances, covariances and distances of pairs.

A pair has V_αβ and the distance |x_α − x_β|²/n, a token V_αα. From the rows of a factor, V = R Rᵀ, the distance is
|R_α − R_β|², without cancellation. V alone gives only V_αα + V_ββ − 2 V_αβ, which is rounding below 1e-15 |x|²/n; rows
that are rounded to a few 1e-16 of their length resolve distances down to about 1e-30 |x|²/n. Every layer adds its
rounding, and later layers change it as they change any distance: `distance_floor` in the results bounds the rounding of
one layer.
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
from limitformer.sampling.arrays import (
    TILE,
    Dtype,
    Outputs,
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
from limitformer.sampling.exits import INSIDE, first_at

Keep = Literal["covariance", "pairs"]

# The rounding of one layer or step in a distance, over the larger variance: from a factor, and from V.
FACTOR_FLOOR = 1e-27
VALUE_FLOOR = 1e-14
# The largest entry that is written, and a quarter of the largest distance: a tenth of the type's largest number.
LARGEST: dict[str, float] = {"float64": np.inf, "float32": 3e37}


class OutputArrays(NamedTuple):
    """Output arrays of one kernel call; an array with no points is not written."""

    pairs: np.ndarray  # (pairs, 2)
    largest: float  # largest entry that is written of a path that has left
    covariance: ResultArray  # m m entries: V
    variance: ResultArray  # m entries: diag V
    pair_covariance: ResultArray  # an entry a pair
    distance: ResultArray


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The quantities of V that are recorded, by the options of `limitformer.simulate` with these names.

    Raises:
        InputError: a value out of range.
    """

    keep: Keep = "covariance"
    pairs: Pairs | None = None
    dtype: Dtype = "float64"

    def __post_init__(self) -> None:
        require_known("keep", self.keep, Keep)
        set_fields(self, pairs=checked_pairs(self.pairs), dtype=checked_dtype(self.dtype))
        unused = self.pairs is not None and self.keep == "covariance"
        require(not unused, 'pairs has no effect with keep="covariance", which is all of V; use keep="pairs".')

    def pairs_among(self, tokens: int) -> NDArray[np.int64]:
        """Return the pairs (pairs, 2) of this many tokens, none if V is recorded.

        Raises:
            InputError: a token that is not there, or no pair.
        """
        if self.keep == "covariance":
            return np.zeros((0, 2), np.int64)
        require(tokens > 1, 'One token makes no pair. Nearest: keep="covariance".')
        return pairs_of(self.pairs, tokens)

    def shapes(self, samples: int, points: int, tokens: int) -> Shapes:
        """Return the shapes of the arrays for the results; an array that is not recorded has no points."""
        whole = points if self.keep == "covariance" else 0
        part, pairs = points - whole, len(self.pairs_among(tokens))
        return {
            "covariance": ((samples, whole, tokens**2), self.dtype),
            "variance": ((samples, part, tokens), self.dtype),
            "pair_covariance": ((samples, part, pairs), self.dtype),
            "distance": ((samples, part, pairs), self.dtype),
            "exits": ((samples,), np.float64),
            "causes": ((samples,), np.int8),
        }

    def shared_shapes(self, points: int, tokens: int) -> Shapes:
        """Return the shapes of the arrays that all samples share: coordinates, without names of tokens, and V₀."""
        coordinates = coordinate_shapes(points, len(self.pairs_among(tokens)))
        return {**coordinates, "start_covariance": ((tokens, tokens), np.float64)}

    def outputs(self, samples: int, points: int, tokens: int, axis: str) -> Outputs:
        """Return arrays for the results.

        Raises:
            InputError: they do not fit the memory.
        """
        smaller = smaller_recordings(self.dtype, len(self.pairs_among(tokens)))
        if self.keep == "covariance" and tokens > 2:
            smaller.append('only some pairs (keep="pairs", pairs=[(0, 1)])')
        shapes, shared = self.shapes(samples, points, tokens), self.shared_shapes(points, tokens)
        outputs = new_outputs(shapes, shared, samples, points, axis, smaller)
        outputs["exits"].fill(np.inf)
        outputs["causes"].fill(INSIDE)
        return outputs

    def output_arrays(self, outputs: Outputs, tokens: int) -> OutputArrays:
        """Return `outputs` in the form that kernels fill."""
        names = ("covariance", "variance", "pair_covariance", "distance")
        return OutputArrays(
            self.pairs_among(tokens), LARGEST[self.dtype], *(as_result_array(outputs[name]) for name in names)
        )

    def fill(self, covariance: NDArray[np.float64], outputs: Outputs) -> None:
        """Write one path V (points, m, m) to every sample of `outputs`."""
        m = covariance.shape[-1]
        if self.keep == "covariance":
            outputs["covariance"][:] = covariance.reshape(-1, m * m)
            return
        i, j = self.pairs_among(m).T
        variance, shared = np.diagonal(covariance, axis1=1, axis2=2), covariance[:, i, j]
        outputs["variance"][:], outputs["pair_covariance"][:] = variance, shared
        outputs["distance"][:] = np.maximum(variance[:, i] + variance[:, j] - 2 * shared, 0)

    def settings(self, floor: float) -> dict[str, Any]:
        """Return the attributes of the results; `floor` is that of distances, relative to the tokens' variance."""
        if self.keep == "covariance":
            return {"keep": self.keep, "dtype": self.dtype}
        pairs = "all" if self.pairs is None else json.dumps(self.pairs)
        return {"keep": self.keep, "dtype": self.dtype, "pairs": pairs, "distance_floor": floor}


ALL_OF_V = Recording()


class ReplicaSlice(NamedTuple):
    """The slice of replicas, and the output arrays, that one kernel call works on."""

    first: int
    key_words: np.ndarray
    points: np.ndarray  # layers or steps to record, ascending
    radius: float  # of the ball; a path that leaves it stops
    arrays: OutputArrays
    exits: np.ndarray
    causes: np.ndarray


class HasRecording(Protocol):
    @property
    def start(self) -> Start: ...
    @property
    def points(self) -> NDArray[Any]: ...
    @property
    def recording(self) -> Recording: ...
    @property
    def axis(self) -> str: ...


class HasBall(HasRecording, Protocol):
    @property
    def radius(self) -> float: ...


class CovarianceProcess:
    """The part of `paths.process.Process` that chains and limits of covariances share."""

    @property
    def tokens(self: HasRecording) -> int:
        return self.start.tokens

    def shapes(self: HasRecording, samples: int) -> Shapes:
        return self.recording.shapes(samples, len(self.points), self.start.tokens)

    @property
    def shared_shapes(self: HasRecording) -> Shapes:
        return self.recording.shared_shapes(len(self.points), self.start.tokens)

    def outputs(self: HasRecording, samples: int) -> Outputs:
        return self.recording.outputs(samples, len(self.points), self.start.tokens, self.axis)

    def share(
        self: HasBall, outputs: Outputs, first: int, key_words: NDArray[np.uint64], points: NDArray[Any]
    ) -> ReplicaSlice:
        """Return the slice of the replicas `first` …, as many as `outputs` have room for."""
        arrays = self.recording.output_arrays(outputs, self.start.tokens)
        return ReplicaSlice(first, key_words, points, self.radius, arrays, outputs["exits"], outputs["causes"])


@driver
def rows_of(arrays, begin):
    """Return the part of the arrays for the `LANES` replicas from `begin` on."""
    end = begin + LANES
    return OutputArrays(
        arrays.pairs,
        arrays.largest,
        replicas_between(arrays.covariance, begin, end),
        replicas_between(arrays.variance, begin, end),
        replicas_between(arrays.pair_covariance, begin, end),
        replicas_between(arrays.distance, begin, end),
    )


@kernel
def replicas_of(arrays):
    """Return how many replicas are written, at most LANES."""
    return replicas_in(arrays.covariance)


@kernel
def write(points, step, arrays, ledger):
    """Write V (`ledger.now`, or V at the exit), or pairs computed from V, to every point that equals `step`."""
    k = first_at(points, step)
    while k < len(points) and points[k] == step:
        for lane in range(replicas_of(arrays)):
            if ledger.exits[lane] == np.inf:
                write_value(ledger.now, lane, 1.0, k, arrays)
            else:
                write_value(ledger.at_exit, lane, scale_of(ledger.at_exit, lane, arrays.largest), k, arrays)
        k += 1


@kernel
def scale_of(v, lane, largest):
    """Return the factor that scales V of one path so that no entry exceeds `largest`."""
    size = 0.0
    for i in range(v.shape[0]):
        size = max(size, v[i, i, lane])
    return 1.0 if size <= largest else largest / size


@kernel
def write_value(v, lane, scale, k, arrays):
    if points_in(arrays.covariance) > 0:
        write_covariance(v, lane, scale, k, arrays.covariance)
    else:
        write_pairs(v, lane, scale, k, arrays)


@kernel
def write_covariance(v, lane, scale, k, covariance):
    m = v.shape[0]
    for i in range(m):
        for j in range(m):
            write_number(covariance, lane, k, i * m + j, scale * v[i, j, lane])


@kernel
def write_pairs(v, lane, scale, k, arrays):
    """Write variances and pairs of one path, computed from V."""
    for i in range(v.shape[0]):
        write_number(arrays.variance, lane, k, i, scale * v[i, i, lane])
    for q in range(len(arrays.pairs)):
        i, j = arrays.pairs[q, 0], arrays.pairs[q, 1]
        write_number(arrays.pair_covariance, lane, k, q, scale * v[i, j, lane])
        squared = max(0.0, v[i, i, lane] + v[j, j, lane] - 2.0 * v[i, j, lane])
        write_number(arrays.distance, lane, k, q, scale * squared)


@kernel
def write_factor(factor, points, step, arrays, ledger):
    """Do the same as `write` for V = R Rᵀ, of which only the recorded entries are formed."""
    k = first_at(points, step)
    if k == len(points) or points[k] != step:
        return
    if points_in(arrays.covariance) > 0:
        gram(factor, ledger.now)
        write(points, step, arrays, ledger)
    else:
        write_rows(factor, factor, False, points, step, arrays, ledger)


@kernel
def write_rows(tokens, rows, relative, points, step, arrays, ledger):
    """Write variances and pairs of `tokens` (m, r, LANES).

    `rows` are the tokens or, if `relative`, their differences from the first.
    """
    k = first_at(points, step)
    while k < len(points) and points[k] == step:
        write_variances(tokens, k, arrays, ledger.tiles)
        write_pairs_of_rows(tokens, rows, relative, k, arrays, ledger.tiles)
        for lane in range(replicas_of(arrays)):
            if ledger.exits[lane] != np.inf:
                write_pairs(ledger.at_exit, lane, scale_of(ledger.at_exit, lane, arrays.largest), k, arrays)
        k += 1


@kernel
def write_variances(tokens, k, arrays, tiles):
    """Write |R_α|² of all tokens at point k."""
    for begin in range(0, tokens.shape[0], TILE):
        count = min(TILE, tokens.shape[0] - begin)
        for q in range(count):
            i = begin + q
            store(tiles, 0, q, inner(tokens, i, tokens, i, FIRST, tokens.shape[1]))
        write_lane_row(tiles, 0, count, begin, k, arrays.variance)


@kernel
def write_pairs_of_rows(tokens, rows, relative, k, arrays, tiles):
    """Write ⟨R_α, R_β⟩ and |R_α − R_β|² of the pairs at point k."""
    for begin in range(0, len(arrays.pairs), TILE):
        count = min(TILE, len(arrays.pairs) - begin)
        for q in range(count):
            i, j = arrays.pairs[begin + q, 0], arrays.pairs[begin + q, 1]
            store(tiles, 0, q, inner(tokens, i, tokens, j, FIRST, tokens.shape[1]))
            store(tiles, 1, q, apart(rows, i, j, 0.0 if relative and i == 0 else 1.0))
        write_lane_row(tiles, 0, count, begin, k, arrays.pair_covariance)
        write_lane_row(tiles, 1, count, begin, k, arrays.distance)


@kernel
def apart(rows, i, j, weight):
    """Return |weight · R_i − R_j|²."""
    squared = everywhere(0.0)
    for k in range(rows.shape[1]):
        difference = weight * load(rows, i, k) - load(rows, j, k)
        squared = squared + difference * difference
    return squared
