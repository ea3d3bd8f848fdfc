"""Starts: refusals, and covariances, means and ranks against NumPy."""

import re

import numpy as np
import pytest
import torch

from limitformer.base.errors import InputError
from limitformer.models import Start, as_start, equicorrelated, from_covariance, from_tokens

pytestmark = pytest.mark.fast

V = np.array([[2.0, 0.3, -0.1], [0.3, 0.5, 0.2], [-0.1, 0.2, 1.0]])
X = np.array([[1.0, -2.0, 0.5, 3.0], [0.2, 0.1, -1.0, 2.0]])


def refuses(message, make, *arguments, **settings):
    with pytest.raises(InputError, match=re.escape(message)):
        make(*arguments, **settings)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1.0, 0.2, 0.0], [0.2, 1.0, 0.0]], "The start must be square, tokens by tokens; got shape (2, 3)."),
        ([[1.0, 0.3], [0.2, 1.0]], "differ from their mirror image by up to 0.1. Repair: (V + V.T)/2."),
        ([[1.0, 2.0], [2.0, 1.0]], "must be positive semi-definite; its smallest eigenvalue is -1."),
        ([[1.0, np.nan], [np.nan, 1.0]], "must be finite; 2 of its 4 entries are NaN or infinite."),
        ([1.0, 2.0], "The start must have 2 dimensions; got shape (2,)."),
        (np.empty((0, 0)), "The start must not be empty; got shape (0, 0)."),
        ([[1.0, 0.0], [0.0, 0.0]], "Every token must have a positive variance; got one that is zero."),
        ("covariance", "The start must be an array of numbers; got str."),
        (None, "The start must be given: a covariance (tokens, tokens). Nearest: equicorrelated(2, correlation=0.2)."),
        ([[1.0], [1.0, 2.0]], "The start must be an array of numbers; got list."),
        (np.eye(2) + 0j, "The start must be real; got complex numbers (complex128). Nearest: their real part, .real."),
    ],
)
def test_arrays_that_are_not_covariances_are_refused(value, message):
    refuses(message, from_covariance, value)
    refuses(message, as_start, value)


def test_covariance_is_stored_unchanged():
    start = from_covariance(V.tolist())
    np.testing.assert_array_equal(start.covariance, V)
    np.testing.assert_array_equal(as_start(torch.tensor(V)).covariance, V)
    assert (start.tokens, start.rank()) == (3, 3)
    assert start.means is None
    assert start.labels is None


@pytest.mark.parametrize("scale", [1e-200, 1e100])
def test_covariance_tolerates_rounding_only(scale):
    """1e-10 of the largest entry is rounding, 1e-8 is a mistake, for skew and for negative eigenvalues."""
    skew = np.array([[0, 1, 0], [-1, 0, 0], [0, 0, 0]])
    forgiven = from_covariance(scale * (V + 1e-10 * skew)).covariance
    np.testing.assert_array_equal(forgiven, forgiven.T)
    refuses("must be symmetric", from_covariance, scale * (V + 1e-8 * skew))
    flat = np.array([[1.0, 1.0], [1.0, 1.0]])
    assert from_covariance(scale * (flat - np.diag([0, 1e-10]))).rank() == 1
    refuses("must be positive semi-definite", from_covariance, scale * (flat - np.diag([0, 1e-7])))


@pytest.mark.parametrize(("tokens", "least"), [(1, "-1"), (3, "-0.5")])
def test_equicorrelated_bounds(tokens, least):
    message = f"correlation of {tokens} tokens must lie in [{least}, 1]; got"
    for correlation in (float(least) - 1e-9, 1 + 1e-9):
        refuses(message, equicorrelated, tokens, correlation)
    for correlation in (float(least), 0.0, 1.0):
        start = equicorrelated(tokens, correlation)
        assert np.linalg.eigvalsh(start.covariance)[0] > -1e-14
        np.testing.assert_array_equal(as_start(start.covariance).covariance, start.covariance)


def test_equicorrelated_refuses_other_mistakes():
    refuses("tokens must be at least 1; got 0.", equicorrelated, 0, 0.2)
    refuses("tokens must be a whole number; got 2.0.", equicorrelated, 2.0, 0.2)
    for variance in (0.0, -1.0):
        refuses("variance must be positive; got", equicorrelated, 2, 0.2, variance)
    for number in (np.inf, np.nan):
        refuses(f"correlation must be finite; got {number}.", equicorrelated, 2, number)
        refuses(f"variance must be finite; got {number}.", equicorrelated, 2, 0.2, number)
    for other in (0.2j, "0.2", None, True):
        refuses(f"correlation must be a number; got {other!r}.", equicorrelated, 2, other)
        refuses(f"variance must be a number; got {other!r}.", equicorrelated, 2, 0.2, other)


@pytest.mark.parametrize("make", [lambda: equicorrelated(10**6, 0.2), lambda: from_tokens(np.ones((10**6, 1)))])
def test_a_covariance_that_does_not_fit_the_memory_is_refused_before_it_is_made(make):
    refuses("A covariance of 1,000,000 tokens takes 37,252.9 GiB, more than is free. Nearest: fewer tokens.", make)


def test_tokens_give_covariance_and_means():
    start = from_tokens(X)
    np.testing.assert_allclose(start.covariance, [[14.25 / 4, 5.5 / 4], [5.5 / 4, 5.05 / 4]], rtol=1e-15)
    np.testing.assert_allclose(start.means, [2.5 / 4, 1.3 / 4], rtol=1e-15)
    assert start.description == "array (2, 4)"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, 2.0], "tokens must have 2 dimensions; got shape (2,)."),
        (np.empty((3, 0)), "tokens must not be empty; got shape (3, 0)."),
        ([[1.0, np.nan]], "tokens must be finite; 1 of its 2 entries are NaN or infinite."),
        ([[1.0, 2.0], [0.0, 0.0]], "Every token must differ from zero; got one that is zero."),
        ("tokens", "tokens must be an array of numbers; got str."),
    ],
)
def test_arrays_that_are_not_tokens_are_refused(value, message):
    refuses(message, from_tokens, value)


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_tokens_whose_squares_leave_the_range_of_doubles_are_refused(size):
    """The message must not call them zero, and an infinite covariance must not pass."""
    with pytest.raises(InputError) as caught:
        from_tokens([[size, -size], [1.0, 2.0]])
    assert "got one that is zero" not in str(caught.value)


@pytest.mark.parametrize(("tokens", "width"), [(2, 7), (5, 3), (4, 4)])
def test_rank_counts_directions(tokens, width):
    x = np.random.default_rng(0).standard_normal((tokens, width))
    assert from_tokens(x).rank() == min(tokens, width)
    assert from_tokens(np.concatenate([x, x[:1], 2 * x[1:2]])).rank() == min(tokens, width)


def test_rank_does_not_depend_on_the_variances():
    """A token of tiny variance adds a direction even next to a large one; a copy of another does not."""
    assert from_covariance(1e-30 * V).rank() == 3
    assert from_covariance(np.diag([1.0, 1e-18])).rank() == 2
    assert from_covariance([[1.0, 1e-9], [1e-9, 1e-18]]).rank() == 1


def test_start_constructor_checks_its_covariance():
    for wrong in (np.full((2, 2), np.nan), np.array([[1.0, 0.5], [-0.5, 1.0]]), np.diag([1.0, -1.0])):
        with pytest.raises(InputError):
            Start(covariance=wrong)
    with pytest.raises(InputError, match="one entry for each of the 3 tokens"):
        Start(covariance=V, labels=("a", "b"))
    with pytest.raises(ValueError, match="read-only"):
        Start(covariance=V).covariance[0, 0] = 7.0


TENSORS = {  # what is refused, and what the line must hold
    "one that is trained": (lambda: torch.eye(2, requires_grad=True), "got Tensor. Nearest: .detach()"),
    "16 bits": (lambda: torch.eye(2, dtype=torch.bfloat16), ".detach().cpu().double().numpy()."),
    "no numbers": (lambda: torch.eye(2, device="meta"), ".detach().cpu().double().numpy()."),
    "complex": (lambda: torch.eye(2, dtype=torch.complex64), "must be real; got complex numbers (complex64)."),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_need_conversion_are_refused_with_the_repair(kind):
    make, message = TENSORS[kind]
    refuses(message, from_tokens, make())
