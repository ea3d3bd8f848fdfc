"""The weights of many networks, each drawn by itself, to be run side by side."""

from unittest.mock import patch

import torch


@torch.no_grad()
def many(module, draw, samples):
    """Parameters by name, (samples, …): `draw()` draws those of `module` anew, in place, that many times."""
    parameters, parts = dict(module.named_parameters()), list(module.named_modules())
    weights = {name: value.new_empty(samples, *value.shape) for name, value in parameters.items()}
    with patch.object(module, "named_modules", lambda: parts):  # which take longer to find than to draw
        for k in range(samples):
            draw()
            torch._foreach_copy_([each[k] for each in weights.values()], list(parameters.values()))
    return weights
