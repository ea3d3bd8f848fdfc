"""[CT, eq. 4] as a plain loop in torch: every value matrix is drawn and every token is moved."""

from math import sqrt

import torch
from torch import Tensor

from limitformer.models import StochasticTransformer


def uniform_tokens(replicas: int, model: StochasticTransformer, generator: torch.Generator) -> Tensor:
    """Draw tokens (replicas, tokens, dim) uniformly on the sphere."""
    x = torch.randn(replicas, model.tokens, model.dim, generator=generator)
    return torch.nn.functional.normalize(x, dim=-1)


def run_layers(x: Tensor, model: StochasticTransformer, layers: int, generator: torch.Generator) -> Tensor:
    """Move `x` (replicas, tokens, dim) through the layers, with Q = K = I or with Q and K drawn in each layer."""
    step = model.sigma / sqrt(model.layers_per_unit_time)
    with torch.inference_mode():
        for _ in range(layers):
            keyed = x @ torch.randn(len(x), model.dim, model.dim, generator=generator) if model.is_fresh else x
            mixed = torch.softmax(model.beta * model.tau * (keyed @ x.mT), dim=-1) @ x
            values = torch.randn(len(x), model.dim, model.dim, generator=generator)
            x = torch.nn.functional.normalize(x + step * (mixed @ values.mT), dim=-1)
    return x
