r"""Two tokens with QᵀK = I: their overlap z is a Markov chain by itself.

Sum s and difference d of two unit vectors are orthogonal, and A(X¹) ± A(X²) = (a ± b)(X¹ ± X²). So a layer
(`sphere.methods`) maps s, d to s + c₊Vs, d + c₋Vd with c± = σ(a ± b)/√L, with weights a on the token itself and b on
the other,

  e = exp(β(z − 1)),  softmax: a = 1/(1 + e), b = e/(1 + e),  unnormalized: a = exp(β)/2, b = exp(β) e/2.

**The state** is w = exp(−2|y|), y = artanh z, and the sign of z. w is the smaller over the larger of |s|² and |d|², so
1 − |z| = 2w/(1 + w) keeps its relative precision. At w = 0, s or d is the zero vector, which layers map to itself:
tokens that coincide, or are antipodes, stay so for ever. Any other w stays positive for ever. To avoid underflow it is
stored as w = v 2^{−400k}. From time to time k rises by one if v is below 2^{−700}, and falls by one if v is above
2^{−150}. With k ≥ 1, 1 + v = 1 + w = 1 in doubles, and both are multiplied by the same factors, so the step does not
depend on k.

**The step.** Call the longer of the two vectors *big* (unit length, coefficient c_b) and the other *small* (squared
length w, coefficient c_s). V big and V small are independent; with g, g′, h, h′ normal and χ², ρ² ~ χ²_{dim−2},

  Q  = |big′|² = (1 + c_b h)² + c_b² (h′² + ρ²),    m = ⟨small, big′⟩/√(wQ) = c_b h′/√Q,
  S∥ = w (m + c_s g)²,                              S⊥ = w [ (√(1 − m²) + c_s g′)² + c_s² χ² ],

the squares of small′ along big′ and across it. With S = S∥ + S⊥, normalisation and the formula for z give

  w′ = 4 Q S⊥ / ( √((Q − S)² + 4 Q S⊥) + |Q − S| )²,

and big and small change places if S > Q. Nothing cancels at either end.

**Drawn queries, causal mask**: the weights of the two tokens differ (`pair.unlike`).

**Hybrid**: s and d keep their directions; ω (`sphere.methods`) multiplies them by 1 + ω(a ± b).

Replicas run side by side in blocks; a replica that has stopped leaves its block.

**In the limit of drawn queries and keys** a step has attention averaged, not drawn.

Near antipodes, one draw of QᵀK moves s = X¹ + X² by b|s| with a probability of order 1/b. Steps of the limit that draw
it must be shorter than 1/b² (`limit`). But the limit depends only on means over the draws. Those of
⟨A(X¹) ± A(X²), A(X¹) ± A(X²)⟩ are

  E|A¹ + A²|² = |s|² (1 + q̃(1 − z)/2),    E|A¹ − A²|² = |d|² (C + q̃(1 + z)/2),    E⟨A¹ + A², A¹ − A²⟩ = 0

with C and q̃ of `overlap.drawn`. A step with the square roots of these factors for a + b and a − b has
the coefficients of the limit. A table in u = artanh z holds them, interpolated by cubics through four points.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from limitformer.numerics.elementary import U64, exponential, logarithm
from limitformer.numerics.kernels import allocator, driver, inlined, kernel, strict_kernel
from limitformer.numerics.lanes import LANES, lane_matrix, magnitude, square_root, store
from limitformer.numerics.random import box_muller, next_chi, next_normal, open_stream, rewind, words_of
from limitformer.numerics.watch import count_whole, is_halted, keep_going
from limitformer.sampling.arrays import points_in, replicas_between, write_number
from limitformer.sphere.overlap.drawn import DrawnAttention
from limitformer.sphere.overlap.position import at_artanh
from limitformer.sphere.pair.chi_squares import blocks_needed, chi_squares
from limitformer.sphere.pair.unlike import advance_unlike
from limitformer.sphere.tokens.values import fill_listed

PER_UNIT = 32  # points of the table in a unit of u: an error of 1e-7
LEAST_OF_LOG = 1e-300  # w whose logarithm is taken


def averages_table(drawn: DrawnAttention) -> NDArray[np.float64]:
    """Return the two square roots (2, points) at even points of u, from −`drawn.last` to `drawn.last`."""
    at = at_artanh(np.linspace(-drawn.last, drawn.last, 1 + 2 * round(PER_UNIT * drawn.last)))
    product, bend = drawn(at)
    squares = np.stack([1 + bend * at.below / 2, product + bend * at.above / 2])
    return np.asarray(np.sqrt(np.maximum(squares, 0.0)))


@inlined
def averaged_weights(w, positive, last, table):
    """Return the averages that replace a + b and a − b."""
    u = -0.5 * logarithm(w if w > LEAST_OF_LOG else LEAST_OF_LOG)
    u = min(u, last)
    place = ((u if positive else -u) + last) * ((table.shape[1] - 1) / (2.0 * last))
    k = min(max(int(place), 1), table.shape[1] - 3)
    x = place - k
    return cubic(table[0], k, x), cubic(table[1], k, x)


@inlined
def cubic(values, k, x):
    """Evaluate at k + x the cubic through the values at k − 1, …, k + 2."""
    a, b, c, d = values[k - 1], values[k], values[k + 1], values[k + 2]
    y = x - 1.0
    outer = d * (x + 1.0) * x * y - a * x * y * (x - 2.0)
    return outer / 6.0 + 0.5 * (b * (x + 1.0) * y * (x - 2.0) - c * (x + 1.0) * x * (x - 2.0))


BLOCK = 256  # replicas side by side: their state stays in the first cache
CHECK = 16  # layers between two checks for stopped replicas
LEAST = 2.0**-1022  # the least normal double, written for a smaller positive w
LEAST_FACTOR = 1e-150  # of w in a layer: only rounding makes it less, and must not make it 0
NEVER_ZERO = 1e-300  # added to squares of order 1, in case a layer maps the longer vector to 0
LOW, HIGH, FOLD = 2.0**-700, 2.0**-150, 2.0**400
LONG = 0.5  # a longer step may change w by more than 2^{100} in CHECK layers


class PairConstants(NamedTuple):
    """Parameters of a model; `fixed` is 0 for softmax, else exp(β)/2, the weight of a token on itself."""

    hybrid: bool
    fresh: bool  # queries and keys are drawn in each layer
    causal: bool
    head_dim: int  # of drawn queries and keys, 0 for normal entries
    averaged: float  # last u of a table of averages that replaces the draws, 0 for no table
    dim: int
    beta: float
    fixed: float
    layers: int
    step: float  # σ/√L, or ε/√L for the hybrid
    drift: float  # 0, or 1/L for the hybrid
    law: int
    stop_plus: float  # w below which a replica with z > 0 stops
    stop_minus: float  # the same for z < 0


class PairBlock(NamedTuple):
    """The `running` (1,) replicas of a block; each array has the shape (BLOCK,)."""

    running: np.ndarray
    replica: np.ndarray  # number, for the random stream
    row: np.ndarray  # row of the results
    w: np.ndarray  # v
    sign: np.ndarray
    first: np.ndarray
    second: np.ndarray
    folds: np.ndarray  # k
    scale: np.ndarray  # χ² of the queries
    unused: np.ndarray  # the second χ² of each draw of `scale`


@allocator
def open_pairs():
    return PairBlock(
        np.zeros(1, np.int64),
        np.zeros(BLOCK, np.uint64),
        np.zeros(BLOCK, np.int64),
        np.zeros(BLOCK),
        np.zeros(BLOCK),
        np.zeros(BLOCK),
        np.zeros(BLOCK),
        np.zeros(BLOCK),
        np.zeros(BLOCK),
        np.zeros(BLOCK),
    )


@driver
def run_pairs(
    start, uniform_start, constants, table, key_words, start_key, points, first, overlap, gap, stopped, watch
):
    """Run replicas `first`, …; write z, 1 − |z| and the layer of the stop (∞ for no stop).

    `start` (2,) is w and the sign, unless the start is uniform; `table` (2, points) is empty or from `averages_table`.
    """
    pairs, stream, scratch = open_pairs(), open_stream(), lane_matrix(2, 1)
    for begin in range(0, len(stopped), BLOCK):
        end = min(begin + BLOCK, len(stopped))
        pairs.running[0] = end - begin
        for i in range(end - begin):
            pairs.replica[i], pairs.row[i] = first + begin + i, i
            pairs.w[i], pairs.folds[i], pairs.sign[i] = start[0], 0.0, start[1]
        if uniform_start:
            draw_pairs(stream, start_key, constants.dim, scratch, pairs)
        overlaps, gaps = replicas_between(overlap, begin, end), replicas_between(gap, begin, end)
        run_block(constants, table, key_words, points, overlaps, gaps, stopped[begin:end], pairs, watch)
        if is_halted(watch):
            return
        count_whole(watch, end - begin)


@kernel
def draw_pairs(stream, start_key, dim, scratch, pairs):
    """Draw two uniform tokens: z = g/√(g² + χ²), χ² with dim − 1 degrees, so w = χ²/(√(g² + χ²) + |g|)²."""
    for begin in range(0, pairs.running[0], LANES):
        rewind(stream, start_key, pairs.replica[begin])
        g, chi = next_normal(stream), next_chi(stream, dim - 1)
        longer = square_root(g * g + chi * chi) + magnitude(g)
        ratio = chi / longer
        store(scratch, 0, 0, ratio * ratio)
        store(scratch, 1, 0, g)
        for lane in range(min(LANES, pairs.running[0] - begin)):
            pairs.w[begin + lane] = scratch[0, 0, lane]
            pairs.sign[begin + lane] = 1.0 if scratch[1, 0, lane] >= 0.0 else -1.0


@kernel
def run_block(constants, table, key_words, points, overlap, gap, stopped, pairs, watch):
    """Run all layers of one block of replicas."""
    for i in range(len(stopped)):
        stopped[i] = np.inf
    k, often = 0, 1 if is_long(constants) else CHECK
    for layer in range(constants.layers + 1):
        if layer > 0:
            advance(constants, table, key_words[0], key_words[1], U64(layer), pairs)
        if layer % often == 0:
            fold(pairs)
        while k < len(points) and points[k] == layer:
            write_pairs(k, overlap, gap, pairs)
            k += 1
        if layer % CHECK == 0:
            retire(constants, layer, k, overlap, gap, stopped, pairs)
            if pairs.running[0] == 0 or not keep_going(watch, len(stopped), layer / (constants.layers + 1)):
                return


@kernel
def is_long(constants):
    """Whether a few layers may multiply w by anything."""
    largest = 2.0 * constants.fixed * max(1.0, np.exp(-2.0 * constants.beta)) if constants.fixed > 0.0 else 1.0
    spread = 3.0 if constants.hybrid else np.sqrt(constants.dim)
    return largest * (constants.drift + constants.step * spread) > LONG


@strict_kernel
def fold(pairs):
    """Bring v back into its range."""
    w, folds = pairs.w, pairs.folds
    for i in range(pairs.running[0]):
        small, large = (w[i] < LOW) & (w[i] > 0.0), (w[i] > HIGH) & (folds[i] > 0.0)
        w[i] *= (FOLD if small else 1.0) * (1.0 / FOLD if large else 1.0)
        folds[i] += (1.0 if small else 0.0) - (1.0 if large else 0.0)


@kernel
def write_pairs(k, overlap, gap, pairs):
    for i in range(pairs.running[0]):
        write_pair(pairs.row[i], k, unfolded(pairs, i), pairs.sign[i], overlap, gap)


@kernel
def unfolded(pairs, i):
    """Return w, at least `LEAST` unless it is 0."""
    w = pairs.w[i]
    if pairs.folds[i] == 0.0 or w == 0.0:
        return w
    for _ in range(min(pairs.folds[i], 3.0)):
        w /= FOLD
    return max(w, LEAST)


@strict_kernel
def write_pair(row, k, w, sign, overlap, gap):
    """Write z and 1 − |z|, which is 0 only for w = 0; strict, so that all callers get the same bits."""
    write_number(overlap, row, k, 0, sign * (1.0 - w) / (1.0 + w))
    write_number(gap, row, k, 0, 2.0 * w / (1.0 + w))


@kernel
def retire(constants, layer, next_point, overlap, gap, stopped, pairs):
    """Remove the replicas that may stop; write their last value at all later points."""
    if constants.stop_plus == 0.0 and constants.stop_minus == 0.0:
        return
    i = 0
    while i < pairs.running[0]:
        bound = constants.stop_plus if pairs.sign[i] > 0.0 else constants.stop_minus
        w = unfolded(pairs, i)
        if w >= bound:
            i += 1
            continue
        stopped[pairs.row[i]] = layer
        for k in range(next_point, points_in(overlap)):
            write_pair(pairs.row[i], k, w, pairs.sign[i], overlap, gap)
        pairs.running[0] -= 1
        last = pairs.running[0]
        pairs.replica[i], pairs.row[i] = pairs.replica[last], pairs.row[last]
        pairs.w[i], pairs.folds[i], pairs.sign[i] = pairs.w[last], pairs.folds[last], pairs.sign[last]


@inlined
def weights(w, positive, beta, fixed):
    """Return a + b and a − b."""
    e = exponential(-2.0 * beta * (w if positive else 1.0) / (1.0 + w))
    scale = fixed if fixed > 0.0 else 1.0 / (1.0 + e)
    return scale * (1.0 + e), scale * (1.0 - e)


@kernel
def advance(constants, table, k0, k1, layer, pairs):
    """Apply one layer to all running replicas."""
    if constants.hybrid:
        advance_hybrid(constants, k0, k1, layer, pairs)
    elif constants.averaged > 0.0:
        advance_averaged(constants, table, k0, k1, layer, pairs)
    elif constants.fresh or constants.causal:
        advance_unlike(constants, k0, k1, layer, pairs)
    else:
        advance_stochastic(constants, k0, k1, layer, pairs)


@strict_kernel
def advance_stochastic(constants, k0, k1, layer, pairs):
    block = draw_chi_squares(constants.dim - 2, k0, k1, layer, pairs)
    move_pairs(constants.beta, constants.fixed, constants.step, k0, k1, block, pairs)


@strict_kernel
def advance_averaged(constants, table, k0, k1, layer, pairs):
    block = draw_chi_squares(constants.dim - 2, k0, k1, layer, pairs)
    move_averaged(constants.averaged, constants.step, table, k0, k1, block, pairs)


@strict_kernel
def draw_chi_squares(degrees, k0, k1, layer, pairs):
    """Draw ρ² (`first`) and χ² (`second`) of a layer; return the block of its normals."""
    block = layer * U64(1 + blocks_needed(degrees))
    chi_squares(degrees, k0, k1, pairs.replica, block + U64(1), pairs.running[0], pairs.first, pairs.second)
    return block


@strict_kernel
def move_averaged(last, step, table, k0, k1, block, pairs):
    """Apply the step of `move_pairs` with averaged weights."""
    for i in range(pairs.running[0]):
        positive = pairs.sign[i] > 0.0
        of_sum, of_difference = averaged_weights(pairs.w[i], positive, last, table)
        move_pair(i, positive, step * of_sum, step * of_difference, k0, k1, block, pairs)


@strict_kernel
def move_pairs(beta, fixed, step, k0, k1, block, pairs):
    """Apply the step, given ρ² (`first`) and χ² (`second`)."""
    for i in range(pairs.running[0]):
        positive = pairs.sign[i] > 0.0
        of_sum, of_difference = weights(pairs.w[i], positive, beta, fixed)
        move_pair(i, positive, step * of_sum, step * of_difference, k0, k1, block, pairs)


@inlined
def move_pair(i, positive, of_sum, of_difference, k0, k1, block, pairs):
    """Apply the step to replica i, given c₊ and c₋."""
    w, rho, chi = pairs.w[i], pairs.first[i], pairs.second[i]
    w0, w1, w2, w3 = words_of(block, pairs.replica[i], k0, k1)
    h, h_ = box_muller(w0, w1)
    g, g_ = box_muller(w2, w3)
    big = of_sum if positive else of_difference
    small = of_difference if positive else of_sum
    radial = 1.0 + big * h
    q = radial * radial + big * big * (h_ * h_ + rho)
    m = big * h_ / np.sqrt(q)
    along = m + small * g
    across = np.sqrt((radial * radial + big * big * rho) / q) + small * g_  # √(1 − m²), which would cancel
    s_across = across * across + small * small * chi  # over w
    difference = q - w * (along * along + s_across)
    product = 4.0 * q * s_across
    longer = np.sqrt(difference * difference + w * product) + abs(difference)
    pairs.w[i] = w * max(product / (longer * longer), LEAST_FACTOR)
    pairs.sign[i] = pairs.sign[i] if difference >= 0.0 else -pairs.sign[i]


@strict_kernel
def advance_hybrid(constants, k0, k1, layer, pairs):
    fill_listed(constants.law, k0, k1, pairs.replica, layer, pairs.running[0], pairs.first)
    stretch_pairs(constants.beta, constants.fixed, constants.drift, constants.step, pairs)


@strict_kernel
def stretch_pairs(beta, fixed, drift, step, pairs):
    """Apply the step of the hybrid model, given v (`first`)."""
    w, sign, v = pairs.w, pairs.sign, pairs.first
    for i in range(pairs.running[0]):
        omega = drift + step * v[i]
        positive = sign[i] > 0.0
        of_sum, of_difference = weights(w[i], positive, beta, fixed)
        big = 1.0 + omega * (of_sum if positive else of_difference)
        small = 1.0 + omega * (of_difference if positive else of_sum)
        long, short = big * big + NEVER_ZERO, w[i] * (small * small)
        stays = short <= long
        w[i] = min(short, long) / max(short, long)
        sign[i] = sign[i] if stays else -sign[i]
