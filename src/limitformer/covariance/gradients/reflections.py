r"""Orthogonal factorisations whose orthogonal part is kept: Householder reflections of rows.

  rows = [L 0] Ω,   Ω = H_s … H₂ H₁,   Hᵢ = 1 − vᵢᵀ vᵢ,   |vᵢ|² = 2,

L lower triangular with a diagonal ≥ 0, as `factor.triangularise` gives it. The s vectors vᵢ stay in the place of the
rows, and Y Ω of other rows Y takes Y from the coordinates that L has to those that the rows had. Ω is orthogonal to
rounding whatever the rows are; a direction of their Gram-Schmidt is not where tokens are identical or nearly so.
"""

from limitformer.numerics.factor import inner
from limitformer.numerics.kernels import kernel
from limitformer.numerics.lanes import choose, load, square_root, store, where_positive

LEAST_SQUARE = 1e-280  # of a vector that is reflected: below, its square has lost its digits


@kernel
def reflect(rows, first, last, out, offset):
    """L of rows[:, first:last] = [L 0] Ω into out[:, offset:], zeros behind it; the vᵢ in the place of the rows."""
    m = rows.shape[0]
    steps = min(m, last - first)
    for i in range(steps):
        norm = make_reflection(rows, i, first + i, last)
        for j in range(i):
            store(out, j, offset + i, 0.0)
        store(out, i, offset + i, norm)
        for j in range(i + 1, m):
            turn_row(rows, i, rows, j, first + i, last)
            store(out, j, offset + i, load(rows, j, first + i))
    for k in range(offset + steps, out.shape[1]):
        for j in range(m):
            store(out, j, k, 0.0)


@kernel
def make_reflection(rows, i, first, last):
    """v in the place of x = rows[i, first:last] such that 1 − vᵀv turns x into (|x|, 0, …); |x|."""
    head, tail = load(rows, i, first), inner(rows, i, rows, i, first + 1, last)
    norm = square_root(head * head + tail)
    shifted = choose(head, -1.0 * tail / (head + norm), head - norm)  # head − |x| without a cancellation
    length = shifted * shifted + tail
    scale = where_positive(length - LEAST_SQUARE, square_root(2.0 / length))
    store(rows, i, first, scale * shifted)
    for k in range(first + 1, last):
        store(rows, i, k, scale * load(rows, i, k))
    return norm


@kernel
def turn_row(vectors, i, rows, j, first, last):
    """Row j of `rows` times Hᵢ, whose vᵢ is vectors[i, first:last]."""
    share = inner(vectors, i, rows, j, first, last)
    for k in range(first, last):
        store(rows, j, k, load(rows, j, k) - share * load(vectors, i, k))


@kernel
def turn_back(vectors, first, last, rows):
    """rows[:, first:last] ← rows[:, first:last] Ω, for the `vectors` (s, …) that `reflect` left there."""
    for i in range(min(vectors.shape[0], last - first) - 1, -1, -1):
        for j in range(rows.shape[0]):
            turn_row(vectors, i, rows, j, first + i, last)
