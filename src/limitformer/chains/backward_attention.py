r"""Attention, forward with what the backward pass needs, and backward. Letters in `backward` and `attention`.

One head with values M = A R N, N the seen part of its value matrix. What comes back is ∂S (m × any), the gradient of
M's rows in orthonormal coordinates, and ∂U = ∂S Nᵀ, that of A R. With W the softmax, Q_h = R T and K_h = R [Gᵀ | B],
B = bartlett(r, n_k − q) what the logits have not seen of the keys:

  δ = Aᵀ ∂S,   ∂A = ∂U Rᵀ,   ∂Y = (W ∘ (∂A − (W ∘ ∂A) 1 1ᵀ))/τ,   ∂Q = ∂Y K_h,   ∂K = ∂Yᵀ Q_h.

The three weights were seen as N, T and [Gᵀ | B] from R. So they pull back Aᵀ ∂U + ∂Q Tᵀ + ∂K G, and outside the
tokens' span a Gaussian matrix whose rows have the covariance of [δ | ∂Q | ∂K]. Squared norms of the weights' gradients
are |Rᵀδ|², |Rᵀ∂Q|² and |Rᵀ∂K|².

Without heads N = [H | T] is the branch's last matrix (`backward_residual`), ∂S = Γ, ∂U = Γ Nᵀ. With heads the outputs
side by side are J = [S_1 | … | S_H]/√(H n_k) = [U 0] Ω_J, and U Q_J W_O follows. Q_J W_O = [H | T] is known, so

  ∂J = [Γ Nᵀ | S Z] Ω_J,   S Sᵀ = Γ Γᵀ,   Z Gaussian,

and what head h has outside the coordinates of S_h = A_h R T_h is S bartlett(m, n_k − q).
"""

from typing import NamedTuple

import numpy as np

from limitformer.chains.attention import AttentionConstants, AttentionWorkspace, attention_matrix, draw_logits
from limitformer.chains.backward_residual import factor_of_gradient, place
from limitformer.chains.checkpoints import lane_stack
from limitformer.chains.reflections import reflect, turn_back
from limitformer.factor import (
    FIRST,
    draw_bartlett,
    multiply,
    multiply_into,
    multiply_transposed,
    triangularise,
)
from limitformer.kernels import driver, kernel
from limitformer.lanes import LANES, everywhere, lane_matrix, load, store
from limitformer.random import draw_normals
from limitformer.watch import halted

QUERY, KEY, VALUE, OUTPUT = 0, 1, 2, 3  # places of the weights' norms


class HeadsMemory(NamedTuple):
    """What the backward pass needs of every head; matrices have LANES behind, q = min(r, n_k)."""

    trapezoids: np.ndarray  # (heads, r, q): T of the logits
    squares: np.ndarray  # (heads, q, r): G
    queries: np.ndarray  # (heads, m, q): R T
    weights: np.ndarray  # (heads, m, m): W
    flats: np.ndarray  # (heads, m m LANES): the same memory
    matrices: np.ndarray  # (heads, m, m): A
    mixed: np.ndarray  # (heads, m, r): A R
    values: np.ndarray  # (heads, r, q): T_h
    side_by_side: np.ndarray  # (m, heads q): J, then the reflections of Ω_J


class HeadsWorkspace(NamedTuple):
    """Scratch matrices, each with LANES behind; q₂ = min(r, n_k − q), q₃ = min(m, n_k − q), w as in `SumWorkspace`."""

    products: np.ndarray  # (m, r)
    head: np.ndarray  # (m, q)
    turned: np.ndarray  # (m, m)
    matrix: np.ndarray  # (m, m): ∂A, then ∂Y
    unseen: np.ndarray  # (r, q₂): B
    keys: np.ndarray  # (m, q + q₂): K_h
    step: np.ndarray  # (m, r)
    root: np.ndarray  # (m, m): S
    scratch: np.ndarray  # (m, w)
    normals: np.ndarray  # (m, heads q − m), or nothing
    joined: np.ndarray  # (m, heads q): ∂J
    rest: np.ndarray  # (m, q₃)
    outcome: np.ndarray  # (m, q + q₃): ∂S
    mixed: np.ndarray  # (m, r): ∂U
    rows: np.ndarray  # (m, m + columns of ∂S + 2 q + q₂): [C | δ | ∂Q | ∂K]


@driver
def heads_memory(tokens, rank, constants):
    q, heads = min(rank, constants.key_dim), constants.heads
    weights = lane_stack(heads, tokens, tokens)
    return HeadsMemory(
        lane_stack(heads, rank, q),
        lane_stack(heads, q, rank),
        lane_stack(heads, tokens, q),
        weights,
        weights.reshape((heads, tokens * tokens * LANES)),
        lane_stack(heads, tokens, tokens),
        lane_stack(heads, tokens, rank),
        lane_stack(heads, rank, q),
        lane_matrix(tokens, heads * q),
    )


@driver
def heads_workspace(tokens, rank, width_of_gradient, constants):
    q = min(rank, constants.key_dim)
    q2, q3 = min(rank, constants.key_dim - q), min(tokens, constants.key_dim - q)
    joined = constants.heads * q
    return HeadsWorkspace(
        lane_matrix(tokens, rank),
        lane_matrix(tokens, q),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, tokens),
        lane_matrix(rank, q2),
        lane_matrix(tokens, q + q2),
        lane_matrix(tokens, rank),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, width_of_gradient),
        lane_matrix(tokens, max(0, joined - tokens)),
        lane_matrix(tokens, joined),
        lane_matrix(tokens, q3),
        lane_matrix(tokens, q + q3),
        lane_matrix(tokens, rank),
        lane_matrix(tokens, tokens + max(width_of_gradient, q + q3) + 2 * q + q2),
    )


@kernel
def mix_reversibly(stream, factor, visible, constants, h, memory, work):
    """A R of head h, from the same numbers as `attention.mix_tokens`."""
    view = AttentionWorkspace(
        memory.trapezoids[h],
        memory.squares[h],
        memory.queries[h],
        work.products,
        memory.weights[h],
        memory.flats[h],
        memory.mixed[h],
        work.head,
        memory.side_by_side,
    )
    draw_logits(stream, factor, constants.key_dim, view)
    softmax = AttentionConstants(0.0, 0.0, constants.inverse_temperature, constants.heads, constants.key_dim)
    attention_matrix(visible, softmax, view)
    shape_weights(memory.weights[h], visible, constants, memory.matrices[h])
    multiply(memory.matrices[h], factor, memory.mixed[h])


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
def join_reversibly(stream, factor, visible, constants, memory, work, out, watch):
    """U of the heads side by side into `out` (m, m), from the same numbers as `attention.mix_heads`."""
    q = work.head.shape[1]
    scale = 1.0 / np.sqrt(constants.heads * constants.key_dim)
    for h in range(constants.heads):
        if halted(watch):
            return
        mix_reversibly(stream, factor, visible, constants, h, memory, work)
        draw_bartlett(stream, constants.key_dim, memory.values[h])
        multiply(memory.mixed[h], memory.values[h], work.head)
        for i in range(out.shape[0]):
            for k in range(q):
                store(memory.side_by_side, i, h * q + k, scale * load(work.head, i, k))
    reflect(memory.side_by_side, FIRST, memory.side_by_side.shape[1], out, FIRST)


@kernel
def pull_through_heads(stream, factor, visible, constants, total, memory, work, pulled, spread, norms, watch):
    """Backward through the output matrix and all heads: `pulled` (m, r), `spread` C (m, m), squared `norms`."""
    q, tokens = work.head.shape[1], factor.shape[0]
    joined = constants.heads * q
    scale = 1.0 / np.sqrt(constants.heads * constants.key_dim)
    add_to_norm(norms, OUTPUT, squared_product(total.branch, total.gradient, FIRST, total.gradient.shape[1]))
    factor_of_gradient(total, work.scratch, work.root)
    for i in range(tokens):
        for k in range(min(tokens, joined)):
            store(work.joined, i, k, load(total.seen, i, k))
    if joined > tokens:
        draw_normals(stream, work.normals)
        multiply_into(work.root, work.normals, joined - tokens, work.joined, tokens)
    turn_back(memory.side_by_side, FIRST, joined, work.joined)
    for h in range(constants.heads):
        if halted(watch):
            return
        draw_bartlett(stream, constants.key_dim - q, work.rest)
        multiply_into(work.root, work.rest, work.rest.shape[1], work.outcome, q)
        for i in range(tokens):
            for k in range(q):
                store(work.outcome, i, k, load(work.joined, i, h * q + k))
        rescale(work.outcome, scale)
        for i in range(tokens):
            for k in range(q):
                store(work.head, i, k, load(work.outcome, i, k))
        multiply_transposed(work.head, memory.values[h], work.mixed)
        pull_through_head(
            stream, factor, visible, constants, h, work.outcome, work.mixed, memory, work, pulled, spread, norms
        )


@kernel
def pull_through_head(
    stream, factor, visible, constants, h, outcome, mixed, memory, work, pulled, spread, norms
):
    """Backward through one head, from ∂S (`outcome`) and ∂U (`mixed`)."""
    tokens, q = factor.shape[0], work.head.shape[1]
    columns, both = outcome.shape[1], work.keys.shape[1]
    at_query = tokens + columns
    at_key = at_query + both
    transpose(memory.matrices[h], work.turned)
    multiply_into(work.turned, outcome, columns, work.rows, tokens)
    multiply(work.turned, mixed, work.step)
    add_to(work.step, pulled)
    add_to_norm(norms, VALUE, squared_product(memory.mixed[h], outcome, FIRST, columns))
    multiply_transposed(mixed, factor, work.matrix)
    pull_through_softmax(memory.weights[h], constants.inverse_temperature, work.matrix)
    multiply_transposed(factor, memory.squares[h], work.head)
    place(work.head, work.keys, FIRST)
    draw_bartlett(stream, constants.key_dim - q, work.unseen)
    multiply_into(factor, work.unseen, both - q, work.keys, q)
    multiply_into(work.matrix, work.keys, both, work.rows, at_query)
    transpose(work.matrix, work.turned)
    multiply_into(work.turned, memory.queries[h], q, work.rows, at_key)
    add_to_norm(norms, QUERY, squared_product(factor, work.rows, at_query, at_key))
    add_to_norm(norms, KEY, squared_product(factor, work.rows, at_key, at_key + q))
    pull_through_logits(work.rows, at_query, at_key, memory.trapezoids[h], memory.squares[h], pulled)
    place(spread, work.rows, FIRST)
    triangularise(work.rows, FIRST, at_key + q, spread, FIRST)


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
def add_to_norm(norms, k, squared):
    """norms[k] += squared."""
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
