r"""The feed-forward sublayers: √(c/n_h) σ(X W_pre/√n) W_post [ST, eq. 4], and √(c/n) σ(X) W with one matrix."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from limitformer import models
from limitformer.models.kinds import of_kind
from limitformer.nn.drawn.own import torch_elementwise
from limitformer.nn.drawn.weights import linear, weight

Slopes = tuple[float, float]

# σ itself, or the slopes s₊ and s₋ of a piecewise linear σ.
ACTIVATIONS: Mapping[type, Callable[[Any, int], Slopes | Callable[[Tensor], Tensor]]] = {
    models.ShapedReLU: models.ShapedReLU.slopes,
    models.ReLU: models.ReLU.slopes,
    models.GELU: lambda part, width: functional.gelu,
    models.Elementwise: lambda part, width: torch_elementwise(part),
    models.Gated: lambda part, width: torch_elementwise(part),
}


class Feedforward(nn.Module):
    """The feed-forward sublayer of a model: `forward` maps (*, tokens, width) to the same shape."""

    def __init__(self, part: models.Feedforward, width: int, networks: tuple[int, ...] = ()) -> None:
        super().__init__()
        hidden = part.hidden_at(width)
        self.gain = part.gain_at(width) ** 0.5
        self.activation = activation_of(part, width)
        self.pre = weight(networks, width, hidden)
        self.gate = weight(networks, width, hidden) if type(part) is models.Gated else None
        self.post = weight(networks, hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Compute √(c/n_h) σ(X W_pre/√n) W_post; a gated pair has σ(…) ∘ X W_gate/√n for σ(…)."""
        active = activate(linear(x, self.pre), self.activation)
        if self.gate is not None:
            active = active * linear(x, self.gate)
        return self.gain * linear(active, self.post)


class OneMatrix(nn.Module):
    """The feed-forward sublayer with one matrix: `forward` maps (*, tokens, width) to the same shape."""

    def __init__(self, part: models.OneMatrix, width: int, networks: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.gain = part.gain_at(width) ** 0.5
        self.activation = activation_of(part.activation, width)
        self.post = weight(networks, width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Compute √(c/n) σ(X) W."""
        return self.gain * linear(activate(x, self.activation), self.post)


def feedforward_of(part: models.Feedforward, width: int, networks: tuple[int, ...] = ()) -> Feedforward | OneMatrix:
    if type(part) is models.OneMatrix:
        return OneMatrix(part, width, networks)
    return Feedforward(part, width, networks)


def activation_of(part: models.Feedforward, width: int) -> Slopes | Callable[[Tensor], Tensor]:
    return of_kind(part, ACTIVATIONS)(part, width)


def activate(x: Tensor, activation: Slopes | Callable[[Tensor], Tensor]) -> Tensor:
    if callable(activation):
        return activation(x)
    positive, negative = activation
    return positive * x.clamp(min=0) + negative * x.clamp(max=0)
