r"""Operations on small matrices that the forward and the backward pass share.

**Reflections** are orthogonal factorisations whose orthogonal part is stored:

  rows = [L 0] Ω,   Ω = H_s … H₂ H₁,   Hᵢ = 1 − vᵢᵀ vᵢ,   |vᵢ|² = 2,

L lower triangular with a diagonal ≥ 0, as `factor.triangularise` returns it. The s vectors vᵢ overwrite the rows. Y Ω
of other rows Y takes Y from the coordinates that L has to those that the rows had. Ω is orthogonal to rounding
whatever the rows are; a direction of their Gram-Schmidt is not where tokens are identical or nearly so.

Allocation of the named buffers that the kernels of this folder work on.

Each sublayer declares a NamedTuple of buffers and a function that returns it with the shape of each. The total of the
shapes is known before anything is allocated, so that a run that does not fit the memory is refused beforehand.
"""

from math import prod
from typing import Any

import numpy as np

from limitformer.numerics.factor import inner, trace_of_gram
from limitformer.numerics.kernels import inlined, kernel
from limitformer.numerics.lanes import LANES, choose, everywhere, load, square_root, store, where_positive
from limitformer.numerics.random import next_chi, next_normal

# An array (*shape, LANES) once it is allocated; before, its shape.
Buffer = Any


def allocate(shapes: Any) -> Any:
    """Replace every shape in a NamedTuple, which may be nested, by zeros of that shape with LANES behind."""
    if hasattr(shapes, "_fields"):
        return type(shapes)(*map(allocate, shapes))
    size = prod(shapes) * LANES
    padded = np.zeros(size + LANES)
    skip = -padded.ctypes.data // 8 % LANES  # an entry begins at a multiple of its size, see `lanes.lane_matrix`
    return padded[skip : skip + size].reshape(*shapes, LANES)


def count_bytes(shapes: Any) -> int:
    """Return the size of all buffers of a NamedTuple of shapes."""
    if hasattr(shapes, "_fields"):
        return sum(map(count_bytes, shapes))
    return 8 * LANES * prod(shapes)


LEAST_SQUARE = 1e-280  # of a vector that is reflected: below, its square has lost its digits


@kernel
def reflect(rows, first, last, out, offset):
    """L of rows[:, first:last] = [L 0] Ω into out[:, offset:], zeros behind it; the vᵢ overwrite the rows."""
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
    """Overwrite x = rows[i, first:last] by v such that 1 − vᵀv turns x into (|x|, 0, …); return |x|."""
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
    """Multiply row j of `rows` by Hᵢ, whose vᵢ is vectors[i, first:last]."""
    share = inner(vectors, i, rows, j, first, last)
    for k in range(first, last):
        store(rows, j, k, load(rows, j, k) - share * load(vectors, i, k))


@kernel
def turn_back(vectors, first, last, rows):
    """rows[:, first:last] ← rows[:, first:last] Ω, for the `vectors` (s, …) that `reflect` left there."""
    for i in range(min(vectors.shape[0], last - first) - 1, -1, -1):
        for j in range(rows.shape[0]):
            turn_row(vectors, i, rows, j, first + i, last)


@kernel
def place(block, out, offset):
    """out[:, offset:] = `block`, as many columns as both have."""
    for i in range(block.shape[0]):
        for j in range(min(block.shape[1], out.shape[1] - offset)):
            store(out, i, offset + j, load(block, i, j))


@kernel
def draw_normals_into(stream, out, first, last):
    for i in range(out.shape[0]):
        for j in range(first, last):
            store(out, i, j, next_normal(stream))


@kernel
def draw_bartlett_into(stream, degrees, out, first, last):
    """`factor.draw_bartlett` into out[:, first:last]."""
    for i in range(out.shape[0]):
        for j in range(last - first):
            if j < i:
                store(out, i, first + j, next_normal(stream))
            elif j == i:
                store(out, i, first + j, next_chi(stream, degrees - i))
            else:
                store(out, i, first + j, 0.0)


@kernel
def clear(a):
    for i in range(a.shape[0]):
        for k in range(a.shape[1]):
            store(a, i, k, 0.0)


@kernel
def add_to(step, out):
    for i in range(out.shape[0]):
        for k in range(out.shape[1]):
            store(out, i, k, load(out, i, k) + load(step, i, k))


@kernel
def add_to_entry(out, k, value):
    store(out, k, 0, load(out, k, 0) + value)


@kernel
def rescale(a, scale):
    """a ← scale · a."""
    for i in range(a.shape[0]):
        for k in range(a.shape[1]):
            store(a, i, k, scale * load(a, i, k))


@kernel
def transpose(a, out):
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            store(out, j, i, load(a, i, j))


@inlined
def squared_norm(a):
    """Return |a|². The comparison makes the stride a constant, on which the order of the sums depends."""
    return trace_of_gram(a) if a.shape[2] == LANES else everywhere(np.nan)


@kernel
def squared_product(a, b, first, last):
    """Return |aᵀ b[:, first:last]|²."""
    total = everywhere(0.0)
    for k in range(a.shape[1]):
        for j in range(first, last):
            entry = everywhere(0.0)
            for i in range(a.shape[0]):
                entry = entry + load(a, i, k) * load(b, i, j)
            total = total + entry * entry
    return total
