"""Small networks of every family, and the statistics by which two laws of them are compared."""

import numpy as np
import torch
import transformers
from scipy.stats import ks_2samp
from torch import nn

import limitformer as lf
from drawn_networks import statistics
from limitformer.subjects.inputs import inputs_of
from limitformer.subjects.losses import chosen_loss
from limitformer.subjects.subject import resolve
from many_networks import parts_found_once

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


def drawn(family, samples, seed=0):
    """Run a model of transformers whose initialisation is repeated for each sample."""
    torch.manual_seed(seed)
    subject = resolve(CONFIGS[family]())
    arguments = inputs_of(inputs_for(family), subject)
    model = subject.factory().double().eval()
    networks = []
    with parts_found_once():
        for _ in range(samples):
            draw_again(model)
            networks.append(
                statistics(model, arguments.of(0, range(1), torch.float64), chosen_loss(None, subject.task))
            )
    return networks


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


def paired(data, networks):
    """Return pairs of samples of both, by the name of the statistic."""
    a, b = data.covariance.values, np.array([each["covariance"] for each in networks])
    pairs, last = {}, a.shape[1] - 1
    for layer in (0, 1, last):
        for name, statistic in STREAM.items():
            pairs[f"{name}, layer {layer}"] = statistic(a[:, layer]), statistic(b[:, layer])
    gradients = np.array([each["stream_gradient"] for each in networks])
    for layer in (0, last):
        pairs[f"stream gradient {layer}"] = data.stream_gradient.values[:, layer], gradients[:, layer]
    for name in data.weight.values:
        mine = data.weight_gradient.sel(weight=name).values
        pairs[f"gradient of {name}"] = mine, np.array([n["weight_gradient"].get(name, np.nan) for n in networks])
    entropy = np.array([each["entropy"] for each in networks])
    if entropy.ndim == 3:
        mine = data.entropy.values[:, ~np.isnan(data.entropy.values[0, :, 0])]
        pairs |= {f"entropy {k}": (mine[:, k, k % mine.shape[2]], entropy[:, k, k % mine.shape[2]]) for k in (0, -1)}
    pairs["loss"] = data.loss.values, np.array([each["loss"] for each in networks])
    return pairs


def correlation(v, i, j):
    return v[:, i, j] / np.sqrt(v[:, i, i] * v[:, j, j])


STREAM = {
    "size of token 4": lambda v: v[:, 4, 4],
    "correlation of tokens 1 and 4": lambda v: correlation(v, 1, 4),
    "correlation of equal tokens": lambda v: correlation(v, 0, 2),
    "largest eigenvalue": lambda v: np.linalg.eigvalsh(v)[:, -1],
}


def p_values(pairs):
    """Return p-values of two-sample Kolmogorov-Smirnov tests; a statistic that only one has fails."""
    p = {}
    for name, (mine, theirs) in pairs.items():
        missing = np.isnan(mine), np.isnan(theirs)
        assert missing[0].mean() == missing[1].mean() or not (missing[0].all() or missing[1].all()), name
        mine, theirs = mine[~missing[0]], theirs[~missing[1]]
        if len(mine) and np.ptp(mine) > 1e-9 * abs(mine[0]):
            p[name] = float(ks_2samp(mine, theirs).pvalue)
    return p


class Step(nn.Module):
    """x + x W."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(8, 8, bias=False)
        nn.init.normal_(self.map.weight, std=0.5)

    def forward(self, x):
        return x + self.map(x)
