"""Triangular factors, Wishart factors and roots, singular ones included."""

import numba
import numpy as np
import pytest
from scipy import stats

from limitformer.factor import (
    copy,
    draw_bartlett,
    draw_gaussian_product,
    gram,
    multiply,
    multiply_transposed,
    root,
    triangularise,
)
from limitformer.random import key, open_stream, rewind

ALPHA = 1e-4


@numba.njit
def fill_bartletts(stream, key_words, degrees, out):
    for i in range(len(out)):
        rewind(stream, key_words, np.uint64(i))
        draw_bartlett(stream, degrees, out[i])


@numba.njit
def fill_products(stream, key_words, degrees, trapezoids, squares):
    for i in range(len(trapezoids)):
        rewind(stream, key_words, np.uint64(i))
        draw_gaussian_product(stream, degrees, trapezoids[i], squares[i])


def key_words(seed):
    return np.array(key(seed, "test"), np.uint64)


def bartletts(rows, columns, degrees, samples=40_000, seed=0):
    out = np.empty((samples, rows, columns))
    fill_bartletts(open_stream(), key_words(seed), degrees, out)
    return out


def triangular(rows, first=0, columns=None):
    """The factor of a copy of `rows`, into an array that was not clean."""
    columns = first + len(rows) if columns is None else columns
    out = np.full((len(rows), columns), np.nan)
    triangularise(rows.copy(), first, out)
    return out


def normals(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 3), (4, 9), (6, 40)])
def test_triangularise_agrees_with_householder(shape):
    """L of rows = L Q is the transpose of R in rowsᵀ = QR, up to the signs of its columns."""
    rows = normals(*shape)
    out = triangular(rows)
    reference = np.linalg.qr(rows.T, mode="r").T
    np.testing.assert_allclose(out, reference * np.sign(reference.diagonal()), atol=1e-14 * 10, rtol=0)
    assert (np.triu(out, 1) == 0).all()
    assert (out.diagonal() > 0).all()


def test_triangularise_copies_the_columns_before_first():
    rows = normals(4, 11, seed=1)
    out = triangular(rows, first=2)
    np.testing.assert_array_equal(out[:, :2], rows[:, :2])
    np.testing.assert_allclose(out[:, 2:], triangular(rows[:, 2:]), rtol=1e-13)
    np.testing.assert_allclose(out @ out.T, rows @ rows.T, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("rank", [0, 1, 2, 4])
def test_triangularise_keeps_the_gram_matrix_of_singular_rows(rank):
    rows = normals(5, rank, seed=2) @ normals(rank, 8, seed=3)
    out = triangular(rows)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out @ out.T, rows @ rows.T, atol=1e-13, rtol=0)


def test_a_dependent_row_gets_a_zero_on_the_diagonal():
    """Exactly: the second row is twice the first, and powers of two do not round."""
    rows = np.array([[1.0, 2.0, -0.5], [2.0, 4.0, -1.0], [0.0, 1.0, 1.0]])
    out = triangular(rows)
    assert out[1, 1] == 0
    np.testing.assert_allclose(out @ out.T, rows @ rows.T, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("distance", [1e-3, 1e-8, 1e-13])
def test_triangularise_sees_how_far_two_nearly_equal_rows_are_apart(distance):
    """The subtraction is exact to 1e-16 of a row, so a distance of 1e-13 keeps three digits."""
    row, across = np.array([1.0, 2.0, -3.0, 0.5]), np.array([0.5, 2.0, 1.5, 0.0])  # orthogonal
    out = triangular(np.stack([row, row + distance * across]))
    expected = distance * np.linalg.norm(across)
    assert abs(out[1, 1] / expected - 1) < 1e-15 / distance + 1e-12
    assert abs(out[1, 0] / out[0, 0] - 1) < 1e-15


@pytest.mark.parametrize("scale", [1e-60, 1e-8, 1e60])
def test_triangularise_is_exact_for_graded_rows(scale):
    """Rows of very different lengths: each row of the Gram matrix is right relative to its own length."""
    lengths = scale ** np.arange(3.0)[::-1]
    rows = lengths[:, None] * normals(3, 7, seed=4)
    out = triangular(rows)
    relative = (out @ out.T - rows @ rows.T) / (lengths[:, None] * lengths)
    assert np.abs(relative).max() < 1e-14 * 7


def test_products_agree_with_numpy():
    a, b, c = normals(3, 5, seed=5), normals(5, 4, seed=6), normals(7, 5, seed=7)
    out, transposed, square, copied = (np.full(shape, np.nan) for shape in ((3, 4), (3, 7), (3, 3), (3, 5)))
    multiply(a, b, out)
    multiply_transposed(a, c, transposed)
    gram(a, square)
    copy(a, copied)
    np.testing.assert_allclose(out, a @ b, rtol=1e-13)
    np.testing.assert_allclose(transposed, a @ c.T, rtol=1e-13)
    np.testing.assert_allclose(square, a @ a.T, rtol=1e-13)
    np.testing.assert_array_equal(square, square.T)
    np.testing.assert_array_equal(copied, a)


def test_products_over_nothing_are_zero():
    out = np.full((2, 3), np.nan)
    multiply(np.empty((2, 0)), np.empty((0, 3)), out)
    np.testing.assert_array_equal(out, np.zeros((2, 3)))


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


@pytest.mark.parametrize(("rows", "columns", "degrees"), [(3, 3, 3), (3, 3, 9), (2, 2, 200), (4, 2, 2), (5, 1, 1)])
def test_bartlett_has_the_moments_of_a_wishart(rows, columns, degrees):
    """Means and covariances within 4.5 standard errors, also for more rows than degrees."""
    factors = bartletts(rows, columns, degrees)
    assert (np.triu(factors, 1) == 0).all()
    assert wishart_scores(factors, degrees) < 4.5
    assert wishart_scores(factors, degrees + 1) > 4.5


def test_bartlett_ignores_nothing_off_the_diagonal():
    """Below the diagonal T is standard normal, on it a chi: KS at 1e-4, the neighbouring chi rejected."""
    factors = bartletts(3, 3, 6, seed=1)
    assert stats.kstest(factors[:, 2, 0], "norm").pvalue > ALPHA
    assert stats.kstest(factors[:, 2, 2], stats.chi(4).cdf).pvalue > ALPHA
    assert stats.kstest(factors[:, 2, 2], stats.chi(6).cdf).pvalue < ALPHA


@pytest.mark.parametrize("degrees", [2, 5])
def test_the_gaussian_product_is_that_of_two_gaussian_matrices(degrees):
    """Fewer degrees than rows, and more: KS of one entry and of the norm; degrees + 1 is rejected."""
    rows, samples = 3, 20_000
    q = min(rows, degrees)
    trapezoids, squares = np.empty((samples, rows, q)), np.empty((samples, q, rows))
    fill_products(open_stream(), key_words(2), degrees, trapezoids, squares)
    ours = trapezoids @ squares
    reference, wrong = (direct_products(rows, k, samples) for k in (degrees, degrees + 1))
    for statistic in (lambda x: x[:, 2, 1], lambda x: (x**2).sum((1, 2))):
        assert stats.ks_2samp(statistic(ours), statistic(reference)).pvalue > ALPHA
        assert stats.ks_2samp(statistic(ours), statistic(wrong)).pvalue < ALPHA


def direct_products(rows, degrees, samples):
    """W_Q W_Kᵀ for W's (rows, degrees) drawn in full."""
    rng = np.random.default_rng(degrees)
    a, b = rng.standard_normal((2, samples, rows, degrees))
    return a @ b.transpose(0, 2, 1)


@pytest.mark.parametrize("columns", [3, 5])
def test_root_of_a_regular_matrix(columns):
    v = np.array([[2.0, 0.3, -0.1], [0.3, 0.5, 0.2], [-0.1, 0.2, 1.0]])
    factor = root(v, columns)
    assert factor.shape == (3, columns)
    np.testing.assert_allclose(factor @ factor.T, v, atol=1e-15 * 10)


@pytest.mark.parametrize("columns", [2, 4, 6])
def test_root_of_a_singular_matrix(columns):
    """Rank two on four tokens: two columns are enough, more are padded."""
    x = normals(4, 2, seed=8)
    factor = root(x @ x.T, columns)
    assert factor.shape == (4, columns)
    np.testing.assert_allclose(factor @ factor.T, x @ x.T, atol=1e-14, rtol=0)


def test_root_cuts_to_the_largest_directions():
    np.testing.assert_allclose(np.abs(root(np.diag([1.0, 9.0, 4.0]), 2)), [[0, 0], [3, 0], [0, 2]], atol=1e-15)


@pytest.mark.parametrize("gap", [1e-6, 1e-9, 1e-12])
def test_root_keeps_the_distance_of_nearly_equal_tokens(gap):
    """1 - rho is half the squared distance of two rows; V itself holds it to 1e-16/gap."""
    v = np.array([[1.0, 1.0 - gap], [1.0 - gap, 1.0]])
    factor = root(v, 2)
    distance = ((factor[0] - factor[1]) ** 2).sum() / 2
    assert abs(distance / gap - 1) < 1e-15 / gap


@pytest.mark.parametrize("gap", [1e-9, 1e-12])
def test_a_factor_holds_small_gaps_more_precisely_than_its_gram_matrix(gap):
    """Of the factor (a, 0), (b, d): 1 - rho = d²/(r (r + b)), r² = b² + d², has no cancellation."""
    row, across = np.array([0.8, -0.6, 0.0]), np.array([0.6, 0.8, 0.0])
    angle = (2 * gap) ** 0.5  # 1 - cos(angle) = gap - gap²/6
    out = triangular(np.stack([row, np.cos(angle) * row + np.sin(angle) * across]))
    b, d = out[1]
    r = np.hypot(b, d)
    assert abs(d * d / (r * (r + b)) / gap - 1) < 1e-15 / angle + gap
