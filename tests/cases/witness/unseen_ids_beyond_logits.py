"""mllama's table of embeddings has 8 more rows than its logits; the batch that no step sees once had ids beyond them.

Right: ids below the vocabulary of its text, and a loss that is finite for every seed.
"""

import numpy as np
from benchmarks.zoo.configurations import small_config

import limitformer as lf


def verify():
    for seed in range(3):
        data = lf.weightless.simulate_steps(
            small_config("mllama"), 16, optimizer="adamw", steps=1, samples=1, seed=seed, progress=False
        )
        assert np.isfinite(data.loss_unseen).all()
