"""Output arrays: which pairs of tokens, which type, how much memory; and the way from eight lanes to rows."""

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
Shapes = Mapping[str, tuple[tuple[int, ...], Any]]  # array name → shape and type
Outputs = dict[str, NDArray[Any]]  # array name → (samples, …)

TILE = 64  # entries that go from lanes to rows at a time: both stay in the first cache


class ResultArray(NamedTuple):
    """An array of results (replicas, points, entries) of one type, and one without points of the other type.

    With both in every call, a kernel is compiled once and not for each type.
    """

    double: np.ndarray
    single: np.ndarray


def as_result_array(array: NDArray[Any]) -> ResultArray:
    replicas, _, entries = array.shape
    of_type = {np.dtype(kind): np.empty((replicas, 0, entries), kind) for kind in (np.float64, np.float32)}
    of_type[array.dtype] = array
    return ResultArray(of_type[np.dtype(np.float64)], of_type[np.dtype(np.float32)])


@driver
def replicas_between(array, begin, end):
    return ResultArray(array.double[begin:end], array.single[begin:end])


@kernel
def replicas_in(array):
    return array.double.shape[0]


@kernel
def points_in(array):
    return array.double.shape[1] + array.single.shape[1]


@kernel
def entries_in(array):
    return array.double.shape[2]


@kernel
def write_number(array, replica, k, j, value):
    """Write entry j at point k of one replica."""
    if array.double.shape[1] > 0:
        array.double[replica, k, j] = value
    else:
        array.single[replica, k, j] = value


@kernel
def write_lane_row(source, i, count, begin, k, array):
    """Copy row i of `source` (rows, ≥ count, LANES) to entries begin … of point k, for at most LANES replicas."""
    if array.double.shape[1] > 0:
        copy_lane_row(source, i, count, begin, k, array.double)
    else:
        copy_lane_row(source, i, count, begin, k, array.single)


@kernel
def copy_lane_row(source, i, count, begin, k, out):
    for lane in range(out.shape[0]):
        for j in range(count):
            out[lane, k, begin + j] = source[i, j, lane]


def all_pairs(tokens: int) -> NDArray[np.int64]:
    """Return the tokens of every pair (pairs, 2), in the order of `numpy.triu_indices`."""
    return np.stack(np.triu_indices(tokens, 1), axis=1).astype(np.int64)


def checked_pairs(pairs: Any) -> Pairs | None:
    """Return `pairs` as tuples of two whole numbers, the smaller first; None stands for all of them.

    Raises:
        InputError: not a list of pairs, a token with itself, or a pair twice.

    >>> checked_pairs([(0, 1), (4, 2)])
    ((0, 1), (2, 4))
    """
    if pairs is None:
        return None
    try:
        array = np.asarray(pairs)
        good = array.ndim == 2 and array.shape[1] == 2 and len(array) > 0 and array.dtype.kind in "iu"
    except ValueError:
        good = False
    require(good, f"pairs must be a list of pairs of tokens, such as [(0, 1), (2, 4)], or None; got {pairs!r}.")
    ordered: Pairs = tuple((min(pair), max(pair)) for pair in array.tolist())
    seen: set[tuple[int, ...]] = set()
    for pair in ordered:
        require(pair[0] != pair[1], f"A pair is two tokens; got {pair}.")
        require(pair not in seen, f"pairs must differ; {pair} is there twice.")
        seen.add(pair)
    return ordered


def pairs_of(pairs: Pairs | None, tokens: int) -> NDArray[np.int64]:
    """Return `pairs` as an array (pairs, 2), all of them if None.

    Raises:
        InputError: a token that is not there.
    """
    if pairs is None:
        return all_pairs(tokens)
    array = np.array(pairs, np.int64)
    outside = [token for token in array.ravel().tolist() if not 0 <= token < tokens]
    require(not outside, f"pairs must be of tokens 0 … {tokens - 1}; got {outside[0] if outside else ''}.")
    return array


def checked_dtype(dtype: Any) -> Dtype:
    """Return the name of the type of the results, given also `numpy.float32` and the like."""
    try:
        name = None if dtype is None else np.dtype(dtype).name
    except TypeError:
        name = None
    for known in get_args(Dtype):
        if name == known:
            return known
    raise InputError(f"dtype must be one of {', '.join(get_args(Dtype))}; got {dtype!r}.")


def bytes_of(shapes: Shapes) -> int:
    return sum(prod(shape) * np.dtype(kind).itemsize for shape, kind in shapes.values())


def coordinate_shapes(points: int, pairs: int) -> Shapes:
    """Return the shapes of the coordinates that all samples share: the points and the two tokens of every pair."""
    return {"points": ((points,), np.float64), "pair_tokens": ((pairs, 2), np.int64)}


def new_outputs(
    shapes: Shapes, shared: Shapes, samples: int, points: int, axis: str, smaller: Iterable[str]
) -> Outputs:
    """Return empty arrays of `shapes`; `shared` are the shapes of the arrays that all samples share.

    Raises:
        InputError: they do not fit the memory; the message names smaller recordings, those in `smaller` too.
    """
    check_bytes(bytes_of(shapes) + bytes_of(shared), samples, points, axis, smaller)
    return {name: np.empty(shape, kind) for name, (shape, kind) in shapes.items()}


def smaller_recordings(dtype: Dtype, pairs: int) -> list[str]:
    """Return the words for recordings that take less memory, for the message of `new_outputs`."""
    halved = ['dtype="float32" for half of it'] if dtype == "float64" else []
    return halved + ([f"fewer than these {pairs:,} pairs"] if pairs > 1 else [])
