r"""The pairs of tokens that are visible under the masks of attention logits.

The size of a logit does not show whether it is masked: some modules have large logits. Hence each operation from the
mask to the softmax is followed, with a boolean tensor that broadcasts to the logits (True: visible):

* `masked_fill` and `where` with a number of −30 or less hide the entries that they fill: e⁻³⁰ = 10⁻¹³ has no weight;
* adding a mask (equal for all heads, or at most 0) to logits (…, heads, M, M) or (·, M, M)
  hides entries 30 or more below the mask's largest entry of the row; it also hides rows of −30 or less throughout;
* other terms, such as position biases by head, hide −∞, and entries far below all logits of a fresh module;
* products of two matrices hide nothing; casts, views and multiples preserve visibility.

After any other operation the sizes of the logits decide.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from limitformer.weightless.tensors import Fingerprint, fingerprint

WEIGHTLESS = 30.0  # logits that much below the others have no weight
FAR, BELOW = -9e3, 1e3  # a mask of unknown kind is below FAR, and this much below its row's largest


class Visible:
    """The known visibility of the tensors of a pass, until they are freed or changed."""

    def __init__(self) -> None:
        self.known: Any = WeakTensorKeyDictionary()

    def of(self, x: Any) -> Tensor | None:
        """Return the visibility of x, None where it is not known."""
        entry: tuple[Tensor, Fingerprint] | None = self.known.get(x) if isinstance(x, Tensor) else None
        return entry[0] if entry is not None and entry[1] == state(x) else None

    def before(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Return the visibility of the result of a function, before it changes its arguments in place."""
        rule = RULES.get(func)
        if rule is None:
            return None
        if kwargs:
            args = [*args, *(kwargs[name] for name in ARGUMENTS if name in kwargs)]
            if "alpha" in kwargs and len(args) == 2:
                args[1] = args[1] * kwargs["alpha"]
        if func is Tensor.where:
            args = args[1], args[0], *args[2:]
        return rule(self, *args)

    def note(self, out: Any, visible: Tensor, viewed: bool = False) -> None:
        """Store the visibility of a result; of a view it is reshaped."""
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return
        if visible.dim():
            if viewed and visible.shape[-2:] == out.shape[-2:]:
                visible = visible.reshape(out.shape)
            pairs = zip(visible.shape[::-1], out.shape[::-1], strict=False)
            if visible.dim() > out.dim() or any(mine not in (1, size) for mine, size in pairs):
                return
        self.known[out] = visible, state(out)


def state(x: Tensor) -> Fingerprint:
    """Return numbers that differ after a change in place."""
    return fingerprint(x) if x.is_inference() else (float(x._version),)


def everything(x: Tensor) -> Tensor:
    """Return the visibility of a tensor without a mask, for any shape."""
    return torch.ones((), dtype=torch.bool, device=x.device)


def is_mask(x: Tensor, heads: int) -> bool:
    """Whether a term that is added to logits is equal for all heads, or at most 0."""
    if x.dim() < 3 or x.shape[-3] < heads:
        return True
    x = x.detach()
    first_is_negative = x.numel() > 0 and not bool((x.flatten(0, -3)[0] > 0).any())  # cheap, and excludes most biases
    return first_is_negative and float(x.amax()) == 0


def visible_in(x: Tensor, heads: int) -> Tensor:
    """Return the visibility of a term from its entries."""
    if not x.dim() or x.shape[-1] == 1:
        return everything(x)
    if not is_mask(x, heads):
        return visible_by_size(x)
    most = x.amax(-1, keepdim=True)
    return (x > most - WEIGHTLESS) & (most > -WEIGHTLESS)


def visible_by_size(x: Tensor) -> Tensor:
    """Return the visibility that follows from the sizes of logits."""
    most = x.amax(-1, keepdim=True)
    return (x > -torch.inf) & (most >= FAR) & ((x >= FAR) | (x >= most - BELOW))


def sum_of(known: Visible, x: Any, y: Any, *_: Any) -> Tensor | None:
    if not isinstance(y, Tensor) or not isinstance(x, Tensor):
        return known.of(x if isinstance(x, Tensor) else y)
    if max(x.dim(), y.dim()) not in (3, 4, 5) or not x.is_floating_point() or not y.is_floating_point():
        return None
    heads = max(each.shape[-3] for each in (x, y) if each.dim() > 2)
    own = [known.of(each) for each in (x, y)]
    followed = any(each is not None for each in own)
    if not followed and max(x.dim(), y.dim()) == 3:  # mostly the stream and a branch
        return None
    terms = [
        visible_in(each.detach(), heads) if one is None else one
        for each, one in zip((x, y), own, strict=True)
        if followed or is_mask(each, heads)
    ]
    return terms[0] & terms[1] if len(terms) > 1 else terms[0] if terms else None


def difference_of(known: Visible, x: Any, y: Any, *_: Any) -> Tensor | None:
    if isinstance(x, Tensor) and isinstance(y, Tensor) and max(x.dim(), y.dim()) in (3, 4, 5) and y.is_floating_point():
        y = -y
    return sum_of(known, x, y)


def masked_fill(known: Visible, x: Any, mask: Any, value: Any) -> Tensor | None:
    """`masked_fill`: x where a mask is false."""
    own = known.of(x)
    if not is_low(value) or not isinstance(mask, Tensor):
        return own
    return ~mask if own is None else own & ~mask


def where(known: Visible, condition: Any, x: Any = None, y: Any = None, *_: Any) -> Tensor | None:
    """`where`: x where a condition is true, else y."""
    if not isinstance(condition, Tensor) or x is None or y is None:
        return None
    condition = condition.bool()
    if is_low(y) and not is_low(x):
        own, chosen_entries = known.of(x), condition
    elif is_low(x) and not is_low(y):
        own, chosen_entries = known.of(y), ~condition
    else:
        return None
    return chosen_entries if own is None else own & chosen_entries


def is_low(value: Any) -> bool:
    """Whether a number, or each entry of a tensor, has no weight after a softmax."""
    if isinstance(value, Tensor):
        return value.is_floating_point() and bool((value.detach() <= -WEIGHTLESS).all())
    return isinstance(value, float | int) and value <= -WEIGHTLESS


def product(known: Visible, x: Any, y: Any, *_: Any) -> Tensor | None:
    """A product of two matrices hides nothing."""
    return everything(x) if isinstance(x, Tensor) and isinstance(y, Tensor) and x.dim() >= 3 else None


def multiple(known: Visible, x: Any, y: Any, *_: Any) -> Tensor | None:
    """λx or x/λ, with λ constant along a row."""
    for logits, factor in ((x, y), (y, x)):
        own = known.of(logits)
        along = not factor.dim() or factor.shape[-1] == 1 if isinstance(factor, Tensor) else factor > 0
        if own is not None and along:
            return own
    return None


def view(known: Visible, x: Any, *_: Any) -> Tensor | None:
    """A view: the visibility in the shape of x, which `note` reshapes."""
    own = known.of(x)
    return own if own is None or not own.dim() else own.expand(x.shape)


ARGUMENTS = ("condition", "self", "input", "equation", "other", "mat2", "mask", "value")
Rule = Callable[..., Tensor | None]
VIEWS: Any = (torch.reshape, Tensor.reshape, Tensor.view, torch.unflatten, Tensor.unflatten, torch.flatten,
              Tensor.flatten, torch.squeeze, Tensor.squeeze, torch.unsqueeze, Tensor.unsqueeze)  # fmt: skip
FUNCTIONS: dict[Rule, Any] = {
    sum_of: (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__),
    difference_of: (torch.sub, torch.subtract, Tensor.sub, Tensor.subtract, Tensor.sub_, Tensor.__sub__,
                    Tensor.__isub__),
    masked_fill: (torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_),
    where: (torch.where, Tensor.where),
    product: (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm),
    lambda known, equation, *operands: product(known, *operands) if len(operands) == 2 else None: (torch.einsum,),
    multiple: (torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.mul_, Tensor.__mul__,
               Tensor.__rmul__, Tensor.__imul__, torch.div, torch.divide, torch.true_divide, Tensor.div,
               Tensor.divide, Tensor.true_divide, Tensor.div_, Tensor.__truediv__, Tensor.__itruediv__),
    lambda known, x, *_: known.of(x): (  # monotone
        Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type, Tensor.type_as,
        Tensor.contiguous, Tensor.clone, torch.clone, Tensor.detach, torch.clamp, Tensor.clamp, torch.max,
        torch.maximum, Tensor.maximum, torch.nan_to_num, Tensor.nan_to_num, functional.dropout),
    view: VIEWS,
}  # fmt: skip
RULES: dict[Any, Rule] = {func: rule for rule, functions in FUNCTIONS.items() for func in functions}


def attention_formula(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, weights and visibility of torch's fused attention, whose heads may share keys."""
    if k.shape[-3] != q.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    visible = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device)
    if causal:
        visible = visible.tril()
        logits = logits.masked_fill(~visible, -torch.inf)
    if mask is not None:
        if allowed is None:
            allowed = mask if mask.dtype == torch.bool else visible_in(mask, q.shape[-3])
        visible = visible & allowed
        logits = logits + mask if mask.dtype != torch.bool else logits.masked_fill(~mask, -torch.inf)
    return logits, logits.softmax(-1), visible


def visible_by_masks(logits: Tensor, attention: Tensor | None, padding: Tensor | None) -> Tensor:
    """Return the visibility under the masks of torch's multi-head attention, where True hides."""
    batch, heads, tokens, others = logits.shape
    visible = torch.ones((batch, 1, tokens, others), dtype=torch.bool, device=logits.device)
    for mask in (attention, padding):
        if mask is None:
            continue
        mask = mask[:, None, None] if mask is padding and mask.dim() == 2 else mask
        mask = mask.unflatten(0, (batch, heads)) if mask.dim() == 3 and len(mask) == batch * heads else mask
        allowed = ~mask if mask.dtype == torch.bool else visible_in(mask, heads)
        more = others - allowed.shape[-1]  # keys that torch appends
        visible = visible & (functional.pad(allowed, (0, more), value=True) if more else allowed)
    return visible
