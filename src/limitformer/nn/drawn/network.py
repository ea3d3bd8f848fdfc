r"""The Transformer of [ST, eq. 11]: sublayers X ← λX + γ f(X), with normalisation before or after.

Attention [ST, eqs. 1, 2, 9]; `limitformer.models.attention` explains the letters and several heads.

In shapes: m tokens, n width, h heads, k head_dim, * any number of networks.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from limitformer import models
from limitformer.models.kinds import of_kind
from limitformer.nn.drawn.own import torch_elementwise, torch_mixing, torch_scale, torch_shaped


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


def weight(networks: tuple[int, ...], rows: int, columns: int) -> nn.Parameter:
    """Return a weight (*networks, rows, columns) that is not drawn yet."""
    return nn.Parameter(torch.empty(*networks, rows, columns))


@torch.no_grad()
def draw_weights(module: nn.Module, generator: torch.Generator | None = None) -> None:
    """Draw every weight of `module` from N(0, 1), in place: the papers keep all scales outside the weights."""
    for parameter in module.parameters():
        parameter.normal_(generator=generator)


def linear(x: Tensor, matrix: Tensor) -> Tensor:
    """Compute x W/√rows, x (*networks, tokens, rows): the n^(−1/2) of [ST, eq. 1]."""
    return x @ matrix / matrix.shape[-2] ** 0.5


class Attention(nn.Module):
    """The attention sublayer of a model: `forward` maps (*, m, n) to (*, m, n).

    Args:
        part: the declaration.
        width: n.
        networks: leading dimensions of the weights; () for one trainable network.
    """

    def __init__(self, part: models.Attention, width: int, networks: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.identity, self.center, _ = part.interventions
        self.temperature = part.temperature_at(width)
        self.heads = part.heads or 1
        joined = self.heads * part.key_dim(width)
        self.query = weight(networks, width, joined)
        self.key = weight(networks, width, joined)
        self.value = weight(networks, width, joined if part.heads else width)
        self.output = weight(networks, joined, width) if part.heads else None

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """Compute A X W_V/√n, with an output projection if there are heads; `visible` (m, m) boolean."""
        values = self.split(linear(x, self.value))
        mixed = (self.matrix(x, visible) @ values).transpose(-2, -3).flatten(-2)  # (*, h, m, k) to (*, m, h k)
        return mixed if self.output is None else linear(mixed, self.output)

    def matrix(self, x: Tensor, visible: Tensor) -> Tensor:
        """Compute A (*, h, m, m)."""
        logits = self.logits(x)
        a = torch.softmax(logits.masked_fill(~visible, -torch.inf), dim=-1)
        if self.center:
            seen = visible.to(a.dtype)
            a = a - seen / seen.sum(-1, keepdim=True)
        if self.identity:
            a = a + torch.eye(x.shape[-2], dtype=x.dtype, device=x.device)
        return a

    def logits(self, x: Tensor) -> Tensor:
        """Compute Y/τ (*, h, m, m)."""
        queries, keys = self.split(linear(x, self.query)), self.split(linear(x, self.key))
        return queries @ keys.mT / self.temperature

    def split(self, x: Tensor) -> Tensor:
        """Reshape (*, m, h k) to (*, h, m, k)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)


class MixingAttention(Attention):
    """Attention with A by a user-defined rule."""

    def __init__(self, part: models.Mixing, width: int, networks: tuple[int, ...] = ()) -> None:
        super().__init__(part, width, networks)
        self.rule = torch_mixing(part)

    def matrix(self, x: Tensor, visible: Tensor) -> Tensor:
        return self.rule(self.logits(x), visible)


KINDS: Mapping[type, Callable[[Any, int, tuple[int, ...]], Attention]] = {
    models.ShapedAttention: Attention,
    models.SoftmaxAttention: Attention,
    models.Mixing: MixingAttention,
}


Slopes = tuple[float, float]

# σ itself, or the slopes s₊ and s₋ of a piecewise linear σ.
ACTIVATIONS: Mapping[type, Callable[[Any, int], Slopes | Callable[[Tensor], Tensor]]] = {
    models.ShapedReLU: models.ShapedReLU.slopes,
    models.ReLU: models.ReLU.slopes,
    models.GELU: lambda part, width: functional.gelu,
    models.Elementwise: lambda part, width: torch_elementwise(part),
    models.Gated: lambda part, width: torch_elementwise(part),
    models.ShapedSmooth: torch_shaped,
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


Strengths = list[tuple[float, float]]
Tokens = Annotated[Tensor, "*networks tokens width"]


def strengths_of(model: models.Transformer) -> list[Strengths]:
    """Return λ and γ of each sublayer, for each layer."""
    rows = [[(skip, gamma) for skip, gamma in row] for row in model.strengths.tolist()]
    return rows if len(rows) == model.depth else rows * model.depth


class Layer(nn.Module):
    """One layer: attention, then feed-forward; `forward` maps (*networks, tokens, width) to the same shape.

    Args:
        model: the Transformer.
        networks: leading dimensions of the weights; () for one trainable network.
        strengths: λ and γ of each sublayer; None takes those of the first layer.
    """

    def __init__(
        self, model: models.Transformer, networks: tuple[int, ...] = (), strengths: Strengths | None = None
    ) -> None:
        super().__init__()
        self.strengths: Strengths = model.strengths[0].tolist() if strengths is None else strengths
        self.causal = model.mask == "causal"
        norm = model.normalisation
        self.pre = Norm(norm) if norm is not None and norm.placement == "pre" else nn.Identity()
        self.post = Norm(norm) if norm is not None and norm.placement == "post" else nn.Identity()
        attention = model.attention
        self.attention = None if attention is None else of_kind(attention, KINDS)(attention, model.width, networks)
        self.feedforward = (
            None if model.feedforward is None else feedforward_of(model.feedforward, model.width, networks)
        )

    def forward(self, x: Tokens) -> Tokens:
        if self.attention is not None:
            attention, visible = self.attention, self.visible(x)
            x = self.add(x, lambda tokens: attention(tokens, visible), *self.strengths[0])
        if self.feedforward is not None:
            x = self.add(x, self.feedforward, *self.strengths[-1])
        return x

    def add(self, x: Tokens, branch: Callable[[Tensor], Tensor], skip: float, gamma: float) -> Tokens:
        """Compute post(λX + γ f(pre(X)))."""
        result: Tensor = self.post(skip * x + gamma * branch(self.pre(x)))
        return result

    def visible(self, x: Tokens) -> Annotated[Tensor, "tokens tokens"]:
        """Return whether the row's token sees the column's."""
        everything = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device)
        return everything.tril() if self.causal else everything


class Network(nn.Module):
    """A network of all layers, its weights drawn from the paper's law."""

    def __init__(self, model: models.Transformer, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(model, strengths=row) for row in strengths_of(model))
        draw_weights(self, generator)

    def forward(self, x: Tokens) -> Tokens:
        """Map tokens (*, tokens, width) to the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x
