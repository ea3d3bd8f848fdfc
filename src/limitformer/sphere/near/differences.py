r"""A layer for differences D of tokens (`forest`): nothing small is a difference of what is not.

Xⁱ = s xᵖ + D, and a layer before its normalisation is linear, so that Y = yⁱ − s yᵖ = D + c V (Aⁱ − s Aᵖ).

**Attention.** Let W_j be the weights of token i, not yet divided by their sum, and r_j = exp(−β ⟨D, QᵀK xʲ⟩) − 1. Token
s xᵖ = xⁱ − D has the weights W_j (1 + r_j), so with ρ = Σ W_j r_j / Σ W_j

  A(xⁱ) − A(s xᵖ) = Σ_j W_j (ρ − r_j) xʲ / Σ_j W_j (1 + r_j)        (softmax),
  A(xⁱ) − A(s xᵖ) = − Σ_j W_j r_j xʲ · factor                        (unnormalized).

For s = 1 this is Aⁱ − Aᵖ; for s = −1, A(xᵖ) + A(−xᵖ) comes to it (`antipodes`).

**Normalisation.** With n² = |y|², uᵖ = yᵖ/nᵖ and q = nᵢ² − nₚ² = 2s ⟨yᵖ, Y⟩ + |Y|²,

  D′ = ( Y − s uᵖ q/(nᵢ + nₚ) ) / nᵢ,        xⁱ′ = s uᵖ + D′.

A difference of zero stays zero. One that is not is held at |D| = LEAST, whose square is still a double.

Replicas in which token i is a root pass by unchanged, to the bit: they run beside others that have relations.
"""

import numpy as np

from limitformer.numerics.elementary import exponentials_less_one
from limitformer.numerics.factor import FIRST, inner, multiply, transposed_block
from limitformer.numerics.kernels import inlined, kernel
from limitformer.numerics.lanes import (
    LANES,
    all_below,
    choose,
    everywhere,
    larger,
    load,
    square_root,
    store,
)
from limitformer.sphere.near.gathered import LENGTH, SIGN, note_gathered
from limitformer.sphere.near.near_tree import release, settle

LEAST = 1e-150


@kernel
def difference_rows(x, constants, attention, forest):
    """Weights of tokens with a parent, and what they are divided by, to those of A(xⁱ) − A(s xᵖ)."""
    n, left = x.shape[0], forest.apart
    if not constants.isotropic:
        multiply(forest.apart, attention.bilinear, attention.turned)
        left = attention.turned
    for i in range(0, n, 2):
        end = min(i + 2, n)
        if forest.children[i] + forest.children[end - 1] == 0:
            continue
        for j in range(0, n, 4):
            transposed_block(left, i, x, j, x.shape[1], forest.change)
        exponentials_less_one(-constants.beta, forest.change_flat[i * n * LANES : end * n * LANES])
        for row in range(i, end):
            difference_row(row, constants.fixed, attention.weights, attention.scales, forest)


@kernel
def difference_row(i, fixed, weights, scales, forest):
    """One row, given the r_j."""
    sign = load(forest.numbers, i, SIGN)
    moment = total = mean = everywhere(0.0)
    for j in range(weights.shape[1]):
        w = load(weights, i, j)
        moment, total = moment + w * load(forest.change, i, j), total + w
    if fixed == 0.0:
        mean = moment / total
        store(scales, i, FIRST, choose(sign * sign, 1.0 / (total + moment), load(scales, i, FIRST)))
    for j in range(weights.shape[1]):
        w = load(weights, i, j)
        store(weights, i, j, choose(sign * sign, w * (mean - load(forest.change, i, j)), w))


@inlined
def part(x, forest):
    """Put D's in place of the tokens that have a parent."""
    for i in range(x.shape[0]):
        if forest.children[i] > 0:
            sign = load(forest.numbers, i, SIGN)
            for k in range(x.shape[1]):
                store(x, i, k, choose(sign * sign, load(forest.apart, i, k), load(x, i, k)))


@inlined
def set_aside(x, forest):
    """Keep the Y's, which stand in place of tokens, and the lengths of the roots, before rows are normalised."""
    for i in range(x.shape[0]):
        if forest.children[i] < LANES:
            store(forest.numbers, i, LENGTH, square_root(inner(x, i, x, i, FIRST, x.shape[1])))
        if forest.children[i] > 0:
            for k in range(x.shape[1]):
                store(forest.apart, i, k, load(x, i, k))


@kernel
def rejoin(farthest, constants, x, forest):
    """D′ and the tokens from the Y's; tokens with |D′|² above `farthest` become roots."""
    released, longest = False, everywhere(0.0)
    for i in range(1, x.shape[0]):
        if forest.children[i] > 0:
            fetch(i, x, forest)
            square = join_row(i, x, forest)
            longest = larger(longest, square)
            least = choose(square, square, everywhere(1.0))
            if not (all_below(square, farthest) and all_below(-1.0 * least, -LEAST * LEAST)):
                released |= bound(i, farthest, forest)
    if released:
        settle(constants, forest)
    note_gathered(longest, constants.beta, forest)


@kernel
def fetch(i, x, forest):
    """Each replica's parent of token i, and its length, into `leader`."""
    for lane in range(LANES):
        parent = max(forest.parent[i, lane], 0)
        forest.leader[1, 0, lane] = forest.numbers[parent, LENGTH, lane]
        for k in range(x.shape[1]):
            forest.leader[0, k, lane] = x[parent, k, lane]


@kernel
def join_row(i, x, forest):
    """|D′|², 0 where token i is a root."""
    apart, leader, coordinates = forest.apart, forest.leader, x.shape[1]
    sign, length = load(forest.numbers, i, SIGN), load(leader, 1, FIRST)
    squared = inner(apart, i, apart, i, FIRST, coordinates)
    longer = squared + 2.0 * (sign * length * inner(leader, FIRST, apart, i, FIRST, coordinates))
    mine = square_root(length * length + longer)
    turn, inverse = sign * longer / (mine + length), 1.0 / mine
    store(forest.numbers, i, LENGTH, choose(sign * sign, mine, load(forest.numbers, i, LENGTH)))
    for k in range(coordinates):
        d = (load(apart, i, k) - turn * load(leader, FIRST, k)) * inverse
        store(apart, i, k, d)
        store(x, i, k, choose(sign * sign, sign * load(leader, FIRST, k) + d, load(x, i, k)))
    return choose(sign * sign, inner(apart, i, apart, i, FIRST, coordinates), everywhere(0.0))


@kernel
def bound(i, farthest, forest):
    """Release the tokens i that are too far from their parents and hold those too near; whether one was released."""
    released = False
    for lane in range(LANES):
        if forest.parent[i, lane] < 0:
            continue
        squared, largest = 0.0, 0.0
        for k in range(forest.apart.shape[1]):
            squared += forest.apart[i, k, lane] * forest.apart[i, k, lane]
            largest = max(largest, abs(forest.apart[i, k, lane]))
        if not squared < farthest:
            release(i, lane, forest)
            released = True
        elif squared < LEAST * LEAST and largest > 0.0:
            hold(i, lane, largest, forest)
    return released


@kernel
def hold(i, lane, largest, forest):
    """Make |D| LEAST, in its direction."""
    squared = 0.0
    for k in range(forest.apart.shape[1]):
        forest.apart[i, k, lane] /= largest
        squared += forest.apart[i, k, lane] * forest.apart[i, k, lane]
    for k in range(forest.apart.shape[1]):
        forest.apart[i, k, lane] *= LEAST / np.sqrt(squared)
