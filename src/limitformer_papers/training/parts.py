"""Blocks and attentions of a model, whichever of ours or of `transformers` it is made of."""

from typing import Any

from torch import nn

from limitformer.base.errors import InputError
from limitformer.hf.attention import AttentionShaping
from limitformer.hf.families import FAMILIES
from limitformer.nn import Block, ShapedSelfAttention


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks, first to last.

    Raises:
        InputError: a model with none that is known.
    """
    own = [module for module in model.modules() if isinstance(module, Block)]
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if own or kind not in FAMILIES:
        if not own:
            raise InputError(f"{type(model).__name__} has no blocks that are known; shape it with hf.shape_model.")
        return list(own)
    base: Any = model.base_model
    return FAMILIES[kind].blocks_of(base)


def probes_of(block: nn.Module) -> list[Any]:
    """The modules of a block whose `probe` is called with its `Logits`."""
    return [module for module in block.modules() if isinstance(module, ShapedSelfAttention | AttentionShaping)]


def weights_of(block: nn.Module, name: str) -> list[nn.Parameter]:
    """A block's weights of queries, keys, values, …, by their name in `nn.InitialVariances`; [] if it has none."""
    found = [module for path, module in block.named_modules() if path.rpartition(".")[2] == name]
    weights: list[Any] = [module.weight for module in found if isinstance(module, nn.Linear)]
    return weights
