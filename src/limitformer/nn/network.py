r"""A Transformer [ST, eq. 11] put together: sublayers X ← λX + γ f(X), with the normalisation where it stands."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from limitformer import models
from limitformer.nn.attention import attention_of
from limitformer.nn.feedforward import feedforward_of
from limitformer.nn.norm import Norm
from limitformer.nn.weights import draw_weights


class Layer(nn.Module):
    """One layer: attention, then feed-forward; `forward` maps (*networks, tokens, width) to the same shape.

    Args:
        model: the Transformer.
        networks: leading dimensions of the weights; () for one trainable network.
        place: which of the layers it is, from 0; it has the λ and γ of that one.
    """

    def __init__(self, model: models.Transformer, networks: tuple[int, ...] = (), place: int = 0) -> None:
        super().__init__()
        self.table = [[(row[0], row[1]) for row in layer] for layer in model.strengths.tolist()]
        self.place = place
        self.causal = model.mask == "causal"
        norm = model.normalisation
        self.pre = Norm(norm) if norm is not None and norm.placement == "pre" else nn.Identity()
        self.post = Norm(norm) if norm is not None and norm.placement == "post" else nn.Identity()
        self.attention = None if model.attention is None else attention_of(model.attention, model.width, networks)
        self.feedforward = (
            None if model.feedforward is None else feedforward_of(model.feedforward, model.width, networks)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        if self.attention is not None:
            attention, visible = self.attention, self.visible(x)
            x = self.add(x, lambda tokens: attention(tokens, visible), *self.strengths[0])
        if self.feedforward is not None:
            x = self.add(x, self.feedforward, *self.strengths[-1])
        return x

    @property
    def strengths(self) -> list[tuple[float, float]]:
        """λ and γ of each sublayer."""
        return self.table[self.place % len(self.table)]

    def add(self, x: Tensor, branch: Callable[[Tensor], Tensor], skip: float, gamma: float) -> Tensor:
        """post(λX + γ f(pre(X)))."""
        result: Tensor = self.post(skip * x + gamma * branch(self.pre(x)))
        return result

    def visible(self, x: Tensor) -> Tensor:
        """(tokens, tokens): whether the row's token sees the column's."""
        everything = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device)
        return everything.tril() if self.causal else everything


class Network(nn.Module):
    """All layers, with their own weights, drawn from the paper's law."""

    def __init__(self, model: models.Transformer, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(model, place=place) for place in range(model.depth))
        draw_weights(self, generator)

    def forward(self, x: Tensor) -> Tensor:
        """(*, tokens, width) to the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x
