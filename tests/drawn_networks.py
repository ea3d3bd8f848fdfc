"""Blocks and attentions of stock models, by their own names."""

import torch


def attentions_of(out):
    """Return the attention matrices in the order of computation, under any name that the model gives them."""
    if getattr(out, "encoder_attentions", None) is not None:
        return [*out.encoder_attentions, *out.decoder_attentions]
    return list(out.attentions or ())


def blocks(model):
    base = getattr(model, model.base_model_prefix, model)
    if hasattr(base, "encoder") and hasattr(base, "decoder"):
        return [*base.encoder.block, *base.decoder.block]
    for path in ("layers", "h", "encoder.layer", "layer"):
        found = base
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            return list(found)
    raise LookupError(type(model).__name__)


def first(out):
    """The tokens of a block's output."""
    return out if isinstance(out, torch.Tensor) else out[0]


def first_tokens(args, kwargs):
    """The tokens of a block's input."""
    return args[0] if args else kwargs["hidden_states"]
