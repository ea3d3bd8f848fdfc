r"""Multi-head self-attention that trains: A_h = γ₁ I + softmax(Q_h K_hᵀ/τ) − γ₂ C̄ [ST, eq. 33] in every head h.

The temperature is τ₀ √n_k here; the other √n of [ST, eq. 9] is in the initial variances of queries and keys
(`limitformer.nn.initialisation`). Without gains it is the softmax attention of every stock Transformer.

In shapes: b batch, m tokens, n width, h heads, g key/value heads, d head_dim.
"""

from collections.abc import Callable
from math import sqrt
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from limitformer.base.errors import require, require_count, require_real
from limitformer.models.attention import dim_of_heads
from limitformer.nn.attention_matrix import Logits, Probe, attention_matrix
from limitformer.nn.gains import Gain
from limitformer.nn.initialisation import InitialVariances, draw
from limitformer.nn.rounding import Float32Linear, to_half_dtype, warn_of_rounding
from limitformer.nn.shaped_attention import shaped_attention
from limitformer.nn.visibility import Keys, Mask, Positions, Visibility

Tokens = Annotated[Tensor, "b m n"]
OfHeads = Annotated[Tensor, "b g m d"]
Past = tuple[Keys, Keys]
Grown = tuple[Annotated[Tensor, "b g grown d"], Annotated[Tensor, "b g grown d"]]
Cache = Callable[[Tensor, Tensor], Past]  # from new keys and values to all of them


class ShapedSelfAttention(nn.Module):
    """`forward` maps tokens (b, m, n) to (b, m, n).

    If `probe` is set, it is called with the logits.

    Args:
        width: n.
        heads: h.
        kv_heads: g, dividing h; None means h.
        head_dim: d; None means width/heads.
        tau0: τ₀ > 0.
        gamma1, gamma2: γ₁, γ₂ at the start; None omits the term.
        per_head: whether each head has its own γ₁ and γ₂.
        trained: whether γ₁ and γ₂ have gradients.
        bias: whether the projections have biases; they start at 0.
        dropout: probability that an entry of the softmax is dropped in training.
        float32: whether softmax − C̄, the sum and the output are in float32 in any dtype (`limitformer.nn.rounding`).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        tau0: float = 1.0,
        gamma1: float | None = 1.0,
        gamma2: float | None = 1.0,
        per_head: bool = True,
        trained: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        float32: bool = False,
    ) -> None:
        super().__init__()
        width, self.heads = require_count("width", width), require_count("heads", heads)
        self.kv_heads = self.heads if kv_heads is None else require_count("kv_heads", kv_heads)
        message = f"kv_heads must divide heads; got heads={heads}, kv_heads={kv_heads}."
        require(self.heads % self.kv_heads == 0, message)
        self.head_dim = dim_of_heads(width, self.heads, head_dim)
        tau0 = require_real("tau0", tau0)
        require(tau0 > 0, f"tau0 must be positive; got {tau0}.")
        dropout = require_real("dropout", dropout)
        require(0 <= dropout < 1, f"dropout must lie in [0, 1); got {dropout}.")
        self.scale = 1 / (tau0 * sqrt(self.head_dim))
        number = self.heads if per_head else None
        self.gamma1 = None if gamma1 is None else Gain(gamma1, number, trained)
        self.gamma2 = None if gamma2 is None else Gain(gamma2, number, trained)
        self.query = nn.Linear(width, self.heads * self.head_dim, bias=bias)
        self.key = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.value = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.output = (Float32Linear if float32 else nn.Linear)(self.heads * self.head_dim, width, bias=bias)
        self.dropout, self.float32 = dropout, float32
        self.probe: Probe | None = None
        draw(self, InitialVariances.shaped(width, joined=self.heads * self.head_dim))

    def forward(
        self,
        x: Tokens,
        mask: Mask | Visibility | None = None,
        is_causal: bool = False,
        *,
        cache: Cache | None = None,
        positions: Positions | None = None,
    ) -> Tokens:
        """Attend to the tokens, and to those in `cache`; mask and positions are as for `shaped_attention`."""
        query, key, value = self.projections(x)
        if cache is not None:
            key, value = cache(key, value)
        warn_of_rounding(value, self.float32 or not (self.gamma1 or self.gamma2))
        if self.probe is not None:
            self.probe(Logits(query, key, self.scale, mask, is_causal, positions))
        arguments = self.gains() | {"scale": self.scale, "mask": mask, "is_causal": is_causal, "positions": positions}
        arguments |= {"dropout": self.dropout if self.training else 0.0}
        mixed = shaped_attention(query, key, value, **arguments, float32=self.float32)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result

    def gains(self) -> dict[str, Any]:
        return {
            "gamma1": 0.0 if self.gamma1 is None else self.gamma1(),
            "gamma2": 0.0 if self.gamma2 is None else self.gamma2(),
        }

    def projections(self, x: Tokens) -> tuple[Annotated[Tensor, "b h m d"], OfHeads, OfHeads]:
        x = to_half_dtype(x, self.query.weight)
        return self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))

    def step(
        self, x: Tokens, past: Past | None = None, mask: Mask | Visibility | None = None, is_causal: bool = True
    ) -> tuple[Tokens, Grown]:
        """Return the output of new tokens that follow those of `past`, and all keys and values; the mask spans all."""
        grown: list[Past] = []

        def append(key: Tensor, value: Tensor) -> Past:
            both = (key, value) if past is None else (torch.cat([past[0], key], -2), torch.cat([past[1], value], -2))
            grown.append(both)
            return both

        return self(x, mask, is_causal, cache=append), grown[0]

    def matrix(self, x: Tokens, mask: Mask | None = None, is_causal: bool = False) -> Annotated[Tensor, "b h m m"]:
        """Return the attention matrix A, for inspection."""
        query, key, _ = self.projections(x)
        return attention_matrix(query, key, **self.gains(), scale=self.scale, mask=mask, is_causal=is_causal)

    def split(self, x: Annotated[Tensor, "b m n"]) -> Annotated[Tensor, "b h m d"]:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
