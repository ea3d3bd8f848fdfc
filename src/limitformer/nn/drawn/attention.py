r"""Attention [ST, eqs. 1, 2, 9]; `limitformer.models.attention` explains the letters and several heads.

In shapes: m tokens, n width, h heads, k head_dim, * any number of networks.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from limitformer import models
from limitformer.models.kinds import of_kind
from limitformer.nn.drawn.own import torch_mixing
from limitformer.nn.drawn.weights import linear, weight


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
        mixed = self.join(self.matrix(x, visible) @ values)
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

    def join(self, x: Tensor) -> Tensor:
        """Reshape (*, h, m, k) to (*, m, h k)."""
        return x.transpose(-2, -3).flatten(-2)


class Mixing(Attention):
    """Attention with A by a user-defined rule."""

    def __init__(self, part: models.Mixing, width: int, networks: tuple[int, ...] = ()) -> None:
        super().__init__(part, width, networks)
        self.rule = torch_mixing(part)

    def matrix(self, x: Tensor, visible: Tensor) -> Tensor:
        return self.rule(self.logits(x), visible)


KINDS: Mapping[type, Callable[[Any, int, tuple[int, ...]], Attention]] = {
    models.ShapedAttention: Attention,
    models.SoftmaxAttention: Attention,
    models.Mixing: Mixing,
}


def attention_of(part: models.Attention, width: int, networks: tuple[int, ...] = ()) -> Attention:
    return of_kind(part, KINDS)(part, width, networks)
