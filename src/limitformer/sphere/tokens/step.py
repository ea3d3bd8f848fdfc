r"""One layer of N tokens X (N × d) in coordinates, for any Q and K and any law of the values.

In rows, a layer (`sphere.methods`) adds (σ/√L) A X Vᵀ and normalises. If values are Gaussian and N < d, V acts only on
the N rows of A X = F O (F lower triangular, O orthonormal rows). V Oᵀ is d × N, standard normal, and the d × d matrix
is never drawn. The hybrid model adds ω A X with one number ω for all tokens.

Heads may have more than d joined rows; V acts on the factor of these rows whatever N is (`queries`).

If QᵀK is I or drawn in each layer and values are Gaussian, the law is invariant under rotations of all tokens. Then the
Gram matrix of N < d tokens is a Markov chain (GRAM).

A token near an earlier token, or near the antipode of one, passes through a layer as their difference
(`near.near_tree`, `near.differences`, `near.antipodes`). A layer is linear before it normalises, so the difference is a
row like the others, and every row has its own relative precision. Gaps 1 − |z| have all their digits down to 1e-300.
"""

from typing import NamedTuple

import numpy as np

from limitformer.numerics.elementary import U64
from limitformer.numerics.factor import (
    FIRST,
    add_multiple,
    draw_bartlett,
    inner,
    multiply,
    multiply_lower,
    multiply_transposed,
    put_in_lanes,
    triangularise,
)
from limitformer.numerics.kernels import allocator, inlined, kernel
from limitformer.numerics.lanes import LANES, lane_matrix, load, square_root, store
from limitformer.numerics.random import Stream, draw_normals, open_stream, rewind
from limitformer.sphere.near.antipodes import Antipodes, add_antipodes, open_antipodes
from limitformer.sphere.near.differences import after_step, difference_rows, insert_differences, store_differences
from limitformer.sphere.near.near_tree import NearTree, all_gathered, any_related, attend_gathered, open_near_tree
from limitformer.sphere.tokens.attention import AttentionParameters, AttentionScratch, attention_workspace, mix, weigh
from limitformer.sphere.tokens.queries import QueryConstants, QueryWorkspace, draw_queries, join_head, query_workspace
from limitformer.sphere.tokens.values import fill

AT_TOKENS, UNIFORM, AT_OVERLAP = 0, 1, 2  # kinds of start
FULL, SKETCHED, SCALAR, GRAM = 0, 1, 2, 3  # parts of the random matrix that a layer draws


class TokenConstants(NamedTuple):
    """Parameters of a model that the kernels read."""

    attention: AttentionParameters
    dim: int
    layers: int
    step: float  # σ/√L, or ε/√L for the hybrid
    drift: float  # 0, or 1/L for the hybrid
    law: int
    draw: int  # FULL, SKETCHED, SCALAR or GRAM
    near: float  # |D|² below which a token is stored as a difference
    update_every: int  # layers between two updates of links
    relink_every: int  # layers between two updates that change parents, a multiple of `update_every`
    queries: QueryConstants


class Relations(NamedTuple):
    """Links of tokens and scratch for antipodes, in a second tuple because kernel arguments are copied."""

    tree: NearTree
    antipodes: Antipodes


class TokenWorkspace(NamedTuple):
    """The workspace of one thread; r is d, or N for the Gram chain. The last axis of a matrix has LANES entries."""

    stream: Stream
    attention: AttentionScratch
    x: np.ndarray  # (N, r)
    mixed: np.ndarray  # (N, r), A X
    moved: np.ndarray  # (N, r)
    factor: np.ndarray  # (N, N)
    values: np.ndarray  # V, or the part of it that is drawn
    flat: np.ndarray  # the memory of `values` in one row, a multiple of four rows
    outside: np.ndarray  # (N, t), t = min(N, d − N), for the Gram chain
    added: np.ndarray  # (N, t)
    rows: np.ndarray  # (N, N + t)
    queries: QueryWorkspace


@allocator
def token_workspace(tokens, coordinates, constants, bilinear):
    shape = value_shape(tokens, coordinates, constants)
    size = (shape[0] * shape[1] + 3) // 4 * 4
    memory = lane_matrix(size, 1)
    flat = memory.reshape(size * LANES)
    t = min(tokens, constants.dim - tokens) if constants.draw == GRAM else 0
    return TokenWorkspace(
        open_stream(),
        attention_workspace(tokens, coordinates, bilinear),
        lane_matrix(tokens, coordinates),
        lane_matrix(tokens, coordinates),
        lane_matrix(tokens, coordinates),
        lane_matrix(tokens, tokens),
        flat[: shape[0] * shape[1] * LANES].reshape((shape[0], shape[1], LANES)),
        flat,
        lane_matrix(tokens, t),
        lane_matrix(tokens, t),
        lane_matrix(tokens, tokens + t),
        query_workspace(tokens, coordinates, constants.queries),
    )


@allocator
def open_relations(tokens, coordinates):
    return Relations(open_near_tree(tokens, coordinates), open_antipodes(tokens, coordinates))


@kernel
def value_shape(tokens, coordinates, constants):
    if constants.draw == FULL:
        return (coordinates, coordinates)
    if constants.draw == SCALAR:
        return (1, 1)
    return (tokens, coordinates)


@kernel
def begin_tokens(start, how, constants, start_key, query_key, replica, work):
    """Set the first tokens of LANES replicas; rows of `start` with a parent hold D."""
    rewind(work.stream, start_key, replica)
    rewind(work.queries.stream, query_key, replica)
    if how == AT_TOKENS:
        put_in_lanes(start, work.x)
    elif work.x.shape[1] < constants.dim:  # the Gram factor of N < d uniform tokens
        draw_bartlett(work.stream, constants.dim, work.x)
        normalise_rows(work.x)
    else:
        draw_normals(work.stream, work.x)
        normalise_rows(work.x)
    if how == AT_OVERLAP:
        place_second(start[1, 0], start[1, 1], work.x)


@kernel
def place_second(along, across, x):
    """Move the second token within the plane of both, to the components `along` and `across` the first."""
    length = inner(x, FIRST, x, FIRST + 1, FIRST, x.shape[1])
    for k in range(x.shape[1]):
        store(x, 1, k, load(x, 1, k) - length * load(x, 0, k))
    normalise_row(1, x)
    for k in range(x.shape[1]):
        store(x, 1, k, along * load(x, 0, k) + across * load(x, 1, k))


@inlined
def advance_tokens(layer, constants, key_words, replica, work, relations):
    """Apply one layer to `work.x`."""
    tree, heads = relations.tree, constants.queries.heads
    related = any_related(tree.children)
    if constants.queries.fresh or not (related and all_gathered(tree.state)):
        for head in range(heads):
            if constants.queries.fresh:
                draw_queries(constants.queries.head_dim, work.queries, work.attention.bilinear)
            attend(related, constants, work, relations)
            if heads > 1:
                join_head(head, heads, work.mixed, work.queries.joined)
    if related:
        attend_gathered(work.x, tree, work.mixed)
        insert_differences(work.x, tree)
    move_tokens(layer, constants, key_words, replica, work)
    if related:
        store_differences(work.x, tree)
    normalise_rows(work.x)
    if related:
        after_step(4.0 * constants.near, constants.attention, work.x, tree)


@inlined
def attend(related, constants, work, relations):
    """Write the attention of one head into `mixed`, as differences for tokens with a parent."""
    weigh(work.x, constants.attention, work.attention)
    if related:
        difference_rows(work.x, constants.attention, work.attention, relations.tree)
    mix(work.x, work.attention, work.mixed)
    if related:
        bilinear = work.attention.bilinear
        add_antipodes(work.x, constants.attention, bilinear, relations.tree, relations.antipodes, work.mixed)


@inlined
def move_tokens(layer, constants, key_words, replica, work):
    """Draw the values of a layer and add their part to `work.x`, before normalisation."""
    if constants.draw == GRAM:
        add_gram(constants, work)
    else:
        values = work.values.shape[0] * work.values.shape[1]
        block = U64(layer) * U64((values + 3) // 4)
        fill(constants.law, key_words[0], key_words[1], replica, block, work.flat)
        add_values(constants, work)


@inlined
def add_values(constants, work):
    """Add step · A X Vᵀ, or ω A X, to X."""
    if constants.draw == SCALAR:
        omega = constants.drift + constants.step * load(work.values, FIRST, FIRST)
        add_multiple(omega, work.mixed, work.x)
        return
    if constants.draw == FULL:
        multiply_transposed(work.mixed, work.values, work.moved)
    else:
        rows = work.queries.joined if constants.queries.heads > 1 else work.mixed
        triangularise(rows, FIRST, rows.shape[1], work.factor, FIRST)
        multiply_lower(work.factor, work.values, work.moved)
    add_multiple(constants.step, work.moved, work.x)


@inlined
def add_gram(constants, work):
    """The factor R (N × N) of the tokens to that of [ R + c S H | c S T ], S = A R (`chains.residual`)."""
    n, t = work.x.shape[0], work.added.shape[1]
    draw_normals(work.stream, work.values)
    draw_bartlett(work.stream, constants.dim - n, work.outside)
    if constants.queries.heads > 1:  # any rows with their Gram matrix will do
        rows = work.queries.joined
        triangularise(rows, FIRST, rows.shape[1], work.mixed, FIRST)
    multiply(work.mixed, work.values, work.moved)
    multiply(work.mixed, work.outside, work.added)
    for i in range(n):
        for k in range(n):
            store(work.rows, i, k, load(work.x, i, k) + constants.step * load(work.moved, i, k))
        for k in range(t):
            store(work.rows, i, n + k, constants.step * load(work.added, i, k))
    triangularise(work.rows, FIRST, n + t, work.x, FIRST)


@kernel
def normalise_rows(x):
    for i in range(x.shape[0]):
        normalise_row(i, x)


@kernel
def normalise_row(i, x):
    scale = 1.0 / square_root(inner(x, i, x, i, FIRST, x.shape[1]))
    for k in range(x.shape[1]):
        store(x, i, k, scale * load(x, i, k))
