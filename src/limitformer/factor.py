r"""Factors of covariance matrices and Gaussian matrices seen from a few directions.

The tokens X (m × n) are carried as a factor R (m × r): X = √n R Q, where the r rows of Q are orthonormal and are
never needed. With a Gaussian weight matrix W (n × n) and a factor U (m × k) of a layer's output U Q′W, Q′ with k
orthonormal rows:

* the part of Q′W inside the row space of Q is a standard normal matrix H (k × r);
* the part outside is standard normal with n − r columns; its LQ factor is T = bartlett(k, n − r), lower
  trapezoidal, T_ii = √χ²_{n−r−i}, T_ij ~ N(0, 1) below [Bartlett, 1933].

Nothing here can fail on a singular matrix: there is no division by a pivot and no square root of a difference.
"""

import numpy as np
from numpy.typing import NDArray

from limitformer.kernels import kernel
from limitformer.random import draw_normals, next_chi, next_normal


def root(covariance: NDArray[np.float64], columns: int) -> NDArray[np.float64]:
    """F (tokens, columns) with F Fᵀ = `covariance`, padded with zeros or cut to the largest directions."""
    values, vectors = np.linalg.eigh(covariance)
    order = np.argsort(values)[::-1][:columns]
    factor = np.zeros((len(covariance), columns))
    factor[:, : len(order)] = vectors[:, order] * np.sqrt(np.maximum(values[order], 0))
    return factor


@kernel
def copy(a, out):
    """out = a. (An assignment of slices would make a temporary copy.)"""
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            out[i, j] = a[i, j]


@kernel
def multiply(a, b, out):
    """out = a b; the innermost loop runs along rows, so that it vectorises."""
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            out[i, j] = 0.0
        for k in range(a.shape[1]):
            x = a[i, k]
            for j in range(b.shape[1]):
                out[i, j] += x * b[k, j]


@kernel
def multiply_transposed(a, b, out):
    """out = a bᵀ."""
    for i in range(a.shape[0]):
        for j in range(b.shape[0]):
            total = 0.0
            for k in range(a.shape[1]):
                total += a[i, k] * b[j, k]
            out[i, j] = total


@kernel
def gram(a, out):
    """out = a aᵀ, symmetric to the last bit."""
    for i in range(a.shape[0]):
        for j in range(i + 1):
            total = 0.0
            for k in range(a.shape[1]):
                total += a[i, k] * a[j, k]
            out[i, j] = total
            out[j, i] = total


@kernel
def triangularise(rows, first, out):
    """The lower triangular factor L of rows[:, first:] = L Q into out[:, first:]; `rows` is overwritten.

    Columns before `first` are copied. Modified Gram-Schmidt, whose triangular factor is backward stable whatever
    the condition number [Björck, Numerical Methods for Least Squares Problems, 1996, Sec. 2.4]; a row that depends
    on the ones before it gets a zero on the diagonal.
    """
    m, c = rows.shape
    for i in range(m):
        for k in range(out.shape[1]):
            out[i, k] = rows[i, k] if k < first else 0.0
    for i in range(m):
        squared = 0.0
        for k in range(first, c):
            squared += rows[i, k] * rows[i, k]
        if squared > 0.0:
            norm = np.sqrt(squared)
            out[i, first + i] = norm
            for j in range(i + 1, m):
                inner = 0.0
                for k in range(first, c):
                    inner += rows[j, k] * rows[i, k]
                share = inner / squared
                out[j, first + i] = share * norm
                for k in range(first, c):
                    rows[j, k] -= share * rows[i, k]


@kernel
def draw_bartlett(stream, degrees, out):
    """Lower trapezoidal T (rows, columns ≤ degrees) into `out`: T Tᵀ ~ Wishart_rows(degrees, I)."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            if j < i:
                out[i, j] = next_normal(stream)
            elif j == i:
                out[i, j] = next_chi(stream, degrees - i)
            else:
                out[i, j] = 0.0


@kernel
def draw_gaussian_product(stream, degrees, trapezoid, square):
    """Factors of W_Q W_Kᵀ between r orthonormal rows, W's with `degrees` columns: trapezoid @ square.

    `trapezoid` (r, q) and `square` (q, r), q = min(r, degrees): an LQ factor of the first r × degrees matrix, and
    the second one turned by the same orthogonal matrix, which leaves it standard normal.
    """
    draw_bartlett(stream, degrees, trapezoid)
    draw_normals(stream, square)
