r"""The initialisation of the paper's architecture: its blocks, and the variances of their weights [ST, App. D].

`transformers` draws weights that a file does not hold, such as a new head. So each linear layer stores the standard
deviation of its weights.
"""

from math import sqrt
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from limitformer.hf.attention import ATTENTION
from limitformer.hf.configuration import ShapedTransformerConfig, check_words
from limitformer.nn import Block, Gain, InitialVariances, Residual, post_ln_block, pre_ln_block, shaped_block

EMBEDDING_STD = sqrt(0.5)


class ShapedTransformerPreTrainedModel(PreTrainedModel):
    """The initialisation that all heads share."""

    config: ShapedTransformerConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    supports_gradient_checkpointing = True

    def __init__(self, config: ShapedTransformerConfig, *inputs: Any, **options: Any) -> None:
        config._attn_implementation = ATTENTION
        super().__init__(config, *inputs, **options)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights that are not loaded; a linear layer has its standard deviation in `initial_std`."""
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=getattr(module, "initial_std", self.config.hidden_size**-0.5))
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=EMBEDDING_STD)
        elif isinstance(module, Gain):
            init.constant_(module.value, module.start)
        elif isinstance(module, Residual):
            gamma = self.config.residual_gamma
            init.constant_(module.gamma, gamma)
            init.constant_(module.lam, sqrt(1 - gamma**2))
        else:
            super()._init_weights(module)


def block_of(config: ShapedTransformerConfig) -> Block:
    """Build a block whose linear layers store their standard deviation; raise `InputError` for an unknown kind."""
    check_words(config)
    sizes: dict[str, Any] = {"hidden": config.intermediate_size, "kv_heads": config.num_key_value_heads}
    width, heads = config.hidden_size, config.num_attention_heads
    if config.kind == "shaped":
        shaping: dict[str, Any] = {name: getattr(config, name) for name in ("tau0", "per_head", "float32")}
        block = shaped_block(width, heads, gamma=config.residual_gamma, **sizes, **shaping)
    else:
        block = {"pre_ln": pre_ln_block, "post_ln": post_ln_block}[config.kind](width, heads, **sizes)
    variances = variances_of(config)
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            module.initial_std = getattr(variances, name.rpartition(".")[2]) ** 0.5
    return block


def variances_of(config: ShapedTransformerConfig) -> InitialVariances:
    """Return the initial variances of a configuration."""
    width, shaped = config.hidden_size, config.kind == "shaped"
    if config.initial == "paper":
        paper = InitialVariances.paper(width)
        return paper if shaped else InitialVariances(**(vars(paper) | {"query": 1 / width, "key": 1 / width}))
    slope = 1 - 1 / sqrt(width) if shaped else 0.0
    law = InitialVariances.shaped if shaped else InitialVariances.standard
    return law(width, hidden=config.intermediate_size, gain=2 / (1 + slope**2))
