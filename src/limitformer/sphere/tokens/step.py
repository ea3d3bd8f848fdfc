r"""N tokens in coordinates: X (N × d), for any Q and K and any law of the values.

A layer of [CT, eq. 4] adds (σ/√L) A X Vᵀ and normalises the rows. If the values are Gaussian and N < d, V acts on the N
rows of A X = F O alone (F lower triangular, O orthonormal rows): V Oᵀ is a d × N standard normal matrix, and the d × d
one is never drawn. The hybrid [CT, eq. 7] adds ω A X with one number ω for all tokens.

Heads, whose joined rows may be more than d, have V act on their factor whatever N is (`queries`).

With QᵀK = I, or one that is drawn in each layer, and Gaussian values the law does not change when all tokens turn
together, so that N < d tokens have a Gram chain: `gram`.

A token that is next to an earlier one or to its antipode goes through a layer as their difference (`forest`,
`differences`, `antipodes`): a row like the others, for all that a layer does before it normalises is linear, and every
row keeps its own relative precision. So gaps 1 − |z| have all their digits down to 1e-300, where they are held.
"""

from typing import NamedTuple

import numpy as np

from limitformer.numerics.elementary import U64
from limitformer.numerics.factor import (
    FIRST,
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
from limitformer.sphere.near.differences import difference_rows, part, rejoin, set_aside
from limitformer.sphere.near.gathered import all_gathered, attend_gathered
from limitformer.sphere.near.near_tree import Forest, any_related, open_forest
from limitformer.sphere.tokens.attention import AttentionConstants, AttentionWorkspace, attention_workspace, mix, weigh
from limitformer.sphere.tokens.queries import (
    QueryConstants,
    QueryWorkspace,
    begin_queries,
    draw_queries,
    join_head,
    query_workspace,
)
from limitformer.sphere.tokens.values import fill

AT_TOKENS, UNIFORM, AT_OVERLAP = 0, 1, 2  # how replicas start
FULL, SKETCHED, SCALAR, GRAM = 0, 1, 2, 3  # what is drawn for a layer


class TokenConstants(NamedTuple):
    """What the kernels know of a model."""

    attention: AttentionConstants
    dim: int
    layers: int
    step: float  # σ/√L, or ε/√L for the hybrid
    drift: float  # 0, or 1/L for the hybrid
    law: int
    draw: int  # FULL, SKETCHED, SCALAR or GRAM
    near: float  # |D|² below which a token is carried as a difference
    look: int  # layers between two looks at which tokens are
    change: int  # layers between two at which tokens may change their parents, a multiple of `look`
    queries: QueryConstants


class Relations(NamedTuple):
    """What tokens next to ±1 of each other need besides: apart, for what is handed to a kernel is copied."""

    forest: Forest
    antipodes: Antipodes


class TokenWorkspace(NamedTuple):
    """Scratch of one thread; r is d, or N for the Gram chain. Matrices have LANES behind."""

    stream: Stream
    attention: AttentionWorkspace
    x: np.ndarray  # (N, r)
    mixed: np.ndarray  # (N, r), A X
    moved: np.ndarray  # (N, r)
    factor: np.ndarray  # (N, N)
    values: np.ndarray  # V, or as much of it as is drawn
    flat: np.ndarray  # its memory in one row, a multiple of four rows
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
    return Relations(open_forest(tokens, coordinates), open_antipodes(tokens, coordinates))


@kernel
def value_shape(tokens, coordinates, constants):
    """Of the random matrix of a layer."""
    if constants.draw == FULL:
        return (coordinates, coordinates)
    if constants.draw == SCALAR:
        return (1, 1)
    return (tokens, coordinates)


@kernel
def begin_tokens(start, how, constants, start_key, query_key, replica, work):
    """The first tokens of the replicas that run side by side; `start` has D's in place of those with a parent."""
    rewind(work.stream, start_key, replica)
    begin_queries(query_key, replica, work.queries)
    if how == AT_TOKENS:
        put_in_lanes(start, work.x)
    elif work.x.shape[1] < constants.dim:  # the factor of N < d uniform tokens
        draw_bartlett(work.stream, constants.dim, work.x)
        normalise_rows(work.x)
    else:
        draw_normals(work.stream, work.x)
        normalise_rows(work.x)
    if how == AT_OVERLAP:
        lean(start[1, 0], start[1, 1], work.x)


@kernel
def lean(along, across, x):
    """Make the second of two tokens so long along the first and so long across it, in their plane."""
    length = inner(x, FIRST, x, FIRST + 1, FIRST, x.shape[1])
    for k in range(x.shape[1]):
        store(x, 1, k, load(x, 1, k) - length * load(x, 0, k))
    normalise_row(1, x)
    for k in range(x.shape[1]):
        store(x, 1, k, along * load(x, 0, k) + across * load(x, 1, k))


@inlined
def advance_tokens(layer, constants, key_words, replica, work, relations):
    """One layer, in place."""
    forest, heads = relations.forest, constants.queries.heads
    related = any_related(forest.children)
    if constants.queries.fresh or not (related and all_gathered(forest.state)):
        for head in range(heads):
            if constants.queries.fresh:
                draw_queries(constants.queries.head_dim, work.queries, work.attention.bilinear)
            attend(related, constants, work, relations)
            if heads > 1:
                join_head(head, heads, work.mixed, work.queries.joined)
    if related:
        attend_gathered(work.x, forest, work.mixed)
        part(work.x, forest)
    move_tokens(layer, constants, key_words, replica, work)
    if related:
        set_aside(work.x, forest)
    normalise_rows(work.x)
    if related:
        rejoin(4.0 * constants.near, constants.attention, work.x, forest)


@inlined
def attend(related, constants, work, relations):
    """What one head makes of the tokens, `mixed`: differences where tokens are carried so."""
    weigh(work.x, constants.attention, work.attention)
    if related:
        difference_rows(work.x, constants.attention, work.attention, relations.forest)
    mix(work.x, work.attention, work.mixed)
    if related:
        bilinear = work.attention.bilinear
        add_antipodes(work.x, constants.attention, bilinear, relations.forest, relations.antipodes, work.mixed)


@inlined
def move_tokens(layer, constants, key_words, replica, work):
    """What a layer adds to the rows of `x`."""
    if constants.draw == GRAM:
        add_gram(constants, work)
    else:
        values = work.values.shape[0] * work.values.shape[1]
        block = U64(layer) * U64((values + 3) // 4)
        fill(constants.law, key_words[0], key_words[1], replica, block, work.flat)
        add_values(constants, work)


@inlined
def add_values(constants, work):
    """X += step · A X Vᵀ, or ω A X."""
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
def add_multiple(scale, a, out):
    """out += scale · a."""
    for i in range(out.shape[0]):
        for k in range(out.shape[1]):
            store(out, i, k, load(out, i, k) + scale * load(a, i, k))


@kernel
def normalise_rows(x):
    for i in range(x.shape[0]):
        normalise_row(i, x)


@kernel
def normalise_row(i, x):
    scale = 1.0 / square_root(inner(x, i, x, i, FIRST, x.shape[1]))
    for k in range(x.shape[1]):
        store(x, i, k, scale * load(x, i, k))
