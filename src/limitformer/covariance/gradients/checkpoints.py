"""Checkpoints of a chain: the factor before each sublayer, and the place of its stream of random numbers.

With both a sublayer can be computed once more, number for number; so the way down needs nothing else of the way up, and
memory for one factor a sublayer.
"""

from typing import NamedTuple

import numpy as np

from limitformer.covariance.gradients.layout import CHECKPOINT
from limitformer.covariance.gradients.scratch import matrix_of
from limitformer.numerics.factor import copy
from limitformer.numerics.kernels import allocator, kernel
from limitformer.numerics.lanes import LANES
from limitformer.numerics.random import BUFFER, U64, refill


class Places(NamedTuple):
    """Of a stream before every sublayer."""

    blocks: np.ndarray  # (sublayers,): its next block
    positions: np.ndarray  # (sublayers,): in its buffer
    retries: np.ndarray  # (sublayers, LANES)


@allocator
def open_places(count):
    return Places(np.zeros(count, np.uint64), np.zeros(count, np.int64), np.zeros((count, LANES), np.uint64))


@kernel
def save_checkpoint(stream, factor, k, places, scratch):
    """Keep the factor before sublayer k, and where the stream is."""
    copy(factor, matrix_of(scratch, CHECKPOINT, k))
    places.blocks[k] = stream.words[3]
    places.positions[k] = stream.position[0]
    for lane in range(LANES):
        places.retries[k, lane] = stream.retries[lane]


@kernel
def restore_checkpoint(stream, factor, k, places, scratch):
    """The same factor again, and the same numbers to come."""
    copy(matrix_of(scratch, CHECKPOINT, k), factor)
    stream.words[3] = places.blocks[k]
    if places.positions[k] < BUFFER:
        stream.words[3] -= U64(BUFFER // 4)
        refill(stream)
    stream.position[0] = places.positions[k]
    for lane in range(LANES):
        stream.retries[lane] = places.retries[k, lane]
