r"""A layer for differences D of tokens (`near_tree`); no small number is computed as a difference of large ones.

Xⁱ = s xᵖ + D, and a layer before its normalisation is linear, so Y = yⁱ − s yᵖ = D + c V (Aⁱ − s Aᵖ).

**Attention.** Let W_j be the weights of token i, not yet divided by their sum, and r_j = exp(−β ⟨D, QᵀK xʲ⟩) − 1. Token
s xᵖ = xⁱ − D has the weights W_j (1 + r_j), so with ρ = Σ W_j r_j / Σ W_j

  A(xⁱ) − A(s xᵖ) = Σ_j W_j (ρ − r_j) xʲ / Σ_j W_j (1 + r_j)        (softmax),
  A(xⁱ) − A(s xᵖ) = − Σ_j W_j r_j xʲ · factor                        (unnormalized).

For s = 1 this is Aⁱ − Aᵖ; for s = −1, A(xᵖ) + A(−xᵖ) is added (`antipodes`).

**Normalisation.** With n² = |y|², uᵖ = yᵖ/nᵖ and q = nᵢ² − nₚ² = 2s ⟨yᵖ, Y⟩ + |Y|²,

  D′ = ( Y − s uᵖ q/(nᵢ + nₚ) ) / nᵢ,        xⁱ′ = s uᵖ + D′.

A zero difference stays zero. Any other is raised to |D| = LEAST if it is shorter, so that its square is a double.

Replicas in which token i is a root keep all their bits, although they share lanes with replicas that have links.
"""

import numpy as np

from limitformer.numerics.elementary import exponential_less_one
from limitformer.numerics.factor import FIRST, inner, multiply, transposed_rows
from limitformer.numerics.kernels import inlined, kernel, strict_kernel
from limitformer.numerics.lanes import LANES, all_below, choose, everywhere, larger, load, square_root, store
from limitformer.sphere.near.near_tree import LENGTH, SIGN, note_gathered, refresh_counts, unlink

LEAST = 1e-150


@kernel
def difference_rows(x, constants, attention, tree):
    """Replace weights and scales of tokens with a parent by those of A(xⁱ) − A(s xᵖ)."""
    n, factor = x.shape[0], tree.apart
    if not constants.isotropic:
        multiply(tree.apart, attention.bilinear, attention.turned)
        factor = attention.turned
    for i in range(0, n, 2):
        end = min(i + 2, n)
        if tree.children[i] + tree.children[end - 1] == 0:
            continue
        transposed_rows(factor, i, x, n, tree.change)
        for row in range(i, end):
            changes(row, -constants.beta, tree.change)
            difference_row(row, constants.fixed, attention.weights, attention.scales, tree)


@strict_kernel
def changes(i, factor, change):
    """Replace the inner products in row i by r_j."""
    for j in range(change.shape[1]):
        store(change, i, j, exponential_less_one(factor * load(change, i, j)))


@kernel
def difference_row(i, fixed, weights, scales, tree):
    """Replace one row, given the r_j."""
    sign = load(tree.numbers, i, SIGN)
    moment = total = mean = everywhere(0.0)
    for j in range(weights.shape[1]):
        w = load(weights, i, j)
        moment, total = moment + w * load(tree.change, i, j), total + w
    if fixed == 0.0:
        mean = moment / total
        store(scales, i, FIRST, choose(sign * sign, 1.0 / (total + moment), load(scales, i, FIRST)))
    for j in range(weights.shape[1]):
        w = load(weights, i, j)
        store(weights, i, j, choose(sign * sign, w * (mean - load(tree.change, i, j)), w))


@inlined
def insert_differences(x, tree):
    """Replace the tokens that have a parent by their D's."""
    for i in range(x.shape[0]):
        if tree.children[i] > 0:
            sign = load(tree.numbers, i, SIGN)
            for k in range(x.shape[1]):
                store(x, i, k, choose(sign * sign, load(tree.apart, i, k), load(x, i, k)))


@inlined
def store_differences(x, tree):
    """Store the Y's, which are in the rows of tokens with a parent, and the lengths of the roots."""
    for i in range(x.shape[0]):
        if tree.children[i] < LANES:
            store(tree.numbers, i, LENGTH, square_root(inner(x, i, x, i, FIRST, x.shape[1])))
        if tree.children[i] > 0:
            for k in range(x.shape[1]):
                store(tree.apart, i, k, load(x, i, k))


@kernel
def after_step(farthest, constants, x, tree):
    """Compute D′ and the tokens from the Y's; a token with |D′|² above `farthest` becomes a root."""
    unlinked, longest = False, everywhere(0.0)
    for i in range(1, x.shape[0]):
        if tree.children[i] > 0:
            gather_parents(i, x, tree)
            square = normalise_difference(i, x, tree)
            longest = larger(longest, square)
            least = choose(square, square, everywhere(1.0))
            if not (all_below(square, farthest) and all_below(-1.0 * least, -LEAST * LEAST)):
                unlinked |= limit_differences(i, farthest, tree)
    if unlinked:
        refresh_counts(constants, tree)
    note_gathered(longest, constants.beta, tree)


@kernel
def gather_parents(i, x, tree):
    """Copy each replica's parent of token i, and the length of that parent, into `leader`."""
    for lane in range(LANES):
        parent = max(tree.parent[i, lane], 0)
        tree.leader[1, 0, lane] = tree.numbers[parent, LENGTH, lane]
        for k in range(x.shape[1]):
            tree.leader[0, k, lane] = x[parent, k, lane]


@kernel
def normalise_difference(i, x, tree):
    """Compute D′ and token i; return |D′|², 0 in lanes where token i is a root."""
    apart, leader, coordinates = tree.apart, tree.leader, x.shape[1]
    sign, length = load(tree.numbers, i, SIGN), load(leader, 1, FIRST)
    squared = inner(apart, i, apart, i, FIRST, coordinates)
    longer = squared + 2.0 * (sign * length * inner(leader, FIRST, apart, i, FIRST, coordinates))
    mine = square_root(length * length + longer)
    turn, inverse = sign * longer / (mine + length), 1.0 / mine
    store(tree.numbers, i, LENGTH, choose(sign * sign, mine, load(tree.numbers, i, LENGTH)))
    for k in range(coordinates):
        d = (load(apart, i, k) - turn * load(leader, FIRST, k)) * inverse
        store(apart, i, k, d)
        store(x, i, k, choose(sign * sign, sign * load(leader, FIRST, k) + d, load(x, i, k)))
    return choose(sign * sign, inner(apart, i, apart, i, FIRST, coordinates), everywhere(0.0))


@kernel
def limit_differences(i, farthest, tree):
    """Unlink token i where it is too far from its parent, raise |D| to LEAST; return whether a lane was unlinked."""
    unlinked = False
    for lane in range(LANES):
        if tree.parent[i, lane] < 0:
            continue
        squared, largest = 0.0, 0.0
        for k in range(tree.apart.shape[1]):
            squared += tree.apart[i, k, lane] * tree.apart[i, k, lane]
            largest = max(largest, abs(tree.apart[i, k, lane]))
        if not squared < farthest:
            unlink(i, lane, tree)
            unlinked = True
        elif squared < LEAST * LEAST and largest > 0.0:
            raise_to_least(i, lane, largest, tree)
    return unlinked


@kernel
def raise_to_least(i, lane, largest, tree):
    """Lengthen D to LEAST without a change of direction."""
    squared = 0.0
    for k in range(tree.apart.shape[1]):
        tree.apart[i, k, lane] /= largest
        squared += tree.apart[i, k, lane] * tree.apart[i, k, lane]
    for k in range(tree.apart.shape[1]):
        tree.apart[i, k, lane] *= LEAST / np.sqrt(squared)
