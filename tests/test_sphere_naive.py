"""The layers of [CT] as they are written there, on arrays of tokens; other tests compare the library with them.

`naive_chain` draws every value matrix in full, adds, and divides by the lengths: equations 2, 3, 4 and 7, nothing else.
"""

import numpy as np
import pytest
from scipy import stats

import limitformer as lf

CUT = stats.truncnorm(-2, 2)


def draw(law, rng, shape):
    """Values of mean 0 and variance 1, by NumPy."""
    if law == "gaussian":
        return rng.standard_normal(shape)
    if law == "uniform":
        return rng.uniform(-(3**0.5), 3**0.5, shape)
    if law == "rademacher":
        return rng.choice([-1.0, 1.0], shape)
    g = rng.standard_normal(shape)
    while (outside := np.abs(g) > 2).any():
        g[outside] = rng.standard_normal(outside.sum())
    return g / CUT.std()


def naive_attention(x, model):
    """A(Xⁱ) (…, N, d) at X (…, N, d) [CT, eqs 2, 3]."""
    query, key = (np.eye(model.dim),) * 2 if model.query_key is None else map(np.array, model.query_key)
    weights = np.exp(model.beta * (x @ query.T) @ np.swapaxes(x @ key.T, -1, -2))
    divisor = weights.sum(-1, keepdims=True) if model.attention == "softmax" else model.tokens
    return weights / divisor @ x


def normalised(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def naive_layer(x, model, value):
    """X_{n+1} (…, N, d): of V (…, d, d) with variance 1 [CT, eq. 4], or of v (…) [CT, eq. 7]."""
    a, layers = naive_attention(x, model), model.layers_per_unit_time
    if isinstance(model, lf.StochasticTransformer):
        return normalised(x + model.sigma / layers**0.5 * a @ np.swapaxes(value, -1, -2))
    omega = 1 / layers + model.epsilon * value / layers**0.5
    return normalised(x + omega[..., None, None] * a)


def naive_chain(model, start, layers, samples, seed):
    """Tokens (samples, N, d) after so many layers from `start` (N, d) or (samples, N, d)."""
    rng = np.random.default_rng(seed)
    x = np.broadcast_to(start, (samples, model.tokens, model.dim)).copy()
    size = (samples, model.dim, model.dim) if isinstance(model, lf.StochasticTransformer) else (samples,)
    for _ in range(layers):
        x = naive_layer(x, model, draw(model.values, rng, size))
    return x


def overlaps_of(x):
    """⟨xⁱ, xʲ⟩ (…, pairs), i < j."""
    first, second = np.triu_indices(x.shape[-2], 1)
    return (x[..., first, :] * x[..., second, :]).sum(-1)


def gaps_of(x):
    """1 − |z| (…, pairs), i < j, from the nearer of xⁱ ∓ xʲ."""
    first, second = np.triu_indices(x.shape[-2], 1)
    minus, plus = ((x[..., first, :] - s * x[..., second, :]) ** 2 for s in (1, -1))
    return np.minimum(minus.sum(-1), plus.sum(-1)) / 2


def tokens_at(seed, tokens, dim):
    """Tokens in general position, no two overlaps alike."""
    return normalised(np.random.default_rng(seed).standard_normal((tokens, dim)))


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
