"""LayerNorm and RMSNorm with gain 1 and bias 0, as at initialisation."""

from torch import Tensor, nn

from limitformer import models


class Norm(nn.Module):
    """Normalise each token over its coordinates: (*, tokens, width) to the same shape."""

    def __init__(self, part: models.Norm) -> None:
        super().__init__()
        self.eps = part.eps
        self.subtract_mean = part.subtracts_mean

    def forward(self, x: Tensor) -> Tensor:
        """(x − x̄)/√(variance + ε), or without the mean."""
        if self.subtract_mean:
            x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()
