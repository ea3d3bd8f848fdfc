"""Logits of unrelated tokens in the first block of stock models at their default width, by a formula for each family.

σ is what the initialiser's range s, the width n and the norms give before the softmax: s²n where two Gaussian matrices
stand between a norm and the logits. The k logits of a row spread around their own mean, tokens may be correlated from
the start (BERT's share a type embedding).
"""

import numpy as np
import transformers

import limitformer as lf

TOKENS = 64
ONE = {"num_hidden_layers": 1}
CASES = {
    "gpt2": (lambda: transformers.GPT2Config(n_layer=1), 0.02**2 * 768),
    "bert": (lambda: transformers.BertConfig(**ONE), 0.02**2 * 768),
    "vit": (lambda: transformers.ViTConfig(**ONE), 0.02**2 * 768),
    "modernbert": (lambda: transformers.ModernBertConfig(**ONE), (0.02 * 0.87963) ** 2 * 768),
    "qwen3": (lambda: transformers.Qwen3Config(**ONE), 1.0),
    "gemma2": (lambda: transformers.Gemma2Config(**ONE), 0.02**2 * 2304),
    "gemma4": (lambda: transformers.Gemma4TextConfig(**ONE), 512**0.5),  # a global layer; 16 in those with a window
    "t5": (lambda: transformers.T5Config(num_layers=1, num_decoder_layers=1), 1.0),
}
BOTH_WAYS = ("bert", "vit", "modernbert", "t5")


def logits(family):
    """Return σ of the first block, simulated and by the formula."""
    make, expected = CASES[family]
    data = lf.weightless.simulate(make(), 1 if family == "vit" else TOKENS, samples=1, seed=0, progress=False)
    seen = float((data["logit_std"][0, 0] ** 2).mean()) ** 0.5
    return seen, expected * np.sqrt(spread_of_a_row(family, data))


def spread_of_a_row(family, data):
    """Return the mean variance of a row's logits around their mean, for σ = 1."""
    tokens = data.sizes["token"]
    rho = lf.correlation(data).values[0, 0][~np.eye(tokens, dtype=bool)].mean()
    k = np.arange(1, tokens + 1)
    return (1 - rho) * (1 - 1 / tokens if family in BOTH_WAYS else np.mean(1 - 1 / k[1:]))
