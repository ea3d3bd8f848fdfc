r"""A Transformer [ST, eq. 11] put together: sublayers X ← λX + γ f(X), with the normalisation where it stands."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from limitformer import models
from limitformer.nn.attention import Attention
from limitformer.nn.feedforward import feedforward_of
from limitformer.nn.norm import Norm
from limitformer.nn.weights import draw_weights


class Layer(nn.Module):
    """One layer: attention, then feed-forward; `forward` maps (*networks, tokens, width) to the same shape.

    Args:
        model: the Transformer.
        networks: leading dimensions of the weights; () for one trainable network.
    """

    def __init__(self, model: models.Transformer, networks: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.skip, self.gamma = model.skip, model.gamma
        self.causal = model.mask == "causal"
        norm = model.normalisation
        self.pre = Norm(norm) if norm is not None and norm.placement == "pre" else nn.Identity()
        self.post = Norm(norm) if norm is not None and norm.placement == "post" else nn.Identity()
        self.attention = None if model.attention is None else Attention(model.attention, model.width, networks)
        self.feedforward = (
            None if model.feedforward is None else feedforward_of(model.feedforward, model.width, networks)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        if self.attention is not None:
            attention, visible = self.attention, self.visible(x)
            x = self.add(x, lambda tokens: attention(tokens, visible))
        if self.feedforward is not None:
            x = self.add(x, self.feedforward)
        return x

    def add(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """post(λX + γ f(pre(X)))."""
        result: Tensor = self.post(self.skip * x + self.gamma * branch(self.pre(x)))
        return result

    def visible(self, x: Tensor) -> Tensor:
        """(tokens, tokens): whether the row's token sees the column's."""
        everything = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device)
        return everything.tril() if self.causal else everything


class Network(nn.Module):
    """All layers, with their own weights, drawn from the paper's law."""

    def __init__(self, model: models.Transformer, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.depth))
        draw_weights(self, generator)

    def forward(self, x: Tensor) -> Tensor:
        """(*, tokens, width) to the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x
