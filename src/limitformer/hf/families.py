"""The paths of submodules in the stock models that can be shaped.

Five model types have a `Family` with all paths, so that their residuals and activations can be shaped too. Of any other
model `found_family` finds the attention of each block, which alone is shaped.

Pre-norm blocks (GPT-2, Llama, ViT) are x + f(norm(x)), post-norm ones (BERT, RoBERTa) norm(x + f(x)).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

Weights = dict[str, list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Paths of submodules.

    Attributes:
        blocks: from the base model to the list of blocks.
        attention: from a block to the module that calls the attention function.
        projection: from a block to the linear map behind that.
        activation: from a block to the activation; like the paths below, empty if only the attention is known.
        activation_name: the activation's name in the configuration.
        norms: from a block to its two normalisations.
        branches: from a block to the two modules whose output is added to the tokens.
        causal: whether all its models are causal; others may be by their configuration's `is_decoder`.
        packs: whether positions that restart begin another sequence, which does not see earlier ones.
        post_norm: whether a branch adds the tokens itself, and normalises the sum.
        gated: whether the activation is multiplied by a second projection.
        weights: a block's weights (fan-out, fan-in) by their name in `nn.InitialVariances`.
    """

    blocks: str
    attention: str
    projection: str = ""
    activation: str = ""
    activation_name: str = "hidden_act"
    norms: tuple[str, str] = ("", "")
    branches: tuple[str, str] = ("", "")
    causal: bool = False
    packs: bool = False
    post_norm: bool = False
    gated: bool = False
    weights: Callable[[nn.Module], Weights] = lambda block: {}

    @property
    def attention_only(self) -> bool:
        """Whether only the attention of its blocks is known."""
        return not self.projection

    def blocks_of(self, base: nn.Module) -> list[nn.Module]:
        return list(attrgetter(self.blocks)(base))


def named_weights(**paths: str) -> Callable[[nn.Module], Weights]:
    """Return a function that collects the weights at these paths, which a space separates."""

    def weights(block: nn.Module) -> Weights:
        return {
            name: [attrgetter(f"{path}.weight")(block) for path in several.split()] for name, several in paths.items()
        }

    return weights


def gpt2_weights(block: Any) -> Weights:
    """Split GPT-2's joined queries, keys and values, and transpose weights, which it stores (fan-in, fan-out)."""
    query, key, value = block.attn.c_attn.weight.mT.chunk(3)
    return {
        "query": [query],
        "key": [key],
        "value": [value],
        "output": [block.attn.c_proj.weight.mT],
        "pre": [block.mlp.c_fc.weight.mT],
        "post": [block.mlp.c_proj.weight.mT],
    }


BERT = Family(
    blocks="encoder.layer",
    attention="attention.self",
    projection="attention.output.dense",
    activation="intermediate.intermediate_act_fn",
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
    branches=("attention.output", "output"),
    post_norm=True,
    weights=named_weights(
        query="attention.self.query", key="attention.self.key", value="attention.self.value",
        output="attention.output.dense", pre="intermediate.dense", post="output.dense",
    ),
)  # fmt: skip
GPT2 = Family(
    blocks="h",
    attention="attn",
    projection="attn.c_proj",
    activation="mlp.act",
    activation_name="activation_function",
    norms=("ln_1", "ln_2"),
    branches=("attn", "mlp"),
    causal=True,
    packs=True,
    weights=gpt2_weights,
)
LLAMA = Family(
    blocks="layers",
    attention="self_attn",
    projection="self_attn.o_proj",
    activation="mlp.act_fn",
    norms=("input_layernorm", "post_attention_layernorm"),
    branches=("self_attn", "mlp"),
    causal=True,
    packs=True,
    gated=True,
    weights=named_weights(
        query="self_attn.q_proj", key="self_attn.k_proj", value="self_attn.v_proj",
        output="self_attn.o_proj", pre="mlp.gate_proj mlp.up_proj", post="mlp.down_proj",
    ),
)  # fmt: skip
VIT = Family(
    blocks="layers",
    attention="attention",
    projection="attention.o_proj",
    activation="mlp.activation_fn",
    norms=("layernorm_before", "layernorm_after"),
    branches=("attention", "mlp"),
    weights=named_weights(
        query="attention.q_proj", key="attention.k_proj", value="attention.v_proj",
        output="attention.o_proj", pre="mlp.fc1", post="mlp.fc2",
    ),
)  # fmt: skip
FAMILIES = {"bert": BERT, "roberta": BERT, "gpt2": GPT2, "llama": LLAMA, "vit": VIT}
ACTIVATION_NAMES = ("hidden_act", "hidden_activation", "activation_function", "activation", "ffn_act_fn")
LISTS = ("layers", "h", "blocks", "layer", "encoder.layer", "encoder.layers", "transformer.layer", "decoder.layers")
ATTENTIONS = (
    "self_attn", "attn", "attention.self", "attention.attention", "attention", "self_attention", "attn.attention",
)  # fmt: skip


def found_family(model: Any) -> Family | None:
    """Return a family that knows only the attention of each block, by the names of submodules; None if it is not found.

    All blocks of one list must have an attention with query, key and value maps at the same path.
    """
    config, base = model.config, model.base_model
    activation = next((name for name in ACTIVATION_NAMES if isinstance(getattr(config, name, None), str)), None)
    if activation is None:
        return None
    for blocks, attention in product(LISTS, ATTENTIONS):
        parts = attentions_at(base, blocks, attention)
        if parts:
            causal = all(getattr(part, "is_causal", False) for part in parts)
            return Family(blocks=blocks, attention=attention, activation_name=activation, causal=causal)
    return None


def attentions_at(base: nn.Module, blocks: str, attention: str) -> list[nn.Module]:
    """Return the attention of each block at these paths, or nothing if any block has none."""
    try:
        several = attrgetter(blocks)(base)
        parts = [attrgetter(attention)(block) for block in several] if isinstance(several, nn.ModuleList) else []
    except AttributeError:
        return []
    maps = ("q", "k", "v"), ("qkv",), ("query_key_value",), ("c_attn",)
    names = [" ".join(name for name, _ in part.named_children()) for part in parts]
    known = all(any(all(each in text for each in group) for group in maps) for text in names)
    return parts if known else []
