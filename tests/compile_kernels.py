"""Compile kernels that tests share: `python tests/compile_kernels.py covariances` for one half of them, or `others`."""

import sys

import numpy as np

import limitformer as lf

START = 0.9 * np.eye(3) + 0.1
ONCE = {"samples": 8, "seed": 0, "threads": 1, "progress": False}


def covariances():
    """Chain, its gradients, and limits."""
    model = network()
    lf.simulate(model, START, **ONCE)
    lf.simulate(model, START, **ONCE, gradients=True)
    lf.simulate(lf.limit(model), START, **ONCE, record=[0.1])
    lf.simulate(lf.limit(model), START, **ONCE, record=[0.1], step="euler-maruyama")


def others():
    """Tokens on the sphere."""
    for tokens in (2, 4):
        model = lf.StochasticTransformer(tokens=tokens, dim=5, beta=1.0, layers_per_unit_time=10)
        lf.simulate(model, **ONCE, horizon=1.0)


def network():
    """With a sublayer of each kind."""
    shaped = {"attention": lf.ShapedAttention(tau0=1.0), "feedforward": lf.ShapedReLU(c_plus=0.0, c_minus=-1.0)}
    return lf.Transformer(width=20, depth=4, gamma=0.5, **shaped)


if __name__ == "__main__":
    {"covariances": covariances, "others": others}[sys.argv[1]]()
