"""The weights of many networks, each drawn by itself, to be run side by side."""

import torch


@torch.no_grad()
def many(module, draw, samples):
    """Parameters by name, (samples, …): `draw()` draws those of `module` anew, in place, that many times."""
    parameters = dict(module.named_parameters())
    weights = {name: value.new_empty(samples, *value.shape) for name, value in parameters.items()}
    for k in range(samples):
        draw()
        torch._foreach_copy_([each[k] for each in weights.values()], list(parameters.values()))
    return weights
