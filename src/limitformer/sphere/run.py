r"""Replicas of N tokens, layer by layer, and what is written down of them."""

import numpy as np

from limitformer.kernels import driver, kernel
from limitformer.lanes import LANES
from limitformer.random import rewind
from limitformer.recording import first_at
from limitformer.sphere.outcome import write_outcome, write_overlaps
from limitformer.sphere.tokens import GRAM, advance_tokens, begin_tokens, token_workspace


@driver
def run_tokens(
    start,
    how,
    constants,
    bilinear,
    key_words,
    start_key,
    points,
    first,
    tolerance,
    coordinates,
    overlap,
    gap,
    outcome,
    positions,
):
    """Replicas `first`, … of N tokens; what is not to be kept has no entries.

    `start` (N, r) as `how` says; `overlap` and `gap` (replicas, points, pairs), `outcome` (replicas, points, 4),
    `positions` (replicas, points, N, r).
    """
    tokens = start.shape[0]
    work = token_workspace(tokens, coordinates, constants, bilinear)
    parent = np.empty(tokens, np.int64)
    for begin in range(0, overlap.shape[0], LANES):
        end = min(begin + LANES, overlap.shape[0])
        replica = np.uint64(first + begin)
        begin_tokens(start, how, constants, start_key, replica, work)
        run_lanes(
            constants,
            key_words,
            replica,
            points,
            tolerance,
            parent,
            overlap[begin:end],
            gap[begin:end],
            outcome[begin:end],
            positions[begin:end],
            work,
        )


@kernel
def run_lanes(constants, key_words, replica, points, tolerance, parent, overlap, gap, outcome, positions, work):
    """All layers of the replicas that run side by side."""
    if constants.draw == GRAM:
        rewind(work.stream, key_words, replica)
    for layer in range(constants.layers + 1):
        if layer > 0:
            advance_tokens(layer, constants, key_words, replica, work)
        k = first_at(points, layer)
        while k < len(points) and points[k] == layer:
            for lane in range(overlap.shape[0]):
                write_lane(work.x, lane, k, tolerance, parent, overlap, gap, outcome, positions)
            k += 1


@kernel
def write_lane(x, lane, k, tolerance, parent, overlap, gap, outcome, positions):
    """What is to be kept of one replica at point k."""
    if overlap.shape[2] > 0:
        write_overlaps(x, lane, overlap[lane, k], gap[lane, k])
    if outcome.shape[2] > 0:
        write_outcome(x, lane, tolerance, parent, outcome[lane, k])
    for i in range(positions.shape[2]):
        for c in range(positions.shape[3]):
            positions[lane, k, i, c] = x[i, c, lane]
