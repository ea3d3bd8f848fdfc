r"""Shaped attention with the cost of a fused kernel: A = γ₁ I + softmax(QKᵀ/τ) − γ₂ C̄ [ST, eq. 33].

Row i of C̄ is the softmax at zero logits under the same mask (`limitformer.nn.visibility`), so at γ₁ = γ₂ = 1 and zero
logits A is the identity under every mask. A is never formed:

  A V = γ₁ V + sdpa(Q, K, V) − γ₂ C̄ V,

and C̄ V is a mean of visible values. `attention_matrix` forms A, to look at and to test against.

Precision: in float32 the sum has the kernel's error, some 1e-6 of the values. In bfloat16 the result is rounded to 1
part in 256; at initialisation (softmax − C̄)V is of the order 1/√(width·tokens) beside V, so that it is then mostly
rounding. `float32=True` computes it, and the sum, in float32 whatever the inputs and autocast are, and gives the sum in
float32: who rounds that to 16 bits has lost it again (`limitformer.nn.float32`).

In shapes: b batch, h heads, g key/value heads, q queries, k keys, d head_dim.
"""

import torch
from torch import Tensor
from torch.nn import functional

from limitformer.nn.attention_inputs import check_inputs
from limitformer.nn.identity_and_mean import Places, Strength, grouped, rest_of_a
from limitformer.nn.rounding import without_autocast
from limitformer.nn.strengths import at_least_float32
from limitformer.nn.visibility import Keys, Mask, Positions, Queries, Visibility, visibility


def shaped_attention(
    query: Queries,
    key: Keys,
    value: Keys,
    *,
    gamma1: Strength,
    gamma2: Strength,
    scale: float,
    mask: Mask | Visibility | None = None,
    is_causal: bool = False,
    positions: Positions | None = None,
    dropout: float = 0.0,
    float32: bool = False,
) -> Queries:
    """A V (b, h, q, d) without forming A.

    Args:
        query: (b, h, q, d).
        key, value: (b, g, k, d) with g dividing h: query head i reads key/value head i·g // h.
        gamma1, gamma2: γ₁, γ₂: numbers, or tensors (), (1,) or (h,); the number 0 leaves its term out.
        scale: 1/τ.
        mask: None, boolean (True is seen) or additive, broadcastable to (b, h, q, k), or a `Visibility`.
        is_causal: besides the mask, a query sees no key after its own position; not with a `Visibility`, which says so
            itself.
        positions: (q,) or (b, q), where the queries stand among the keys; None: they are the last q, as in decoding
            with a growing cache. A cache of fixed length needs them.
        dropout: probability that an entry of the softmax is dropped.
        float32: whether softmax − C̄ and the sum are computed in float32, which the result then has too; else the
            result has the values' dtype.

    Raises:
        InputError: arguments of another kind, or shapes that do not fit.
    """
    check_inputs(
        query, key, value, gamma1=gamma1, gamma2=gamma2, scale=scale, mask=mask, is_causal=is_causal,
        positions=positions, dropout=dropout, float32=float32,
    )  # fmt: skip
    if float32:
        with without_autocast(query.device.type):
            raised = [x.to(at_least_float32(x.dtype)) for x in (query, key, value)]
            return shaped_attention(
                *raised, gamma1=gamma1, gamma2=gamma2, scale=scale, mask=mask, is_causal=is_causal,
                positions=positions, dropout=dropout,
            )  # fmt: skip
    queries, keys = query.shape[-2], key.shape[-2]
    if not isinstance(mask, Visibility):
        mask = visibility(
            mask, is_causal=is_causal, queries=queries, keys=keys, positions=positions, device=query.device
        )
    groups = (key.shape[1], query.shape[1] // key.shape[1])
    seen = None if mask.seen is None else grouped(mask.seen, groups).to(value.dtype)
    # Before the kernel, so that autograd comes to it after the kernel's backward has freed its memory.
    rest = rest_of_a(value, mask, gamma1, gamma2, groups, Places(queries, positions))
    mixed = fused(query, key, value, mask, scale, dropout).unflatten(1, groups)
    if rest is None:
        return (mixed if seen is None else mixed * seen).flatten(1, 2)
    return total(rest, mixed, seen).flatten(1, 2).to(value.dtype)


def total(rest: Tensor, mixed: Tensor, seen: Tensor | None) -> Tensor:
    """The rest and the softmax's part, where queries see anything; in place where that can be."""
    plain = type(rest) is type(mixed) is Tensor
    if torch.compiler.is_compiling() or not plain or rest.dtype != mixed.dtype or rest.shape != mixed.shape:
        return rest + (mixed if seen is None else mixed * seen)
    return rest.add_(mixed) if seen is None else rest.addcmul_(mixed, seen)


def fused(query: Tensor, key: Tensor, value: Tensor, seen: Visibility, scale: float, dropout: float) -> Tensor:
    """Softmax attention (b, h, q, d) by the fused kernel."""
    shared = False
    if query.shape[1] != key.shape[1]:  # for torch, which has tensors and symbols for sizes where it looks on
        shared = True
    mask = seen.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    if shared and mask is not None:  # kernels that take groups and a mask together are not fused everywhere
        repeats = query.shape[1] // key.shape[1]
        key, value, shared = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), False
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=seen.causal, scale=scale, enable_gqa=shared
    )
