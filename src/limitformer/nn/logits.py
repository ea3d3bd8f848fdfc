r"""The logits of an attention, and the entropy of its softmax, without a matrix of all queries and keys.

H = −Σₖ p log p = lse − Σₖ p y  for a row of logits y, p = softmax(y), lse = log Σₖ exp y: a few rows at a time.

In shapes: b batch, h heads, g key/value heads, q queries, k keys, d head_dim.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from limitformer.nn.visibility import Keys, Mask, Positions, Queries, Visibility, causal_mask, hidden_where

ROWS = 64  # queries at a time


@dataclass(frozen=True, eq=False)
class Logits:
    """The logits y = QKᵀ scale under a mask; arguments as for `shaped_attention`."""

    query: Queries
    key: Keys
    scale: float
    mask: Mask | Visibility | None = None
    is_causal: bool = False
    positions: Positions | None = None

    def rows(self) -> Iterator[tuple[Annotated[Tensor, "b h rows k"], Annotated[Tensor, "b h rows"]]]:
        """Yield logits of `ROWS` queries in double precision, and whether each of these queries sees itself."""
        visible = self.visible()
        key = self.key.double().repeat_interleave(self.query.shape[1] // self.key.shape[1], 1)
        for begin in range(0, self.query.shape[-2], ROWS):
            part = slice(begin, begin + ROWS)
            logits = self.query[..., part, :].double() @ key.mT * self.scale
            bias = visible[..., part if visible.shape[-2] > 1 else slice(None), :]
            logits = logits.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else logits + bias
            own = self.places()[..., part, None].expand(*logits.shape[:-1], 1)
            yield logits, logits.gather(-1, own).squeeze(-1) > -torch.inf

    def places(self) -> Annotated[Tensor, "#b 1 q"]:
        """Return the places of the queries among the keys."""
        queries, keys = self.query.shape[-2], self.key.shape[-2]
        places = torch.arange(keys - queries, keys, device=self.query.device)
        places = places if self.positions is None else self.positions
        return places[None, None] if places.dim() == 1 else places[:, None]

    def visible(self) -> Annotated[Tensor, "#b #h #q k"]:
        """Return the mask, boolean or additive, the causal part included."""
        causal = self.mask.causal if isinstance(self.mask, Visibility) else self.is_causal
        mask = self.mask.as_mask() if isinstance(self.mask, Visibility) else self.mask
        queries, keys = self.query.shape[-2], self.key.shape[-2]
        if mask is None:
            mask = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=self.query.device)
        mask = mask[None, None] if mask.dim() == 2 else mask
        if mask.dtype != torch.bool:
            mask = mask.double().masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
        return hidden_where(mask, ~causal_mask(queries, keys, self.positions, self.query.device)) if causal else mask


Probe = Callable[[Logits], None]


@torch.no_grad()
def entropy(logits: Logits) -> Annotated[Tensor, "h"]:
    """Return the mean entropy of the softmax by head, in nats, over queries that see themselves (padding does not)."""
    total = torch.zeros(logits.query.shape[1], dtype=torch.float64, device=logits.query.device)
    counted = torch.zeros_like(total)
    for rows, sees_itself in logits.rows():
        lse = torch.logsumexp(rows, -1)
        p = torch.exp(rows - lse[..., None])
        mean = (p * rows.masked_fill(p == 0, 0.0)).sum(-1)
        total += torch.where(sees_itself, lse - mean, 0.0).sum((0, 2))
        counted += sees_itself.sum((0, 2))
    return total / counted.clamp(min=1)
