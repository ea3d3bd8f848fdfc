"""Small results of every kind, as numbers and as hashes of their bits. A change of the code may not change them.

`python tests/published_bits.py` prints a table of the hashes, of networks in torch and of the figures' records too; run
it before and after, on one machine. Which bits a kernel makes depends on the processor, so what the tests keep are the
numbers (`test_published_bits.py`).
"""

import hashlib
import json
from pathlib import Path

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
SPHERE = {"tokens": 3, "beta": 2.0, "layers_per_unit_time": 20}
ON_SPHERE = {
    "pair": lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=100),
    "sphere, Gram matrix": lf.StochasticTransformer(**SPHERE, dim=7),
    "sphere, coordinates": lf.StochasticTransformer(**SPHERE, dim=5, values="rademacher"),
    "hybrid": lf.HybridTransformer(**SPHERE, dim=4, epsilon=0.5),
    "sphere limit": lf.limit(lf.StochasticTransformer(**SPHERE, dim=5)),
}
MADE_BY = ("limitformer_version", "stamp")
WITH_GRADIENTS = ("shaped", "GELU, 4 heads, Pre-LN", "causal, Post-LN")


def results():
    """Yield (name, arrays) of each result."""
    common = {"samples": 20, "seed": 7, "threads": 1, "progress": False}
    for name, model in MODELS.items():
        yield name, [lf.simulate(model, START, **common).covariance.values]
    for name in WITH_GRADIENTS:
        found = lf.simulate(MODELS[name], START, gradients=True, **common)
        yield f"{name}, gradients", [found[key].values for key in ("loss", "stream_gradient", "weight_gradient")]
    limit = lf.limit(MODELS["attention alone"])
    for step, name in {"factor": "limit", "euler-maruyama": "limit, Euler-Maruyama"}.items():
        yield name, [lf.simulate(limit, START, step=step, **common).covariance.values]
    for name, model in ON_SPHERE.items():
        yield name, [lf.simulate(model, horizon=2.0, **common).overlap.values]


def in_torch():
    """Yield (name, arrays) of drawn and weightless networks."""
    common = {"samples": 4, "seed": 7, "progress": False, "device": "cpu"}
    model = MODELS["shaped"]
    yield "network", [lf.nn.simulate(model, START, **common).covariance.values]
    found = lf.weightless.simulate(model, START, gradients=True, **common)
    yield "weightless", [found[key].values for key in ("covariance", "weight_gradient")]


def records():
    """Yield (name, text as bytes) of each figure's record in docs, without version and stamp."""
    for path in sorted((Path(__file__).parents[1] / "docs" / "figures").glob("*.json")):
        kept = {key: value for key, value in json.loads(path.read_text()).items() if key not in MADE_BY}
        yield path.stem, [np.frombuffer(json.dumps(kept, sort_keys=True).encode(), np.uint8)]


def numbers_of(arrays):
    """Return two numbers that depend on every entry: the mean, and the mean of the cosines."""
    entries = np.concatenate([np.asarray(array, np.float64).ravel() for array in arrays])
    return float(entries.mean()), float(np.cos(entries).mean())


def digest_of(arrays):
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    for kind in (results, in_torch, records):
        for name, arrays in kind():
            print(f"{digest_of(arrays)[:32]}  {name}", flush=True)
