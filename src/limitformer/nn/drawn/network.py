r"""The Transformer of [ST, eq. 11]: sublayers X ← λX + γ f(X), with normalisation before or after."""

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor, nn

from limitformer import models
from limitformer.nn.drawn.attention import attention_of
from limitformer.nn.drawn.feedforward import feedforward_of
from limitformer.nn.drawn.norm import Norm
from limitformer.nn.drawn.weights import draw_weights

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
        self.attention = None if model.attention is None else attention_of(model.attention, model.width, networks)
        self.feedforward = (
            None if model.feedforward is None else feedforward_of(model.feedforward, model.width, networks)
        )

    def forward(self, x: Tokens) -> Tokens:
        """Compute the layer's output."""
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
