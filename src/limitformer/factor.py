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

from limitformer.kernels import kernel
from limitformer.lanes import everywhere, load, square_root, store, where_positive
from limitformer.random import draw_normals, next_chi, next_normal


def root(covariance: NDArray[np.float64], columns: int) -> NDArray[np.float64]:
    """F (tokens, columns) with F Fᵀ = `covariance`, padded with zeros or cut to the largest directions."""
    values, vectors = np.linalg.eigh(covariance)
    order = np.argsort(values)[::-1][:columns]
    # An eigenvalue of 1e-16 is rounding, but its root of 1e-8 would tell identical tokens apart.
    rounding = len(values) * np.finfo(float).eps * values[-1]
    kept = np.where(values[order] > rounding, values[order], 0)
    factor = np.zeros((len(covariance), columns))
    factor[:, : len(order)] = vectors[:, order] * np.sqrt(kept)
    return factor


@kernel
def put(matrix, out):
    """out = `matrix` (rows, columns), a plain one, in all lanes."""
    for i in range(matrix.shape[0]):
        for j in range(matrix.shape[1]):
            store(out, i, j, matrix[i, j])


@kernel
def copy(a, out):
    """out = a."""
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            store(out, i, j, load(a, i, j))


@kernel
def multiply(a, b, out):
    """out = a b."""
    multiply_into(a, b, b.shape[1], out, 0)


@kernel
def multiply_into(a, b, columns, out, offset):
    """out[:, offset:] = a b[:, :columns], four columns at a time, so that an entry of `a` is loaded once for them."""
    for i in range(a.shape[0]):
        for j in range(0, columns - 3, 4):
            s0 = s1 = s2 = s3 = everywhere(0.0)
            for k in range(a.shape[1]):
                x = load(a, i, k)
                s0 = s0 + x * load(b, k, j)
                s1 = s1 + x * load(b, k, j + 1)
                s2 = s2 + x * load(b, k, j + 2)
                s3 = s3 + x * load(b, k, j + 3)
            store(out, i, offset + j, s0)
            store(out, i, offset + j + 1, s1)
            store(out, i, offset + j + 2, s2)
            store(out, i, offset + j + 3, s3)
        for j in range(columns - columns % 4, columns):
            total = everywhere(0.0)
            for k in range(a.shape[1]):
                total = total + load(a, i, k) * load(b, k, j)
            store(out, i, offset + j, total)


@kernel
def inner(a, i, b, j, first, last):
    """The inner product of row i of `a` and row j of `b`, over columns first … last − 1."""
    total = everywhere(0.0)
    for k in range(first, last):
        total = total + load(a, i, k) * load(b, j, k)
    return total


@kernel
def multiply_transposed(a, b, out):
    """out = a bᵀ."""
    for i in range(a.shape[0]):
        for j in range(b.shape[0]):
            store(out, i, j, inner(a, i, b, j, 0, a.shape[1]))


@kernel
def gram(a, out):
    """out = a aᵀ, symmetric to the last bit."""
    for i in range(a.shape[0]):
        for j in range(i + 1):
            total = inner(a, i, a, j, 0, a.shape[1])
            store(out, i, j, total)
            store(out, j, i, total)


@kernel
def trace_of_gram(a):
    """The trace of a aᵀ."""
    total = everywhere(0.0)
    for i in range(a.shape[0]):
        total = total + inner(a, i, a, i, 0, a.shape[1])
    return total


@kernel
def triangularise(rows, first, last, out, offset):
    """The lower triangular factor L of rows[:, first:last] = L Q into out[:, offset:]; `rows` is overwritten.

    Modified Gram-Schmidt, whose triangular factor is backward stable whatever the condition number
    [Björck, Numerical Methods for Least Squares Problems, 1996, Sec. 2.4]; a row that depends on the ones before it
    gets a zero on the diagonal.
    """
    for i in range(rows.shape[0]):
        squared = inner(rows, i, rows, i, first, last)
        norm, inverse = square_root(squared), where_positive(squared, 1.0 / squared)
        store(out, i, offset + i, norm)
        for j in range(i + 1, rows.shape[0]):
            share = inner(rows, i, rows, j, first, last) * inverse
            store(out, j, offset + i, share * norm)
            store(out, i, offset + j, 0.0)
            for k in range(first, last):
                store(rows, j, k, load(rows, j, k) - share * load(rows, i, k))


@kernel
def draw_bartlett(stream, degrees, out):
    """Lower trapezoidal T (rows, columns ≤ degrees) into `out`: T Tᵀ ~ Wishart_rows(degrees, I)."""
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
    """Factors of W_Q W_Kᵀ between r orthonormal rows, W's with `degrees` columns: trapezoid @ square.

    `trapezoid` (r, q) and `square` (q, r), q = min(r, degrees): an LQ factor of the first r × degrees matrix, and
    the second one turned by the same orthogonal matrix, which leaves it standard normal.
    """
    draw_bartlett(stream, degrees, trapezoid)
    draw_normals(stream, square)
