"""Normalisation at initialisation, with gain 1 and bias 0."""

from torch import Tensor, nn

from limitformer import models
from limitformer.nn.drawn.own import torch_scale


class Norm(nn.Module):
    """Normalise each token over its coordinates: (*, tokens, width) to the same shape."""

    def __init__(self, part: models.Norm) -> None:
        super().__init__()
        self.eps = part.eps
        self.subtract_mean = part.subtracts_mean
        self.scale = torch_scale(part) if type(part) is models.RadialNorm else None

    def forward(self, x: Tensor) -> Tensor:
        """Compute (x − x̄)/√(variance + ε), or without the mean; a user-defined norm is (x − x̄) s(variance + ε)."""
        if self.subtract_mean:
            x = x - x.mean(-1, keepdim=True)
        variance = x.square().mean(-1, keepdim=True) + self.eps
        return x / variance.sqrt() if self.scale is None else x * self.scale(variance)
