r"""Shaped attention with the cost of a fused kernel: A = γ₁ I + softmax(QKᵀ/τ) − γ₂ C̄ [ST, eq. 33].

Row i of C̄ is the softmax at zero logits under the same mask (`limitformer.nn.visibility`), so at γ₁ = γ₂ = 1 and zero
logits A is the identity under every mask. A is never formed:

  A V = γ₁ V + sdpa(Q, K, V) − γ₂ C̄ V,

and C̄ V is a mean of visible values. `attention_matrix` forms A, to look at and to test against.

Precision: in float32 the sum has the kernel's error, some 1e-6 of the values. In bfloat16 each of the three terms is
rounded to 1 part in 256; at initialisation softmax − C̄ is of the order 1/√width beside the identity, so that it is then
mostly rounding. `float32=True` computes the perturbation, and the sum, in float32 whatever the inputs and autocast are.

In shapes: b batch, h heads, g key/value heads, q queries, k keys, d head_dim.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from limitformer.errors import InputError, require
from limitformer.nn.visibility import Visibility, causal_mask, visibility

Gain = float | Tensor


def shaped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    gamma1: Gain,
    gamma2: Gain,
    scale: float,
    mask: Tensor | Visibility | None = None,
    is_causal: bool = False,
    positions: Tensor | None = None,
    dropout: float = 0.0,
    float32: bool = False,
) -> Tensor:
    """A V (b, h, q, d) without forming A.

    Args:
        query: (b, h, q, d).
        key, value: (b, g, k, d) with g dividing h: query head i reads key/value head i·g // h.
        gamma1, gamma2: γ₁, γ₂: numbers, or tensors () or (h,); the number 0 leaves its term out.
        scale: 1/τ.
        mask: None, boolean (True is seen) or additive, broadcastable to (b, h, q, k), or a `Visibility`.
        is_causal: besides the mask, a query sees no key after its own position; a `Visibility` says so itself.
        positions: (q,) or (b, q), where the queries stand among the keys; None: they are the last q, as in decoding
            with a growing cache. A cache of fixed length needs them.
        dropout: probability that an entry of the softmax is dropped.
        float32: whether softmax − C̄ and the sum are computed in float32; the result has the values' dtype.

    Raises:
        InputError: shapes that do not fit.
    """
    if float32:
        with torch.autocast(query.device.type, enabled=False):
            raised = [x.float() for x in (query, key, value)]
            return shaped_attention(
                *raised, gamma1=gamma1, gamma2=gamma2, scale=scale, mask=mask, is_causal=is_causal,
                positions=positions, dropout=dropout,
            ).to(value.dtype)  # fmt: skip
    check_shapes(query, key, value, positions)
    queries, keys = query.shape[-2], key.shape[-2]
    if not isinstance(mask, Visibility):
        check_mask_batch(mask, query)
        mask = visibility(
            mask, is_causal=is_causal, queries=queries, keys=keys, positions=positions, device=query.device
        )
    groups = (key.shape[1], query.shape[1] // key.shape[1])
    seen = None if mask.seen is None else grouped(mask.seen, groups).to(value.dtype)
    # Before the kernel, so that autograd comes to it after the kernel's backward has freed its memory.
    rest = rest_of_a(value, mask, seen, gamma1, gamma2, groups, Places(queries, positions))
    mixed = fused(query, key, value, mask, scale, dropout).unflatten(1, groups)
    if rest is None:
        return (mixed if seen is None else mixed * seen).flatten(1, 2)
    if torch.compiler.is_compiling() or rest.dtype != mixed.dtype or rest.shape != mixed.shape:
        return (rest + (mixed if seen is None else mixed * seen)).flatten(1, 2)
    return (rest.add_(mixed) if seen is None else rest.addcmul_(mixed, seen)).flatten(1, 2)


def attention_matrix(
    query: Tensor,
    key: Tensor,
    *,
    gamma1: Gain,
    gamma2: Gain,
    scale: float,
    mask: Tensor | None = None,
    is_causal: bool = False,
    positions: Tensor | None = None,
) -> Tensor:
    """A (b, h, q, k) itself, term by term as written; arguments as for `shaped_attention`."""
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
    return first * identity + (softmax_of_seen(logits + bias) - second * softmax_of_seen(bias))


def softmax_of_seen(logits: Tensor) -> Tensor:
    """The softmax over the last axis, where a row of −∞ gives zeros."""
    seen = (logits > -torch.inf).any(-1, keepdim=True)
    return torch.where(seen, torch.softmax(torch.where(seen, logits, 0.0), -1), 0.0)


def fused(query: Tensor, key: Tensor, value: Tensor, seen: Visibility, scale: float, dropout: float) -> Tensor:
    """Softmax attention (b, h, q, d) by the fused kernel."""
    shared = query.shape[1] != key.shape[1]
    mask = seen.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    if shared and mask is not None:  # kernels that take groups and a mask together are not fused everywhere
        repeats = query.shape[1] // key.shape[1]
        key, value, shared = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), False
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=seen.causal, scale=scale, enable_gqa=shared
    )


@dataclass(frozen=True, eq=False)
class Places:
    """Where the queries stand among the keys: `positions`, or the last `queries`."""

    queries: int
    positions: Tensor | None

    def own(self, value: Tensor) -> Tensor:
        """The values (b, g, q, d) at the queries' own places."""
        if self.positions is None:
            whole = self.queries == value.shape[-2]
            return value if whole else value.narrow(-2, value.shape[-2] - self.queries, self.queries)
        return value.gather(-2, self.index(value))

    def add_own(self, total: Tensor, gradient: Tensor) -> Tensor:
        """Adjoint of `own`, added to `total` (b, g, k, d) in place: of (b, g, q, d)."""
        if self.positions is None:
            total.narrow(-2, total.shape[-2] - self.queries, self.queries).add_(gradient)
            return total
        return total.scatter_add_(-2, self.index(total), gradient)

    def index(self, value: Tensor) -> Tensor:
        """The positions for each number of (b, g, q, d)."""
        assert self.positions is not None
        rows = self.positions[None] if self.positions.dim() == 1 else self.positions
        return rows[:, None, :, None].expand(value.shape[0], value.shape[1], -1, value.shape[-1])


def rest_of_a(
    value: Tensor,
    mask: Visibility,
    seen: Tensor | None,
    gamma1: Gain,
    gamma2: Gain,
    groups: tuple[int, int],
    places: Places,
) -> Tensor | None:
    """γ₁ v − γ₂ C̄ v (b, g, h/g, q, d); None if both gains are the number 0."""
    u = by_group(gamma1, groups, value) if used(gamma1) else None
    w = None
    if used(gamma2):
        counts = mask.counts(value)
        w = -by_group(gamma2, groups, value)
        w = w if counts is None else (w / grouped(counts, groups)).to(value.dtype)
        w = w if seen is None else w * seen
    if u is None and w is None:
        return None
    if u is None:
        u = value.new_zeros(())
    trained_mask = mask.mask is not None and mask.mask.requires_grad
    if torch.compiler.is_compiling() or trained_mask:
        return rest(value, u, w, mask, groups, places)
    result: Tensor = Rest.apply(value, u, w, mask, groups, places)
    return result


def rest(
    value: Tensor, u: Tensor, w: Tensor | None, mask: Visibility, groups: tuple[int, int], places: Places
) -> Tensor:
    """u v + w Σ v, the sum over what is seen; w is −γ₂ over the counts."""
    own = places.own(value)[:, :, None].expand(-1, -1, groups[1], -1, -1)
    if w is None:
        return u * own
    return torch.addcmul(u * own, w, grouped(mask.sums(value), groups))


class Rest(torch.autograd.Function):
    """`rest`, which keeps nothing but the values: sums are cheaper to take again than to hold."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        value: Tensor, u: Tensor, w: Tensor | None, mask: Visibility, groups: tuple[int, int], places: Places
    ) -> Tensor:
        return rest(value, u, w, mask, groups, places)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.mask, ctx.groups, ctx.places = inputs[3:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        value, u, w = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        of_u = of_w = of_value = None
        if wanted[1]:
            of_u = (gradient * ctx.places.own(value)[:, :, None]).sum_to_size(u.shape)
        if w is not None:
            sums = grouped(ctx.mask.sums(value), ctx.groups) if wanted[2] else None
            one = ctx.mask.mean == "all" or (ctx.mask.mean == "rows" and ctx.mask.mask.shape[-2] == 1)
            through = gradient.sum(-2, keepdim=True) if one else gradient  # all queries have one mean
            of_w = None if sums is None else (through * sums).sum_to_size(w.shape)
            del sums
            of_value = ctx.mask.adjoint(through * w, value.shape[-2])
        if not wanted[0]:
            return None, of_u, of_w, None, None, None
        return value_gradient(value, gradient, u, of_value, ctx.places), of_u, of_w, None, None, None


def value_gradient(value: Tensor, gradient: Tensor, u: Tensor, rest: Tensor | None, places: Places) -> Tensor:
    """The gradient of u v, added to what the sums have."""
    single = gradient.shape[2] == 1
    whole = places.positions is None and places.queries == value.shape[-2]
    if whole and single and rest is not None:
        factor = u if u.dim() == 0 else u.squeeze(1)
        return torch.addcmul(rest, factor, gradient.squeeze(2))
    own = (gradient * u).squeeze(2) if single else (gradient * u).sum(2)
    if rest is None and whole:
        return own
    full = torch.zeros_like(value) if rest is None else rest.expand_as(value).clone()
    return places.add_own(full, own)


def grouped(x: Tensor, groups: tuple[int, int]) -> Tensor:
    """(b, 1 | g | h, …) to (b, 1 | g, 1 | h/g, …)."""
    return x.unflatten(1, groups) if x.shape[1] == groups[0] * groups[1] else x[:, :, None]


def by_group(gain: Gain, groups: tuple[int, int], like: Tensor) -> Tensor:
    """A gain of the dtype of `like`: () as it is, (h,) as (g, h/g, 1, 1)."""
    if not isinstance(gain, Tensor):
        return like.new_full((), gain)
    heads = groups[0] * groups[1]
    if gain.dim() > 1 or gain.numel() not in (1, heads):
        raise InputError(f"gamma1 and gamma2 must be numbers, () or ({heads},); got {tuple(gain.shape)}.")
    gain = gain.to(like.dtype)
    return gain.view(*groups, 1, 1) if gain.numel() == heads else gain


def used(gain: Gain) -> bool:
    """Whether a term is computed: not if its gain is the number 0."""
    return isinstance(gain, Tensor) or gain != 0.0


def check_shapes(query: Tensor, key: Tensor, value: Tensor, positions: Tensor | None) -> None:
    """`InputError` unless queries, keys, values and positions fit each other."""
    shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
    fits = query.dim() == key.dim() == 4 and key.shape == value.shape
    fits = fits and (query.shape[0], query.shape[3]) == (key.shape[0], key.shape[3])
    require(
        fits,
        "query must be (batch, heads, queries, head_dim), key and value (batch, kv_heads, keys, head_dim); "
        f"got {shapes}.",
    )
    divides = query.shape[1] % key.shape[1] == 0
    require(divides, f"kv_heads must divide heads; got {key.shape[1]} and {query.shape[1]}.")
    queries, keys = query.shape[-2], key.shape[-2]
    if positions is None:
        message = f"{queries} queries cannot be the last of {keys} keys: A has an identity. Give positions."
        require(queries <= keys, message)
        return
    placed = positions.shape in ((queries,), (query.shape[0], queries))
    require(placed, f"positions must be ({queries},) or ({query.shape[0]}, {queries}); got {tuple(positions.shape)}.")


def check_mask_batch(mask: Tensor | None, query: Tensor) -> None:
    """`InputError` unless the batch and heads of a mask are those of the queries, or 1."""
    if mask is None or mask.dim() != 4:
        return
    fits = mask.shape[0] in (1, query.shape[0]) and mask.shape[1] in (1, query.shape[1])
    wanted = f"({query.shape[0]} or 1, {query.shape[1]} or 1, …)"
    require(fits, f"mask must have the shape {wanted}; got {tuple(mask.shape)}.")
