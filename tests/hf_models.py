"""Small Hugging Face models in float64, masks for them, and shaped attention written out as a matrix."""

from functools import cache

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    RobertaConfig,
    RobertaModel,
    ViTConfig,
    ViTModel,
)
from transformers.masking_utils import eager_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

import limitformer as lf
from limitformer.hf import Shaping, shape_model
from limitformer.nn import Residual, gains
from limitformer.nn.drawn.simulate import TokenLaw, gram
from many_networks import many

BATCH, TOKENS, WIDTH, HEADS, KV_HEADS, LAYERS, VOCABULARY, POSITIONS = 3, 10, 16, 4, 2, 2, 50, 40
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
TEXT = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "intermediate_size": 24}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NO_DROPOUT = {
    "bert": UNDROPPED,
    "roberta": UNDROPPED,
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {},
    "vit": {},
}
GPT2_SIZES = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCABULARY, "n_positions": POSITIONS}
NO_ENDS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}


def config_of(family, **options):
    """A small configuration of a stock family."""
    options = NO_DROPOUT.get(family, {}) | options
    if family == "bert":
        return BertConfig(**(TEXT | NO_ENDS | options))
    if family == "mistral":  # its attention is found by structure
        return MistralConfig(**(TEXT | NO_ENDS | {"num_key_value_heads": KV_HEADS, "sliding_window": None} | options))
    if family == "roberta":
        return RobertaConfig(**(TEXT | {"pad_token_id": 1} | options))
    if family == "gpt2":
        return GPT2Config(**(GPT2_SIZES | NO_ENDS | options))
    if family == "llama":
        return LlamaConfig(**(TEXT | NO_ENDS | {"num_key_value_heads": KV_HEADS} | options))
    return ViTConfig(**(SIZES | {"intermediate_size": 24, "image_size": 12, "patch_size": 4} | options))


CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"  # since 5.24
BASE = {"bert": BertModel, "roberta": RobertaModel, "gpt2": GPT2Model, "llama": LlamaModel, "vit": ViTModel}
UNPOOLED = {"bert", "roberta", "vit"}


def stock(family, seed=0, **options):
    """An untrained base model in float64, whose weights are large enough for attention to be far from uniform."""
    torch.manual_seed(seed)
    config = config_of(family, **options)
    model = BASE[family](config, **({"add_pooling_layer": False} if family in UNPOOLED else {}))
    return loud(model.double().eval())


@torch.no_grad()
def loud(model, std=0.4):
    """Draw matrices N(0, std²): with the library's initialisation attention would be close to C̄."""
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.normal_(std=std)
    return model


@torch.no_grad()
def unlike(model, seed=5):
    """Move gains away from 1, and residuals, so that they differ."""
    generator = torch.Generator().manual_seed(seed)
    for gain in gains(model):
        gain.value.add_(0.3 * torch.randn(gain.value.shape, generator=generator))
    for module in model.modules():
        if isinstance(module, Residual):
            module.lam.add_(0.1 * torch.randn((), generator=generator))
            module.gamma.add_(0.1 * torch.randn((), generator=generator))
    return model


def shaped(family, seed=0, shaping=None, **options):
    """A shaped model whose gains differ."""
    return unlike(shape_model(stock(family, seed, **options), shaping or Shaping(tau0=0.8)))


def inputs_of(family, seed=1, batch=BATCH):
    generator = torch.Generator().manual_seed(seed)
    if family == "vit":
        return {"pixel_values": torch.randn(batch, 3, 12, 12, generator=generator, dtype=torch.float64)}
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, TOKENS), generator=generator)}


def padding(left):
    """(b, m): 0, 3 and 6 tokens of padding."""
    seen = torch.arange(TOKENS) < TOKENS - torch.tensor([0, 3, 6])[:, None]
    return (seen.flip(-1) if left else seen).long()


def restarting():
    """(b, m): positions of three texts in one row."""
    return (torch.arange(TOKENS) % 4).expand(BATCH, TOKENS)


def arbitrary():
    """(b, 1, m, m) boolean, with rows without visible tokens."""
    mask = torch.rand(BATCH, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(7)) < 0.5
    mask[:, :, 2] = False
    return mask


def added():
    """(b, 1, m, m) of numbers that are added to the logits."""
    bias = torch.randn(BATCH, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    return bias.masked_fill(~arbitrary(), torch.finfo(torch.float64).min)


MASKS = {
    "none": {},
    "right padding": {"attention_mask": padding(left=False)},
    "left padding": {"attention_mask": padding(left=True)},
    "boolean": {"attention_mask": arbitrary()},
    "added": {"attention_mask": added()},
    "packed": {"position_ids": restarting()},
}


def added_mask(mask, query, key):
    """Return any mask as numbers to add, −∞ for hidden tokens: (b|1, h|1, q|1, k)."""
    if mask is None:
        return query.new_zeros(1, 1, query.shape[-2], key.shape[-2])
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return mask.masked_fill(mask < -1e30, -torch.inf)


def softmax(logits):
    """Compute the softmax by its definition; rows of −∞ become zeros."""
    top = logits.amax(-1, keepdim=True).clamp(min=-1e300)
    exponentials = (logits - top).exp()
    return exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1e-300)


def explicit_matrix(query, key, bias, gamma1, gamma2, scale, places=None):
    """A = γ₁ I + softmax(QKᵀ scale + bias) − γ₂ softmax(0 + bias), as it is written."""
    queries, keys = query.shape[-2], key.shape[-2]
    places = torch.arange(keys - queries, keys) if places is None else places
    identity = functional.one_hot(places, keys).to(query.dtype)
    logits = torch.einsum("bhqd,bhkd->bhqk", query, key) * scale
    gamma1, gamma2 = (torch.as_tensor(gain).reshape(-1, 1, 1) for gain in (gamma1, gamma2))
    return gamma1 * identity + softmax(logits + bias) - gamma2 * softmax(torch.zeros_like(logits) + bias)


def explicit_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
    """The attention function of a model whose masks are those of "eager"; without caches."""
    assert dropout == 0.0
    shaping = module.shaping
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    bias = added_mask(attention_mask, query, key)
    gains = (0.0 if gain is None else gain.value for gain in (shaping.gamma1, shaping.gamma2))
    a = explicit_matrix(query, key, bias, *gains, scaling / shaping.tau0)
    return torch.einsum("bhqk,bhkd->bqhd", a, value).contiguous(), a


def written_out(monkeypatch):
    """Let models with shaped attention use `explicit_attention` and eager masks."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "shaped", explicit_attention)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "shaped", eager_mask)


# Laws.

V0 = np.array([[1.0, 0.3, -0.4], [0.3, 1.0, 0.2], [-0.4, 0.2, 1.0]])


class Blocks(nn.Module):
    """A module of only blocks."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


def declared(width, depth, hidden, mask=None):
    """Return the model of `chain`: γ = ½, τ₀ = ½, four heads, a shaped ReLU of slope 1 − 1/√n."""
    return lf.Transformer(
        width=width,
        depth=depth,
        gamma=0.5,
        attention=lf.ShapedAttention(tau0=0.5, heads=4),
        feedforward=lf.ShapedReLU(c_plus=0.0, c_minus=-1.0, hidden=hidden),
        **({} if mask is None else {"mask": mask}),
    )


@cache
def chain(width, causal=False):
    """Statistics of the exact chain's covariance after five layers, twice as wide inside."""
    model = declared(width, 5, 2 * width, "causal" if causal else None)
    result = lf.simulate(model, V0, samples=30_000, seed=1, record=[5])
    return summary(result["covariance"].values[:, -1])


@torch.no_grad()
def network(blocks, draw, samples, width, seed=2):
    """The same statistics of `samples` networks, whose weights `draw(generator)` draws in place."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    weights = many(blocks, lambda: draw(generator), samples)
    x = TokenLaw(lf.models.as_start(V0), declared(width, 1, width)).tokens(samples, generator)
    with sdpa_kernel(SDPBackend.MATH):  # the only kernel with a rule for vmap
        tokens = vmap(lambda w, one: functional_call(blocks, w, (one[None],))[0])(weights, x.double())
    return summary(gram(tokens).numpy())


def summary(v):
    """Statistics of covariances (samples, 3, 3)."""
    rho = v / np.sqrt(np.einsum("naa,nbb->nab", v, v))
    names = {"ρ_01": rho[:, 0, 1], "ρ_12": rho[:, 1, 2], "V_00": v[:, 0, 0], "V_22": v[:, 2, 2]}
    return {**names, "log det V": np.linalg.slogdet(v)[1]}
