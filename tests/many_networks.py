"""Weights of many networks, drawn independently and evaluated together."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import nn


@contextmanager
def parts_found_once():
    """Cache the parameters of modules inside the block, because looking them up takes longer than drawing."""
    found, find = {}, nn.Module.named_modules

    def named_modules(module, memo=None, prefix="", remove_duplicate=True):
        if memo is not None:
            return find(module, memo, prefix, remove_duplicate)
        kept = found.setdefault(module, {})
        if (prefix, remove_duplicate) not in kept:
            kept[prefix, remove_duplicate] = list(find(module, None, prefix, remove_duplicate))
        return iter(kept[prefix, remove_duplicate])

    with patch.object(nn.Module, "named_modules", named_modules):
        yield


@torch.no_grad()
def many(module, draw, samples):
    """Return parameters by name, (samples, …). `draw()` draws those of `module` again, in place, once per sample."""
    parameters = dict(module.named_parameters())
    weights = {name: value.new_empty(samples, *value.shape) for name, value in parameters.items()}
    with parts_found_once():
        for k in range(samples):
            draw()
            torch._foreach_copy_([each[k] for each in weights.values()], list(parameters.values()))
    return weights
