"""Recording of N tokens, eight replicas at a time: overlaps of pairs, outcomes or positions."""

from typing import NamedTuple

import numpy as np

from limitformer.numerics.factor import FIRST
from limitformer.numerics.kernels import allocator, driver, kernel
from limitformer.numerics.lanes import LANES, everywhere, lane_matrix, load, smaller, store, where_positive
from limitformer.sampling.arrays import TILE, ResultArray, entries_in, replicas_between, write_lane_row
from limitformer.sphere.outcome import count_clusters, measure, sort_replica


class Record(NamedTuple):
    """Output arrays of one kernel call; an array that is not written has no columns."""

    pairs: np.ndarray  # (pairs, 2), all pairs for outcomes
    tolerance: float
    overlap: ResultArray  # one entry per pair
    gap: ResultArray
    outcome: np.ndarray  # (replicas, points, 4)
    positions: ResultArray  # N r entries
    stopped: np.ndarray  # (replicas,): layer of an early stop


class RecordWorkspace(NamedTuple):
    """Scratch memory."""

    minus: np.ndarray  # (1, TILE, LANES): 1 − z, then z
    plus: np.ndarray  # (1, TILE, LANES): 1 + z, then 1 − |z|
    parent: np.ndarray  # (LANES, N): an earlier token of the same cluster
    size: np.ndarray  # (N,): tokens per cluster


@allocator
def record_workspace(tokens):
    parent, size = np.empty((LANES, tokens), np.int64), np.empty(tokens, np.int64)
    return RecordWorkspace(lane_matrix(1, TILE), lane_matrix(1, TILE), parent, size)


@driver
def part_of(record, begin, end):
    """Return the rows of replicas begin … end − 1."""
    return Record(
        record.pairs,
        record.tolerance,
        replicas_between(record.overlap, begin, end),
        replicas_between(record.gap, begin, end),
        record.outcome[begin:end],
        replicas_between(record.positions, begin, end),
        record.stopped[begin:end],
    )


@kernel
def write_point(x, tree, k, record, work):
    """Write point k of LANES replicas with tokens `x` (N, r, LANES) and links `tree`."""
    if entries_in(record.overlap) > 0:
        write_overlaps(x, tree, k, record, work)
    if record.outcome.shape[2] > 0:
        write_outcomes(x, tree, k, record, work)
    if entries_in(record.positions) > 0:
        for i in range(x.shape[0]):
            write_lane_row(x, i, x.shape[1], i * x.shape[1], k, record.positions)


@kernel
def write_overlaps(x, tree, k, record, work):
    """Write z and 1 − |z| of all recorded pairs."""
    for begin in range(0, len(record.pairs), TILE):
        count = min(TILE, len(record.pairs) - begin)
        measure(x, tree, record.pairs, begin, count, work.minus, work.plus)
        take_overlaps(count, work.minus, work.plus)
        write_lane_row(work.minus, FIRST, count, begin, k, record.overlap)
        write_lane_row(work.plus, FIRST, count, begin, k, record.gap)


@kernel
def take_overlaps(count, minus, plus):
    """Replace (1 − z, 1 + z) by (z, 1 − |z|)."""
    for q in range(count):
        apart, across = load(minus, FIRST, q), load(plus, FIRST, q)
        gap = smaller(apart, across)
        sign = 1.0 - where_positive(apart - across, everywhere(2.0))
        store(minus, FIRST, q, sign * (1.0 - gap))
        store(plus, FIRST, q, gap)


@kernel
def write_outcomes(x, tree, k, record, work):
    replicas = record.outcome.shape[0]
    for lane in range(replicas):
        record.outcome[lane, k, :] = 0
        for i in range(x.shape[0]):
            work.parent[lane, i] = i
    for begin in range(0, len(record.pairs), TILE):
        count = min(TILE, len(record.pairs) - begin)
        measure(x, tree, record.pairs, begin, count, work.minus, work.plus)
        for lane in range(replicas):
            sort_replica(
                record.pairs,
                begin,
                count,
                lane,
                record.tolerance,
                work.minus,
                work.plus,
                work.parent[lane],
                record.outcome[lane, k],
            )
    for lane in range(replicas):
        count_clusters(work.parent[lane], work.size, record.outcome[lane, k])
