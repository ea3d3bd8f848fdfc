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
the branch (`attention`, `feedforward`) to its `pulled` part in Q and the factor C, `spread`, of its
Gaussian part outside, through the norm, and together again (`backward_residual.fold`). What is fresh on the way down
comes from a stream of its own.

The loss is ½|x|² of the last tokens, mean over the m tokens, so G = X/m at the top: P = √n R/m, T = 0.
"""

from typing import NamedTuple

import numpy as np

from limitformer.covariance.chain.norm import normalise, pull_through_norm
from limitformer.covariance.chain.residual import POST_NORM, PRE_NORM
from limitformer.covariance.chain.start import turn_at_random
from limitformer.covariance.chain.transformer import ATTENTION, HEADS, residual_at
from limitformer.covariance.gradients.attention import (
    join_reversibly,
    mix_reversibly,
    pull_through_head,
    pull_through_heads,
)
from limitformer.covariance.gradients.checkpoints import (
    Places,
    open_places,
    restore_checkpoint,
    save_checkpoint,
)
from limitformer.covariance.gradients.feedforward import (
    activate_reversibly,
    clear_matrix,
    pull_through_units,
)
from limitformer.covariance.gradients.layout import (
    BRANCH,
    DIRECTION,
    FACTOR,
    GRADIENT,
    INSIDE,
    MIXED,
    NORMAL,
    NORMS,
    OUTSIDE,
    PREVIOUS,
    PULLED,
    SEEN,
    SPREAD,
    SQUARE,
    SUMMED,
    WIDE,
)
from limitformer.covariance.gradients.residual import add_branch_reversibly, fold, unfold
from limitformer.covariance.gradients.scratch import Scratch, matrix, matrix_of, open_scratch
from limitformer.numerics.factor import FIRST, copy, trace_of_gram
from limitformer.numerics.kernels import allocator, driver, inlined, kernel
from limitformer.numerics.lanes import LANES, load, square_root, store
from limitformer.numerics.random import Stream, open_stream, rewind
from limitformer.numerics.watch import count_whole, is_halted, keep_going
from limitformer.paths.exits import check_factor, clear_exits, copy_exits, first_at, open_ledger
from limitformer.paths.recording import replicas_of, rows_of, write_factor

WEIGHTS = np.array([3, 4, 2])  # of the sublayers ATTENTION, HEADS, FEEDFORWARD


class Gradients(NamedTuple):
    """What is kept of the gradients."""

    loss: np.ndarray  # (replicas,)
    stream: np.ndarray  # (replicas, points): |G|
    weights: np.ndarray  # (replicas, weights): |∂W|


class Work(NamedTuple):
    """Of one thread."""

    stream: Stream
    fresh: Stream  # of what is drawn on the way down
    places: Places
    scratch: Scratch


@allocator
def open_work(table, count):
    return Work(open_stream(), open_stream(), open_places(count), open_scratch(table))


@driver
def run_replicas_with_gradients(start, turned, constants, table, sublayers, visible, share, gradients, watch):
    """As `transformer.run_replicas`, from the same numbers, and their `gradients`."""
    work, ledger = open_work(table, constants.depth * len(sublayers)), open_ledger(start.shape[0])
    for begin in range(0, len(share.exits), LANES):
        begin_at(start, turned, constants, share.key_words, np.uint64(share.first + begin), work)
        record = rows_of(share.arrays, begin)
        go_up(constants, sublayers, visible, share.points, share.radius, record, ledger, work, watch)
        rows = Gradients(
            gradients.loss[begin : begin + LANES],
            gradients.stream[begin : begin + LANES],
            gradients.weights[begin : begin + LANES],
        )
        go_down(constants, sublayers, visible, share.points, rows, ledger.exits, work, watch)
        if is_halted(watch):
            return
        copy_exits(ledger, begin, share.exits, share.causes)
        count_whole(watch, min(LANES, len(share.exits) - begin))


@kernel
def begin_at(start, turned, constants, keys, replica, work):
    """The tokens of this replica and its neighbours."""
    rewind(work.stream, keys[0], replica)
    rewind(work.fresh, keys[1], replica)
    factor = matrix(work.scratch, FACTOR)
    copy(start, factor)
    if turned:
        spread = min(start.shape[0], constants.width)
        turn_at_random(work.stream, factor, matrix(work.scratch, DIRECTION), spread, constants.width)


@kernel
def go_up(constants, sublayers, visible, layers, radius, record, ledger, work, watch):
    """All layers of the replicas that run side by side, with a checkpoint before each sublayer."""
    factor, previous = matrix(work.scratch, FACTOR), matrix(work.scratch, PREVIOUS)
    clear_exits(ledger)
    for layer in range(constants.depth + 1):
        if not keep_going(watch, replicas_of(record), layer / (3.0 * constants.depth + 1.0)):
            return
        copy(factor, previous)
        if layer > 0:
            for place in range(len(sublayers)):
                k = (layer - 1) * len(sublayers) + place
                save_checkpoint(work.stream, factor, k, work.places, work.scratch)
                residual = residual_at(constants, layer, place)
                apply_reversibly(work.stream, sublayers[place], residual, constants, visible, work.scratch, watch)
        check_factor(factor, previous, layer, radius, ledger)
        write_factor(factor, layers, layer, record, ledger)


@kernel
def go_down(constants, sublayers, visible, layers, rows, exits, work, watch):
    """The gradients, from the last layer to the first."""
    begin_at_the_top(constants, rows, exits, work.scratch)
    column = rows.weights.shape[1]
    for layer in range(constants.depth, -1, -1):
        if not keep_going(watch, len(rows.loss), (3.0 * constants.depth - 2.0 * layer) / (3.0 * constants.depth + 1.0)):
            return
        write_stream(layers, layer, rows, exits, work.scratch)
        if layer > 0:
            for place in range(len(sublayers) - 1, -1, -1):
                k, sublayer = (layer - 1) * len(sublayers) + place, sublayers[place]
                restore_checkpoint(work.stream, matrix(work.scratch, FACTOR), k, work.places, work.scratch)
                residual = residual_at(constants, layer, place)
                gamma = np.sqrt(constants.width) * residual.branch
                pull_through_sublayer(
                    work.stream, work.fresh, sublayer, residual, constants, visible, work.scratch, watch
                )
                column -= WEIGHTS[sublayer]
                write_weights(column, WEIGHTS[sublayer], gamma, rows, exits, work.scratch)


@inlined
def begin_at_the_top(constants, rows, exits, scratch):
    """The loss; P = √n R/m, T = 0."""
    factor, inside, norms = matrix(scratch, FACTOR), matrix(scratch, INSIDE), matrix(scratch, NORMS)
    tokens = factor.shape[0]
    store(norms, 0, 0, 0.5 * constants.width / tokens * trace_of_gram(factor))
    for lane in range(len(rows.loss)):
        rows.loss[lane] = norms[0, 0, lane] if exits[lane] == np.inf else np.nan
    clear_matrix(matrix(scratch, OUTSIDE))
    for i in range(tokens):
        for k in range(factor.shape[1]):
            store(inside, i, k, np.sqrt(constants.width) / tokens * load(factor, i, k))


@inlined
def apply_reversibly(stream, sublayer, residual, constants, visible, scratch, watch):
    """As `transformer.apply_sublayer`; what the way down needs stays in `scratch`."""
    factor, source = matrix(scratch, FACTOR), matrix(scratch, NORMAL)
    if residual.placement == PRE_NORM:
        normalise(factor, residual.mean_columns, residual.eps, residual.address, source)
    else:
        copy(factor, source)
    total = SQUARE
    if sublayer == ATTENTION:
        total = WIDE
        mix_reversibly(stream, source, visible, constants.attention, FIRST, scratch)
        copy(matrix_of(scratch, MIXED, FIRST), matrix(scratch, WIDE + BRANCH))
    elif sublayer == HEADS:
        join_reversibly(stream, source, visible, constants.attention, scratch, watch)
    else:
        activate_reversibly(stream, source, constants.feedforward, scratch, watch)
    add_branch_reversibly(stream, factor, residual, scratch, total)
    if residual.placement == POST_NORM:
        copy(factor, matrix(scratch, SUMMED))
        normalise(matrix(scratch, SUMMED), residual.mean_columns, residual.eps, residual.address, factor)


@inlined
def pull_through_sublayer(stream, fresh, sublayer, residual, constants, visible, scratch, watch):
    """(P, T) from after a sublayer to before it, and its weights' squared norms over γ²."""
    source, pulled, spread = matrix(scratch, NORMAL), matrix(scratch, PULLED), matrix(scratch, SPREAD)
    mean, eps = residual.mean_columns, residual.eps
    copy(matrix(scratch, FACTOR), matrix(scratch, PREVIOUS))
    apply_reversibly(stream, sublayer, residual, constants, visible, scratch, watch)
    if residual.placement == POST_NORM:
        pull_through_norm(matrix(scratch, SUMMED), mean, eps, matrix(scratch, INSIDE), matrix(scratch, OUTSIDE))
    clear_matrix(pulled)
    clear_matrix(spread)
    clear_matrix(matrix(scratch, NORMS))
    total = WIDE if sublayer == ATTENTION else SQUARE
    unfold(fresh, residual, scratch, total)
    if sublayer == ATTENTION:
        pull_through_head(fresh, source, visible, constants.attention, FIRST, WIDE + GRADIENT, WIDE + SEEN, scratch)
    elif sublayer == HEADS:
        pull_through_heads(fresh, source, visible, constants.attention, scratch, watch)
    else:
        pull_through_units(fresh, source, constants.feedforward, scratch, watch)
    if residual.placement == PRE_NORM:
        pull_through_norm(matrix(scratch, PREVIOUS), mean, eps, pulled, spread)
    fold(fresh, residual, scratch, total)


@kernel
def write_stream(layers, layer, rows, exits, scratch):
    """|G| where `layers` asks for `layer`; NaN of a replica that left the ball."""
    k, norms = first_at(layers, layer), matrix(scratch, NORMS)
    if k == len(layers) or layers[k] != layer:
        return
    squared = trace_of_gram(matrix(scratch, INSIDE)) + trace_of_gram(matrix(scratch, OUTSIDE))
    store(norms, 0, 0, square_root(squared))
    for lane in range(len(rows.loss)):
        rows.stream[lane, k] = norms[0, 0, lane] if exits[lane] == np.inf else np.nan


@kernel
def write_weights(column, count, gamma, rows, exits, scratch):
    """|∂W| of the weights of one sublayer."""
    norms = matrix(scratch, NORMS)
    for q in range(count):
        for lane in range(len(rows.loss)):
            norm = gamma * np.sqrt(norms[q, 0, lane])
            rows.weights[lane, column + q] = norm if exits[lane] == np.inf else np.nan
