r"""Shaped attention at the cost of a fused kernel: A = γ₁ I + softmax(QKᵀ/τ) − γ₂ C̄ [ST, eq. 33].

Row i of C̄ is the softmax at zero logits under the same mask (`limitformer.nn.visibility`), so at γ₁ = γ₂ = 1 and zero
logits A is the identity under every mask. A is never formed:

  A V = γ₁ V + sdpa(Q, K, V) − γ₂ C̄ V,

and C̄ V is a mean of visible values. `attention_matrix` forms A, for inspection and tests.

Precision: in float32 the sum has the kernel's error, about 1e-6 of the values. In bfloat16 the result is rounded to 1
part in 256. At initialisation (softmax − C̄)V is smaller than V by a factor of the order 1/√(width·tokens), so it is
then mostly rounding. `float32=True` computes it, and the sum, in float32 for any dtype of the inputs and under
autocast, and returns float32: rounding the sum to 16 bits loses it again (`limitformer.nn.rounding`).

Arguments are checked by types and shapes only: to read values of tensors would wait for the device. In shapes: b batch,
h heads, g key/value heads, q queries, k keys, d head_dim.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from limitformer.base.errors import InputError, require, require_real
from limitformer.nn.identity_and_mean import QueryPlaces, Strength, grouped, identity_and_mean_terms
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
    """Compute A V (b, h, q, d) without forming A.

    Args:
        query: (b, h, q, d).
        key, value: (b, g, k, d) with g dividing h: query head i reads key/value head i·g // h.
        gamma1, gamma2: γ₁, γ₂: numbers, or tensors (), (1,) or (h,); the number 0 leaves its term out.
        scale: 1/τ.
        mask: None, boolean (True is seen) or additive, broadcastable to (b, h, q, k), or a `Visibility`.
        is_causal: in addition to the mask, a query sees no key after its own position; a `Visibility` has its own flag.
        positions: (q,) or (b, q), places of the queries among the keys; None: they are the last q, as in decoding with
            a growing cache. A cache of fixed length needs them.
        dropout: probability that an entry of the softmax is dropped.
        float32: whether softmax − C̄ and the sum are computed, and returned, in float32; otherwise the result has the
            values' dtype.

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
    # Before the kernel, so that autograd reaches it after the kernel's backward has freed its memory.
    terms = identity_and_mean_terms(value, mask, gamma1, gamma2, groups, QueryPlaces(queries, positions))
    mixed = fused(query, key, value, mask, scale, dropout).unflatten(1, groups)
    if terms is None:
        return (mixed if seen is None else mixed * seen).flatten(1, 2)
    return total(terms, mixed, seen).flatten(1, 2).to(value.dtype)


def total(terms: Tensor, mixed: Tensor, seen: Tensor | None) -> Tensor:
    """Add the softmax's part for the queries that see anything; in place if possible."""
    ordinary = type(terms) is type(mixed) is Tensor
    if torch.compiler.is_compiling() or not ordinary or terms.dtype != mixed.dtype or terms.shape != mixed.shape:
        return terms + (mixed if seen is None else mixed * seen)
    return terms.add_(mixed) if seen is None else terms.addcmul_(mixed, seen)


def fused(query: Tensor, key: Tensor, value: Tensor, visible: Visibility, scale: float, dropout: float) -> Tensor:
    """Compute softmax attention (b, h, q, d) by torch's fused kernel."""
    shared = False
    if query.shape[1] != key.shape[1]:  # a branch, since the comparison may be symbolic when torch traces or compiles
        shared = True
    mask = visible.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    if shared and mask is not None:  # kernels that take groups and a mask together are not fused everywhere
        repeats = query.shape[1] // key.shape[1]
        key, value, shared = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), False
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=visible.causal, scale=scale, enable_gqa=shared
    )


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    gamma1: Any,
    gamma2: Any,
    scale: Any,
    mask: Any,
    is_causal: Any,
    positions: Any,
    dropout: Any = 0.0,
    float32: Any = False,
) -> None:
    """Raise `InputError` unless the arguments of `shaped_attention` have the right kinds and fit each other."""
    if not torch.compiler.is_compiling():  # a compiled call has symbols for numbers, and ran uncompiled before
        check_tensors({"query": query, "key": key, "value": value})
        if not float32:  # float32 gives them one dtype
            check_dtypes_and_devices(query, key, value)
        check_gain("gamma1", gamma1, query)
        check_gain("gamma2", gamma2, query)
        if not isinstance(scale, Tensor):
            require_real("scale", scale)
        if not 0 <= require_real("dropout", dropout) <= 1:
            raise InputError(f"dropout must be a probability; got {dropout}.")
        for name, switch in (("is_causal", is_causal), ("float32", float32)):
            if str(switch) not in ("True", "False", "1", "0"):
                raise InputError(f"{name} must be True or False; got {switch!r}.")
        check_mask_and_positions(mask, positions, query)
    check_shapes(query, key, value, positions)
    if isinstance(mask, Tensor) and mask.dim() == 4:
        fits = mask.shape[0] in (1, query.shape[0]) and mask.shape[1] in (1, query.shape[1])
        wanted = f"({query.shape[0]} or 1, {query.shape[1]} or 1, …)"
        require(fits, f"mask must have the shape {wanted}; got {tuple(mask.shape)}.")
    both = isinstance(mask, Visibility) and is_causal
    require(not both, "is_causal is part of a Visibility: pass it to limitformer.nn.visibility.")


def check_tensors(inputs: dict[str, Any]) -> None:
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a tensor; got {type(x).__name__}. Nearest: torch.as_tensor({name}).")
        if x.is_nested:
            raise InputError(f"{name} must not be nested: pad it and pass a mask.")
        if not x.is_floating_point():
            raise InputError(f"{name} must be of real numbers; got {x.dtype}. Nearest: {name}.float().")


def check_dtypes_and_devices(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise `InputError` unless they have one dtype, unless autocast chooses it, and one device."""
    same = query.dtype == key.dtype == value.dtype or torch.is_autocast_enabled(query.device.type)
    if not same or not query.device == key.device == value.device:
        kinds = ", ".join(f"{x.dtype} on {x.device}" for x in (query, key, value))
        raise InputError(f"query, key and value must have one dtype and device; got {kinds}.")


def check_gain(name: str, gain: Any, query: Tensor) -> None:
    """Raise `InputError` unless a gain is a finite number or a real tensor on the queries' device; () may be on any."""
    if not isinstance(gain, Tensor):
        require_real(name, gain)
        return
    if gain.is_complex():
        raise InputError(f"{name} must be of real numbers; got {gain.dtype}.")
    if gain.device != query.device and gain.dim():
        raise InputError(f"{name} is on {gain.device}, query on {query.device}. Nearest: {name}.to(query.device).")


def check_mask_and_positions(mask: Any, positions: Any, query: Tensor) -> None:
    if not (mask is None or isinstance(mask, Tensor | Visibility)):
        raise InputError(f"mask must be a tensor, a Visibility or None; got {type(mask).__name__}.")
    if not (positions is None or isinstance(positions, Tensor)):
        raise InputError(f"positions must be a tensor or None; got {type(positions).__name__}.")
    if positions is not None and positions.dtype not in (torch.int64, torch.int32):
        raise InputError(f"positions must be whole numbers; got {positions.dtype}. Nearest: positions.long().")
    for name, x in (("mask", mask), ("positions", positions)):
        if isinstance(x, Tensor) and x.device != query.device:
            raise InputError(f"{name} is on {x.device}, query on {query.device}. Nearest: {name}.to(query.device).")


def check_shapes(query: Tensor, key: Tensor, value: Tensor, positions: Tensor | None) -> None:
    """Raise `InputError` unless queries, keys, values and positions have shapes that fit each other."""
    fits = query.dim() == key.dim() == 4 and key.shape == value.shape
    fits = fits and (query.shape[0], query.shape[3]) == (key.shape[0], key.shape[3])
    if not fits:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        needed = "query must be (batch, heads, queries, head_dim), key and value (batch, kv_heads, keys, head_dim)"
        raise InputError(f"{needed}; got {shapes}.")
    if key.shape[1] < 1 or query.shape[1] < 1 or query.shape[1] % key.shape[1]:
        raise InputError(f"kv_heads must divide heads; got {key.shape[1]} and {query.shape[1]}.")
    queries, keys = query.shape[-2], key.shape[-2]
    if positions is None:
        message = f"{queries} queries cannot be the last of {keys} keys: the identity in A needs positions."
        require(queries <= keys, message)
        return
    fits = positions.shape in ((queries,), (query.shape[0], queries))
    require(fits, f"positions must be ({queries},) or ({query.shape[0]}, {queries}); got {tuple(positions.shape)}.")
