r"""Replicas of N tokens, layer by layer."""

import numpy as np

from limitformer.kernels import driver, kernel
from limitformer.lanes import LANES
from limitformer.random import rewind
from limitformer.recording import first_at
from limitformer.sphere.record import part_of, record_workspace, write_point
from limitformer.sphere.tokens import GRAM, advance_tokens, begin_tokens, token_workspace


@driver
def run_tokens(start, how, constants, bilinear, key_words, start_key, points, first, coordinates, record):
    """Replicas `first`, … of N tokens: `start` (N, r) as `how` says, `record` as in `record`."""
    tokens, replicas = start.shape[0], record.overlap.shape[0]
    work = token_workspace(tokens, coordinates, constants, bilinear)
    record_work = record_workspace(tokens)
    for begin in range(0, replicas, LANES):
        rows = part_of(record, begin, min(begin + LANES, replicas))
        replica = np.uint64(first + begin)
        begin_tokens(start, how, constants, start_key, replica, work)
        run_lanes(constants, key_words, replica, points, rows, record_work, work)


@kernel
def run_lanes(constants, key_words, replica, points, record, record_work, work):
    """All layers of the replicas that run side by side."""
    if constants.draw == GRAM:
        rewind(work.stream, key_words, replica)
    for layer in range(constants.layers + 1):
        if layer > 0:
            advance_tokens(layer, constants, key_words, replica, work)
        k = first_at(points, layer)
        while k < len(points) and points[k] == layer:
            write_point(work.x, k, record, record_work)
            k += 1
