r"""A residual sum, forward and backward; letters in `backward`.

**Forward**, `forward_sum`: X′/√n = M [Q; Q⊥] with M = [ λR + (γ/√n) U H | (γ/√n) U T ]; M = [R′ 0] Ω, so that Q′ is the
first rows of Ω [Q; Q⊥]. H (k × r) and T (k × t) are the branch's last matrix seen from U: N = H Q + T Q⊥.

**Backward**, before the branch, `unfold`: G′ = P′ Q′ + T′ E′, E′ a Haar frame outside Q′. Of the n − r directions
there, t lie among [Q; Q⊥] and the others are new. In these coordinates E′ is Φ, the orthogonal part of a Gaussian
matrix [Z | bartlett(s, n − r − t)]. Hence G′ = Γ [Q; Q⊥; E₂],

  Γ = [ [P′ | (T′Φ)₁] Ω | (T′Φ)₂ ]   (m × w).

**Backward**, after the branch, `fold`: the branch returns a gradient that has coordinates `inner` in Q, and outside it
C Z with Z Gaussian. Z is drawn in the directions Q⊥ and E₂; in new ones its factor is bartlett(m, n − r − t − t₂):

  P = λ Γ_Q + (γ/√n) inner,   T = factor of [ λ Γ_(Q⊥, E₂) + (γ/√n) C Z | (γ/√n) C bartlett ].
"""

from typing import NamedTuple

from limitformer.covariance.gradients.matrices import (
    Buffer,
    draw_bartlett_into,
    draw_normals_into,
    place,
    reflect,
    turn_back,
)
from limitformer.numerics.factor import FIRST, copy, multiply_into, multiply_transposed, triangularise
from limitformer.numerics.kernels import kernel
from limitformer.numerics.lanes import load, store


class StreamGradient(NamedTuple):
    """The gradient G in the tokens."""

    inside: Buffer  # P
    outside: Buffer  # T


class BranchGradient(NamedTuple):
    """The gradients of a branch, by its input and by its weights."""

    inside: Buffer  # its coordinates in Q
    spread: Buffer  # C: its rows outside Q are Gaussian of covariance C Cᵀ
    norms: Buffer  # |∂W|²/γ² of the branch's weights, in the order of their names


class SumBuffers(NamedTuple):
    """A residual sum whose branch has an output factor U of k columns."""

    branch: Buffer  # U
    known: Buffer  # [H | T | 0], the branch's last matrix N
    rows: Buffer  # M, then the reflections of Ω
    frame: Buffer  # the reflections of Φ
    gradient: Buffer  # Γ
    seen: Buffer  # Γ Nᵀ
    fresh: Buffer  # [Z | bartlett]
    update: Buffer  # (γ/√n) C [Z | bartlett]; first the discarded triangle of Φ
    copied: Buffer  # Γ, overwritten by `find_root`
    root: Buffer  # S, S Sᵀ = Γ Γᵀ


def sum_shapes(m: int, r: int, k: int, outside: int) -> SumBuffers:
    """Return the shapes for m tokens, r columns of R, k of U, and n − r = `outside` directions."""
    t = min(k, outside)
    s, t2 = min(m, outside), min(m, outside, outside - t)
    t3 = min(m, outside - t - t2)
    width = r + t + t2
    return SumBuffers(
        branch=(m, k),
        known=(k, width),
        rows=(m, r + t),
        frame=(s, width),
        gradient=(m, width),
        seen=(m, k),
        fresh=(m, t + t2 + t3),
        update=(m, t + t2 + t3),
        copied=(m, width),
        root=(m, m),
    )


@kernel
def forward_sum(stream, factor, constants, total):
    """Draw the numbers of `residual.add_branch` and update `factor` by the branch whose factor is `total.branch`."""
    r, columns, rows = factor.shape[1], total.rows.shape[1], total.rows
    draw_normals_into(stream, total.known, FIRST, r)
    draw_bartlett_into(stream, constants.outside, total.known, r, columns)
    multiply_into(total.branch, total.known, columns, rows, FIRST)
    for i in range(rows.shape[0]):
        for k in range(columns):
            moved = constants.branch * load(rows, i, k)
            store(rows, i, k, moved + constants.skip * load(factor, i, k) if k < r else moved)
    if columns == r:
        copy(rows, factor)
        return
    for i in range(rows.shape[0]):
        for k in range(constants.mean_columns):
            store(factor, i, k, load(rows, i, k))
    reflect(rows, constants.mean_columns, columns, factor, constants.mean_columns)


@kernel
def unfold(stream, constants, stream_gradient, total):
    """(P′, T′) to Γ in `total.gradient`, and Γ Nᵀ in `total.seen`."""
    gradient = total.gradient
    r, columns, width = stream_gradient.inside.shape[1], total.rows.shape[1], gradient.shape[1]
    for i in range(gradient.shape[0]):
        for k in range(width):
            store(gradient, i, k, 0.0)
    place(stream_gradient.inside, gradient, FIRST)
    if columns > r:
        place(stream_gradient.outside, gradient, r)
        draw_normals_into(stream, total.frame, r, columns)
        draw_bartlett_into(stream, constants.outside - (columns - r), total.frame, columns, width)
        reflect(total.frame, r, width, total.update, FIRST)
        turn_back(total.frame, r, width, gradient)
        turn_back(total.rows, constants.mean_columns, columns, gradient)
    multiply_transposed(gradient, total.known, total.seen)


@kernel
def fold(stream, constants, stream_gradient, branch_gradient, total):
    """Γ and the gradient that the branch returns, to (P, T)."""
    gradient, update, fresh, inside = total.gradient, total.update, total.fresh, stream_gradient.inside
    r, known, columns = inside.shape[1], gradient.shape[1] - inside.shape[1], update.shape[1]
    draw_normals_into(stream, fresh, FIRST, known)
    draw_bartlett_into(stream, constants.outside - known, fresh, known, columns)
    multiply_into(branch_gradient.spread, fresh, columns, update, FIRST)
    for i in range(inside.shape[0]):
        for k in range(r):
            carried, returned = load(gradient, i, k), load(branch_gradient.inside, i, k)
            store(inside, i, k, constants.skip * carried + constants.branch * returned)
        for k in range(columns):
            moved = constants.branch * load(update, i, k)
            store(update, i, k, moved + constants.skip * load(gradient, i, r + k) if k < known else moved)
    if columns > stream_gradient.outside.shape[1]:
        triangularise(update, FIRST, columns, stream_gradient.outside, FIRST)
    else:
        place(update, stream_gradient.outside, FIRST)


@kernel
def find_root(total):
    """S with S Sᵀ = Γ Γᵀ into `total.root`."""
    copy(total.gradient, total.copied)
    triangularise(total.copied, FIRST, total.copied.shape[1], total.root, FIRST)
