r"""Which pairs of tokens a mask lets see each other, by what was done to the logits rather than by how large they are.

A logit far below its row's largest is masked in one module and a large logit in another. So masks are followed from
where they act to the softmax, as what is visible (broadcast to the logits' shape):

* `masked_fill` and `where` with a number of −30 or less hide what they fill: e⁻³⁰ = 10⁻¹³ has no weight,
* an addition of logits (·, heads, M, M) and a tensor that is the same for all heads, or that is 0 at most, hides what
  is 30 or more below the tensor's largest entry of the row, and rows that are −30 or less throughout,
* other terms, such as position biases by head, hide what is −∞, or far below all logits of a fresh module,
* products of two matrices hide nothing; casts, views, and multiples keep what is hidden; all else is not understood.

Logits whose way is not understood have masks by their size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from limitformer.weightless.tensors import Marks, marks

WEIGHTLESS = 30.0  # logits that much below the others have no weight
FAR, BELOW = -9e3, 1e3  # a mask of a kind unknown is below FAR, and that much below its row's largest


class Visible:
    """What is visible in the tensors of a pass, as long as they live and stay as they are."""

    def __init__(self) -> None:
        self.known: Any = WeakTensorKeyDictionary()

    def of(self, x: Any) -> Tensor | None:
        """What is visible in x, if that is known."""
        found: tuple[Tensor, Marks] | None = self.known.get(x) if isinstance(x, Tensor) else None
        return found[0] if found is not None and found[1] == state(x) else None

    def before(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """What will be visible in what a function returns; asked before it changes its arguments."""
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

    def keep(self, out: Any, visible: Tensor, viewed: bool = False) -> None:
        """That so much is visible in a tensor, or in one that it is a view of."""
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return
        if visible.dim():
            if viewed and visible.shape[-2:] == out.shape[-2:]:
                visible = visible.reshape(out.shape)
            pairs = zip(visible.shape[::-1], out.shape[::-1], strict=False)
            if visible.dim() > out.dim() or any(seen not in (1, size) for seen, size in pairs):
                return
        self.known[out] = visible, state(out)

    def of_term(self, x: Tensor, heads: int) -> Tensor:
        """What an addend of logits of so many heads lets see."""
        known = self.of(x)
        return visible_in(x.detach(), heads) if known is None else known


def state(x: Tensor) -> Marks:
    """What changes when a tensor is changed in place."""
    return marks(x) if x.is_inference() else (float(x._version),)


def everything(x: Tensor) -> Tensor:
    """All is visible, of any shape."""
    return torch.ones((), dtype=torch.bool, device=x.device)


def is_mask(x: Tensor, heads: int) -> bool:
    """Whether an addend of logits is the same for all heads, or 0 at most; the first matrix tells most others apart."""
    if x.dim() < 3 or x.shape[-3] < heads:
        return True
    x = x.detach()
    return x.numel() > 0 and not bool((x.flatten(0, -3)[0] > 0).any()) and float(x.amax()) == 0


def visible_in(x: Tensor, heads: int) -> Tensor:
    """What an addend lets see of which nothing else is known."""
    if not x.dim() or x.shape[-1] == 1:
        return everything(x)
    if not is_mask(x, heads):
        return visible_by_size(x)
    most = x.amax(-1, keepdim=True)
    return (x > most - WEIGHTLESS) & (most > -WEIGHTLESS)


def visible_by_size(x: Tensor) -> Tensor:
    """What is no mask by its size alone."""
    most = x.amax(-1, keepdim=True)
    return (x > -torch.inf) & (most >= FAR) & ((x >= FAR) | (x >= most - BELOW))


def sum_of(known: Visible, x: Any, y: Any, *_: Any) -> Tensor | None:
    """x + y."""
    if not isinstance(y, Tensor) or not isinstance(x, Tensor):
        return known.of(x if isinstance(x, Tensor) else y)
    if max(x.dim(), y.dim()) != 4 or not x.is_floating_point() or not y.is_floating_point():
        return None
    heads = max(each.shape[-3] for each in (x, y) if each.dim() > 2)
    followed = any(known.of(each) is not None for each in (x, y))
    terms = [each for each in (x, y) if followed or is_mask(each, heads)]
    if not terms:
        return None
    visible = known.of_term(terms[0], heads)
    return visible & known.of_term(terms[1], heads) if len(terms) > 1 else visible


def difference_of(known: Visible, x: Any, y: Any, *_: Any) -> Tensor | None:
    """x − y."""
    if isinstance(x, Tensor) and isinstance(y, Tensor) and max(x.dim(), y.dim()) == 4 and y.is_floating_point():
        y = -y
    return sum_of(known, x, y)


def filled(known: Visible, x: Any, mask: Any, value: Any) -> Tensor | None:
    """x where a mask is false."""
    own = known.of(x)
    if not is_low(value) or not isinstance(mask, Tensor):
        return own
    return ~mask if own is None else own & ~mask


def chosen(known: Visible, condition: Any, x: Any = None, y: Any = None, *_: Any) -> Tensor | None:
    """x where a condition is true, else y."""
    if not isinstance(condition, Tensor) or x is None or y is None:
        return None
    condition = condition.bool()
    if is_low(y) and not is_low(x):
        own, shown = known.of(x), condition
    elif is_low(x) and not is_low(y):
        own, shown = known.of(y), ~condition
    else:
        return None
    return shown if own is None else own & shown


def is_low(value: Any) -> bool:
    """Whether a number, or a tensor throughout, has no weight beside logits."""
    if isinstance(value, Tensor):
        return value.is_floating_point() and bool((value.detach() <= -WEIGHTLESS).all())
    return isinstance(value, float | int) and value <= -WEIGHTLESS


def product(known: Visible, x: Any, y: Any, *_: Any) -> Tensor | None:
    """Of two matrices: nothing is hidden."""
    return everything(x) if isinstance(x, Tensor) and isinstance(y, Tensor) and x.dim() >= 3 else None


def contraction(known: Visible, equation: Any, *operands: Any) -> Tensor | None:
    """The same by `einsum`."""
    first = operands[0] if len(operands) == 2 else None
    return everything(first) if isinstance(first, Tensor) and first.dim() >= 3 else None


def multiple(known: Visible, x: Any, y: Any, *_: Any) -> Tensor | None:
    """λx or x/λ, with λ the same along a row."""
    for logits, factor in ((x, y), (y, x)):
        own = known.of(logits)
        along = not factor.dim() or factor.shape[-1] == 1 if isinstance(factor, Tensor) else factor > 0
        if own is not None and along:
            return own
    return None


def same(known: Visible, x: Any, *_: Any) -> Tensor | None:
    """The same entries, or larger ones for larger ones."""
    return known.of(x)


def viewed(known: Visible, x: Any, *_: Any) -> Tensor | None:
    """Another shape: what is visible in it, where all is."""
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
    filled: (torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_),
    chosen: (torch.where, Tensor.where),
    product: (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm),
    contraction: (torch.einsum,),
    multiple: (torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.mul_, Tensor.__mul__,
               Tensor.__rmul__, Tensor.__imul__, torch.div, torch.divide, torch.true_divide, Tensor.div,
               Tensor.divide, Tensor.true_divide, Tensor.div_, Tensor.__truediv__, Tensor.__itruediv__),
    same: (Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type, Tensor.type_as,
           Tensor.contiguous, Tensor.clone, torch.clone, Tensor.detach, torch.clamp, Tensor.clamp, torch.max,
           torch.maximum, Tensor.maximum, torch.nan_to_num, Tensor.nan_to_num, functional.dropout),
    viewed: VIEWS,
}  # fmt: skip
RULES: dict[Any, Rule] = {func: rule for rule, functions in FUNCTIONS.items() for func in functions}


def formula(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None, shown: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits and weights of torch's fused attention, whose heads may share keys, and what its mask lets see."""
    if k.shape[-3] != q.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    visible = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device)
    if causal:
        visible = visible.tril()
        logits = logits.masked_fill(~visible, -torch.inf)
    if mask is not None:
        if shown is None:
            shown = mask if mask.dtype == torch.bool else visible_in(mask, q.shape[-3])
        visible = visible & shown
        logits = logits + mask if mask.dtype != torch.bool else logits.masked_fill(~mask, -torch.inf)
    return logits, logits.softmax(-1), visible


def visible_by_masks(logits: Tensor, attention: Tensor | None, padding: Tensor | None) -> Tensor:
    """What the masks of torch's attention of several heads let see; they are true where they hide."""
    batch, heads, tokens, others = logits.shape
    visible = torch.ones((batch, 1, tokens, others), dtype=torch.bool, device=logits.device)
    for mask in (attention, padding):
        if mask is None:
            continue
        mask = mask[:, None, None] if mask is padding and mask.dim() == 2 else mask
        mask = mask.unflatten(0, (batch, heads)) if mask.dim() == 3 and len(mask) == batch * heads else mask
        shown = ~mask if mask.dtype == torch.bool else visible_in(mask, heads)
        more = others - shown.shape[-1]  # keys that torch appends
        visible = visible & (functional.pad(shown, (0, more), value=True) if more else shown)
    return visible
