r"""Attention, forward with what the backward pass needs, and backward. Letters in `backward` and
`chain.attention`, names in `layout`.

One head with values M = A R N, N the seen part of its value matrix. What comes back is ∂S (m × any), the gradient of
M's rows in orthonormal coordinates, and ∂U = ∂S Nᵀ, that of A R. With W the softmax, Q_h = R T and K_h = R [Gᵀ | B],
B = bartlett(r, n_k − q) what the logits have not seen of the keys:

  δ = Aᵀ ∂S,   ∂A = ∂U Rᵀ,   ∂Y = (W ∘ (∂A − (W ∘ ∂A) 1 1ᵀ))/τ,   ∂Q = ∂Y K_h,   ∂K = ∂Yᵀ Q_h.

The three weights were seen as N, T and [Gᵀ | B] from R. So they pull back Aᵀ ∂U + ∂Q Tᵀ + ∂K G, and outside the
tokens' span a Gaussian matrix whose rows have the covariance of [δ | ∂Q | ∂K]. Squared norms of the weights' gradients
are |Rᵀδ|², |Rᵀ∂Q|² and |Rᵀ∂K|².

Without heads N = [H | T] is the branch's last matrix (`residual`), ∂S = Γ, ∂U = Γ Nᵀ. With heads the outputs
side by side are J = [S_1 | … | S_H]/√(H n_k) = [U 0] Ω_J, and U Q_J W_O follows. Q_J W_O = [H | T] is known, so

  ∂J = [Γ Nᵀ | S Z] Ω_J,   S Sᵀ = Γ Γᵀ,   Z Gaussian,

and what head h has outside the coordinates of S_h = A_h R T_h is S bartlett(m, n_k − q).
"""

import numpy as np

from limitformer.covariance.chain.attention import (
    AttentionConstants,
    AttentionWorkspace,
    attention_matrix,
    draw_logits,
)
from limitformer.covariance.gradients.layout import (
    BRANCH,
    EXTRA,
    FACING,
    GRADIENT,
    HEAD,
    JOINED,
    KEYS,
    MATRIX,
    MIXED,
    NORMS,
    OUTCOME,
    PRODUCTS,
    PULLED,
    ROOT,
    SEEN,
    SIDE_BY_SIDE,
    SOFTMAX,
    SPREAD,
    SQUARE,
    STACKED,
    TRAPEZOID,
    TURNED,
    UNSEEN,
    UPDATE,
    VALUES,
)
from limitformer.covariance.gradients.reflections import reflect, turn_back
from limitformer.covariance.gradients.residual import (
    draw_bartlett_into,
    draw_normals_into,
    find_root,
    place,
)
from limitformer.covariance.gradients.scratch import flat_of, matrix, matrix_of
from limitformer.numerics.factor import (
    FIRST,
    draw_bartlett,
    multiply,
    multiply_into,
    multiply_transposed,
    triangularise,
)
from limitformer.numerics.kernels import kernel
from limitformer.numerics.lanes import everywhere, load, store
from limitformer.numerics.watch import is_halted

QUERY, KEY, VALUE, OUTPUT = np.arange(4)  # places of the weights' norms


@kernel
def mix_reversibly(stream, factor, visible, constants, h, scratch):
    """A R of head h, from the same numbers as `attention.mix_tokens`."""
    weights, mixed, turned = matrix_of(scratch, SOFTMAX, h), matrix_of(scratch, MIXED, h), matrix(scratch, TURNED)
    work = AttentionWorkspace(
        matrix_of(scratch, TRAPEZOID, h),
        matrix_of(scratch, FACING, h),
        matrix(scratch, HEAD),
        matrix(scratch, PRODUCTS),
        weights,
        flat_of(scratch, SOFTMAX, h),
        mixed,
        matrix(scratch, HEAD),
        matrix(scratch, SIDE_BY_SIDE),
    )
    draw_logits(stream, factor, constants.key_dim, work)
    shared = constants.inverse_temperature, constants.heads, constants.key_dim, constants.address
    softmax = AttentionConstants(0.0, 0.0, *shared)
    attention_matrix(visible, softmax, work)
    shape_weights(weights, visible, constants, turned)
    multiply(turned, factor, mixed)


@kernel
def shape_weights(weights, visible, constants, out):
    """A = identity·I + W − center·p."""
    for i in range(visible.shape[0]):
        count = 0
        for j in range(visible.shape[1]):
            count += 1 if visible[i, j] else 0
        for j in range(visible.shape[1]):
            shift = constants.identity if i == j else 0.0
            if visible[i, j]:
                shift -= constants.center / count
            store(out, i, j, load(weights, i, j) + shift)


@kernel
def join_reversibly(stream, factor, visible, constants, scratch, watch):
    """U of the heads side by side, from the same numbers as `attention.mix_heads`."""
    head, joined = matrix(scratch, HEAD), matrix(scratch, SIDE_BY_SIDE)
    scale = 1.0 / np.sqrt(constants.heads * constants.key_dim)
    for h in range(constants.heads):
        if is_halted(watch):
            return
        mix_reversibly(stream, factor, visible, constants, h, scratch)
        draw_bartlett(stream, constants.key_dim, matrix_of(scratch, VALUES, h))
        multiply(matrix_of(scratch, MIXED, h), matrix_of(scratch, VALUES, h), head)
        rescale(head, scale)
        place(head, joined, h * head.shape[1])
    reflect(joined, FIRST, joined.shape[1], matrix(scratch, SQUARE + BRANCH), FIRST)


@kernel
def pull_through_heads(stream, factor, visible, constants, scratch, watch):
    """Backward through the output matrix and all heads, to `pulled`, C and the squared norms."""
    gradient, seen, root = matrix(scratch, SQUARE + GRADIENT), matrix(scratch, SQUARE + SEEN), matrix(scratch, ROOT)
    joined, extra, tokens = matrix(scratch, JOINED), matrix(scratch, EXTRA), factor.shape[0]
    add_to_norm(scratch, OUTPUT, squared_product(matrix(scratch, SQUARE + BRANCH), gradient, FIRST, gradient.shape[1]))
    find_root(gradient, scratch)
    place(seen, joined, FIRST)
    beyond = max(FIRST, joined.shape[1] - tokens)
    draw_normals_into(stream, extra, FIRST, beyond)
    multiply_into(root, extra, beyond, joined, tokens)
    turn_back(matrix(scratch, SIDE_BY_SIDE), FIRST, joined.shape[1], joined)
    rescale(joined, 1.0 / np.sqrt(constants.heads * constants.key_dim))
    for h in range(constants.heads):
        if is_halted(watch):
            return
        pull_through_values(stream, constants, h, scratch)
        pull_through_head(stream, factor, visible, constants, h, OUTCOME, UPDATE, scratch)


@kernel
def pull_through_values(stream, constants, h, scratch):
    """∂S of head h, in the coordinates of S and beside them, and ∂U."""
    outcome, head, extra = matrix(scratch, OUTCOME), matrix(scratch, HEAD), matrix(scratch, EXTRA)
    joined, q = matrix(scratch, JOINED), matrix(scratch, HEAD).shape[1]
    for i in range(head.shape[0]):
        for k in range(q):
            store(head, i, k, load(joined, i, h * q + k))
    rest = outcome.shape[1] - q
    draw_bartlett_into(stream, constants.key_dim - q, extra, FIRST, rest)
    multiply_into(matrix(scratch, ROOT), extra, rest, outcome, q)
    rescale(outcome, 1.0 / np.sqrt(constants.heads * constants.key_dim))
    place(head, outcome, FIRST)
    multiply_transposed(head, matrix_of(scratch, VALUES, h), matrix(scratch, UPDATE))


@kernel
def pull_through_head(stream, factor, visible, constants, h, from_outcome, from_mixed, scratch):
    """Backward through one head, from the matrices ∂S and ∂U of these names."""
    outcome, update, stacked = matrix(scratch, from_outcome), matrix(scratch, from_mixed), matrix(scratch, STACKED)
    turned, upon, products = matrix(scratch, TURNED), matrix(scratch, MATRIX), matrix(scratch, PRODUCTS)
    keys, head, mixed = matrix(scratch, KEYS), matrix(scratch, HEAD), matrix_of(scratch, MIXED, h)
    at_query = factor.shape[0] + outcome.shape[1]
    at_key = at_query + keys.shape[1]
    last = at_key + head.shape[1]
    shape_weights(matrix_of(scratch, SOFTMAX, h), visible, constants, upon)
    transpose(upon, turned)
    multiply_into(turned, outcome, outcome.shape[1], stacked, factor.shape[0])
    multiply(turned, update, products)
    add_to(products, matrix(scratch, PULLED))
    add_to_norm(scratch, VALUE, squared_product(mixed, outcome, FIRST, outcome.shape[1]))
    multiply_transposed(update, factor, upon)
    pull_through_softmax(matrix_of(scratch, SOFTMAX, h), constants.inverse_temperature, upon)
    find_keys(stream, factor, constants, h, scratch)
    multiply_into(upon, keys, keys.shape[1], stacked, at_query)
    transpose(upon, turned)
    multiply(factor, matrix_of(scratch, TRAPEZOID, h), head)
    multiply_into(turned, head, head.shape[1], stacked, at_key)
    add_to_norm(scratch, QUERY, squared_product(factor, stacked, at_query, at_key))
    add_to_norm(scratch, KEY, squared_product(factor, stacked, at_key, last))
    trapezoid, facing = matrix_of(scratch, TRAPEZOID, h), matrix_of(scratch, FACING, h)
    pull_through_logits(stacked, at_query, at_key, trapezoid, facing, matrix(scratch, PULLED))
    place(matrix(scratch, SPREAD), stacked, FIRST)
    triangularise(stacked, FIRST, last, matrix(scratch, SPREAD), FIRST)


@kernel
def find_keys(stream, factor, constants, h, scratch):
    """K_h = R [Gᵀ | B], B fresh."""
    keys, head, unseen = matrix(scratch, KEYS), matrix(scratch, HEAD), matrix(scratch, UNSEEN)
    q = head.shape[1]
    multiply_transposed(factor, matrix_of(scratch, FACING, h), head)
    place(head, keys, FIRST)
    draw_bartlett(stream, constants.key_dim - q, unseen)
    multiply_into(factor, unseen, unseen.shape[1], keys, q)


@kernel
def pull_through_softmax(weights, inverse_temperature, matrix):
    """∂A to ∂Y, in place."""
    for i in range(weights.shape[0]):
        mean = everywhere(0.0)
        for j in range(weights.shape[1]):
            mean = mean + load(weights, i, j) * load(matrix, i, j)
        for j in range(weights.shape[1]):
            store(matrix, i, j, inverse_temperature * load(weights, i, j) * (load(matrix, i, j) - mean))


@kernel
def pull_through_logits(rows, at_query, at_key, trapezoid, square, pulled):
    """pulled += ∂Q Tᵀ + ∂K G, for ∂Q and ∂K in the columns of `rows` from there on."""
    q = trapezoid.shape[1]
    for i in range(pulled.shape[0]):
        for k in range(pulled.shape[1]):
            total = load(pulled, i, k)
            for j in range(q):
                total = total + load(rows, i, at_query + j) * load(trapezoid, k, j)
                total = total + load(rows, i, at_key + j) * load(square, j, k)
            store(pulled, i, k, total)


@kernel
def squared_product(a, b, first, last):
    """|aᵀ b[:, first:last]|²."""
    total = everywhere(0.0)
    for k in range(a.shape[1]):
        for j in range(first, last):
            entry = everywhere(0.0)
            for i in range(a.shape[0]):
                entry = entry + load(a, i, k) * load(b, i, j)
            total = total + entry * entry
    return total


@kernel
def add_to_norm(scratch, k, squared):
    """norms[k] += squared."""
    norms = matrix(scratch, NORMS)
    store(norms, k, 0, load(norms, k, 0) + squared)


@kernel
def add_to(step, out):
    """out += step."""
    for i in range(out.shape[0]):
        for k in range(out.shape[1]):
            store(out, i, k, load(out, i, k) + load(step, i, k))


@kernel
def rescale(matrix, scale):
    """matrix ← scale · matrix."""
    for i in range(matrix.shape[0]):
        for k in range(matrix.shape[1]):
            store(matrix, i, k, scale * load(matrix, i, k))


@kernel
def transpose(a, out):
    """out = aᵀ."""
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            store(out, j, i, load(a, i, j))
