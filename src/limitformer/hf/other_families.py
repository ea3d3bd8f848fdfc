"""`check_attention`: whether the attention that was found in a model's blocks is the one that it uses.

The model runs once on three tokens, or one image, with an attention function that notes who calls it and with what.
"""

from inspect import signature
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from limitformer.base.errors import InputError, first_line, require
from limitformer.base.foreign import lookup, pair
from limitformer.hf.attention import refuse_meaningless, shaped_mask
from limitformer.hf.families import Family
from limitformer.nn import Visibility

NOTING = "limitformer-noting"
TOKENS = 3
HIDDEN = -1e4  # numbers in a mask below this hide a token
Call = tuple[nn.Module, Tensor, Tensor]
calls: list[Call] = []


def noting_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Visibility | None,
    **options: Any,
) -> Any:
    """Note a call, and return what torch's attention returns."""
    refuse_meaningless(options)
    alike = query.shape[-1] == key.shape[-1] == value.shape[-1]
    sizes = f"{query.shape[-1]} coordinates, values {value.shape[-1]}"
    require(alike, f"Shaped attention needs values of the size of queries; queries have {sizes}.")
    mask = attention_mask.as_mask() if isinstance(attention_mask, Visibility) else attention_mask
    biased = False
    if mask is not None and mask.is_floating_point():  # a bias may be zero so far
        biased = mask.requires_grad or mask.shape[1] > 1 or has_bias(mask)
    require(not biased, "Shaped attention has no meaning for a bias of the logits (attention_mask).")
    calls.append((module, query, key))
    return sdpa_attention_forward(module, query, key, value, mask, **options)


def has_bias(mask: Tensor) -> bool:
    """Whether a mask adds numbers other than 0 and a large negative one."""
    return not mask.is_meta and bool(((mask != 0) & (mask > HIDDEN)).any())


def check_attention(model: PreTrainedModel, family: Family) -> None:
    """Raise `InputError` unless the attention of each block, and nothing else, calls the attention function once."""
    kind, noted = model.config.model_type, noted_calls(model)
    parts = [attrgetter(family.attention)(block) for block in family.blocks_of(model.base_model)]
    called = [call[0] for call in noted]
    alike = len(called) == len(parts) and all(a is b for a, b in zip(called, parts, strict=True))
    counted = f"the attention function was called {len(called)} times for {len(parts)} blocks of {family.blocks}"
    require(alike, f"{kind} cannot be shaped: {counted}.")
    heads = model.config.num_attention_heads
    for _, query, key in noted:
        fits = query.shape[1] == heads and query.shape[2] == key.shape[2]
        require(
            fits, f"{kind} cannot be shaped: queries {tuple(query.shape)} are not of {heads} heads, keys of others."
        )
    cached = not family.causal or all(hasattr(part, "layer_idx") for part in parts)
    require(cached, f"{kind} cannot be shaped: its attention has no layer_idx, by which a cache knows it.")


def noted_calls(model: PreTrainedModel) -> list[Call]:
    """Run the model's base once, unchanged, and return the calls of its attention function."""
    configs: dict[int, Any] = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    calls.clear()
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        for config in configs.values():
            config._attn_implementation = NOTING
        before_pass = torch.get_rng_state()
        with torch.enable_grad():  # a bias that is zero so far still has a gradient
            model.base_model(**small_inputs(model))
        own = torch.equal(torch.get_rng_state(), before_pass)
        require(own, f"{model.config.model_type} draws random numbers of its own when it runs.")
        return list(calls)
    except InputError:
        raise
    except Exception as error:  # the model's own code, which may raise anything
        what = f"it does not run on {TOKENS} tokens: {type(error).__name__}: {first_line(error)}"
        what = "its code reads the mask itself" if Visibility.__name__ in str(error) else what
        raise InputError(f"{model.config.model_type} cannot be shaped: {what}") from error
    finally:
        calls.clear()
        for key, config in configs.items():
            config._attn_implementation = before[key]
        for part in training:
            part.training = True


def small_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return three tokens, or one image of the size in the configuration."""
    some = next(model.parameters())
    if model.main_input_name == "pixel_values":
        size = pair(lookup(model.config, ("image_size",)), 224)
        channels = lookup(model.config, ("num_channels",)) or 3
        return {
            "pixel_values": torch.randn(1, channels, *size, generator=torch.Generator().manual_seed(0)).to(
                some.device, some.dtype
            )
        }
    ids = torch.arange(TOKENS, device=some.device)[None]
    takes_mask = "attention_mask" in signature(type(model.base_model).forward).parameters
    # A token of padding, so that a mask is made, as some models index theirs.
    padding = {"attention_mask": (ids < TOKENS - 1).long()} if takes_mask and not some.is_meta else {}
    return {"input_ids": ids, **padding}


AttentionInterface.register(NOTING, noting_attention)
AttentionMaskInterface.register(NOTING, shaped_mask)
