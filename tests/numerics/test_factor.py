"""Triangular factors, Wishart factors and roots, singular ones included."""

import numba
import numpy as np
import pytest
from scipy import stats

from limitformer.numerics.factor import (
    copy,
    draw_bartlett,
    draw_gaussian_product,
    gram,
    gram_of_lower,
    lower_root,
    multiply,
    multiply_by_lower,
    multiply_by_lower_transposed,
    multiply_into,
    multiply_lower,
    multiply_transposed,
    root,
    triangularise,
)
from limitformer.numerics.lanes import LANES
from limitformer.numerics.random import key, open_stream, rewind

ALPHA = 1e-4


@numba.njit
def fill_bartletts(stream, key_words, degrees, out):
    for i in range(len(out)):
        rewind(stream, key_words, np.uint64(LANES * i))
        draw_bartlett(stream, degrees, out[i])


@numba.njit
def fill_products(stream, key_words, degrees, trapezoids, squares):
    for i in range(len(trapezoids)):
        rewind(stream, key_words, np.uint64(LANES * i))
        draw_gaussian_product(stream, degrees, trapezoids[i], squares[i])


def key_words(seed):
    return np.array(key(seed, "test"), np.uint64)


def samples_of(draws):
    """(samples, rows, columns) from (batches, rows, columns, LANES), replica after replica."""
    return np.moveaxis(draws, -1, 1).reshape(-1, *draws.shape[1:3])


def bartletts(rows, columns, degrees, samples=40_000, seed=0):
    out = np.full((samples // LANES, rows, columns, LANES), np.nan)
    fill_bartletts(open_stream(), key_words(seed), degrees, out)
    return samples_of(out)


# Powers of two, so that a lane that is scaled by its own has the bits of every other one, scaled.
SCALES = 2.0 ** np.array([0, -3, 5, 1, -7, 2, 11, -1])


def stacked(matrix, scales=SCALES):
    """`matrix` (rows, columns) in eight lanes, each times its scale."""
    return np.ascontiguousarray(np.asarray(matrix, float)[..., None] * scales)


def triangular(rows, first=0, last=None, offset=0, columns=None, scales=SCALES):
    """Return the factor of a copy of `rows` (rows, columns), written into an array of other numbers.

    It is made of eight lanes, each `rows` times its own power of two, which all have to agree.
    """
    last = rows.shape[1] if last is None else last
    columns = offset + len(rows) if columns is None else columns
    out = np.full((len(rows), columns, LANES), np.nan)
    triangularise(stacked(rows, scales), first, last, out, offset)
    out /= scales
    np.testing.assert_array_equal(out, np.broadcast_to(out[..., :1], out.shape))
    return out[..., 0]


def lanewise(function, *arguments):
    """NumPy's `function` of matrices (rows, columns, LANES), lane by lane."""
    return np.stack([function(*(x[..., lane] for x in arguments)) for lane in range(LANES)], -1)


def normals(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 3), (4, 9)])
def test_triangularise_agrees_with_householder(shape):
    """L of rows = L Q is the transpose of R in rowsᵀ = QR, up to the signs of its columns."""
    rows = normals(*shape)
    out = triangular(rows)
    reference = np.linalg.qr(rows.T, mode="r").T
    np.testing.assert_allclose(out, reference * np.sign(reference.diagonal()), atol=1e-14 * 10, rtol=0)
    assert (np.triu(out, 1) == 0).all()
    assert (out.diagonal() > 0).all()


@pytest.mark.parametrize("rank", [0, 2])
def test_triangularise_keeps_the_gram_matrix_of_singular_rows(rank):
    rows = normals(5, rank, seed=2) @ normals(rank, 8, seed=3)
    out = triangular(rows)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out @ out.T, rows @ rows.T, atol=1e-13, rtol=0)


@pytest.mark.parametrize("distance", [1e-3, 1e-13])
def test_triangularise_keeps_the_distance_of_nearly_equal_rows(distance):
    """The subtraction is exact to 1e-16 of a row, so a distance of 1e-13 keeps three digits."""
    row, across = np.array([1.0, 2.0, -3.0, 0.5]), np.array([0.5, 2.0, 1.5, 0.0])  # orthogonal
    out = triangular(np.stack([row, row + distance * across]))
    expected = distance * np.linalg.norm(across)
    assert abs(out[1, 1] / expected - 1) < 1e-15 / distance + 1e-12
    assert abs(out[1, 0] / out[0, 0] - 1) < 1e-15


@pytest.mark.parametrize("size", [1e-150, 1e-158])
def test_triangularise_stays_finite_where_squares_are_nearly_zero(size):
    """Squares are subnormal from 1e-154 down, and their inverses infinite from 1e-155; the factor is neither.

    At 1e-158 a square of 1e-316 has eight digits left.
    """
    rows = np.array([[1.0, 2.0, -0.5], [3.0, -1.0, 1.0], [2.0, 0.3, -1.0]])
    precision = max(1e-13, 10 * 5e-324 / size**2)
    ours = triangular(size * rows, scales=np.ones(LANES)) / size
    np.testing.assert_allclose(ours, triangular(rows), rtol=precision, atol=precision)


def test_triangularise_handles_a_dependent_row_in_one_lane():
    """The diagonal is zero only in the lane where the second row is twice the first, or zero."""
    rows = stacked(normals(3, 5, seed=22), np.ones(LANES))
    rows[1, :, 3] = 2 * rows[0, :, 3]
    rows[0, :, 6] = 0
    out = np.full((3, 3, LANES), np.nan)
    triangularise(rows.copy(), 0, 5, out, 0)
    np.testing.assert_array_equal(np.argwhere(out[[0, 1, 2], [0, 1, 2]] == 0), [[0, 6], [1, 3]])
    np.testing.assert_array_equal(out[:, 0, 6], 0)
    np.testing.assert_allclose(lanewise(lambda x: x @ x.T, out), lanewise(lambda x: x @ x.T, rows), atol=1e-13, rtol=0)


@pytest.mark.parametrize("columns", [1, 3, 4, 6])
def test_products_agree_with_numpy(columns):
    """Blocks have four columns, so every number of columns modulo four is tried, with eight different matrices."""
    a, b, c = normals(3, 5, LANES, seed=5), normals(5, columns, LANES, seed=6), normals(7, 5, LANES, seed=7)
    out, transposed, square, copied = (
        np.full((*shape, LANES), np.nan) for shape in ((3, columns), (3, 7), (3, 3), (3, 5))
    )
    multiply(a, b, out)
    multiply_transposed(a, c, transposed)
    gram(a, square)
    copy(a, copied)
    np.testing.assert_allclose(out, lanewise(np.matmul, a, b), rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(transposed, lanewise(lambda x, y: x @ y.T, a, c), rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(square, lanewise(lambda x: x @ x.T, a), rtol=1e-13, atol=1e-14)
    np.testing.assert_array_equal(square, square.swapaxes(0, 1))
    np.testing.assert_array_equal(copied, a)


@pytest.mark.parametrize("tokens", [1, 3, 4, 6])
def test_products_with_lower_triangles_agree_with_numpy(tokens):
    """Eight different matrices at once, of any number of columns modulo four; the Gram matrix is symmetric."""
    lower = lanewise(np.tril, normals(tokens, tokens, LANES, seed=14))
    other, wide = normals(tokens, tokens, LANES, seed=15), normals(tokens, tokens + 3, LANES, seed=16)
    for kernel, reference, arguments in (
        (multiply_lower, np.matmul, (lower, wide)),
        (multiply_by_lower, np.matmul, (other, lower)),
        (multiply_by_lower_transposed, lambda a, b: a @ b.T, (other, lower)),
    ):
        expected = lanewise(reference, *arguments)
        out = np.full(expected.shape, np.nan)
        kernel(*arguments, out)
        np.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-14)
    square = np.full(lower.shape, np.nan)
    gram_of_lower(lower, square)
    np.testing.assert_allclose(square, lanewise(lambda a: a @ a.T, lower), rtol=1e-13, atol=1e-14)
    np.testing.assert_array_equal(square, square.swapaxes(0, 1))


@pytest.mark.parametrize(("columns", "offset"), [(0, 1), (3, 2), (8, 0)])
def test_multiply_into_writes_only_the_given_columns(columns, offset):
    a, b = normals(3, 5, LANES, seed=8), normals(5, 9, LANES, seed=9)
    out = np.full((3, 12, LANES), np.nan)
    multiply_into(a, b, columns, out, offset)
    expected = lanewise(np.matmul, a, b)[:, :columns]
    np.testing.assert_allclose(out[:, offset : offset + columns], expected, rtol=1e-13, atol=1e-14)
    assert np.isnan(np.delete(out, np.arange(offset, offset + columns), axis=1)).all()


def wishart_scores(factors, degrees):
    """Entries of W = T Tᵀ and of their products against the Wishart's moments, in standard errors."""
    w = factors @ factors.transpose(0, 2, 1)
    rows, columns = np.triu_indices(w.shape[1])
    entries = w[:, rows, columns]
    equal = (rows == columns).astype(float)
    mean = degrees * equal
    first = (entries.mean(0) - mean) / (entries.std(0) / len(w) ** 0.5)
    # Cov(W_ab, W_cd) = degrees (1[a=c] 1[b=d] + 1[a=d] 1[b=c]): 2 degrees on, degrees off the diagonal.
    products = (entries - mean)[:, :, None] * (entries - mean)[:, None, :]
    second = (products.mean(0) - np.diag(degrees * (1 + equal))) / (products.std(0) / len(w) ** 0.5)
    return max(np.abs(first).max(), np.abs(second).max())


@pytest.mark.parametrize(("rows", "columns", "degrees"), [(3, 3, 9), (4, 2, 2), (5, 1, 1)])
def test_bartlett_has_the_moments_of_a_wishart(rows, columns, degrees):
    """Means and covariances within 4.5 standard errors, also for more rows than degrees."""
    factors = bartletts(rows, columns, degrees)
    assert (np.triu(factors, 1) == 0).all()
    assert wishart_scores(factors, degrees) < 4.5
    assert wishart_scores(factors, degrees + 1) > 4.5


@pytest.mark.parametrize("degrees", [2, 5])
def test_the_gaussian_product_is_that_of_two_gaussian_matrices(degrees):
    """Fewer degrees than rows, and more: KS of one entry and of the norm; degrees + 1 is rejected."""
    rows, samples = 3, 20_000
    q = min(rows, degrees)
    trapezoids, squares = (np.full((samples // LANES, *shape, LANES), np.nan) for shape in ((rows, q), (q, rows)))
    fill_products(open_stream(), key_words(2), degrees, trapezoids, squares)
    ours = samples_of(trapezoids) @ samples_of(squares)
    reference, wrong = (direct_products(rows, k, samples) for k in (degrees, degrees + 1))
    for statistic in (lambda x: x[:, 2, 1], lambda x: (x**2).sum((1, 2))):
        assert stats.ks_2samp(statistic(ours), statistic(reference)).pvalue > ALPHA
        assert stats.ks_2samp(statistic(ours), statistic(wrong)).pvalue < ALPHA


def direct_products(rows, degrees, samples):
    """W_Q W_Kᵀ for W's (rows, degrees) drawn in full."""
    rng = np.random.default_rng(degrees)
    a, b = rng.standard_normal((2, samples, rows, degrees))
    return a @ b.transpose(0, 2, 1)


@pytest.mark.parametrize(("rank", "columns"), [(4, 4), (2, 2), (2, 6)])
def test_root_of_any_rank(rank, columns):
    """Rank two on four tokens: two columns are enough, more are padded."""
    x = normals(4, rank, seed=8)
    factor = root(x @ x.T, columns)
    assert factor.shape == (4, columns)
    np.testing.assert_allclose(factor @ factor.T, x @ x.T, atol=1e-14, rtol=0)


@pytest.mark.parametrize("rank", [1, 4])
def test_the_lower_root_is_a_lower_triangle_whatever_the_rank(rank):
    x = normals(4, rank, seed=17)
    factor = lower_root(x @ x.T)
    assert factor.shape == (4, 4)
    assert (np.triu(factor, 1) == 0).all()
    np.testing.assert_allclose(factor @ factor.T, x @ x.T, atol=1e-14, rtol=0)


@pytest.mark.parametrize("gap", [1e-6, 1e-12])
def test_root_keeps_the_distance_of_nearly_equal_tokens(gap):
    """1 - rho is half the squared distance of two rows; V itself holds it to 1e-16/gap."""
    v = np.array([[1.0, 1.0 - gap], [1.0 - gap, 1.0]])
    factor = root(v, 2)
    distance = ((factor[0] - factor[1]) ** 2).sum() / 2
    assert abs(distance / gap - 1) < 1e-15 / gap
