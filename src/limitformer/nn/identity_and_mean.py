r"""The terms that shaped attention adds to the softmax: γ₁ v − γ₂ C̄ v, forward and backward, at the cost of a sum.

Autograd would store the means, and a product for each head; here only the values are stored. Gains are in float32 or
finer, and so is the result: a gain of 16 bits would move in steps of 1/256.

In shapes: b batch, h heads, g key/value heads, q queries, k keys, d head_dim.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from limitformer.base.errors import InputError
from limitformer.nn.strengths import at_least_float32
from limitformer.nn.visibility import Visibility

Strength = float | Annotated[Tensor, "h", "1", ""]


@dataclass(frozen=True, eq=False)
class QueryPlaces:
    """The places of the queries among the keys: `positions`, or the last `queries`."""

    queries: int
    positions: Tensor | None

    def own(self, value: Tensor) -> Tensor:
        """Return the values (b, g, q, d) at the places of the queries."""
        if self.positions is None:
            whole = self.queries == value.shape[-2]
            return value if whole else value.narrow(-2, value.shape[-2] - self.queries, self.queries)
        return value.gather(-2, self.index(value))

    def add_own(self, total: Tensor, gradient: Tensor) -> Tensor:
        """Add the adjoint of `own`, applied to `gradient` (b, g, q, d), to `total` (b, g, k, d) in place."""
        if self.positions is None:
            total.narrow(-2, total.shape[-2] - self.queries, self.queries).add_(gradient)
            return total
        return total.scatter_add_(-2, self.index(total), gradient)

    def index(self, value: Tensor) -> Tensor:
        """Return the positions expanded to (b, g, q, d)."""
        assert self.positions is not None
        rows = self.positions[None] if self.positions.dim() == 1 else self.positions
        return rows[:, None, :, None].expand(value.shape[0], value.shape[1], -1, value.shape[-1])


def identity_and_mean_terms(
    value: Tensor, mask: Visibility, gamma1: Strength, gamma2: Strength, groups: tuple[int, int], places: QueryPlaces
) -> Tensor | None:
    """Return γ₁ v − γ₂ C̄ v (b, g, h/g, q, d) in float32 or finer; None if both gains are the number 0."""
    u = by_group(gamma1, groups, value) if has_term(gamma1) else None
    w = -by_group(gamma2, groups, value) if has_term(gamma2) else None
    if u is None and w is None:
        return None
    if u is None:
        u = value.new_zeros(1, dtype=at_least_float32(value.dtype))
    trained_mask = mask.mask is not None and mask.mask.requires_grad
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or trained_mask:
        return weighted_terms(value, u, w, mask, groups, places)
    tensors = (mask.mask, mask.seen, mask.padding, places.positions)
    result: Tensor = WeightedTerms.apply(value, u, w, *tensors, Visibility(mean=mask.mean), groups, places.queries)
    return result


def weighted_terms(
    value: Tensor, u: Tensor, w: Tensor | None, mask: Visibility, groups: tuple[int, int], places: QueryPlaces
) -> Tensor:
    """Return u v + w C̄ v, where w is −γ₂."""
    own = places.own(value)[:, :, None].expand(-1, -1, groups[1], -1, -1)
    if w is None:
        return u * own
    return torch.addcmul(w * grouped(mask.means(value), groups), u, own)


class WeightedTerms(torch.autograd.Function):
    """u v + w C̄ v, which stores only the values for the backward pass: means are cheaper to compute again.

    The tensors of the mask and the positions are arguments of their own, so that PyTorch sees changes and maps of them.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, u: Tensor, w: Tensor | None, *arguments: Any) -> Tensor:
        return weighted_terms(value, u, w, *arguments_of_terms(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:7])
        ctx.constants = inputs[7:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        value, u, w, *tensors = ctx.saved_tensors
        mask, groups, places = arguments_of_terms(*tensors, *ctx.constants)
        of_u = of_w = of_value = None
        if ctx.needs_input_grad[1]:
            of_u = inner(gradient, places.own(value)).sum_to_size(u.shape)
        if w is not None:
            of_w, of_value = through_means(value, gradient, w, mask, groups)
        whole = value_gradient(value, gradient, u, of_value, places) if ctx.needs_input_grad[0] else None
        return whole, of_u, of_w, *[None] * 7


def arguments_of_terms(
    mask: Tensor | None, seen: Tensor | None, padding: Tensor | None, positions: Tensor | None,
    kind: Visibility, groups: tuple[int, int], queries: int,
) -> tuple[Visibility, tuple[int, int], QueryPlaces]:  # fmt: skip
    """Return the last arguments of `weighted_terms` from those of `WeightedTerms.forward`."""
    return replace(kind, mask=mask, seen=seen, padding=padding), groups, QueryPlaces(queries, positions)


def through_means(
    value: Tensor, gradient: Tensor, w: Tensor, mask: Visibility, groups: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of w C̄ v by w and by v."""
    keys = value.shape[-2]
    one = mask.mean == "all" or (mask.mask is not None and mask.mean == "rows" and mask.mask.shape[-2] == 1)
    if groups[1] == 1 and not one:  # ⟨D, C̄ v⟩ = ⟨C̄ᵀ D, v⟩, and C̄ᵀ D is needed anyway
        back = mask.adjoint(gradient, keys)[:, :, None]
        return inner(back, value).sum_to_size(w.shape), (back * w).squeeze(2)
    through = gradient.sum(-2, keepdim=True) if one else gradient  # all queries have one mean
    of_w = (through * grouped(mask.means(value), groups)).sum_to_size(w.shape)
    return of_w, mask.adjoint(through * w, keys)


def inner(x: Tensor, value: Tensor) -> Tensor:
    """Return inner products (b, g, r, q, 1) of `x` (b, g, r, q, d) and values (b, g, q, d)."""
    return torch.linalg.vecdot(x, value[:, :, None].to(x.dtype))[..., None]


def value_gradient(value: Tensor, gradient: Tensor, u: Tensor, of_means: Tensor | None, places: QueryPlaces) -> Tensor:
    """Add the gradient of u v by v to `of_means`, that of w C̄ v."""
    single = gradient.shape[2] == 1
    whole = places.positions is None and places.queries == value.shape[-2]
    if whole and single and of_means is not None:
        factor = u.squeeze(1) if u.dim() > 1 else u
        return torch.addcmul(of_means, factor, gradient.squeeze(2))
    own = (gradient * u).squeeze(2) if single else (gradient * u).sum(2)
    if of_means is None and whole:
        return own
    full = torch.zeros_like(value, dtype=own.dtype) if of_means is None else of_means.expand_as(value).clone()
    return places.add_own(full, own)


def grouped(x: Tensor, groups: tuple[int, int]) -> Tensor:
    """Reshape (b, 1 | g | h, …) to (b, 1 | g, 1 | h/g, …)."""
    return x.unflatten(1, groups) if x.shape[1] == groups[0] * groups[1] else x[:, :, None]


def by_group(gain: Strength, groups: tuple[int, int], like: Tensor) -> Tensor:
    """Return a gain in float32, or finer if `like` is: one number as (1,), (h,) as (g, h/g, 1, 1)."""
    dtype = at_least_float32(like.dtype)
    if not isinstance(gain, Tensor):
        return like.new_full((1,), float(gain), dtype=dtype)
    heads = groups[0] * groups[1]
    if gain.dim() > 1 or gain.numel() not in (1, heads):
        raise InputError(f"gamma1 and gamma2 must be numbers, () or ({heads},); got {tuple(gain.shape)}.")
    gain = gain.to(dtype)
    return gain.view(*groups, 1, 1) if gain.numel() == heads else gain.view(1)


def has_term(gain: Strength) -> bool:
    return isinstance(gain, Tensor) or gain != 0.0
