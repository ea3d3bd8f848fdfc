"""Checkpoints of a chain: the factor before each sublayer, and the position of its stream of random numbers.

Both together reproduce a sublayer number for number. The backward pass therefore needs nothing else of the forward
pass, and the memory of a checkpoint is one factor.
"""

from typing import NamedTuple

import numpy as np

from limitformer.numerics.factor import copy
from limitformer.numerics.kernels import allocator, kernel
from limitformer.numerics.lanes import LANES
from limitformer.numerics.random import BUFFER, U64, refill


class Checkpoints(NamedTuple):
    """One checkpoint for each sublayer of every layer."""

    factors: np.ndarray  # (sublayers, m, r, LANES)
    blocks: np.ndarray  # (sublayers,): the stream's next block
    positions: np.ndarray  # (sublayers,): the next number in the stream's buffer
    retries: np.ndarray  # (sublayers, LANES)


@allocator
def open_checkpoints(factors):
    count = factors.shape[0]
    return Checkpoints(
        factors, np.zeros(count, np.uint64), np.zeros(count, np.int64), np.zeros((count, LANES), np.uint64)
    )


@kernel
def save_checkpoint(stream, factor, k, checkpoints):
    copy(factor, checkpoints.factors[k])
    checkpoints.blocks[k] = stream.words[3]
    checkpoints.positions[k] = stream.position[0]
    for lane in range(LANES):
        checkpoints.retries[k, lane] = stream.retries[lane]


@kernel
def restore_checkpoint(stream, factor, k, checkpoints):
    copy(checkpoints.factors[k], factor)
    stream.words[3] = checkpoints.blocks[k]
    if checkpoints.positions[k] < BUFFER:
        stream.words[3] -= U64(BUFFER // 4)
        refill(stream)
    stream.position[0] = checkpoints.positions[k]
    for lane in range(LANES):
        stream.retries[lane] = checkpoints.retries[k, lane]
