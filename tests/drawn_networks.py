"""Networks as transformers draws them, measured by transformers' and torch's own outputs: the second route to the law.

Nothing here is of `limitformer`: hidden states, attentions and gradients come from the model itself.
"""

import numpy as np
import torch


def statistics(model, arguments, loss):
    """Return one drawn model's covariances by layer, entropies by head, gradient norms by weight, and loss."""
    hidden = {}
    handles = [
        block.register_forward_pre_hook(lambda m, a, k, i=i: hidden.update({i: first_tokens(a, k)}), with_kwargs=True)
        for i, block in enumerate(blocks(model))
    ]
    last = blocks(model)[-1].register_forward_hook(lambda m, a, out: hidden.update({"last": first(out)}))
    out = model(**arguments, output_attentions=True)
    for handle in (*handles, last):
        handle.remove()
    stream = [hidden[i] for i in range(len(handles))] + [hidden["last"]]
    for x in stream:
        x.retain_grad() if x.requires_grad else None
    value = loss(out, arguments)
    value.mean().backward()
    attentions = [a for a in attentions_of(out) if a is not None]
    return {
        "covariance": np.array([gram(x) for x in stream]),
        "entropy": np.array([entropies(a) for a in attentions]),
        "loss": float(value.mean().detach()),
        "stream_gradient": np.array([np.nan if x.grad is None else float(x.grad.norm()) for x in stream]),
        "weight_gradient": {n: float(p.grad.norm()) for n, p in model.named_parameters() if p.grad is not None},
    }


def attentions_of(out):
    """Return the attention matrices in the order of computation, under any name that the model gives them."""
    if getattr(out, "encoder_attentions", None) is not None:
        return [*out.encoder_attentions, *out.decoder_attentions]
    return list(out.attentions or ())


def blocks(model):
    """Encoder, then decoder."""
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


def gram(x):
    """X Xᵀ/n of all tokens."""
    tokens = x.detach().flatten(0, 1).double()
    return (tokens @ tokens.mT / x.shape[-1]).numpy()


def entropies(attention):
    """Mean entropy by head, of rows that see two tokens or more; what a row lacks to 1 went to a sink."""
    a = attention.detach().double()
    sink = (1 - a.sum(-1, keepdim=True)).clamp(min=0)
    a = torch.cat([a, torch.where(sink > 1e-9, sink, 0.0)], -1)
    rows = (a > 0).sum(-1) > 1
    each = torch.special.entr(a).sum(-1)
    return ((each * rows).sum(-1) / rows.sum(-1)).mean(0).numpy()
