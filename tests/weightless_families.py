"""Small networks of every family."""

import numpy as np
import torch
import transformers
from torch import nn

import limitformer as lf

SIZE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPS = {"num_key_value_heads": 2}
HEADS = {**GROUPS, "head_dim": 8}
MIXED = {**SIZE, **IDS, **GROUPS, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"moe_intermediate_size": 24, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
EXPERTS |= {"num_key_value_heads": 4}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 40, "dropout_rate": 0.0}
VIT = {name: SIZE[name] for name in SIZE if name != "vocab_size"}

CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=40, n_embd=32, n_layer=3, n_head=4, n_positions=16, initializer_range=0.2,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    ),
    "bert": lambda: transformers.BertConfig(**SIZE, **NO_DROPOUT),
    "roberta": lambda: transformers.RobertaConfig(**SIZE, **NO_DROPOUT, max_position_embeddings=20),
    "vit": lambda: transformers.ViTConfig(**VIT, **NO_DROPOUT, image_size=8, patch_size=4),
    "modernbert": lambda: transformers.ModernBertConfig(**SIZE, **IDS, cls_token_id=1, sep_token_id=2),
    "llama": lambda: transformers.LlamaConfig(**SIZE, **GROUPS),
    "mistral": lambda: transformers.MistralConfig(**SIZE, **GROUPS, sliding_window=3),
    "qwen2": lambda: transformers.Qwen2Config(**SIZE, **GROUPS),
    "qwen3": lambda: transformers.Qwen3Config(**SIZE, **HEADS),
    "gemma": lambda: transformers.GemmaConfig(**SIZE, **HEADS),
    "gemma2": lambda: transformers.Gemma2Config(**SIZE, **HEADS, query_pre_attn_scalar=8),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZE, **HEADS, query_pre_attn_scalar=8),
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **SIZE, **HEADS, global_head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=40
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SIZE, **IDS),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZE, **IDS),
    "cohere": lambda: transformers.CohereConfig(**SIZE, **IDS),
    "t5": lambda: transformers.T5Config(**T5),
    "mixtral": lambda: transformers.MixtralConfig(**MIXED),
    "gpt_oss": lambda: transformers.GptOssConfig(**MIXED, head_dim=8),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**SIZE, **EXPERTS, **LATENT, first_k_dense_replace=1),
}  # fmt: skip

INPUTS = [3, 7, 3, 9, 5]  # two tokens are equal


def inputs_for(family):
    """Ids, or two noise images."""
    return 2 if family == "vit" else INPUTS


def weightless(family, samples, seed=1, inputs=None, **options):
    """Simulate a family without weights, in float64 by default."""
    prepared = inputs_for(family) if inputs is None else inputs
    config = CONFIGS[family]()
    options = {"gradients": True, "dtype": torch.float64, "progress": False} | options
    return lf.weightless.simulate(config, prepared, samples=samples, seed=seed, **options)


def draw_again(model):
    """Repeat the model's own initialisation; a tied head takes the law of the embedding."""
    for part in (*model.modules(), *model.parameters(), *model.buffers()):
        part.__dict__.pop("_is_hf_initialized", None)
    embeddings = [part for part in model.modules() if isinstance(part, torch.nn.Embedding)]
    tables = {id(part.weight) for part in embeddings}
    for part in model.modules():
        if part not in embeddings and id(getattr(part, "weight", None)) in tables:
            part.weight = torch.nn.Parameter(torch.empty_like(part.weight))
    model.initialize_weights()
    model.tie_weights()
    model.zero_grad(set_to_none=True)


def correlation(v, i, j):
    return v[:, i, j] / np.sqrt(v[:, i, i] * v[:, j, j])


class Step(nn.Module):
    """x + x W."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(8, 8, bias=False)
        nn.init.normal_(self.map.weight, std=0.5)

    def forward(self, x):
        return x + self.map(x)
