r"""A itself, γ₁ I + softmax(QKᵀ/τ) − γ₂ C̄ [ST, eq. 33], formed term by term as written, for inspection and tests.

The logits of an attention, and the entropy of its softmax, without a matrix of all queries and keys.

H = −Σₖ p log p = lse − Σₖ p y  for a row of logits y, p = softmax(y), lse = log Σₖ exp y: a few rows at a time.

In shapes: b batch, h heads, g key/value heads, q queries, k keys, d head_dim.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional

from limitformer.nn.identity_and_mean import Strength
from limitformer.nn.rounding import without_autocast
from limitformer.nn.shaped_attention import check_inputs
from limitformer.nn.strengths import at_least_float32
from limitformer.nn.visibility import Keys, Mask, Positions, Queries, Visibility, causal_mask, hidden_where


def attention_matrix(
    query: Queries,
    key: Keys,
    *,
    gamma1: Strength,
    gamma2: Strength,
    scale: float,
    mask: Mask | Visibility | None = None,
    is_causal: bool = False,
    positions: Positions | None = None,
) -> Annotated[Tensor, "b h q k"]:
    """Return A itself, term by term as written; arguments and errors are those of `shaped_attention`."""
    check_inputs(
        query, key, key, gamma1=gamma1, gamma2=gamma2, scale=scale, mask=mask, is_causal=is_causal, positions=positions
    )
    if isinstance(mask, Visibility):
        is_causal, mask = mask.causal, mask.as_mask()
    batch, heads, queries, _ = query.shape
    keys = key.shape[-2]
    logits = query @ key.repeat_interleave(heads // key.shape[1], 1).mT * scale
    bias = torch.zeros((), dtype=logits.dtype, device=logits.device)
    if mask is not None and mask.dtype == torch.bool:
        bias = bias.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        bias = mask.to(logits.dtype).masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
    if is_causal:
        bias = bias.masked_fill(~causal_mask(queries, keys, positions, query.device), -torch.inf)
    bias = bias.expand(batch, heads, queries, keys)
    places = torch.arange(keys - queries, keys, device=query.device) if positions is None else positions
    identity = functional.one_hot(places, keys).to(logits.dtype)
    identity = identity if identity.dim() == 2 else identity[:, None]
    first, second = (g[:, None, None] if isinstance(g, Tensor) and g.dim() else g for g in (gamma1, gamma2))
    return first * identity + (masked_softmax(logits + bias) - second * masked_softmax(bias))


def mixed_and_matrix(
    mixed: Tensor, query: Tensor, key: Tensor, value: Tensor, *, dropout: float = 0.0, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """Return A V and A, where `mixed` (b, h, q, d) is A V by the fused kernel.

    A is in float32 or finer. A V keeps its bits, but its gradient goes through A, which may then have a gradient of its
    own. Dropout is drawn inside the kernel: then A is without dropout, and A V keeps the kernel's gradient.
    """
    dtype = at_least_float32(value.dtype)
    with without_autocast(query.device.type):
        a = attention_matrix(query.to(dtype), key.to(dtype), **arguments)
        if dropout or not a.requires_grad:
            return mixed, a
        repeats = query.shape[1] // value.shape[1]
        product = (a @ value.to(dtype).repeat_interleave(repeats, 1)).to(mixed.dtype)
    return mixed.detach() + (product - product.detach()), a


def masked_softmax(logits: Tensor) -> Tensor:
    """Return the softmax over the last axis; a row of −∞ gives zeros."""
    seen = (logits > -torch.inf).any(-1, keepdim=True)
    return torch.where(seen, torch.softmax(torch.where(seen, logits, 0.0), -1), 0.0)


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
