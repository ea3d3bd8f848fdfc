r"""Factors of covariance matrices and Gaussian matrices seen from a few directions.

The tokens X (m × n) are carried as a factor R (m × r): X = √n R Q, where the r rows of Q are orthonormal and are
never needed. With a Gaussian weight matrix W (n × n) and a factor U (m × k) of a layer's output U Q′W, Q′ with k
orthonormal rows:

* the part of Q′W inside the row space of Q is a standard normal matrix H (k × r);
* the part outside is standard normal with n − r columns; its LQ factor is T = bartlett(k, n − r), lower
  trapezoidal, T_ii = √χ²_{n−r−i}, T_ij ~ N(0, 1) below [Bartlett, 1933].

Nothing here can fail on a singular matrix: there is no division by a pivot that is not checked and no square root of
a difference. Matrices of kernels are (rows, columns, LANES), eight replicas side by side (`lanes`).
"""

import numpy as np
from numpy.typing import NDArray

from limitformer.models.start import correlations_of
from limitformer.numerics.kernels import inlined, kernel
from limitformer.numerics.lanes import everywhere, load, product, square_root, store, where_positive
from limitformer.numerics.random import draw_normals, next_chi, next_normal

# Column 0. A literal 0 would be a constant of the compiled code, and kernels that take it would be compiled again.
FIRST = np.int64(0)


def root(covariance: NDArray[np.float64], columns: int) -> NDArray[np.float64]:
    """Return F (…, tokens, columns) with F Fᵀ = `covariance`, padded with zeros or cut to the largest directions.

    It uses the correlations, so that a token of small variance keeps its precision next to one of large variance.
    """
    correlations, deviation = correlations_of(covariance)
    values, vectors = np.linalg.eigh(correlations)
    values, vectors = values[..., ::-1][..., :columns], vectors[..., ::-1][..., :columns]  # the largest first
    # An eigenvalue of 1e-16 is rounding, but its root of 1e-8 would separate identical tokens.
    rounding = covariance.shape[-1] * np.finfo(float).eps * values[..., :1]
    positive = np.where(values > rounding, values, 0)
    factor = np.zeros((*covariance.shape[:-1], columns))
    factor[..., : values.shape[-1]] = deviation[..., :, None] * vectors * np.sqrt(positive)[..., None, :]
    return factor


def lower_root(covariance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the lower triangular L (tokens, tokens) with L Lᵀ = `covariance`, which may be singular."""
    return np.asarray(np.linalg.qr(root(covariance, len(covariance)).T, mode="r")).T.copy()


@kernel
def put_in_lanes(matrix, out):
    """Copy an ordinary `matrix` (rows, columns) into all lanes of `out`."""
    for i in range(matrix.shape[0]):
        for j in range(matrix.shape[1]):
            store(out, i, j, matrix[i, j])


@kernel
def copy(a, out):
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            store(out, i, j, load(a, i, j))


@kernel
def add_multiple(scale, a, out):
    for i in range(out.shape[0]):
        for k in range(out.shape[1]):
            store(out, i, k, load(out, i, k) + scale * load(a, i, k))


@kernel
def multiply(a, b, out):
    multiply_into(a, b, b.shape[1], out, FIRST)


@kernel
def multiply_into(a, b, columns, out, offset):
    """out[:, offset:] = a b[:, :columns]."""
    for i in range(0, a.shape[0], 2):
        for j in range(0, columns, 4):
            multiply_block(a, i, b, j, columns, FIRST, a.shape[1], out, offset)


@kernel
def multiply_lower(a, b, out):
    """out = a b for a lower triangular `a`, whose zeros above the diagonal are stored, at half the work."""
    for i in range(0, a.shape[0], 2):
        for j in range(0, b.shape[1], 4):
            multiply_block(a, i, b, j, b.shape[1], FIRST, min(i + 2, a.shape[1]), out, FIRST)


@kernel
def multiply_by_lower(a, b, out):
    """out = a b for a lower triangular `b`, whose zeros above the diagonal are stored."""
    for i in range(0, a.shape[0], 2):
        for j in range(0, b.shape[1], 4):
            multiply_block(a, i, b, j, b.shape[1], j, a.shape[1], out, FIRST)


@kernel
def multiply_lower_by_lower(a, b, out):
    """out = a b on and below the diagonal, for lower triangular `a` and `b`, whose zeros above it are stored."""
    for i in range(0, a.shape[0], 2):
        last = min(i + 2, a.shape[1])
        for j in range(0, last, 4):
            multiply_block(a, i, b, j, b.shape[1], j, last, out, FIRST)


@kernel
def multiply_block(a, i, b, j, columns, first, last, out, offset):
    """Two rows by four columns of a product, over first ≤ k < last, or fewer at the edges.

    With eight sums in parallel an entry is loaded once for several products, and no addition waits for another.
    """
    if i + 2 > a.shape[0] or j + 4 > columns:
        for row in range(i, min(i + 2, a.shape[0])):
            for column in range(j, min(j + 4, columns)):
                total = everywhere(0.0)
                for k in range(first, last):
                    total = total + load(a, row, k) * load(b, k, column)
                store(out, row, offset + column, total)
        return
    s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = everywhere(0.0)
    for k in range(first, last):
        x, y = load(a, i, k), load(a, i + 1, k)
        b0, b1, b2, b3 = load(b, k, j), load(b, k, j + 1), load(b, k, j + 2), load(b, k, j + 3)
        s0, s1, s2, s3 = s0 + x * b0, s1 + x * b1, s2 + x * b2, s3 + x * b3
        t0, t1, t2, t3 = t0 + y * b0, t1 + y * b1, t2 + y * b2, t3 + y * b3
    store_four(out, i, offset + j, s0, s1, s2, s3)
    store_four(out, i + 1, offset + j, t0, t1, t2, t3)


@kernel
def store_four(out, i, j, s0, s1, s2, s3):
    store(out, i, j, s0)
    store(out, i, j + 1, s1)
    store(out, i, j + 2, s2)
    store(out, i, j + 3, s3)


@kernel
def inner(a, i, b, j, first, last):
    """Return the inner product of row i of `a` and row j of `b`, over columns first … last − 1.

    It has four sums rather than one, so that no addition waits for the previous one.
    """
    s0 = s1 = s2 = s3 = everywhere(0.0)
    blocks = (last - first) // 4
    for k in range(first, first + 4 * blocks, 4):
        s0 = s0 + load(a, i, k) * load(b, j, k)
        s1 = s1 + load(a, i, k + 1) * load(b, j, k + 1)
        s2 = s2 + load(a, i, k + 2) * load(b, j, k + 2)
        s3 = s3 + load(a, i, k + 3) * load(b, j, k + 3)
    for k in range(first + 4 * blocks, last):
        s0 = s0 + load(a, i, k) * load(b, j, k)
    return (s0 + s1) + (s2 + s3)


@kernel
def multiply_transposed(a, b, out):
    for i in range(0, a.shape[0], 2):
        transposed_rows(a, i, b, b.shape[0], out)


@kernel
def transposed_rows(a, i, b, columns, out):
    """Rows i and i + 1 of a bᵀ, at least the first `columns`."""
    for j in range(0, columns, 4):
        transposed_block(a, i, b, j, a.shape[1], out)


@kernel
def multiply_by_lower_transposed(a, b, out):
    """out = a bᵀ for a lower triangular `b`, whose zeros above the diagonal are stored."""
    for i in range(0, a.shape[0], 2):
        for j in range(0, b.shape[0], 4):
            transposed_block(a, i, b, j, min(j + 4, a.shape[1]), out)


@inlined
def transposed_block(a, i, b, j, last, out):
    """Two rows by four columns of a bᵀ, over k < last, or fewer at the edges."""
    if i + 2 > a.shape[0] or j + 4 > b.shape[0]:
        for row in range(i, min(i + 2, a.shape[0])):
            for column in range(j, min(j + 4, b.shape[0])):
                store(out, row, column, inner(a, row, b, column, FIRST, last))
        return
    s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = everywhere(0.0)
    for k in range(last):
        x, y = load(a, i, k), load(a, i + 1, k)
        b0, b1, b2, b3 = load(b, j, k), load(b, j + 1, k), load(b, j + 2, k), load(b, j + 3, k)
        s0, s1, s2, s3 = s0 + x * b0, s1 + x * b1, s2 + x * b2, s3 + x * b3
        t0, t1, t2, t3 = t0 + y * b0, t1 + y * b1, t2 + y * b2, t3 + y * b3
    store_four(out, i, j, s0, s1, s2, s3)
    store_four(out, i + 1, j, t0, t1, t2, t3)


@kernel
def gram(a, out):
    """out = a aᵀ, symmetric to the last bit."""
    for i in range(0, a.shape[0], 2):
        transposed_rows(a, i, a, i + 2, out)
    mirror(a.shape[0], out)


@kernel
def gram_of_lower(a, out):
    """out = a aᵀ for a lower triangular `a`, whose zeros above the diagonal are stored."""
    for i in range(0, a.shape[0], 2):
        for j in range(0, i + 2, 4):
            transposed_block(a, i, a, j, min(j + 4, a.shape[1]), out)
    mirror(a.shape[0], out)


@kernel
def mirror(m, out):
    """Copy the entries below the diagonal of the first m columns to above it."""
    for i in range(m):
        for j in range(i):
            store(out, j, i, load(out, i, j))


@kernel
def trace_of_gram(a):
    """Return the trace of a aᵀ."""
    total = everywhere(0.0)
    for i in range(a.shape[0]):
        total = total + inner(a, i, a, i, FIRST, a.shape[1])
    return total


@kernel
def triangularise(rows, first, last, out, offset):
    """Write the lower triangular L of rows[:, first:last] = L Q into out[:, offset:]; overwrite `rows`.

    Modified Gram-Schmidt, whose triangular factor is backward stable whatever the condition number
    [Björck, Numerical Methods for Least Squares Problems, 1996, Sec. 2.4]; a row that depends on the ones before it
    gets a zero on the diagonal, up to rounding.
    """
    m = rows.shape[0]
    for i in range(m):
        squared = inner(rows, i, rows, i, first, last)
        norm = square_root(squared)
        inverse = where_positive(squared, 1.0 / norm)  # 1/|x|² could overflow
        store(out, i, offset + i, norm)
        for j in range(i + 1, m):
            store(out, i, offset + j, 0.0)
        fours = (m - i - 1) // 4
        for j in range(i + 1, i + 1 + 4 * fours, 4):
            take_out_of_four(rows, i, j, inverse, first, last, out, offset)
        for j in range(i + 1 + 4 * fours, m):
            take_out_of_one(rows, i, j, inverse, first, last, out, offset)


@kernel
def take_out_of_one(rows, i, j, inverse, first, last, out, offset):
    """Subtract the part along row i, of norm 1/`inverse`, from row j, and store its length."""
    length = inner(rows, i, rows, j, first, last) * inverse
    store(out, j, offset + i, length)
    share = product(length, inverse)
    for k in range(first, last):
        store(rows, j, k, load(rows, j, k) - share * load(rows, i, k))


@kernel
def take_out_of_four(rows, i, j, inverse, first, last, out, offset):
    """Do the same for rows j … j + 3, so that row i is loaded once for all."""
    s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = everywhere(0.0)
    for k in range(first, last - 1, 2):
        x, y = load(rows, i, k), load(rows, i, k + 1)
        s0, t0 = s0 + x * load(rows, j, k), t0 + y * load(rows, j, k + 1)
        s1, t1 = s1 + x * load(rows, j + 1, k), t1 + y * load(rows, j + 1, k + 1)
        s2, t2 = s2 + x * load(rows, j + 2, k), t2 + y * load(rows, j + 2, k + 1)
        s3, t3 = s3 + x * load(rows, j + 3, k), t3 + y * load(rows, j + 3, k + 1)
    if (last - first) % 2 == 1:
        x = load(rows, i, last - 1)
        s0, s1 = s0 + x * load(rows, j, last - 1), s1 + x * load(rows, j + 1, last - 1)
        s2, s3 = s2 + x * load(rows, j + 2, last - 1), s3 + x * load(rows, j + 3, last - 1)
    s0, s1, s2, s3 = (s0 + t0) * inverse, (s1 + t1) * inverse, (s2 + t2) * inverse, (s3 + t3) * inverse
    store(out, j, offset + i, s0)
    store(out, j + 1, offset + i, s1)
    store(out, j + 2, offset + i, s2)
    store(out, j + 3, offset + i, s3)
    s0, s1, s2, s3 = product(s0, inverse), product(s1, inverse), product(s2, inverse), product(s3, inverse)
    for k in range(first, last):
        x = load(rows, i, k)
        store(rows, j, k, load(rows, j, k) - s0 * x)
        store(rows, j + 1, k, load(rows, j + 1, k) - s1 * x)
        store(rows, j + 2, k, load(rows, j + 2, k) - s2 * x)
        store(rows, j + 3, k, load(rows, j + 3, k) - s3 * x)


@kernel
def draw_bartlett(stream, degrees, out):
    """Draw a lower trapezoidal T (rows, columns ≤ degrees) into `out`: T Tᵀ ~ Wishart_rows(degrees, I)."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            if j < i:
                store(out, i, j, next_normal(stream))
            elif j == i:
                store(out, i, j, next_chi(stream, degrees - i))
            else:
                store(out, i, j, 0.0)


@kernel
def draw_gaussian_product(stream, degrees, trapezoid, square):
    """Draw factors of W_Q W_Kᵀ between r orthonormal rows, for W with `degrees` columns: trapezoid @ square.

    `trapezoid` (r, q), q = min(r, degrees), is an LQ factor of the first r × degrees matrix. `square` (q, r) is the
    second one rotated by the same orthogonal matrix, which leaves it standard normal.
    """
    draw_bartlett(stream, degrees, trapezoid)
    draw_normals(stream, square)
