r"""Replicas of N tokens, layer by layer."""

import numpy as np

from limitformer.numerics.kernels import driver, kernel
from limitformer.numerics.lanes import LANES
from limitformer.numerics.random import rewind
from limitformer.numerics.watch import count_whole, goes_on, halted
from limitformer.recording.exits import first_at
from limitformer.sphere.forest import look, plant
from limitformer.sphere.record import part_of, record_workspace, write_point
from limitformer.sphere.tokens import GRAM, advance_tokens, begin_tokens, open_relations, token_workspace


@driver
def run_tokens(
    start,
    start_parent,
    start_sign,
    how,
    constants,
    bilinear,
    key_words,
    start_key,
    query_key,
    points,
    first,
    coordinates,
    record,
    watch,
):
    """Replicas `first`, … of N tokens, `record` as in `record`.

    `start` (N, r) is as `how` says, with differences where `start_parent` and `start_sign` (N,) say so (`relations`).
    """
    tokens, replicas = start.shape[0], record.overlap.shape[0]
    work = token_workspace(tokens, coordinates, constants, bilinear)
    relations, record_work = open_relations(tokens, coordinates), record_workspace(tokens)
    for begin in range(0, replicas, LANES):
        rows = part_of(record, begin, min(begin + LANES, replicas))
        replica = np.uint64(first + begin)
        begin_tokens(start, how, constants, start_key, query_key, replica, work)
        plant(start_parent, start_sign, constants.attention, work.x, relations.forest)
        run_lanes(constants, key_words, replica, points, rows, record_work, work, relations, watch)
        if halted(watch):
            return
        count_whole(watch, min(LANES, replicas - begin))


@kernel
def run_lanes(constants, key_words, replica, points, record, record_work, work, relations, watch):
    """All layers of the replicas that run side by side."""
    forest = relations.forest
    if constants.draw == GRAM:
        rewind(work.stream, key_words, replica)
    for layer in range(constants.layers + 1):
        if not goes_on(watch, record.overlap.shape[0], layer / (constants.layers + 1)):
            return
        if layer > 0:
            advance_tokens(layer, constants, key_words, replica, work, relations)
        if constants.near > 0.0 and layer % constants.look == 0:
            look(work.x, constants.near, layer % constants.change == 0, constants.attention, forest)
        k = first_at(points, layer)
        while k < len(points) and points[k] == layer:
            write_point(work.x, forest, k, record, record_work)
            k += 1
