"""Public shapes: sizes in the configurations of well-known models, and where they are published.

Other entries are the defaults of the installed transformers for the family; weights are never loaded.
"""

from typing import Any

from limitformer.base.errors import InputError, nearest

GPT2 = "Radford et al., Language Models are Unsupervised Multitask Learners, 2019; openai-community/gpt2"
BERT = "Devlin et al., arXiv 1810.04805; google-bert"
ROBERTA = "Liu et al., arXiv 1907.11692; FacebookAI/roberta"
VIT = "Dosovitskiy et al., arXiv 2010.11929; google/vit"
MODERNBERT = "Warner et al., arXiv 2412.13663; answerdotai/ModernBERT"
LLAMA2 = "Touvron et al., arXiv 2307.09288; meta-llama/Llama-2"
LLAMA3 = "Grattafiori et al., arXiv 2407.21783; meta-llama/Llama-3"
MISTRAL = "Jiang et al., arXiv 2310.06825; mistralai/Mistral-7B-v0.1"
QWEN2 = "Yang et al., arXiv 2407.10671; Qwen/Qwen2"
QWEN3 = "Yang et al., arXiv 2505.09388; Qwen/Qwen3"
GEMMA = "Gemma Team, arXiv 2403.08295; google/gemma"
GEMMA2 = "Gemma Team, arXiv 2408.00118; google/gemma-2"
GEMMA3 = "Gemma Team, arXiv 2503.19786; google/gemma-3"
OLMO2 = "OLMo Team, arXiv 2501.00656; allenai/OLMo-2"
NEOX = "Black et al., arXiv 2204.06745; EleutherAI/gpt-neox-20b"
PYTHIA = "Biderman et al., arXiv 2304.01373; EleutherAI/pythia"
COHERE = "Cohere, 2024; CohereLabs/c4ai-command-r-v01"
T5 = "Raffel et al., arXiv 1910.10683; google-t5"
MIXTRAL = "Jiang et al., arXiv 2401.04088; mistralai/Mixtral"
GPT_OSS = "OpenAI, arXiv 2508.10925; openai/gpt-oss"
DEEPSEEK = "DeepSeek-AI, arXiv 2412.19437; deepseek-ai/DeepSeek-V3"


def gpt2(width: int, depth: int, heads: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_embd": width, "n_layer": depth, "n_head": heads}


def encoder(kind: str, width: int, depth: int, heads: int, hidden: int, **more: Any) -> dict[str, Any]:
    """Return the sizes of BERT and similar models."""
    sizes = {"model_type": kind, "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": hidden, **more}


def decoder(
    kind: str, width: int, depth: int, heads: int, groups: int, hidden: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    """Return the sizes of Llama and similar models."""
    return encoder(kind, width, depth, heads, hidden, num_key_value_heads=groups, vocab_size=vocabulary, **more)


def t5(width: int, depth: int, heads: int, hidden: int) -> dict[str, Any]:
    sizes = {"model_type": "t5", "d_model": width, "num_layers": depth, "num_heads": heads}
    return {**sizes, "d_ff": hidden, "d_kv": 64}


ROPE_3 = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
ROBERTA_IDS = {"vocab_size": 50265, "max_position_embeddings": 514, "pad_token_id": 1}

SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": (gpt2(768, 12, 12), GPT2),
    "gpt2-medium": (gpt2(1024, 24, 16), GPT2),
    "gpt2-large": (gpt2(1280, 36, 20), GPT2),
    "gpt2-xl": (gpt2(1600, 48, 25), GPT2),
    "bert-base": (encoder("bert", 768, 12, 12, 3072), BERT),
    "bert-large": (encoder("bert", 1024, 24, 16, 4096), BERT),
    "roberta-base": (encoder("roberta", 768, 12, 12, 3072, **ROBERTA_IDS), ROBERTA),
    "roberta-large": (encoder("roberta", 1024, 24, 16, 4096, **ROBERTA_IDS), ROBERTA),
    "vit-base": (encoder("vit", 768, 12, 12, 3072), VIT),
    "vit-large": (encoder("vit", 1024, 24, 16, 4096), VIT),
    "vit-huge": (encoder("vit", 1280, 32, 16, 5120, patch_size=14), VIT),
    "modernbert-base": (encoder("modernbert", 768, 22, 12, 1152), MODERNBERT),
    "modernbert-large": (encoder("modernbert", 1024, 28, 16, 2624), MODERNBERT),
    "llama-2-7b": (decoder("llama", 4096, 32, 32, 32, 11008, 32000), LLAMA2),
    "llama-2-13b": (decoder("llama", 5120, 40, 40, 40, 13824, 32000), LLAMA2),
    "llama-2-70b": (decoder("llama", 8192, 80, 64, 8, 28672, 32000), LLAMA2),
    "llama-3-8b": (decoder("llama", 4096, 32, 32, 8, 14336, 128256, **ROPE_3), LLAMA3),
    "llama-3-70b": (decoder("llama", 8192, 80, 64, 8, 28672, 128256, **ROPE_3), LLAMA3),
    "llama-3-405b": (decoder("llama", 16384, 126, 128, 8, 53248, 128256, **ROPE_3), LLAMA3),
    "llama-3.2-1b": (decoder("llama", 2048, 16, 32, 8, 8192, 128256, tie_word_embeddings=True, **ROPE_3), LLAMA3),
    "llama-3.2-3b": (decoder("llama", 3072, 28, 24, 8, 8192, 128256, tie_word_embeddings=True, **ROPE_3), LLAMA3),
    "mistral-7b": (decoder("mistral", 4096, 32, 32, 8, 14336, 32000), MISTRAL),
    "qwen2-0.5b": (decoder("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True), QWEN2),
    "qwen2-1.5b": (decoder("qwen2", 1536, 28, 12, 2, 8960, 151936, tie_word_embeddings=True), QWEN2),
    "qwen2-7b": (decoder("qwen2", 3584, 28, 28, 4, 18944, 152064), QWEN2),
    "qwen2-72b": (decoder("qwen2", 8192, 80, 64, 8, 29568, 152064), QWEN2),
    "qwen3-0.6b": (decoder("qwen3", 1024, 28, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True), QWEN3),
    "qwen3-8b": (decoder("qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128), QWEN3),
    "qwen3-32b": (decoder("qwen3", 5120, 64, 64, 8, 25600, 151936, head_dim=128), QWEN3),
    "gemma-2b": (decoder("gemma", 2048, 18, 8, 1, 16384, 256000, head_dim=256), GEMMA),
    "gemma-7b": (decoder("gemma", 3072, 28, 16, 16, 24576, 256000, head_dim=256), GEMMA),
    "gemma-2-2b": (decoder("gemma2", 2304, 26, 8, 4, 9216, 256000, head_dim=256), GEMMA2),
    "gemma-2-9b": (decoder("gemma2", 3584, 42, 16, 8, 14336, 256000, head_dim=256), GEMMA2),
    "gemma-2-27b": (
        decoder("gemma2", 4608, 46, 32, 16, 36864, 256000, head_dim=128, query_pre_attn_scalar=144),
        GEMMA2,
    ),
    "gemma-3-1b": (decoder("gemma3_text", 1152, 26, 4, 1, 6912, 262144, head_dim=256), GEMMA3),
    "olmo-2-7b": (decoder("olmo2", 4096, 32, 32, 32, 11008, 100352), OLMO2),
    "olmo-2-13b": (decoder("olmo2", 5120, 40, 40, 40, 13824, 100352), OLMO2),
    "gpt-neox-20b": (encoder("gpt_neox", 6144, 44, 64, 24576, vocab_size=50432), NEOX),
    "pythia-160m": (encoder("gpt_neox", 768, 12, 12, 3072, vocab_size=50304), PYTHIA),
    "pythia-6.9b": (encoder("gpt_neox", 4096, 32, 32, 16384, vocab_size=50432), PYTHIA),
    "pythia-12b": (encoder("gpt_neox", 5120, 36, 40, 20480, vocab_size=50688), PYTHIA),
    "command-r": (decoder("cohere", 8192, 40, 64, 64, 22528, 256000, logit_scale=0.0625), COHERE),
    "t5-small": (t5(512, 6, 8, 2048), T5),
    "t5-base": (t5(768, 12, 12, 3072), T5),
    "t5-large": (t5(1024, 24, 16, 4096), T5),
    "mixtral-8x7b": (decoder("mixtral", 4096, 32, 32, 8, 14336, 32000, num_local_experts=8), MIXTRAL),
    "mixtral-8x22b": (decoder("mixtral", 6144, 56, 48, 8, 16384, 32768, num_local_experts=8), MIXTRAL),
    "gpt-oss-20b": (
        decoder("gpt_oss", 2880, 24, 64, 8, 2880, 201088, head_dim=64, num_local_experts=32),
        GPT_OSS,
    ),
    "gpt-oss-120b": (
        decoder("gpt_oss", 2880, 36, 64, 8, 2880, 201088, head_dim=64, num_local_experts=128),
        GPT_OSS,
    ),
    "deepseek-v3": (decoder("deepseek_v3", 7168, 61, 128, 128, 18432, 129280), DEEPSEEK),
}


def shapes() -> dict[str, dict[str, Any]]:
    """Return every public shape: the sizes of its configuration, and under `source` where they are published.

    >>> shapes()["llama-3-405b"]["hidden_size"]
    16384
    """
    return {name: {**numbers, "source": source} for name, (numbers, source) in SHAPES.items()}


def require_shape(name: str) -> None:
    """Raise `InputError` unless there is a public shape of this name."""
    if name not in SHAPES:
        hint = nearest(name.lower(), SHAPES, cutoff=0.3)
        raise InputError(f"there is no public shape, file or folder {name!r}.{hint} All: limitformer check list.")
