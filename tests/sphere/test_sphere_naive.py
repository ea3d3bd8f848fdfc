"""The plain loops of `sphere_naive` by hand."""

import numpy as np
import pytest

import limitformer as lf
from sphere_naive import gaps_of, naive_attention, naive_layer, overlaps_of

X = np.array([[0.6, 0.8], [1.0, 0.0]])


@pytest.mark.parametrize("attention", ["softmax", "unnormalized"])
def test_a_layer_by_hand(attention):
    """Two tokens of overlap 0.6, β = log 2, one V: every number worked out from the paper."""
    model = lf.StochasticTransformer(
        tokens=2, dim=2, beta=np.log(2), layers_per_unit_time=4, sigma=3.0, attention=attention
    )
    divisor = 2 + 2**0.6 if attention == "softmax" else 2
    a = np.array([2 * X[0] + 2**0.6 * X[1], 2**0.6 * X[0] + 2 * X[1]]) / divisor
    v = np.array([[0.3, -1.0], [2.0, 0.5]])
    moved = [x + 3 / 2 * np.array([0.3 * b[0] - b[1], 2 * b[0] + 0.5 * b[1]]) for x, b in zip(X, a, strict=True)]
    expected = np.array([x / (x @ x) ** 0.5 for x in moved])
    np.testing.assert_allclose(naive_layer(X, model, v), expected, rtol=1e-14, atol=1e-15)
    assert np.abs(naive_layer(X, model, v.T) - expected).max() > 0.1


def test_a_hybrid_layer_by_hand():
    model = lf.HybridTransformer(tokens=2, dim=2, beta=0.0, layers_per_unit_time=4, epsilon=3.0)
    omega = 1 / 4 + 3 * 0.5 / 2
    moved = X + omega * X.mean(0)
    expected = moved / np.sqrt((moved**2).sum(1, keepdims=True))
    np.testing.assert_allclose(naive_layer(X[None], model, np.array([0.5]))[0], expected, rtol=1e-14)


def test_queries_and_keys_by_hand():
    """Row i of the weights belongs to the query of token i: the pair (K, Q) is another layer."""
    query, key = np.array([[1.0, 2.0]]), np.array([[0.5, -1.0]])
    options = {"tokens": 2, "dim": 2, "beta": 1.0, "layers_per_unit_time": 1, "attention": "unnormalized"}
    model = lf.StochasticTransformer(query_key=(query, key), **options)
    logits = np.array([[2.2 * -0.5, 2.2 * 0.5], [1.0 * -0.5, 1.0 * 0.5]])
    np.testing.assert_allclose(naive_attention(X, model), np.exp(logits) @ X / 2, rtol=1e-14)
    swapped = lf.StochasticTransformer(query_key=(key, query), **options)
    assert np.abs(naive_attention(X, swapped) - np.exp(logits) @ X / 2).max() > 0.1


def test_overlaps_and_gaps_by_hand():
    np.testing.assert_allclose(overlaps_of(X), [0.6], rtol=1e-15)
    np.testing.assert_allclose(gaps_of(X), [0.4], rtol=1e-15)
    np.testing.assert_allclose(gaps_of(X * [[1], [-1]]), [0.4], rtol=1e-15)
