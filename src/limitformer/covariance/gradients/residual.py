r"""A residual sum, forward with what the backward pass needs, and backward. Letters in `backward`, names in `layout`.

Forward: X′/√n = M [Q; Q⊥] with M = [ λR + (γ/√n) U H | (γ/√n) U T ]; M = [R′ 0] Ω, so that Q′ is the first rows of
Ω [Q; Q⊥]. H (k × r) and T (k × t) are the branch's last matrix seen from U: N = H Q + T Q⊥.

Backward, `unfold`: G′ = P′ Q′ + T′ E′, E′ a Haar frame outside Q′. Of its n − r directions there, t lie among
[Q; Q⊥] and the others are new: in these coordinates E′ is Φ, the orthogonal part of a Gaussian matrix
[Z | bartlett(s, n − r − t)]. Hence G′ = Γ [Q; Q⊥; E₂],

  Γ = [ [P′ | (T′Φ)₁] Ω | (T′Φ)₂ ]   (m × w).

`fold`: what the branch pulls back has coordinates `pulled` in Q, and outside it C Z with Z Gaussian, as seen in the
directions Q⊥ and E₂ and in new ones, where its factor is bartlett(m, n − r − t − t₂):

  P = λ Γ_Q + (γ/√n) pulled,   T = factor of [ λ Γ_(Q⊥, E₂) + (γ/√n) C Z | (γ/√n) C bartlett ].
"""

from limitformer.covariance.gradients.layout import (
    BRANCH,
    COPIED,
    FRAME,
    FRESH,
    GRADIENT,
    INSIDE,
    KNOWN,
    OUTSIDE,
    PULLED,
    PUSHED,
    ROOT,
    ROWS,
    SEEN,
    SPREAD,
)
from limitformer.covariance.gradients.reflections import reflect, turn_back
from limitformer.covariance.gradients.scratch import matrix
from limitformer.numerics.factor import FIRST, copy, multiply_into, multiply_transposed, triangularise
from limitformer.numerics.kernels import kernel
from limitformer.numerics.lanes import load, store
from limitformer.numerics.random import next_chi, next_normal


@kernel
def place(block, out, offset):
    """out[:, offset:] = `block`, as many columns as both have."""
    for i in range(block.shape[0]):
        for j in range(min(block.shape[1], out.shape[1] - offset)):
            store(out, i, offset + j, load(block, i, j))


@kernel
def draw_normals_into(stream, out, first, last):
    """out[:, first:last] as `random.draw_normals`."""
    for i in range(out.shape[0]):
        for j in range(first, last):
            store(out, i, j, next_normal(stream))


@kernel
def draw_bartlett_into(stream, degrees, out, first, last):
    """out[:, first:last] as `factor.draw_bartlett`."""
    for i in range(out.shape[0]):
        for j in range(last - first):
            if j < i:
                store(out, i, first + j, next_normal(stream))
            elif j == i:
                store(out, i, first + j, next_chi(stream, degrees - i))
            else:
                store(out, i, first + j, 0.0)


@kernel
def add_branch_reversibly(stream, factor, constants, scratch, total):
    """As `residual.add_branch`, from the same numbers; `total` is WIDE or SQUARE."""
    known, rows = matrix(scratch, total + KNOWN), matrix(scratch, total + ROWS)
    r, columns = factor.shape[1], rows.shape[1]
    draw_normals_into(stream, known, FIRST, r)
    draw_bartlett_into(stream, constants.outside, known, r, columns)
    multiply_into(matrix(scratch, total + BRANCH), known, columns, rows, FIRST)
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
def unfold(stream, constants, scratch, total):
    """(P′, T′) to Γ, and Γ Nᵀ."""
    gradient, frame, rows = (
        matrix(scratch, total + GRADIENT),
        matrix(scratch, total + FRAME),
        matrix(scratch, total + ROWS),
    )
    inside, known = matrix(scratch, INSIDE), matrix(scratch, total + KNOWN)
    r, columns, width = inside.shape[1], rows.shape[1], gradient.shape[1]
    for i in range(gradient.shape[0]):
        for k in range(width):
            store(gradient, i, k, 0.0)
    place(inside, gradient, FIRST)
    if columns > r:
        place(matrix(scratch, OUTSIDE), gradient, r)
        draw_normals_into(stream, frame, r, columns)
        draw_bartlett_into(stream, constants.outside - (columns - r), frame, columns, width)
        reflect(frame, r, width, matrix(scratch, total + PUSHED), FIRST)
        turn_back(frame, r, width, gradient)
        turn_back(rows, constants.mean_columns, columns, gradient)
    multiply_transposed(gradient, known, matrix(scratch, total + SEEN))


@kernel
def fold(stream, constants, scratch, total):
    """Γ and what the branch pulls back, `pulled` and C, to (P, T)."""
    gradient, pulled, pushed = (
        matrix(scratch, total + GRADIENT),
        matrix(scratch, PULLED),
        matrix(scratch, total + PUSHED),
    )
    inside, outside, fresh = matrix(scratch, INSIDE), matrix(scratch, OUTSIDE), matrix(scratch, total + FRESH)
    r, known, columns = inside.shape[1], gradient.shape[1] - inside.shape[1], pushed.shape[1]
    draw_normals_into(stream, fresh, FIRST, known)
    draw_bartlett_into(stream, constants.outside - known, fresh, known, columns)
    multiply_into(matrix(scratch, SPREAD), fresh, columns, pushed, FIRST)
    for i in range(inside.shape[0]):
        for k in range(r):
            kept, moved = load(gradient, i, k), load(pulled, i, k)
            store(inside, i, k, constants.skip * kept + constants.branch * moved)
        for k in range(columns):
            moved = constants.branch * load(pushed, i, k)
            store(pushed, i, k, moved + constants.skip * load(gradient, i, r + k) if k < known else moved)
    if columns > outside.shape[1]:
        triangularise(pushed, FIRST, columns, outside, FIRST)
    else:
        place(pushed, outside, FIRST)


@kernel
def find_root(gradient, scratch):
    """S with S Sᵀ = Γ Γᵀ."""
    copied = matrix(scratch, COPIED)
    copy(gradient, copied)
    triangularise(copied, FIRST, copied.shape[1], matrix(scratch, ROOT), FIRST)
