"""What the way up and down works on: a name, a row in the `Scratch` table, for every matrix.

m tokens, r columns of a factor, n_h hidden units in tiles, q = min(r, n_k), q₂ = min(r, n_k − q), q₃ = min(m, n_k − q).
Of a sum whose branch has k columns: t = min(k, n − r), s = min(m, n − r), t₂ = min(s, n − r − t),
t₃ = min(m, n − r − t − t₂), w = r + t + t₂; k is r in the branch of [ST, eq. 1] (WIDE), m in the others (SQUARE).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitformer.covariance.chain.feedforward import TILE
from limitformer.covariance.gradients.scratch import table_of


def names(count: int, first: int = 0) -> list[np.int64]:
    """Numbers of rows of the table; plain ones would be compiled in, and every kernel that takes them once more."""
    return [np.int64(k) for k in range(first, first + count)]


# Of a sum, from WIDE or SQUARE on: U, [H | T | 0], M and then the reflections of Ω, those of Φ, Γ, Γ Nᵀ, fresh numbers
# [Z | bartlett], what they become.
BRANCH, KNOWN, ROWS, FRAME, GRADIENT, SEEN, FRESH, PUSHED = names(8)
WIDE, SQUARE = np.int64(0), np.int64(8)

CHECKPOINT, FACTOR, PREVIOUS, NORMAL, SUMMED, DIRECTION = names(6, 16)
INSIDE, OUTSIDE, PULLED, SPREAD, NORMS, ROOT, COPIED = names(7, 22)
TRAPEZOID, FACING, SOFTMAX, MIXED, VALUES, SIDE_BY_SIDE = names(6, 29)
PRODUCTS, HEAD, TURNED, MATRIX, UNSEEN, KEYS, EXTRA, JOINED, OUTCOME, UPDATE, STACKED = names(11, 35)
UNIT_NORMALS, UNIT_ROWS, UNIT_FRESH, UNITS, UNIT_GRADIENT, UNIT_STACKED = names(6, 46)

Shape = tuple[int, int, int]


def layout(tokens: int, rank: int, sublayers: int, constants: Any) -> NDArray[np.int64]:
    """The table for `sublayers` of all layers together, in the order of the names."""
    m, r = tokens, rank
    outside = min(m, constants.residual.outside)
    shapes = [*of_sum(m, r, r, constants.residual.outside), *of_sum(m, r, m, constants.residual.outside)]
    shapes += [(sublayers, m, r), *[(1, m, r)] * 4, (1, r, 1)]
    shapes += [(1, m, r), (1, m, outside), (1, m, r), (1, m, m), (1, 4, 1), (1, m, m), shapes[8 + int(GRADIENT)]]
    widest = max(shapes[int(WIDE + GRADIENT)][2], shapes[int(SQUARE + GRADIENT)][2])
    return table_of([*shapes, *of_heads(m, r, widest, constants.attention), *of_units(m, r, constants.feedforward)])


def of_sum(m: int, r: int, k: int, outside: int) -> list[Shape]:
    """BRANCH to PUSHED."""
    t = min(k, outside)
    s, t2 = min(m, outside), min(m, outside, outside - t)
    t3 = min(m, outside - t - t2)
    w = r + t + t2
    pushed = (1, m, t + t2 + t3)
    return [(1, m, k), (1, k, w), (1, m, r + t), (1, s, w), (1, m, w), (1, m, k), pushed, pushed]


def of_heads(m: int, r: int, w: int, constants: Any) -> list[Shape]:
    """TRAPEZOID to STACKED."""
    heads, q = constants.heads, min(r, constants.key_dim)
    q2, q3 = min(r, constants.key_dim - q), min(m, constants.key_dim - q)
    kept = [(heads, r, q), (heads, q, r), (heads, m, m), (heads, m, r), (heads, r, q), (1, m, heads * q)]
    square, row, head = (1, m, m), (1, m, r), (1, m, q)
    extra, stacked = max(heads * q - m, q3, 0), m + max(w, q + q3) + 2 * q + q2
    scratch = [row, head, square, square, (1, r, q2), (1, m, q + q2), (1, m, extra)]
    return [*kept, *scratch, (1, m, heads * q), (1, m, q + q3), row, (1, m, stacked)]


def of_units(m: int, r: int, constants: Any) -> list[Shape]:
    """UNIT_NORMALS to UNIT_STACKED."""
    tiles = -(-constants.hidden // TILE)
    rows = (m, m + TILE)
    return [(tiles, r, TILE), (tiles, *rows), (1, m, TILE), (1, m, TILE), (1, *rows), (1, *rows)]
