"""Logits of unrelated tokens in the first block of stock models at their default width, by a formula for each family.

σ is what the initialiser's range s, the width n and the norms give before the softmax: s²n where two Gaussian matrices
stand between a norm and the logits. The k logits of a row spread around their own mean, tokens may be correlated from
the start (BERT's share a type embedding), and gpt-oss has an attention sink and YaRN's factor on queries and keys.
"""

import numpy as np
import transformers

import limitformer as lf

TOKENS = 64
ONE = {"num_hidden_layers": 1}
YARN = (0.1 * np.log(32) + 1) ** 2
CASES = {
    "gpt2": (lambda: transformers.GPT2Config(n_layer=1), 0.02**2 * 768),
    "bert": (lambda: transformers.BertConfig(**ONE), 0.02**2 * 768),
    "roberta": (lambda: transformers.RobertaConfig(**ONE), 0.02**2 * 768),
    "vit": (lambda: transformers.ViTConfig(**ONE), 0.02**2 * 768),
    "modernbert": (lambda: transformers.ModernBertConfig(**ONE), (0.02 * 0.87963) ** 2 * 768),
    "llama": (lambda: transformers.LlamaConfig(**ONE), 0.02**2 * 4096),
    "mistral": (lambda: transformers.MistralConfig(**ONE), 0.02**2 * 4096),
    "qwen2": (lambda: transformers.Qwen2Config(**ONE), 0.02**2 * 4096),
    "qwen3": (lambda: transformers.Qwen3Config(**ONE), 1.0),
    "gemma": (lambda: transformers.GemmaConfig(**ONE), 0.02**2 * 3072),
    "gemma2": (lambda: transformers.Gemma2Config(**ONE), 0.02**2 * 2304),
    "gemma3": (lambda: transformers.Gemma3TextConfig(**ONE), 1.0),
    "gemma4": (lambda: transformers.Gemma4TextConfig(**ONE), 512**0.5),  # a global layer; 16 in those with a window
    "olmo": (lambda: transformers.OlmoConfig(**ONE), 0.02**2 * 4096),
    "olmo2": (lambda: transformers.Olmo2Config(**ONE), 1.0),
    "gpt_oss": (lambda: transformers.GptOssConfig(**ONE), 0.02**2 * 2880 * YARN),
    "gpt_neox": (lambda: transformers.GPTNeoXConfig(**ONE), 0.02**2 * 6144),
    "cohere": (lambda: transformers.CohereConfig(**ONE), 0.02**2 * 8192),
    "t5": (lambda: transformers.T5Config(num_layers=1, num_decoder_layers=1), 1.0),
    "deepseek_v3": (
        lambda: transformers.DeepseekV3Config(**ONE, first_k_dense_replace=1),
        0.02**2 * np.sqrt((128 * 1536 * 512 + 64 * 1536 * 7168) / 192),
    ),
}
BOTH_WAYS = ("bert", "roberta", "vit", "modernbert", "t5")
CHEAP = ("gpt2", "bert", "vit", "modernbert", "qwen3", "gemma2", "gemma4", "t5")


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
    if family == "gpt_oss":  # a sink of logit 0
        return np.mean(k**2 / (k + 1) ** 2)
    return (1 - rho) * (1 - 1 / tokens if family in BOTH_WAYS else np.mean(1 - 1 / k[1:]))
