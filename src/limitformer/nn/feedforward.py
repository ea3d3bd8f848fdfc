r"""The feed-forward sublayers: √(c/n_h) σ(X W_pre/√n) W_post [ST, eq. 4], and with one matrix √(c/n) σ(X) W."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from limitformer import models
from limitformer.models.kinds import of_kind
from limitformer.nn.weights import linear, weight

# Of a piecewise linear activation; None stands for GELU, which has none.
SLOPES: Mapping[type, Callable[[Any, int], tuple[float, float] | None]] = {
    models.ShapedReLU: models.ShapedReLU.slopes,
    models.ReLU: models.ReLU.slopes,
    models.GELU: lambda part, width: None,
}


class Feedforward(nn.Module):
    """The feed-forward sublayer of a model: `forward` maps (*, tokens, width) to the same shape."""

    def __init__(self, part: models.Feedforward, width: int, networks: tuple[int, ...] = ()) -> None:
        super().__init__()
        hidden = part.hidden_at(width)
        self.gain = part.gain(width) ** 0.5
        self.slopes = slopes_of(part, width)
        self.pre = weight(networks, width, hidden)
        self.post = weight(networks, hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """√(c/n_h) σ(X W_pre/√n) W_post."""
        return self.gain * linear(activate(linear(x, self.pre), self.slopes), self.post)


class OneMatrix(nn.Module):
    """The same with one matrix."""

    def __init__(self, part: models.OneMatrix, width: int, networks: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.gain = part.gain(width) ** 0.5
        self.slopes = slopes_of(part.activation, width)
        self.post = weight(networks, width, width)

    def forward(self, x: Tensor) -> Tensor:
        """√(c/n) σ(X) W."""
        return self.gain * linear(activate(x, self.slopes), self.post)


def feedforward_of(part: models.Feedforward, width: int, networks: tuple[int, ...] = ()) -> Feedforward | OneMatrix:
    """The sublayer of a declaration."""
    if type(part) is models.OneMatrix:
        return OneMatrix(part, width, networks)
    return Feedforward(part, width, networks)


def slopes_of(part: models.Feedforward, width: int) -> tuple[float, float] | None:
    """s₊ and s₋ of a piecewise-linear σ; None of GELU."""
    return of_kind(part, SLOPES)(part, width)


def activate(x: Tensor, slopes: tuple[float, float] | None) -> Tensor:
    """σ entry by entry."""
    if slopes is None:
        return functional.gelu(x)
    positive, negative = slopes
    return positive * x.clamp(min=0) + negative * x.clamp(max=0)
