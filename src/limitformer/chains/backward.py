r"""The exact law of a finite Transformer's gradients, with no n × n weight ever drawn: the chain, up and then down.

Letters. The tokens are X = √n R Q, Q with r orthonormal rows. The gradient of the loss in X, at any height, is

  G = P Q + T E,

P (m × r) its coordinates where the tokens are, E (s × n) orthonormal rows outside, s = min(m, n − r), T (m × s) a
factor of what G has there. The frame E need not be known: **given the tokens and all that lies below, and given P and
T, it is uniformly distributed (Haar) among the frames outside Q**, because the weights above are fresh and their law
does not change under rotations of R^n that leave Q as it is. That is what closes the recursion on (P, T).

A Gaussian weight W that is used once, in Z W with Z = S_Z Q_Z, Q_Z of orthonormal rows, has shown Q_Z W = N and nothing
else. Coming back with the gradient D of Z W it is therefore [the theorem of weightless networks, docs/weightless.md]

  D Wᵀ = D Nᵀ Q_Z + (a Gaussian matrix of row covariance D Dᵀ outside Q_Z),     |∂W|² = |S_Zᵀ D|².

N has to be the same as on the way up. So the way up leaves a checkpoint before each sublayer, the factor R and the
place in the stream of random numbers; on the way down each sublayer is computed once more from there
(`add_branch_reversibly`, `join_reversibly`, `activate_reversibly`), which leaves N, the attention and the reflections
in memory, and then backward: G′ as Γ in the directions that the sublayer knows (`backward_residual.unfold`), through
the branch (`backward_attention`, `backward_feedforward`) to its `pulled` part in Q and the factor C, `spread`, of its
Gaussian part outside, through the norm, and together again (`backward_residual.fold`). What is fresh on the way down
comes from a stream of its own.

The loss is ½|x|² of the last tokens, mean over the m tokens, so G = X/m at the top: P = √n R/m, T = 0.
"""

from typing import NamedTuple

import numpy as np

from limitformer.chains.backward_attention import (
    HeadsMemory,
    HeadsWorkspace,
    heads_memory,
    heads_workspace,
    join_reversibly,
    mix_reversibly,
    pull_through_head,
    pull_through_heads,
)
from limitformer.chains.backward_feedforward import (
    UnitsMemory,
    UnitsWorkspace,
    activate_reversibly,
    pull_through_units,
    units_memory,
    units_workspace,
)
from limitformer.chains.backward_residual import SumWorkspace, add_branch_reversibly, fold, sum_workspace, unfold
from limitformer.chains.checkpoints import Checkpoints, open_checkpoints, restore_checkpoint, save_checkpoint
from limitformer.chains.norm import normalise, pull_through_norm
from limitformer.chains.residual import POST_NORM, PRE_NORM
from limitformer.chains.start import turn_at_random
from limitformer.chains.transformer import ATTENTION, HEADS, Constants
from limitformer.factor import copy, put, trace_of_gram
from limitformer.kernels import driver, kernel
from limitformer.lanes import LANES, lane_matrix, load, square_root, store
from limitformer.random import Stream, open_stream, rewind
from limitformer.recording import Ledger, check_factor, clear, first_at, open_ledger, report
from limitformer.watch import count_whole, goes_on, halted
from limitformer.writing import replicas_of, rows_of, write_factor

WEIGHTS = np.array([3, 4, 2])  # of the sublayers ATTENTION, HEADS, FEEDFORWARD


class Workspace(NamedTuple):
    """Scratch of one thread; matrices have LANES behind."""

    stream: Stream
    fresh: Stream
    ledger: Ledger
    checkpoints: Checkpoints
    heads: HeadsMemory
    units: UnitsMemory
    through_heads: HeadsWorkspace
    through_units: UnitsWorkspace
    wide: SumWorkspace  # for the branch of [ST, eq. 1], which has r columns
    square: SumWorkspace  # for the others, which are triangular
    factor: np.ndarray  # (m, r): R
    previous: np.ndarray  # (m, r)
    normal: np.ndarray  # (m, r)
    summed: np.ndarray  # (m, r): R before a Post-norm
    direction: np.ndarray  # (r, 1)
    inside: np.ndarray  # (m, r): P
    outside: np.ndarray  # (m, s): T
    pulled: np.ndarray  # (m, r)
    spread: np.ndarray  # (m, m): C
    norms: np.ndarray  # (4, 1): |∂W|² of a sublayer's weights


class Gradients(NamedTuple):
    """What is kept of the gradients."""

    loss: np.ndarray  # (replicas,)
    stream: np.ndarray  # (replicas, points): |G|
    weights: np.ndarray  # (replicas, weights): |∂W|


@driver
def gradient_workspace(tokens, rank, count, constants):
    wide = sum_workspace(tokens, rank, rank, constants.residual)
    square = sum_workspace(tokens, rank, tokens, constants.residual)
    return Workspace(
        open_stream(),
        open_stream(),
        open_ledger(tokens),
        open_checkpoints(count, tokens, rank),
        heads_memory(tokens, rank, constants.attention),
        units_memory(tokens, rank, constants.feedforward),
        heads_workspace(tokens, rank, max(wide.gradient.shape[1], square.gradient.shape[1]), constants.attention),
        units_workspace(tokens, square.gradient.shape[1]),
        wide,
        square,
        lane_matrix(tokens, rank),
        lane_matrix(tokens, rank),
        lane_matrix(tokens, rank),
        lane_matrix(tokens, rank),
        lane_matrix(rank, 1),
        lane_matrix(tokens, rank),
        lane_matrix(tokens, min(tokens, constants.residual.outside)),
        lane_matrix(tokens, rank),
        lane_matrix(tokens, tokens),
        lane_matrix(4, 1),
    )


@driver
def run_replicas_with_gradients(
    start, turned, constants, sublayers, visible, layers, keys, first, radius, record, gradients, exits, causes, watch
):
    """As `transformer.run_replicas`, from the same numbers, and their `gradients`."""
    work = gradient_workspace(start.shape[0], start.shape[1], constants.depth * len(sublayers), constants)
    for begin in range(0, len(exits), LANES):
        rewind(work.stream, keys[0], np.uint64(first + begin))
        rewind(work.fresh, keys[1], np.uint64(first + begin))
        put(start, work.factor)
        if turned:
            spread = min(start.shape[0], constants.width)
            turn_at_random(work.stream, work.factor, work.direction, spread, constants.width)
        go_up(constants, sublayers, visible, layers, radius, rows_of(record, begin), work, watch)
        rows = Gradients(
            gradients.loss[begin : begin + LANES],
            gradients.stream[begin : begin + LANES],
            gradients.weights[begin : begin + LANES],
        )
        go_down(constants, sublayers, visible, layers, rows, work, watch)
        if halted(watch):
            return
        report(work.ledger, begin, exits, causes)
        count_whole(watch, min(LANES, len(exits) - begin))


@kernel
def go_up(constants, sublayers, visible, layers, radius, record, work, watch):
    """All layers of the replicas that run side by side, with a checkpoint before each sublayer."""
    clear(work.ledger)
    for layer in range(constants.depth + 1):
        if not goes_on(watch, replicas_of(record), layer / (3.0 * constants.depth + 1.0)):
            return
        copy(work.factor, work.previous)
        if layer > 0:
            for place in range(len(sublayers)):
                save_checkpoint(work.stream, work.factor, (layer - 1) * len(sublayers) + place, work.checkpoints)
                apply_reversibly(sublayers[place], constants, visible, work, watch)
        check_factor(work.factor, work.previous, layer, radius, work.ledger)
        write_factor(work.factor, layers, layer, record, work.ledger)


@kernel
def go_down(constants, sublayers, visible, layers, rows, work, watch):
    """The gradients, from the last layer to the first."""
    begin_at_the_top(constants, rows, work)
    column = rows.weights.shape[1]
    for layer in range(constants.depth, 0, -1):
        if not goes_on(watch, len(rows.loss), (3.0 * constants.depth - 2.0 * layer) / (3.0 * constants.depth + 1.0)):
            return
        write_stream(layers, layer, rows, work)
        for place in range(len(sublayers) - 1, -1, -1):
            restore_checkpoint(work.stream, work.factor, (layer - 1) * len(sublayers) + place, work.checkpoints)
            column -= WEIGHTS[sublayers[place]]
            pull_through_sublayer(sublayers[place], constants, visible, work, watch)
            write_weights(column, WEIGHTS[sublayers[place]], np.sqrt(constants.width) * constants.residual.branch, rows, work)
    write_stream(layers, 0, rows, work)


@kernel
def begin_at_the_top(constants, rows, work):
    """The loss; P = √n R/m, T = 0."""
    tokens = work.factor.shape[0]
    store(work.norms, 0, 0, 0.5 * constants.width / tokens * trace_of_gram(work.factor))
    for lane in range(len(rows.loss)):
        inside = work.ledger.exits[lane] == np.inf
        rows.loss[lane] = work.norms[0, 0, lane] if inside else np.nan
    for i in range(tokens):
        for k in range(work.factor.shape[1]):
            store(work.inside, i, k, np.sqrt(constants.width) / tokens * load(work.factor, i, k))
        for k in range(work.outside.shape[1]):
            store(work.outside, i, k, 0.0)


@kernel
def source_of(residual, work):
    """What a branch starts from: R, or its normal."""
    if residual.placement == PRE_NORM:
        normalise(work.factor, residual.mean_columns, residual.eps, work.normal)
    else:
        copy(work.factor, work.normal)


@kernel
def apply_reversibly(sublayer, constants, visible, work, watch):
    """As `transformer.apply_sublayer`; `work.previous` keeps its R."""
    residual = constants.residual
    source_of(residual, work)
    if sublayer == ATTENTION:
        mix_reversibly(
            work.stream, work.normal, visible, constants.attention, 0, work.heads, work.through_heads
        )
        copy(work.heads.mixed[0], work.wide.branch)
        add_branch_reversibly(work.stream, work.factor, residual, work.wide)
    elif sublayer == HEADS:
        join_reversibly(
            work.stream, work.normal, visible, constants.attention, work.heads, work.through_heads, work.square.branch, watch
        )
        add_branch_reversibly(work.stream, work.factor, residual, work.square)
    else:
        activate_reversibly(work.stream, work.normal, constants.feedforward, work.units, work.square.branch, watch)
        add_branch_reversibly(work.stream, work.factor, residual, work.square)
    if residual.placement == POST_NORM:
        copy(work.factor, work.summed)
        normalise(work.summed, residual.mean_columns, residual.eps, work.factor)


@kernel
def pull_through_sublayer(sublayer, constants, visible, work, watch):
    """(P, T) from after a sublayer to before it, and its weights' squared norms over γ²."""
    residual = constants.residual
    copy(work.factor, work.previous)
    apply_reversibly(sublayer, constants, visible, work, watch)
    if residual.placement == POST_NORM:
        pull_through_norm(work.summed, residual.mean_columns, residual.eps, work.inside, work.outside)
    clear_matrix(work.pulled)
    clear_matrix(work.spread)
    clear_matrix(work.norms)
    if sublayer == ATTENTION:
        unfold(work.fresh, work.inside, work.outside, residual, work.wide)
        pull_through_head(
            work.fresh, work.normal, visible, constants.attention, 0, work.wide.gradient, work.wide.seen,
            work.heads, work.through_heads, work.pulled, work.spread, work.norms,
        )  # fmt: skip
    elif sublayer == HEADS:
        unfold(work.fresh, work.inside, work.outside, residual, work.square)
        pull_through_heads(
            work.fresh, work.normal, visible, constants.attention, work.square,
            work.heads, work.through_heads, work.pulled, work.spread, work.norms, watch,
        )  # fmt: skip
    else:
        unfold(work.fresh, work.inside, work.outside, residual, work.square)
        pull_through_units(
            work.fresh, work.normal, constants.feedforward, work.square,
            work.units, work.through_units, work.pulled, work.spread, work.norms, watch,
        )  # fmt: skip
    if residual.placement == PRE_NORM:
        pull_through_norm(work.previous, residual.mean_columns, residual.eps, work.pulled, work.spread)
    if sublayer == ATTENTION:
        fold(work.fresh, work.pulled, work.spread, residual, work.wide, work.inside, work.outside)
    else:
        fold(work.fresh, work.pulled, work.spread, residual, work.square, work.inside, work.outside)


@kernel
def clear_matrix(matrix):
    """Zeros."""
    for i in range(matrix.shape[0]):
        for k in range(matrix.shape[1]):
            store(matrix, i, k, 0.0)


@kernel
def write_stream(layers, layer, rows, work):
    """|G| where `layers` asks for `layer`; NaN of a replica that left the ball."""
    k = first_at(layers, layer)
    if k == len(layers) or layers[k] != layer:
        return
    store(work.norms, 0, 0, square_root(trace_of_gram(work.inside) + trace_of_gram(work.outside)))
    for lane in range(len(rows.loss)):
        rows.stream[lane, k] = work.norms[0, 0, lane] if work.ledger.exits[lane] == np.inf else np.nan


@kernel
def write_weights(column, count, gamma, rows, work):
    """|∂W| of the weights of one sublayer."""
    for q in range(count):
        for lane in range(len(rows.loss)):
            norm = gamma * np.sqrt(work.norms[q, 0, lane])
            rows.weights[lane, column + q] = norm if work.ledger.exits[lane] == np.inf else np.nan
