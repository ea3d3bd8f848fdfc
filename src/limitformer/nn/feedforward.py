r"""The feed-forward sublayer [ST, eq. 4]: √(c/n_h) σ(X W_pre/√n) W_post."""

from torch import Tensor, nn
from torch.nn import functional

from limitformer import models
from limitformer.nn.weights import linear, weight


class Feedforward(nn.Module):
    """The feed-forward sublayer of a model: `forward` maps (*, tokens, width) to the same shape."""

    def __init__(self, part: models.Feedforward, width: int, networks: tuple[int, ...] = ()) -> None:
        super().__init__()
        hidden = part.hidden_at(width)
        self.gain = part.gain(width) ** 0.5
        self.slopes = part.slopes(width) if isinstance(part, models.ShapedReLU | models.ReLU) else None
        self.pre = weight(networks, width, hidden)
        self.post = weight(networks, hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """√(c/n_h) σ(X W_pre/√n) W_post."""
        return self.gain * linear(self.activation(linear(x, self.pre)), self.post)

    def activation(self, x: Tensor) -> Tensor:
        """σ entry by entry."""
        if self.slopes is None:
            return functional.gelu(x)
        positive, negative = self.slopes
        return positive * x.clamp(min=0) + negative * x.clamp(max=0)
