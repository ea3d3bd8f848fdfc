r"""Two clusters as two points: p tokens at X¹ and q at X², softmax with QᵀK = I.

Merged tokens (`merging`) move as one. With e = exp(β(z − 1)), a token of the first cluster has the weight p/(p + qe) on
its cluster and qe/(p + qe) on the other; for the second, exchange p and q. In the letters of `pair.unlike`

  φ = (T₁ + T₂)/2 = pq (1 − e²) / ((p + qe)(q + pe)),    θ = (T₁ − T₂)/2 = (p² − q²) e / ((p + qe)(q + pe)):

clusters of equal size, θ = 0, are a pair as in `pair.chain`; others leave −1, even from w = 0.
"""

from typing import NamedTuple

import numpy as np

from limitformer.numerics.elementary import U64, exponential
from limitformer.numerics.kernels import allocator, inlined, kernel, strict_kernel
from limitformer.numerics.watch import keep_going
from limitformer.sampling.exits import first_at
from limitformer.sphere.outcome import ANTIPODAL, CLUSTERS, LARGEST, UNRESOLVED
from limitformer.sphere.pair.chain import BLOCK, CHECK, PairBlock, PairConstants, fold, is_long, open_pairs, unfolded
from limitformer.sphere.pair.chi_squares import blocks_needed, chi_squares
from limitformer.sphere.pair.unlike import LEAST_START, NORMALS, normals_of, turn_unlike
from limitformer.sphere.stopping.merging import NOT_YET, Merging

LAST = 2**62  # above any number of layers


class Continuation(NamedTuple):
    """Parameters of replicas that continue as two points."""

    bounds: Merging
    pair: PairConstants
    key_words: np.ndarray  # (2,)


class TwoClusters(NamedTuple):
    """The replicas of a group that run as two points."""

    pairs: PairBlock
    size: np.ndarray  # (BLOCK,): p


@allocator
def open_two_clusters():
    return TwoClusters(open_pairs(), np.zeros(BLOCK))


@kernel
def run_two_clusters(follow, tokens, replica, points, record, merged, last, two, watch):
    """Run the merged replicas to the last layer and write outcomes and stops to `record`.

    `last` is the layer by which all of them have merged.
    """
    constants, key_words, replicas = follow.pair, follow.key_words, len(record.stopped)
    two.pairs.running[0], often = 0, 1 if is_long(constants) else CHECK
    for layer in range(first_merged(replicas, merged.since), constants.layers + 1):
        advance_clusters(constants, tokens, key_words[0], key_words[1], U64(layer), two)
        if layer % often == 0:
            fold(two.pairs)
        k = first_at(points, layer)
        while k < len(points) and points[k] == layer:
            write_running(k, tokens, record, two)
            k += 1
        if layer % CHECK == 0:
            admit(layer, replica, replicas, merged, two)
            retire(layer, k, tokens, follow.bounds, record, two)
            over = two.pairs.running[0] == 0 and layer >= last
            if over or not keep_going(watch, replicas, max(layer, last) / (constants.layers + 1)):
                return


@kernel
def first_merged(replicas, since):
    """Return the first layer at which a replica merged, LAST if none did."""
    first = LAST
    for lane in range(replicas):
        if since[lane] != NOT_YET:
            first = min(first, since[lane])
    return first


@kernel
def admit(layer, replica, replicas, merged, two):
    """Add the replicas that merged at this layer."""
    pairs = two.pairs
    for lane in range(replicas):
        if merged.since[lane] == layer:
            i = pairs.running[0]
            pairs.replica[i], pairs.row[i] = replica + U64(lane), lane
            pairs.w[i], pairs.sign[i], pairs.folds[i] = merged.w[lane], merged.sign[lane], 0.0
            two.size[i] = merged.size[lane]
            pairs.running[0] += 1


@kernel
def retire(layer, next_point, tokens, bounds, record, two):
    """Remove the replicas that have arrived; write their last outcome at all later points."""
    pairs, i = two.pairs, 0
    while i < pairs.running[0]:
        if not has_arrived(i, tokens, bounds, two):
            i += 1
            continue
        record.stopped[pairs.row[i]] = layer
        for k in range(next_point, record.outcome.shape[1]):
            write_outcome(i, k, tokens, record, two)
        pairs.running[0] -= 1
        last = pairs.running[0]
        pairs.replica[i], pairs.row[i], two.size[i] = pairs.replica[last], pairs.row[last], two.size[last]
        pairs.w[i], pairs.folds[i], pairs.sign[i] = pairs.w[last], pairs.folds[last], pairs.sign[last]


@kernel
def has_arrived(i, tokens, bounds, two):
    """Whether a replica will stay one cluster, or two of equal size at antipodes."""
    if two.pairs.sign[i] > 0.0:
        return two.size[i] == tokens or unfolded(two.pairs, i) < bounds.stop_plus
    return 2.0 * two.size[i] == tokens and unfolded(two.pairs, i) < bounds.stop_minus


@kernel
def write_running(k, tokens, record, two):
    for i in range(two.pairs.running[0]):
        write_outcome(i, k, tokens, record, two)


@kernel
def write_outcome(i, k, tokens, record, two):
    """Write the outcome of replica i at point k."""
    w, p = unfolded(two.pairs, i), np.int64(two.size[i])
    near, pairs = 2.0 * w / (1.0 + w) <= record.tolerance, p * (tokens - p)
    one, antipodal = near and two.pairs.sign[i] > 0.0, near and two.pairs.sign[i] < 0.0
    outcome = record.outcome[two.pairs.row[i], k]
    outcome[CLUSTERS] = 1 if one else 2
    outcome[LARGEST] = tokens if one else max(p, tokens - p)
    outcome[ANTIPODAL] = pairs if antipodal else 0
    outcome[UNRESOLVED] = 0 if near else pairs


@kernel
def advance_clusters(constants, tokens, k0, k1, layer, two):
    """Apply one layer to all running replicas."""
    degrees, pairs = max(constants.dim - 3, 0), two.pairs
    block = layer * U64(NORMALS + blocks_needed(degrees))
    after = block + U64(NORMALS)
    chi_squares(degrees, k0, k1, pairs.replica, after, pairs.running[0], pairs.first, pairs.second)
    move_clusters(constants, tokens, k0, k1, block, two)


@inlined
def cluster_weights(p, q, beta, positive, w):
    """Return φ and θ."""
    e = exponential(-2.0 * beta * (w if positive else 1.0) / (1.0 + w))
    both = (p + q * e) * (q + p * e)
    return p * q * (1.0 - e * e) / both, (p - q) * (p + q) * e / both


@strict_kernel
def move_clusters(constants, tokens, k0, k1, block, two):
    """Apply the step, given the χ²."""
    beta, step, dim, pairs = constants.beta, constants.step, constants.dim, two.pairs
    for i in range(pairs.running[0]):
        of_layer, _, _ = normals_of(block, pairs.replica[i], k0, k1)
        positive, p, w = pairs.sign[i] > 0.0, two.size[i], pairs.w[i]
        driven = p + p != tokens and not positive
        w = max(w, LEAST_START) if driven else w
        phi, theta = cluster_weights(p, tokens - p, beta, positive, w)
        ratio = np.sqrt(w)
        lean = theta * (ratio if positive else 1.0 / ratio) if p + p != tokens else 0.0
        turn_unlike(i, positive, w, step * phi, step * lean, step, dim, of_layer, pairs)
