r"""The exact law of a finite Transformer's gradients, with no n × n weight ever drawn: the chain, forward and backward.

**Letters.** The tokens are X = √n R Q, Q with r orthonormal rows. The gradient of the loss in X, at any height, is

  G = P Q + T E,

P (m × r) its coordinates where the tokens are, E (s × n) orthonormal rows outside, s = min(m, n − r), T (m × s) a
factor of G outside.

**The Haar frame.** The frame E need not be known: given the tokens, all that lies below, P and T, it is uniformly
distributed (Haar) among the frames outside Q; rows of it that G does not determine are drawn so. The reason is that the
weights above are fresh and that, given all that lies below, their law does not change under rotations of R^n that leave
Q fixed (docs/theory.md). This closes the recursion on (P, T).

**A weight that is used once.** A Gaussian weight W in Z W, with Z = S_Z Q_Z and orthonormal rows of Q_Z, has shown
Q_Z W = N and nothing else. Going back with the gradient D of Z W it is therefore [the theorem of weightless networks,
docs/weightless.md]

  D Wᵀ = D Nᵀ Q_Z + (a Gaussian matrix of row covariance D Dᵀ outside Q_Z),     |∂W|² = |S_Zᵀ D|².

**The forward pass** leaves a checkpoint before each sublayer: the factor R and the position in the stream of random
numbers (below).

**The backward pass** must meet the same N. So it computes each sublayer once more from its checkpoint
(`forward_sublayer`), which leaves N, the attention and the reflections in buffers, and then goes back through it
(`backward_sublayer`):

1. through a Post-norm;
2. `residual.unfold`: G′ becomes Γ, its coordinates in the directions that the sublayer knows;
3. through the branch, `attention` or `feedforward`: its gradient in Q, and the factor C of its Gaussian part outside;
4. through a Pre-norm;
5. `residual.fold`: together again, to (P, T).

Fresh numbers of the backward pass come from a stream of their own.

**The loss** is ½|x|² of the last tokens, averaged over the m tokens, so G = X/m at the top: P = √n R/m, T = 0.

**Checkpoints** are the factor before each sublayer and the position of its stream of random numbers.

Both together reproduce a sublayer number for number. The backward pass therefore needs nothing else of the forward
pass, and the memory of a checkpoint is one factor.
"""

from typing import NamedTuple

import numpy as np

from limitformer.covariance.chain.residual import POST_NORM, PRE_NORM, backward_norm, normalise
from limitformer.covariance.chain.start import turn_at_random
from limitformer.covariance.chain.transformer import ATTENTION, FEEDFORWARD, HEADS, Constants, residual_at
from limitformer.covariance.gradients.attention import (
    AttentionBuffers,
    AttentionRecord,
    backward_head,
    backward_heads,
    forward_head,
    forward_heads,
    record_shapes,
    scratch_shapes,
)
from limitformer.covariance.gradients.feedforward import UnitBuffers, backward_units, forward_units, unit_shapes
from limitformer.covariance.gradients.matrices import Buffer, clear, squared_norm
from limitformer.covariance.gradients.residual import (
    BranchGradient,
    StreamGradient,
    SumBuffers,
    fold,
    forward_sum,
    sum_shapes,
    unfold,
)
from limitformer.numerics.factor import FIRST, copy
from limitformer.numerics.kernels import allocator, driver, inlined, kernel
from limitformer.numerics.lanes import LANES, load, square_root, store
from limitformer.numerics.random import BUFFER, U64, Stream, open_stream, refill, rewind
from limitformer.numerics.watch import count_whole, is_halted, keep_going
from limitformer.sampling.exits import Ledger, check_factor, clear_exits, copy_exits, first_at, open_ledger
from limitformer.sampling.recording import replicas_of, rows_of, write_factor


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


WEIGHTS = np.array([3, 4, 2])  # of the sublayers ATTENTION, HEADS, FEEDFORWARD; a gated pair has one more


class GradientArrays(NamedTuple):
    """Output arrays of the gradients."""

    loss: np.ndarray  # (replicas,)
    stream: np.ndarray  # (replicas, points): |G|
    weights: np.ndarray  # (replicas, weights): |∂W|


class Buffers(NamedTuple):
    """The matrices that one thread works on."""

    checkpoints: Buffer  # R before each sublayer
    factor: Buffer  # R
    previous: Buffer  # R before the layer; in the backward pass before the sublayer
    source: Buffer  # the branch's input: R, normalised by a Pre-norm
    summed: Buffer  # R before a Post-norm
    direction: Buffer
    stream_gradient: StreamGradient
    branch_gradient: BranchGradient
    wide: SumBuffers  # for the branch of [ST, eq. 1], whose factor U has r columns
    square: SumBuffers  # for the others, whose U is triangular
    record: AttentionRecord
    scratch: AttentionBuffers
    units: UnitBuffers
    norm: Buffer  # |G|, or the loss


class BackwardWork(NamedTuple):
    """The state of one thread."""

    stream: Stream
    fresh: Stream  # for the numbers that are drawn in the backward pass
    ledger: Ledger
    checkpoints: Checkpoints


def buffer_shapes(m: int, r: int, sublayers: int, constants: Constants) -> Buffers:
    """Return the shapes for m tokens, r columns of R and the sublayers of all layers together."""
    outside = constants.residual.outside
    wide, square = sum_shapes(m, r, r, outside), sum_shapes(m, r, m, outside)
    width = max(wide.gradient[1], square.gradient[1])
    return Buffers(
        checkpoints=(sublayers, m, r),
        factor=(m, r),
        previous=(m, r),
        source=(m, r),
        summed=(m, r),
        direction=(r, 1),
        stream_gradient=StreamGradient(inside=(m, r), outside=(m, min(m, outside))),
        branch_gradient=BranchGradient(inside=(m, r), spread=(m, m), norms=(4, 1)),
        wide=wide,
        square=square,
        record=record_shapes(m, r, constants.attention),
        scratch=scratch_shapes(m, r, width, constants.attention),
        units=unit_shapes(m, r, constants.feedforward),
        norm=(1, 1),
    )


@allocator
def open_work(tokens, factors):
    return BackwardWork(open_stream(), open_stream(), open_ledger(tokens), open_checkpoints(factors))


@driver
def run_replicas_with_gradients(start, turned, constants, buffers, sublayers, visible, share, gradients, watch):
    """Run the replicas of a share as `transformer.run_replicas`, from the same numbers, and their `gradients`."""
    work = open_work(start.shape[0], buffers.checkpoints)
    for begin in range(0, len(share.exits), LANES):
        begin_at(start, turned, constants, share.key_words, np.uint64(share.first + begin), work, buffers)
        record = rows_of(share.arrays, begin)
        go_forward(constants, sublayers, visible, share.points, share.radius, record, work, buffers, watch)
        rows = GradientArrays(
            gradients.loss[begin : begin + LANES],
            gradients.stream[begin : begin + LANES],
            gradients.weights[begin : begin + LANES],
        )
        go_backward(constants, sublayers, visible, share.points, rows, work, buffers, watch)
        if is_halted(watch):
            return
        copy_exits(work.ledger, begin, share.exits, share.causes)
        count_whole(watch, min(LANES, len(share.exits) - begin))


@kernel
def begin_at(start, turned, constants, keys, replica, work, buffers):
    """Put the start of `replica` and its neighbours into `buffers.factor`."""
    rewind(work.stream, keys[0], replica)
    rewind(work.fresh, keys[1], replica)
    copy(start, buffers.factor)
    if turned:
        spread = min(start.shape[0], constants.width)
        turn_at_random(work.stream, buffers.factor, buffers.direction, spread, constants.width)


@kernel
def go_forward(constants, sublayers, visible, layers, radius, record, work, buffers, watch):
    """Run all layers of the replicas that run side by side, with a checkpoint before each sublayer."""
    factor = buffers.factor
    clear_exits(work.ledger)
    for layer in range(constants.depth + 1):
        if not keep_going(watch, replicas_of(record), layer / (3.0 * constants.depth + 1.0)):
            return
        copy(factor, buffers.previous)
        if layer > 0:
            for place in range(len(sublayers)):
                k = (layer - 1) * len(sublayers) + place
                save_checkpoint(work.stream, factor, k, work.checkpoints)
                residual = residual_at(constants, layer, place)
                forward_sublayer(work.stream, sublayers[place], residual, constants, visible, buffers, watch)
        check_factor(factor, buffers.previous, layer, radius, work.ledger)
        write_factor(factor, layers, layer, record, work.ledger)


@kernel
def go_backward(constants, sublayers, visible, layers, rows, work, buffers, watch):
    """Compute the gradients from the last layer to the first."""
    exits = work.ledger.exits
    begin_at_the_top(constants, rows, exits, buffers)
    column = rows.weights.shape[1]
    for layer in range(constants.depth, -1, -1):
        if not keep_going(watch, len(rows.loss), (3.0 * constants.depth - 2.0 * layer) / (3.0 * constants.depth + 1.0)):
            return
        write_stream(layers, layer, rows, exits, buffers)
        if layer > 0:
            for place in range(len(sublayers) - 1, -1, -1):
                k, sublayer = (layer - 1) * len(sublayers) + place, sublayers[place]
                restore_checkpoint(work.stream, buffers.factor, k, work.checkpoints)
                residual = residual_at(constants, layer, place)
                gamma = np.sqrt(constants.width) * residual.branch
                backward_sublayer(work.stream, work.fresh, sublayer, residual, constants, visible, buffers, watch)
                gated = sublayer == FEEDFORWARD and constants.feedforward.gated
                count = WEIGHTS[sublayer] + 1 if gated else WEIGHTS[sublayer]
                column -= count
                write_weights(column, count, gamma, rows, exits, buffers.branch_gradient.norms)


@inlined
def begin_at_the_top(constants, rows, exits, buffers):
    """The loss; P = √n R/m, T = 0."""
    factor, inside, norm = buffers.factor, buffers.stream_gradient.inside, buffers.norm
    tokens = factor.shape[0]
    store(norm, 0, 0, 0.5 * constants.width / tokens * squared_norm(factor))
    for lane in range(len(rows.loss)):
        rows.loss[lane] = norm[0, 0, lane] if exits[lane] == np.inf else np.nan
    clear(buffers.stream_gradient.outside)
    for i in range(tokens):
        for k in range(factor.shape[1]):
            store(inside, i, k, np.sqrt(constants.width) / tokens * load(factor, i, k))


@inlined
def forward_sublayer(stream, sublayer, residual, constants, visible, buffers, watch):
    """Apply a sublayer as `transformer.apply_sublayer`; the buffers then have what the backward pass needs."""
    factor, source = buffers.factor, buffers.source
    if residual.placement == PRE_NORM:
        normalise(factor, residual.mean_columns, residual.eps, residual.address, source)
    else:
        copy(factor, source)
    attention, record, scratch, square = constants.attention, buffers.record, buffers.scratch, buffers.square
    if sublayer == ATTENTION:
        forward_head(stream, source, visible, attention, FIRST, record, scratch)
        copy(record.mixed[FIRST], buffers.wide.branch)
        forward_sum(stream, factor, residual, buffers.wide)
    elif sublayer == HEADS:
        forward_heads(stream, source, visible, attention, record, scratch, square.branch, watch)
        forward_sum(stream, factor, residual, square)
    else:
        forward_units(stream, source, constants.feedforward, buffers.units, square.branch, watch)
        forward_sum(stream, factor, residual, square)
    if residual.placement == POST_NORM:
        copy(factor, buffers.summed)
        normalise(buffers.summed, residual.mean_columns, residual.eps, residual.address, factor)


@inlined
def backward_sublayer(stream, fresh, sublayer, residual, constants, visible, buffers, watch):
    """(P, T) from after a sublayer to before it, and the squared norms of its weights' gradients over γ²."""
    copy(buffers.factor, buffers.previous)
    forward_sublayer(stream, sublayer, residual, constants, visible, buffers, watch)
    gradient, returned, mean, eps = (
        buffers.stream_gradient,
        buffers.branch_gradient,
        residual.mean_columns,
        residual.eps,
    )
    if residual.placement == POST_NORM:
        backward_norm(buffers.summed, mean, eps, gradient.inside, gradient.outside)
    clear(returned.inside)
    clear(returned.spread)
    clear(returned.norms)
    source, attention, record, scratch = buffers.source, constants.attention, buffers.record, buffers.scratch
    if sublayer == ATTENTION:
        total = buffers.wide
        unfold(fresh, residual, gradient, total)
        backward_head(fresh, source, visible, attention, FIRST, total.gradient, total.seen, record, scratch, returned)
    else:
        total = buffers.square
        unfold(fresh, residual, gradient, total)
        if sublayer == HEADS:
            backward_heads(fresh, source, visible, attention, record, scratch, total, returned, watch)
        else:
            backward_units(fresh, source, constants.feedforward, buffers.units, total, returned, watch)
    if residual.placement == PRE_NORM:
        backward_norm(buffers.previous, mean, eps, returned.inside, returned.spread)
    fold(fresh, residual, gradient, returned, total)


@kernel
def write_stream(layers, layer, rows, exits, buffers):
    """Write |G| where `layers` has `layer`; NaN for a replica that left the ball."""
    k, norm = first_at(layers, layer), buffers.norm
    if k == len(layers) or layers[k] != layer:
        return
    gradient = buffers.stream_gradient
    store(norm, 0, 0, square_root(squared_norm(gradient.inside) + squared_norm(gradient.outside)))
    for lane in range(len(rows.loss)):
        rows.stream[lane, k] = norm[0, 0, lane] if exits[lane] == np.inf else np.nan


@kernel
def write_weights(column, count, gamma, rows, exits, norms):
    """Write |∂W| of the weights of one sublayer."""
    for q in range(count):
        for lane in range(len(rows.loss)):
            norm = gamma * np.sqrt(norms[q, 0, lane])
            rows.weights[lane, column + q] = norm if exits[lane] == np.inf else np.nan
