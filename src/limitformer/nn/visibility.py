r"""Masks, and the mean of the values that each query sees, C̄ v [ST, eqs. 9, 33].

Row i of C̄ is the softmax of zero logits under the mask: 1/mᵢ on the mᵢ tokens that query i sees, 0 elsewhere; under an
additive mask it is the softmax of the mask's row. C̄ v costs as little as the mask's shape allows: a mean without a
mask, a cumulative sum under a causal one (padded or not), one row for all queries if the mask does not depend on the
query (padding), otherwise one product that all heads share. The kind of mask decides this, not its entries: nothing
waits for the device, and `torch.compile` compiles it whole.

Rules, for every kind of mask:

* Boolean: True is seen. Additive: −∞ is unseen, and so is half the least number of the mask's dtype and anything below.
* A query that sees nothing has a row of zeros in the softmax and in C̄: its output is γ₁ v.
* Causal alignment is at the bottom right: the queries are the last of the keys, or at `positions`.

In shapes: b batch, h heads, g key/value heads, q queries, k keys, d head_dim; # marks an axis that may be 1 instead.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn import functional

from limitformer.base.errors import InputError, require

BLOCK = 16  # tokens
Queries = Annotated[Tensor, "b h q d"]
Keys = Annotated[Tensor, "b g k d"]
Mask = Annotated[Tensor, "q k", "#b #h #q k"]
Positions = Annotated[Tensor, "q", "b q"]
OfQueries = Annotated[Tensor, "#b #h #q 1"]


@dataclass(frozen=True, eq=False)
class Visibility:
    """A prepared mask; `shaped_attention` takes it instead of a mask, so that layers can share it.

    Attributes:
        mask: the mask of the fused kernel, without empty rows; None shows all.
        causal: whether the kernel's own causal flag replaces the mask.
        seen: (b|1, h|1, q|1, 1), whether a query sees anything; None if all do.
        mean: how C̄ v is computed.
        padding: for "causal", the keys that any query may see; None if all are.
    """

    mask: Annotated[Tensor, "#b #h #q k"] | None = None
    causal: bool = False
    seen: OfQueries | None = None
    mean: Literal["all", "causal", "rows"] = "all"
    padding: Annotated[Tensor, "#b 1 k 1"] | None = None

    def means(self, value: Keys) -> Annotated[Tensor, "b g #q d", "b h #q d"]:
        """Compute C̄ v, for h heads if the mask has heads."""
        if self.mean == "all":
            return value.mean(-2, keepdim=True)
        if self.mean == "causal":
            return causal_sum(value, self.shares(value), self.padding)
        return weighted_sum(self.weights(value), value)

    def adjoint(self, gradient: Annotated[Tensor, "b g r #q d"], keys: int) -> Annotated[Tensor, "b g #k d"]:
        """Apply the adjoint of `means`; r = h/g."""
        if self.mean == "all":
            return gradient.sum((2, 3)).unsqueeze(2) / keys
        if self.mean == "causal":
            single = gradient.sum(2) if gradient.shape[2] > 1 else gradient.squeeze(2)
            return causal_sum(single, self.padding, self.shares(gradient), backward=True)
        return weighted_adjoint(self.weights(gradient), gradient)

    def shares(self, like: Annotated[Tensor, "..."]) -> OfQueries:
        """Return 1/mᵢ of a causal mask, 0 for a query that sees nothing."""
        exact = torch.promote_types(like.dtype, torch.float32)  # bfloat16 counts to 256 only
        if self.padding is None:
            return 1 / torch.arange(1, like.shape[-2] + 1, device=like.device, dtype=exact)[None, None, :, None]
        counts = self.padding.cumsum(-2)
        return (counts > 0) / counts.clamp(min=1).to(exact)

    def as_mask(self) -> Mask | None:
        """Return the original mask, without the causal part if `causal` is set."""
        if self.mask is None or self.seen is None:
            return self.mask
        return self.mask & self.seen if self.mask.dtype == torch.bool else hidden_where(self.mask, ~self.seen)

    def weights(self, like: Annotated[Tensor, "..."]) -> Annotated[Tensor, "#b #h #q k"]:
        """Return the rows of C̄, zeros for a query that sees nothing."""
        assert self.mask is not None
        exact = torch.promote_types(like.dtype, torch.float32)
        if self.mask.dtype == torch.bool:
            rows = self.mask / self.mask.sum(-1, keepdim=True).to(exact)
        else:
            rows = torch.softmax(self.mask, -1, dtype=exact)
        return (rows if self.seen is None else rows * self.seen).to(like.dtype)


def visibility(
    mask: Mask | None,
    *,
    is_causal: bool = False,
    queries: int,
    keys: int,
    positions: Positions | None = None,
    device: torch.device | str | None = None,
) -> Visibility:
    """Prepare a mask.

    Args:
        mask: boolean or additive, (q, k) or (b|1, h|1, q|1, k); None shows everything.
        is_causal: whether, in addition to the mask, a query sees no key after its own position.
        queries, keys: q and k.
        positions: (q,) or (b, q), places of the queries among the keys; None: they are the last.
        device: device of the tensors; unused with a mask.
    """
    mask = None if mask is None else as_four_axes(mask, queries, keys)
    if not is_causal or (queries == 1 and positions is None):
        return Visibility() if mask is None else by_rows(mask)
    require(queries <= keys, f"Causal attention needs at least as many keys as queries; got {queries} and {keys}.")
    padding = mask is None or (mask.dtype == torch.bool and mask.shape[-3:-1] == (1, 1))
    square = queries == keys and positions is None
    if mask is None and square:
        return Visibility(causal=True, mean="causal")
    lower = causal_mask(queries, keys, positions, device if mask is None else mask.device)
    joined = lower if mask is None else hidden_where(mask, ~lower)
    if not (padding and square):
        return by_rows(joined)
    assert mask is not None
    safe, seen = without_empty_rows(joined)
    return Visibility(mask=safe, seen=seen, mean="causal", padding=mask.mT)


def as_four_axes(mask: Tensor, queries: int, keys: int) -> Tensor:
    """Return a mask as (b|1, h|1, q|1, k), with axes that only repeat cut to one.

    Raises:
        InputError: another shape or dtype.
    """
    four = mask[None, None] if mask.dim() == 2 else mask
    fits = four.dim() == 4 and four.shape[-1] == keys and four.shape[-2] in (1, queries)
    if not fits:
        raise InputError(
            f"mask must have the shape (batch or 1, heads or 1, {queries} or 1, {keys}) or ({queries}, {keys}) for "
            f"{queries} queries and {keys} keys; got {tuple(mask.shape)}."
        )
    kind = mask.dtype == torch.bool or mask.dtype.is_floating_point
    require(kind, f"mask must be boolean (True is seen) or floating (added); got {mask.dtype}. Nearest: mask.bool().")
    for axis in range(3):
        if four.shape[axis] > 1 and four.stride(axis) == 0:
            four = four.narrow(axis, 0, 1)
    return four


def by_rows(mask: Tensor) -> Visibility:
    """Prepare a mask of any kind: C̄ is the softmax of its rows."""
    safe, seen = without_empty_rows(mask)
    return Visibility(mask=safe, seen=seen, mean="rows")


def without_empty_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Let empty rows see all, and return which rows saw anything: kernels differ on empty rows, some return NaN."""
    if mask.dtype == torch.bool:
        seen = mask.any(-1, keepdim=True)
        return mask | ~seen, seen
    unseen = mask <= torch.finfo(mask.dtype).min / 2
    seen = ~unseen.all(-1, keepdim=True)
    return mask.masked_fill(unseen, -torch.inf).masked_fill(~seen, 0.0), seen


def hidden_where(mask: Tensor, hidden: Tensor) -> Tensor:
    return mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, -torch.inf)


def causal_mask(queries: int, keys: int, positions: Tensor | None, device: torch.device | str | None) -> Tensor:
    """Return the causal mask (b|1, 1, q, k): key ≤ position of the query."""
    if positions is None:
        positions = torch.arange(keys - queries, keys, device=device)
    rows = positions[None] if positions.dim() == 1 else positions
    return torch.arange(keys, device=positions.device) <= rows[:, None, :, None]


def causal_sum(value: Tensor, rows: Tensor | None, columns: Tensor | None, backward: bool = False) -> Tensor:
    """Compute rᵢ Σₖ cₖ vₖ over k ≤ i, or k ≥ i, of values (b, g, k, d); r and c are (b|1, 1, k, 1), or ones.

    It runs in blocks of `BLOCK` tokens: a triangle within each, and the sums of the others. With tokens before heads,
    the layout of projections, it is one product for all heads; `cumsum` takes twice the time.
    """
    heads, keys = value.shape[1:3]
    blocks = in_blocks(value.transpose(1, 2).flatten(2))
    r, c = (in_blocks(factors_of(x, value)) for x in (rows, columns))  # (b|1, blocks, BLOCK, 1)
    totals = (c.mT @ blocks).squeeze(2)
    past = totals.cumsum(1)
    others = (past[:, -1:] - past if backward else past - totals)[:, :, None]
    triangle = torch.ones(BLOCK, BLOCK, dtype=value.dtype, device=value.device)
    triangle = r * (triangle.triu() if backward else triangle.tril()) * c.mT
    sums = torch.addcmul(triangle @ blocks, r, others)
    return sums.flatten(1, 2)[:, :keys].unflatten(2, (heads, -1)).transpose(1, 2)


def in_blocks(x: Tensor) -> Tensor:
    """Reshape (b, k, n) to (b, blocks, BLOCK, n), with zeros at the end."""
    keys = x.shape[1]
    return (functional.pad(x, (0, 0, 0, -keys % BLOCK)) if keys % BLOCK else x).unflatten(1, (-1, BLOCK))


def factors_of(x: Tensor | None, value: Tensor) -> Tensor:
    """Return the factors (b|1, k, 1) of each token; None stands for ones."""
    return value.new_ones(1, value.shape[2], 1) if x is None else x[:, 0].to(value.dtype)


def weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    """Compute Σₖ wₖ vₖ of weights (b|1, h|1, q|1, k) and values (b, g, k, d): (b, g|h, q|1, d).

    The weights are never repeated over batch or heads, as `matmul` would: that is the memory of A itself.
    """
    batch = "" if weights.shape[0] == 1 else "b"
    weights = weights if batch else weights.squeeze(0)
    if weights.shape[-3] == 1:
        return torch.einsum(f"{batch}qk,bgkd->bgqd", weights.squeeze(-3), value)
    by_group = weights.unflatten(-3, (value.shape[1], -1))
    return torch.einsum(f"{batch}ghqk,bgkd->bghqd", by_group, value).flatten(1, 2)


def weighted_adjoint(weights: Tensor, gradient: Tensor) -> Tensor:
    """Apply the adjoint of `weighted_sum`: (b, g, h/g, q|1, d) to (b, g, k, d)."""
    batch = "" if weights.shape[0] == 1 else "b"
    weights = weights if batch else weights.squeeze(0)
    if weights.shape[-3] == 1:
        return torch.einsum(f"{batch}qk,bgqd->bgkd", weights.squeeze(-3), gradient.sum(2))
    by_group = weights.unflatten(-3, gradient.shape[1:3])
    return torch.einsum(f"{batch}ghqk,bghqd->bgkd", by_group, gradient)
