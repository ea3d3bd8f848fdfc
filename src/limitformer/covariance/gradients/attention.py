r"""Attention, forward and backward; letters in `backward` and `chain.attention`.

**Forward**: one head with values is M = A R N, N the seen part of its value matrix. Several heads side by side are
J = [S_1 | … | S_H]/√(H n_k) = [U 0] Ω_J, S_h = A_h R T_h.

**Backward through one head**: ∂S (m × any) is the gradient of M's rows in orthonormal coordinates, and ∂U = ∂S Nᵀ that
of A R. With W the softmax, Q_h = R T and K_h = R [Gᵀ | B], B = bartlett(r, n_k − q) the part of the keys that the
logits have not seen:

  δ = Aᵀ ∂S,   ∂A = ∂U Rᵀ,   ∂Y = (W ∘ (∂A − (W ∘ ∂A) 1 1ᵀ))/τ,   ∂Q = ∂Y K_h,   ∂K = ∂Yᵀ Q_h.

The forward pass shows the three weights as N, T and [Gᵀ | B] from R. So they return Aᵀ ∂U + ∂Q Tᵀ + ∂K G inside the
tokens' span, and outside it a Gaussian matrix whose rows have the covariance of [δ | ∂Q | ∂K]. Squared norms of the
weights' gradients are |Rᵀδ|², |Rᵀ∂Q|² and |Rᵀ∂K|².

Without an output matrix, N = [H | T] is the branch's last matrix (`residual`), ∂S = Γ and ∂U = Γ Nᵀ.

**Backward through the output matrix**: U Q_J W_O follows the heads side by side, and Q_J W_O = [H | T] is known, so

  ∂J = [Γ Nᵀ | S Z] Ω_J,   S Sᵀ = Γ Γᵀ,   Z Gaussian,

and the part of ∂J of head h outside the coordinates of S_h is S bartlett(m, n_k − q).
"""

from typing import NamedTuple

import numpy as np

from limitformer.covariance.chain.attention import AttentionConstants, AttentionWorkspace, attention_matrix, draw_logits
from limitformer.covariance.gradients.matrices import (
    Buffer,
    add_to,
    add_to_entry,
    draw_bartlett_into,
    draw_normals_into,
    place,
    reflect,
    rescale,
    squared_product,
    transpose,
    turn_back,
)
from limitformer.covariance.gradients.residual import find_root
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


class AttentionRecord(NamedTuple):
    """The record of the forward pass; the first five are of each head."""

    trapezoid: Buffer  # T
    facing: Buffer  # G
    softmax: Buffer  # W
    mixed: Buffer  # A R
    values: Buffer  # T_h
    side_by_side: Buffer  # J, then the reflections of Ω_J


class AttentionBuffers(NamedTuple):
    """Buffers of one head at a time."""

    products: Buffer
    head: Buffer  # R T, S_h or its gradient
    turned: Buffer  # A, or a transpose
    matrix: Buffer  # A, then ∂A, then ∂Y
    unseen: Buffer  # B
    keys: Buffer  # K_h
    extra: Buffer  # Z, or the bartlett behind S
    joined: Buffer  # ∂J
    outcome: Buffer  # ∂S
    update: Buffer  # ∂U
    stacked: Buffer  # [C | δ | ∂Q | ∂K], to be triangularised


def record_shapes(m: int, r: int, constants: AttentionConstants) -> AttentionRecord:
    """Return the shapes for m tokens and r columns of R."""
    heads, q = constants.heads, min(r, constants.key_dim)
    return AttentionRecord(
        trapezoid=(heads, r, q),
        facing=(heads, q, r),
        softmax=(heads, m, m),
        mixed=(heads, m, r),
        values=(heads, r, q),
        side_by_side=(m, heads * q),
    )


def scratch_shapes(m: int, r: int, width: int, constants: AttentionConstants) -> AttentionBuffers:
    """Return the shapes for m tokens, r columns of R and at most `width` columns of Γ."""
    heads, q = constants.heads, min(r, constants.key_dim)
    q2, q3 = min(r, constants.key_dim - q), min(m, constants.key_dim - q)
    return AttentionBuffers(
        products=(m, r),
        head=(m, q),
        turned=(m, m),
        matrix=(m, m),
        unseen=(r, q2),
        keys=(m, q + q2),
        extra=(m, max(heads * q - m, q3, 0)),
        joined=(m, heads * q),
        outcome=(m, q + q3),
        update=(m, r),
        stacked=(m, m + max(width, q + q3) + 2 * q + q2),
    )


@kernel
def forward_head(stream, factor, visible, constants, h, record, scratch):
    """Draw the numbers of `attention.mix_tokens` and compute A R of head h into `record.mixed`."""
    weights = record.softmax[h]
    work = AttentionWorkspace(
        record.trapezoid[h],
        record.facing[h],
        scratch.head,
        scratch.products,
        weights,
        record.mixed[h],
        scratch.head,
        record.side_by_side,
    )
    draw_logits(stream, factor, constants.key_dim, work)
    shared = constants.inverse_temperature, constants.heads, constants.key_dim, constants.address
    softmax = AttentionConstants(0.0, 0.0, *shared)
    attention_matrix(visible, softmax, work)
    shape_weights(weights, visible, constants, scratch.turned)
    multiply(scratch.turned, factor, record.mixed[h])


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
def forward_heads(stream, factor, visible, constants, record, scratch, out, watch):
    """Draw the numbers of `attention.mix_heads` and compute U of the heads side by side into `out`."""
    head, joined = scratch.head, record.side_by_side
    scale = 1.0 / np.sqrt(constants.heads * constants.key_dim)
    for h in range(constants.heads):
        if is_halted(watch):
            return
        forward_head(stream, factor, visible, constants, h, record, scratch)
        draw_bartlett(stream, constants.key_dim, record.values[h])
        multiply(record.mixed[h], record.values[h], head)
        rescale(head, scale)
        place(head, joined, h * head.shape[1])
    reflect(joined, FIRST, joined.shape[1], out, FIRST)


@kernel
def backward_heads(stream, factor, visible, constants, record, scratch, total, returned, watch):
    """Go from Γ in `total` through the output matrix and all heads to the gradient that the branch returns."""
    joined, extra, tokens = scratch.joined, scratch.extra, factor.shape[0]
    add_to_entry(returned.norms, OUTPUT, squared_product(total.branch, total.gradient, FIRST, total.gradient.shape[1]))
    find_root(total)
    place(total.seen, joined, FIRST)
    beyond = max(FIRST, joined.shape[1] - tokens)
    draw_normals_into(stream, extra, FIRST, beyond)
    multiply_into(total.root, extra, beyond, joined, tokens)
    turn_back(record.side_by_side, FIRST, joined.shape[1], joined)
    rescale(joined, 1.0 / np.sqrt(constants.heads * constants.key_dim))
    for h in range(constants.heads):
        if is_halted(watch):
            return
        backward_values(stream, constants, h, total.root, record, scratch)
        backward_head(stream, factor, visible, constants, h, scratch.outcome, scratch.update, record, scratch, returned)


@kernel
def backward_values(stream, constants, h, root, record, scratch):
    """∂S of head h, in the coordinates of S_h and outside them, and ∂U."""
    outcome, head, extra, q = scratch.outcome, scratch.head, scratch.extra, scratch.head.shape[1]
    for i in range(head.shape[0]):
        for k in range(q):
            store(head, i, k, load(scratch.joined, i, h * q + k))
    rest = outcome.shape[1] - q
    draw_bartlett_into(stream, constants.key_dim - q, extra, FIRST, rest)
    multiply_into(root, extra, rest, outcome, q)
    rescale(outcome, 1.0 / np.sqrt(constants.heads * constants.key_dim))
    place(head, outcome, FIRST)
    multiply_transposed(head, record.values[h], scratch.update)


@kernel
def backward_head(stream, factor, visible, constants, h, outcome, update, record, scratch, returned):
    """Go from ∂S in `outcome` and ∂U in `update` through head h to the gradient that the branch returns."""
    turned, matrix, stacked, keys, head = scratch.turned, scratch.matrix, scratch.stacked, scratch.keys, scratch.head
    at_query = factor.shape[0] + outcome.shape[1]
    at_key = at_query + keys.shape[1]
    last = at_key + head.shape[1]
    shape_weights(record.softmax[h], visible, constants, matrix)
    transpose(matrix, turned)
    multiply_into(turned, outcome, outcome.shape[1], stacked, factor.shape[0])
    multiply(turned, update, scratch.products)
    add_to(scratch.products, returned.inside)
    add_to_entry(returned.norms, VALUE, squared_product(record.mixed[h], outcome, FIRST, outcome.shape[1]))
    multiply_transposed(update, factor, matrix)
    backward_softmax(record.softmax[h], constants.inverse_temperature, matrix)
    find_keys(stream, factor, constants, record.facing[h], scratch)
    multiply_into(matrix, keys, keys.shape[1], stacked, at_query)
    transpose(matrix, turned)
    multiply(factor, record.trapezoid[h], head)
    multiply_into(turned, head, head.shape[1], stacked, at_key)
    add_to_entry(returned.norms, QUERY, squared_product(factor, stacked, at_query, at_key))
    add_to_entry(returned.norms, KEY, squared_product(factor, stacked, at_key, last))
    backward_logits(stacked, at_query, at_key, record.trapezoid[h], record.facing[h], returned.inside)
    place(returned.spread, stacked, FIRST)
    triangularise(stacked, FIRST, last, returned.spread, FIRST)


@kernel
def find_keys(stream, factor, constants, facing, scratch):
    """K_h = R [Gᵀ | B], B fresh."""
    q = scratch.head.shape[1]
    multiply_transposed(factor, facing, scratch.head)
    place(scratch.head, scratch.keys, FIRST)
    draw_bartlett(stream, constants.key_dim - q, scratch.unseen)
    multiply_into(factor, scratch.unseen, scratch.unseen.shape[1], scratch.keys, q)


@kernel
def backward_softmax(weights, inverse_temperature, matrix):
    """∂A to ∂Y, in place."""
    for i in range(weights.shape[0]):
        mean = everywhere(0.0)
        for j in range(weights.shape[1]):
            mean = mean + load(weights, i, j) * load(matrix, i, j)
        for j in range(weights.shape[1]):
            store(matrix, i, j, inverse_temperature * load(weights, i, j) * (load(matrix, i, j) - mean))


@kernel
def backward_logits(rows, at_query, at_key, trapezoid, facing, inside):
    """inside += ∂Q Tᵀ + ∂K G, for ∂Q and ∂K in the columns of `rows` from `at_query` and `at_key` on."""
    q = trapezoid.shape[1]
    for i in range(inside.shape[0]):
        for k in range(inside.shape[1]):
            total = load(inside, i, k)
            for j in range(q):
                total = total + load(rows, i, at_query + j) * load(trapezoid, k, j)
                total = total + load(rows, i, at_key + j) * load(facing, j, k)
            store(inside, i, k, total)
