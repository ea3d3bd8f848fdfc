"""The layers of [CT] as they are written there, on arrays of tokens; other tests compare the library with them.

`naive_chain` draws every value matrix in full, adds, and divides by the lengths: equations 2, 3, 4 and 7, nothing else.
"""

import numpy as np
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
    """Return tokens (samples, N, d) after `layers` layers from `start` (N, d) or (samples, N, d)."""
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


def euler_maruyama(model, start, dt, steps, samples, seed, drift=1.0):
    """[CT, eq. 6] or, for the hybrid, eq. 8, step by step as printed; tokens (samples, N, d)."""
    rng = np.random.default_rng(seed)
    y = np.broadcast_to(start, (samples, *start.shape)).copy()
    for _ in range(steps):
        a = naive_attention(y, model)
        squared, along = (a * a).sum(-1, keepdims=True), (y * a).sum(-1, keepdims=True)
        if isinstance(model, lf.HybridTransformer):
            tangent = a - along * y
            second = 1.5 * along**2 * y - 0.5 * squared * y - along * a
            noise = rng.standard_normal((samples, 1, 1)) * dt**0.5
            y = y + (model.epsilon**2 * drift * second + tangent) * dt + model.epsilon * tangent * noise
        else:
            w = rng.standard_normal((samples, model.dim, model.dim)) * dt**0.5
            noise = a @ np.swapaxes(w, -1, -2)
            noise -= (noise * y).sum(-1, keepdims=True) * y
            y = y + drift * (1 - model.dim) / 2 * model.sigma**2 * squared * y * dt + model.sigma * noise
    return y


def near_plus(model, layers, rng, samples=10_000):
    """log w_n/w_0 of two tokens next to +1, where attention is all on their sum: independent factors."""
    c = model.sigma / model.layers_per_unit_time**0.5
    total = np.zeros(samples)
    for _ in range(layers):
        h, h_ = rng.standard_normal((2, samples))
        u = (1 + c * h) ** 2 + c * c * rng.chisquare(model.dim - 2, samples)
        total += np.log(u) - 2 * np.log(u + c * c * h_**2)
    return total
