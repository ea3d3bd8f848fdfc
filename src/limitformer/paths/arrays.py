"""What is kept of tokens: which pairs, in which type, how much memory it takes; and from eight lanes to rows."""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import InputError, require
from limitformer.base.memory import check_bytes
from limitformer.numerics.kernels import driver, kernel

Dtype = Literal["float64", "float32"]
Pairs = tuple[tuple[int, int], ...]
Shapes = Mapping[str, tuple[tuple[int, ...], Any]]  # of arrays: name → shape and type

TILE = 64  # entries that are turned from lanes to rows at a time: both stay in the first cache


class ResultArray(NamedTuple):
    """An array of results (replicas, points, entries) of one type, and one without points of the other.

    So a kernel is compiled once, for both.
    """

    double: np.ndarray
    single: np.ndarray


def as_result_array(array: NDArray[Any]) -> ResultArray:
    """`array` (replicas, points, entries) as kernels fill it."""
    replicas, _, entries = array.shape
    of_type = {np.dtype(kind): np.empty((replicas, 0, entries), kind) for kind in (np.float64, np.float32)}
    of_type[array.dtype] = array
    return ResultArray(of_type[np.dtype(np.float64)], of_type[np.dtype(np.float32)])


@driver
def replicas_between(kept, begin, end):
    """Those of the replicas begin … end − 1."""
    return ResultArray(kept.double[begin:end], kept.single[begin:end])


@kernel
def replicas_in(kept):
    return kept.double.shape[0]


@kernel
def points_in(kept):
    return kept.double.shape[1] + kept.single.shape[1]


@kernel
def entries_in(kept):
    return kept.double.shape[2]


@kernel
def write_number(kept, replica, k, j, value):
    """Entry j at point k of one replica."""
    if kept.double.shape[1] > 0:
        kept.double[replica, k, j] = value
    else:
        kept.single[replica, k, j] = value


@kernel
def write_lane_row(source, i, count, begin, k, kept):
    """Row i of `source` (rows, ≥ count, LANES) to entries begin … of point k in `kept`, of at most LANES replicas."""
    if kept.double.shape[1] > 0:
        spill(source, i, count, begin, k, kept.double)
    else:
        spill(source, i, count, begin, k, kept.single)


@kernel
def spill(source, i, count, begin, k, out):
    for lane in range(out.shape[0]):
        for j in range(count):
            out[lane, k, begin + j] = source[i, j, lane]


def all_pairs(tokens: int) -> NDArray[np.int64]:
    """(pairs, 2): the tokens of every pair, in the order of `numpy.triu_indices`."""
    return np.stack(np.triu_indices(tokens, 1), axis=1).astype(np.int64)


def checked_pairs(pairs: Any) -> Pairs | None:
    """`pairs` as tuples of two whole numbers, the smaller first; None stands for all of them.

    Raises:
        InputError: no list of pairs, a token with itself, or a pair twice.

    >>> checked_pairs([(0, 1), (4, 2)])
    ((0, 1), (2, 4))
    """
    if pairs is None:
        return None
    try:
        found = np.asarray(pairs)
        good = found.ndim == 2 and found.shape[1] == 2 and len(found) > 0 and found.dtype.kind in "iu"
    except ValueError:
        good = False
    require(good, f"pairs must be a list of pairs of tokens, such as [(0, 1), (2, 4)], or None; got {pairs!r}.")
    ordered: Pairs = tuple((min(pair), max(pair)) for pair in found.tolist())
    seen: set[tuple[int, ...]] = set()
    for pair in ordered:
        require(pair[0] != pair[1], f"A pair is two tokens; got {pair}.")
        require(pair not in seen, f"pairs must differ; {pair} is there twice.")
        seen.add(pair)
    return ordered


def pairs_of(pairs: Pairs | None, tokens: int) -> NDArray[np.int64]:
    """(pairs, 2): all of them if None.

    Raises:
        InputError: a token that is not there.
    """
    if pairs is None:
        return all_pairs(tokens)
    found = np.array(pairs, np.int64)
    outside = [token for token in found.ravel().tolist() if not 0 <= token < tokens]
    require(not outside, f"pairs must be of tokens 0 … {tokens - 1}; got {outside[0] if outside else ''}.")
    return found


def checked_dtype(dtype: Any) -> Dtype:
    """The name of the type that numbers are kept in; also from `numpy.float32` and the like."""
    try:
        name = None if dtype is None else np.dtype(dtype).name
    except TypeError:
        name = None
    for known in get_args(Dtype):
        if name == known:
            return known
    raise InputError(f"dtype must be one of {', '.join(get_args(Dtype))}; got {dtype!r}.")


def bytes_of(shapes: Shapes) -> int:
    """What arrays of these shapes take."""
    return sum(prod(shape) * np.dtype(kind).itemsize for shape, kind in shapes.values())


def coordinate_shapes(points: int, pairs: int) -> Shapes:
    """Of what results have once, whatever the samples: the points and the two tokens of every pair."""
    return {"points": ((points,), np.float64), "pair_tokens": ((pairs, 2), np.int64)}


def new_outputs(
    shapes: Shapes, once: Shapes, samples: int, points: int, axis: str, smaller: Iterable[str]
) -> dict[str, Any]:
    """Arrays of `shapes` that are not filled yet; `once` is what the results will have beside them.

    Raises:
        InputError: they do not fit the memory; the message says how to keep less, `smaller` among it.
    """
    check_bytes(bytes_of(shapes) + bytes_of(once), samples, points, axis, smaller)
    return {name: np.empty(shape, kind) for name, (shape, kind) in shapes.items()}


def smaller_recordings(dtype: Dtype, pairs: int) -> list[str]:
    """How a recording of so many pairs could take less, beside fewer points: in words, for `new_outputs`."""
    halved = ['dtype="float32" for half of it'] if dtype == "float64" else []
    return halved + ([f"fewer than these {pairs:,} pairs"] if pairs > 1 else [])
