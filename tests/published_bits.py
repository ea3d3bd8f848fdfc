"""A few small results of every kind, as numbers and as hashes of their bits, which no change of the kernels may change.

`python tests/published_bits.py` prints the hashes; run it before and after, on one machine. Which bits a kernel makes
depends on the processor, so what the tests keep are the numbers (`test_published_bits.py`).
"""

import hashlib

import numpy as np

import limitformer as lf

START = np.array([[1.0, 0.3, -0.4], [0.3, 1.6, 0.2], [-0.4, 0.2, 0.7]])
SHAPED_RELU, SHAPED = lf.ShapedReLU(c_plus=0.5, c_minus=-1.0, hidden=100), lf.ShapedAttention(tau0=1.0)
SIZE = {"width": 32, "depth": 6, "gamma": 0.5}

MODELS = {
    "shaped": lf.Transformer(**SIZE, attention=SHAPED, feedforward=SHAPED_RELU),
    "attention alone": lf.Transformer(**SIZE, attention=SHAPED),
    "ReLU alone": lf.Transformer(**SIZE, feedforward=lf.ReLU()),
    "GELU, 4 heads, Pre-LN": lf.Transformer(
        **SIZE, attention=lf.SoftmaxAttention(heads=4), feedforward=lf.GELU(hidden=70), norm="pre"
    ),
    "causal, Post-LN": lf.Transformer(
        **SIZE, attention=lf.SoftmaxAttention(tau0=0.7), feedforward=lf.ReLU(), norm="post", mask="causal"
    ),
    "RMSNorm, λ = 1": lf.Transformer(
        **SIZE, lam=1.0, attention=lf.ShapedAttention(tau0=2.0, heads=2), norm=lf.RMSNorm(placement="pre")
    ),
    "one matrix": lf.Transformer(**SIZE, feedforward=lf.OneMatrix(activation=lf.GELU())),
}
WITH_GRADIENTS = ("shaped", "GELU, 4 heads, Pre-LN", "causal, Post-LN")


def results():
    """(name, arrays) of each."""
    common = {"samples": 20, "seed": 7, "threads": 1, "progress": False}
    for name, model in MODELS.items():
        yield name, [lf.simulate(model, START, **common).covariance.values]
    for name in WITH_GRADIENTS:
        found = lf.simulate(MODELS[name], START, gradients=True, **common)
        yield f"{name}, gradients", [found[key].values for key in ("loss", "stream_gradient", "weight_gradient")]
    limit = lf.limit(MODELS["attention alone"])
    yield "limit", [lf.simulate(limit, START, **common).covariance.values]
    pair = lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=100)
    yield "pair", [lf.simulate(pair, horizon=2.0, **common).overlap.values]


def numbers_of(arrays):
    """Two numbers in which every entry has its share: their mean, and that of their cosines."""
    entries = np.concatenate([np.asarray(array, np.float64).ravel() for array in arrays])
    return float(entries.mean()), float(np.cos(entries).mean())


def digest_of(arrays):
    """SHA-256 of the bytes."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    for name, arrays in results():
        print(f"{digest_of(arrays)[:32]}  {name}: {numbers_of(arrays)!r}", flush=True)
