r"""A residual sum, forward with what the backward pass needs, and backward. Letters in `backward`.

Forward: X′/√n = M [Q; Q⊥] with M = [ λR + (γ/√n) U H | (γ/√n) U T ]; M = [R′ 0] Ω, so that [Q; Q⊥] = Ωᵀ [Q′; …].
H (k × r) and T (k × t) are the branch's last matrix seen from U, N = H Q + T Q⊥.

Backward, `unfold`: G′ = P′ Q′ + T′ E′, E′ a Haar frame outside Q′. Of its n − r directions there, t lie among
[Q; Q⊥] and the others are new: E′ is Φ in these coordinates, the orthogonal part of a Gaussian matrix
[Z | bartlett(s, n − r − t)]. Hence G′ = Γ [Q; Q⊥; E₂],

  Γ = [ [P′ | (T′Φ)₁] Ω | (T′Φ)₂ ]   (m × (r + t + t₂)).

`fold`: what the branch pulls back has coordinates `pulled` in Q, and outside it C Z with Z Gaussian, as seen in the
directions Q⊥ and E₂ and in new ones, where its factor is bartlett(m, n − r − t − t₂):

  P = λ Γ_Q + (γ/√n) pulled,   T = factor of [ λ Γ_(Q⊥, E₂) + (γ/√n) C Z | (γ/√n) C bartlett ].
"""

from typing import NamedTuple

import numpy as np

from limitformer.chains.reflections import reflect, turn_back
from limitformer.factor import FIRST, copy, draw_bartlett, multiply_into, multiply_transposed, triangularise
from limitformer.kernels import driver, kernel
from limitformer.lanes import lane_matrix, load, store
from limitformer.random import draw_normals


class SumWorkspace(NamedTuple):
    """Of a branch whose factor has k columns; matrices have LANES behind.

    t = min(k, n − r), s = min(m, n − r), t₂ = min(s, n − r − t), t₃ = min(m, n − r − t − t₂), w = r + t + t₂.
    """

    branch: np.ndarray  # (m, k): U
    inside: np.ndarray  # (k, r): H
    outside: np.ndarray  # (k, t): T
    known: np.ndarray  # (k, w): [H | T | 0]
    rows: np.ndarray  # (m, r + t): M, then the reflections of Ω
    normals: np.ndarray  # (s, t)
    bartlett: np.ndarray  # (s, t₂)
    frame: np.ndarray  # (s, t + t₂): the reflections of Φ
    triangle: np.ndarray  # (s, s)
    turned: np.ndarray  # (m, t + t₂)
    gradient: np.ndarray  # (m, w): Γ
    seen: np.ndarray  # (m, k): Γ Nᵀ
    fresh: np.ndarray  # (m, t + t₂): Z
    beyond: np.ndarray  # (m, t₃)
    pushed: np.ndarray  # (m, t + t₂ + t₃)


@driver
def sum_workspace(tokens, rank, columns, constants):
    t = min(columns, constants.outside)
    s = min(tokens, constants.outside)
    t2 = min(s, constants.outside - t)
    t3 = min(tokens, constants.outside - t - t2)
    return SumWorkspace(
        lane_matrix(tokens, columns),
        lane_matrix(columns, rank),
        lane_matrix(columns, t),
        lane_matrix(columns, rank + t + t2),
        lane_matrix(tokens, rank + t),
        lane_matrix(s, t),
        lane_matrix(s, t2),
        lane_matrix(s, t + t2),
        lane_matrix(s, s),
        lane_matrix(tokens, t + t2),
        lane_matrix(tokens, rank + t + t2),
        lane_matrix(tokens, columns),
        lane_matrix(tokens, t + t2),
        lane_matrix(tokens, t3),
        lane_matrix(tokens, t + t2 + t3),
    )


@kernel
def place(block, out, offset):
    """out[:, offset:] = `block`."""
    for i in range(block.shape[0]):
        for j in range(block.shape[1]):
            store(out, i, offset + j, load(block, i, j))


@kernel
def add_branch_reversibly(stream, factor, constants, work):
    """As `residual.add_branch`, from the same numbers; Ω stays in `work.rows`."""
    r, t = work.inside.shape[1], work.outside.shape[1]
    draw_normals(stream, work.inside)
    draw_bartlett(stream, constants.outside, work.outside)
    place(work.inside, work.known, FIRST)
    place(work.outside, work.known, r)
    multiply_into(work.branch, work.known, r + t, work.rows, FIRST)
    for i in range(work.rows.shape[0]):
        for k in range(r + t):
            moved = constants.branch * load(work.rows, i, k)
            store(work.rows, i, k, moved + constants.skip * load(factor, i, k) if k < r else moved)
    if t == 0:
        copy(work.rows, factor)
        return
    for i in range(work.rows.shape[0]):
        for k in range(constants.mean_columns):
            store(factor, i, k, load(work.rows, i, k))
    reflect(work.rows, constants.mean_columns, r + t, factor, constants.mean_columns)


@kernel
def unfold(stream, inside, outside, constants, work):
    """(P′, T′) to Γ, and Γ Nᵀ."""
    r, t = work.inside.shape[1], work.outside.shape[1]
    place(inside, work.gradient, FIRST)
    if t > 0:
        draw_normals(stream, work.normals)
        draw_bartlett(stream, constants.outside - t, work.bartlett)
        place(work.normals, work.frame, FIRST)
        place(work.bartlett, work.frame, t)
        reflect(work.frame, FIRST, work.frame.shape[1], work.triangle, FIRST)
        turn_by_frame(outside, work)
        place(work.turned, work.gradient, r)
        turn_back(work.rows, constants.mean_columns, r + t, work.gradient)
    multiply_transposed(work.gradient, work.known, work.seen)


@kernel
def turn_by_frame(outside, work):
    """T′Φ into `work.turned`."""
    for i in range(outside.shape[0]):
        for k in range(outside.shape[1], work.turned.shape[1]):
            store(work.turned, i, k, 0.0)
    place(outside, work.turned, FIRST)
    turn_back(work.frame, FIRST, work.frame.shape[1], work.turned)


@kernel
def fold(stream, pulled, spread, constants, work, inside, outside):
    """Γ and what the branch pulls back, (`pulled`, C), to (P, T)."""
    r, known, columns = inside.shape[1], work.fresh.shape[1], work.pushed.shape[1]
    draw_normals(stream, work.fresh)
    draw_bartlett(stream, constants.outside - known, work.beyond)
    multiply_into(spread, work.fresh, known, work.pushed, FIRST)
    multiply_into(spread, work.beyond, columns - known, work.pushed, known)
    for i in range(inside.shape[0]):
        for k in range(r):
            kept, moved = load(work.gradient, i, k), load(pulled, i, k)
            store(inside, i, k, constants.skip * kept + constants.branch * moved)
        for k in range(columns):
            moved = constants.branch * load(work.pushed, i, k)
            store(work.pushed, i, k, moved + constants.skip * load(work.gradient, i, r + k) if k < known else moved)
    if columns > outside.shape[1]:
        triangularise(work.pushed, FIRST, columns, outside, FIRST)
    else:
        place(work.pushed, outside, FIRST)


@kernel
def factor_of_gradient(work, scratch, out):
    """S with S Sᵀ = Γ Γᵀ into `out` (m, m); `scratch` has the shape of Γ."""
    copy(work.gradient, scratch)
    triangularise(scratch, FIRST, scratch.shape[1], out, FIRST)
