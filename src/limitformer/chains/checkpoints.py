"""Checkpoints of a chain: the factor before each sublayer, and the place of its stream of random numbers.

With both a sublayer can be computed once more, number for number; so the backward pass needs nothing else of the
forward one, and memory for one factor a sublayer.
"""

from typing import NamedTuple

import numpy as np

from limitformer.factor import copy
from limitformer.kernels import driver, kernel
from limitformer.lanes import LANES, lane_matrix
from limitformer.random import BUFFER, U64, refill


class Checkpoints(NamedTuple):
    """Of all sublayers of `LANES` replicas."""

    factors: np.ndarray  # (sublayers, m, r, LANES)
    blocks: np.ndarray  # (sublayers,): the stream's next block
    positions: np.ndarray  # (sublayers,): in its buffer
    retries: np.ndarray  # (sublayers, LANES)


@driver
def lane_stack(count, rows, columns):
    """`count` matrices (rows, columns, LANES)."""
    return lane_matrix(count * rows, columns).reshape((count, rows, columns, LANES))


@driver
def open_checkpoints(count, tokens, rank):
    return Checkpoints(
        lane_stack(count, tokens, rank),
        np.zeros(count, np.uint64),
        np.zeros(count, np.int64),
        np.zeros((count, LANES), np.uint64),
    )


@kernel
def save_checkpoint(stream, factor, k, checkpoints):
    """Keep the factor before sublayer k, and where the stream is."""
    copy(factor, checkpoints.factors[k])
    checkpoints.blocks[k] = stream.words[3]
    checkpoints.positions[k] = stream.position[0]
    for lane in range(LANES):
        checkpoints.retries[k, lane] = stream.retries[lane]


@kernel
def restore_checkpoint(stream, factor, k, checkpoints):
    """The same factor again, and the same numbers to come."""
    copy(checkpoints.factors[k], factor)
    stream.words[3] = checkpoints.blocks[k]
    if checkpoints.positions[k] < BUFFER:
        stream.words[3] -= U64(BUFFER // 4)
        refill(stream)
    stream.position[0] = checkpoints.positions[k]
    for lane in range(LANES):
        stream.retries[lane] = checkpoints.retries[k, lane]
