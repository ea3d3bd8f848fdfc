r"""`Measure`, which watches the stream, its branches and the heads while tokens go through a module.

*Blocks* are the modules of its outermost lists that map tokens (B, M, n) to tokens of the same shape (`blocks`). The
*stream* is their input. Inside a block, an addition x + f of the stream x and a tensor f of the same shape ends a
sublayer, whose branch is f. The sum, or a norm of it, is the new stream; λx counts as x. A softmax of logits
(B, heads, M, ·) is attention; only summaries by head are stored.

  covariance   V = X Xᵀ/n of the stream before each block and after the last (S, layers + 1, T, T),
  inside       V after each sublayer (S, layers, sublayers, T, T),
  branch       √(|f|²/(T n)) (S, layers, sublayers),
  step         |X' − X|/|X| from block to block (S, layers),
  largest      largest |x| of the stream, and typical: its median (S, layers + 1),
  entropy      of a row of attention, mean over those that see two tokens or more (S, layers, heads),
  seen         number of tokens that such a row sees,
  spread       √ of the mean variance of a row's logits, and the largest logit of a visible pair.

S samples; T tokens of all sequences of a sample, without padding. A stream (M, B, n) is transposed first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from limitformer.weightless.blocks import is_norm, stream_axis, tokens_among
from limitformer.weightless.implicit import METADATA, Implicit
from limitformer.weightless.masks import VIEWS, Visible, attention_formula, visible_by_masks, visible_by_size
from limitformer.weightless.roots import gram
from limitformer.weightless.run import OneSampleOnlyError
from limitformer.weightless.tensors import Marks, marks

ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__}
SCALINGS = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
SOFTMAX = {functional.softmax, torch.softmax, Tensor.softmax}
FUSED = functional.scaled_dot_product_attention
BEFORE, INSIDE = "before the blocks", "inside the blocks"  # where a parameter was read


class Measure(TorchFunctionMode):
    """A mode that measures one pass of `samples` samples, of `rows` sequences each, through `blocks`.

    Args:
        counted: which tokens (B, M) are not padding; None: all.
        axis: the dimension of the stream in which the sequences lie; None: by its sizes.
    """

    def __init__(
        self, blocks: list[nn.Module], samples: int, rows: int = 1, counted: Tensor | None = None,
        axis: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.blocks, self.samples, self.rows, self.counted, self.axis = blocks, samples, rows, counted, axis
        self.ends: list[Tensor] = []  # the stream before the first block and after the last
        self.layer = -1  # index of the running block
        self.stream: list[Tensor] = []  # the tensors of the block that are the stream
        self.sum: tuple[Tensor, Marks, Tensor] | None = None  # the last sum, its marks and its covariance
        self.covariance: list[Tensor] = []
        self.size: dict[str, list[Tensor]] = {"step": [], "largest": [], "typical": []}
        self.before: Tensor | None = None  # the stream a block ago
        self.inside: list[list[Tensor]] = []
        self.branch: list[list[Tensor]] = []
        self.heads: list[dict[str, Tensor]] = []
        self.gradient: dict[int, Tensor] = {}
        self.hooks: list[Any] = []
        self.used: set[Any] = set()  # parameters that were read: ids, and names of those without entries
        self.before_blocks: frozenset[Any] = frozenset()  # those that were read before the first block
        self.inside_blocks: frozenset[Any] = frozenset()  # those that were read up to the end of the last block
        self.visible = Visible()

    def __enter__(self) -> "Measure":
        for block in self.blocks:
            self.hooks.append(block.register_forward_pre_hook(self.before_block, with_kwargs=True))
            self.hooks.append(block.register_forward_hook(self.after_block, with_kwargs=True))
        for block in self.blocks:
            for name, part in block.named_modules():
                if is_norm(name, part):
                    self.hooks.append(part.register_forward_hook(self.after_norm))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and measure sums and softmaxes."""
        kwargs = kwargs or {}
        read = self.used if getattr(func, "__name__", "") not in METADATA else None
        check_entries(func, args, read)
        if kwargs:
            check_entries(func, kwargs.values(), read)
        if func is FUSED and self.layer >= 0:
            return self.dot_product_attention(*args, **kwargs)
        if func is functional.multi_head_attention_forward and self.layer >= 0:
            with self.inside_multi_head_attention(args, kwargs):
                return func(*args, **kwargs)
        visible = self.visible.before(func, args, kwargs) if self.layer >= 0 else None
        out = func(*args, **kwargs)
        if visible is not None:
            self.visible.note(out, visible, func in VIEWS)
        if self.layer >= 0 and isinstance(out, Tensor):
            if func in ADDITIONS:
                self.end_sublayer(args, out)
            elif func in SCALINGS:
                self.follow_multiple(args, out)
            elif func in SOFTMAX and out.dim() == 4 and out.shape[0] % self.samples == 0:
                logits = args[0] if args else kwargs["input"]
                self.summarise_attention(logits, out, self.visible.of(logits))
        return out

    def before_block(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        """Measure the stream before a block."""
        x = tokens_among(args, kwargs)
        if x is None:
            return
        self.before_blocks = self.before_blocks or frozenset(self.used)
        if self.axis is None:
            self.axis = stream_axis(x.shape, self.rows, self.samples)
        if self.axis == 1 and self.samples > 1:
            raise OneSampleOnlyError
        self.ends = self.ends or [x]
        self.measure_stream(x)
        self.layer = len(self.covariance) - 1
        self.stream = [x]
        self.inside.append([])
        self.branch.append([])
        self.heads.append({})

    def after_block(self, block: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """Take the output of a block as the end of the stream, until another block begins."""
        if self.layer < 0:  # without tokens it is not a block
            return
        self.last = out if isinstance(out, Tensor) else out[0]
        self.inside_blocks = frozenset(self.used)
        self.layer, self.stream = -1, []

    def finish(self) -> None:
        """Measure the stream after the last block."""
        self.measure_stream(self.last)
        self.ends.append(self.last)
        self.before = self.sum = None
        del self.last

    def mixes(self) -> bool:
        """Whether the last token depends on sequences other than its own; needs a pass with gradients."""
        first, last = self.ends
        if not last.requires_grad or not first.requires_grad or first.dim() != 3 or last.dim() != 3:
            return False
        direction = torch.linspace(-1.0, 2.0, last.shape[-1], dtype=last.dtype, device=last.device)
        (gradient,) = torch.autograd.grad(last[-1, -1] @ direction, first, allow_unused=True)
        if gradient is None:
            return False
        own = gradient.shape[self.axis or 0] // self.rows  # indices along the dimension that one sequence has
        return bool((gradient.movedim(self.axis or 0, 0)[:-own] != 0).any())

    def measure_stream(self, x: Tensor) -> None:
        """Measure V and sizes of the stream, and hook the norm of its gradient."""
        place = len(self.covariance)
        known = self.sum[2] if self.sum and self.sum[0] is x and self.sum[1] == marks(x) else None
        self.covariance.append(self.gram(x) if known is None else known)
        tokens = self.by_sample(x).flatten(1)
        if self.before is not None and self.before.shape == tokens.shape:
            self.size["step"].append(norm(tokens - self.before) / norm(self.before))
        size = tokens.abs()
        largest = size.amax(1)
        self.size["largest"].append(largest.double())
        self.size["typical"].append(torch.where(largest.isnan(), largest, median(size)).double())
        self.before = tokens
        if x.requires_grad:

            def note_gradient(gradient: Tensor) -> None:
                self.gradient[place] = self.by_sample(gradient).double().square().sum((-1, -2)).sqrt()

            x.register_hook(note_gradient)

    def end_sublayer(self, args: Any, out: Tensor) -> None:
        """End a sublayer if the stream is a term of the sum `out`."""
        if len(args) < 2 or not all(isinstance(a, Tensor) for a in args[:2]) or out.dim() != 3:
            return
        stream = next((a for a in args[:2] if any(a is x for x in self.stream)), None)
        if stream is None or args[0].shape != args[1].shape:
            return
        branch = args[1] if stream is args[0] else args[0]
        branch = out - stream if branch is out else branch  # f += x
        f, covariance = self.by_sample(branch).flatten(1), self.gram(out)
        self.branch[-1].append(norm(f) / f.shape[1] ** 0.5)
        self.inside[-1].append(covariance)
        self.stream, self.sum = [out], (out, marks(out), covariance)

    def follow_multiple(self, args: Any, out: Tensor) -> None:
        """Count a multiple λx of the stream as the stream."""
        number = any(isinstance(a, float | int) or (isinstance(a, Tensor) and a.dim() < 2) for a in args)
        if number and any(a is x for a in args for x in self.stream):
            self.stream.append(out)

    def after_norm(self, part: nn.Module, args: Any, out: Any) -> None:
        """Count a norm of the stream as the stream: the next sum may be with it."""
        if self.layer >= 0 and args and any(args[0] is x for x in self.stream) and self.inside[-1]:
            self.stream.append(out)

    def summarise_attention(self, logits: Tensor, weights: Tensor, visible: Tensor | None) -> None:
        """Summarise the first attention of a block by head; unknown visibility follows from the sizes of logits."""
        if not self.heads[-1]:
            logits = logits.detach().float()
            visible = visible_by_size(logits) if visible is None else visible & (logits > -torch.inf)
            self.heads[-1] = self.by_head(logits, weights.detach().float(), visible)

    def by_head(self, logits: Tensor, weights: Tensor, visible: Tensor) -> dict[str, Tensor]:
        """Summarise logits (S·B, h, M, ·) and their softmax; each summary is (S, h)."""
        most = logits.amax(-1, keepdim=True)
        seen = visible.sum(-1)
        rows = (seen > 1).double()
        if self.counted is not None and self.counted.shape[-1] == rows.shape[-1]:
            rows = rows * self.counted.repeat(self.samples, 1)[:, None]
        mask = visible.to(logits.dtype)
        below = (logits - most).clamp_(min=torch.finfo(logits.dtype).min)  # log(weight/largest weight)
        entropy = -((weights * below).sum(-1) + weights.sum(-1) * weights.amax(-1).log()).double()
        below.mul_(mask)
        mean = below.sum(-1, keepdim=True) / seen[..., None].clamp(min=1)
        square = torch.linalg.vector_norm((below - mean).mul_(mask), dim=-1).double().square() / seen.clamp(min=1)
        largest = logits.masked_fill(~visible, -torch.inf).amax((-1, -2)).double()

        def over_rows(values: Tensor) -> Tensor:
            counted = torch.where(rows > 0, values, 0.0)  # a row without visible tokens has no entropy
            return self.mean(counted.sum(-1) / rows.sum(-1).clamp(min=1))

        return {
            "entropy": over_rows(entropy),
            "effective_tokens": over_rows(entropy.exp()),
            "tokens_seen": over_rows(seen.double()),
            "logit_std": over_rows(square).sqrt(),
            "largest_logit": largest.unflatten(0, (self.samples, -1)).amax(1),
        }

    def mean(self, values: Tensor) -> Tensor:
        """Average over a sample's sequences: (S·B, h) to (S, h)."""
        return values.unflatten(0, (self.samples, -1)).mean(1)

    def dot_product_attention(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Call torch's fused attention, and summarise logits and weights of its formula."""
        out = FUSED(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if q.dim() == 4 and q.shape[0] % self.samples == 0:
            with torch.no_grad():
                visible = None if attn_mask is None else self.visible.of(attn_mask)
                self.summarise_attention(*attention_formula(q, k, attn_mask, is_causal, scale, visible))
        return out

    @contextmanager
    def inside_multi_head_attention(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Replace the functions that torch's multi-head attention calls, as no mode sees these calls."""
        softmax_of_torch, heads = functional.softmax, args[4]
        padding, attention = (
            args[index] if len(args) > index else kwargs.get(name)
            for index, name in ((14, "key_padding_mask"), (16, "attn_mask"))
        )

        def softmax(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            out = softmax_of_torch(x, *args, **kwargs)
            if x.dim() == 3 and x.shape[0] % (heads * self.samples) == 0:
                logits, weights = (each.unflatten(0, (-1, heads)) for each in (x, out))
                self.summarise_attention(logits, weights, visible_by_masks(logits, attention, padding))
            return out

        replaced: Any = functional
        replaced.softmax, replaced.scaled_dot_product_attention = softmax, self.dot_product_attention
        try:
            yield
        finally:
            replaced.softmax, replaced.scaled_dot_product_attention = softmax_of_torch, FUSED

    def by_sample(self, x: Tensor) -> Tensor:
        """Reshape tokens (S·B, M, n) to (S, T, n), without padding."""
        x = x.detach().transpose(0, 1) if self.axis == 1 and x.dim() == 3 else x.detach()
        tokens = x.reshape(self.samples, -1, x.shape[-1])
        if self.counted is None or self.counted.numel() != tokens.shape[1]:
            return tokens
        return tokens[:, self.counted.flatten()]

    def gram(self, x: Tensor) -> Tensor:
        return gram(self.by_sample(x)) / x.shape[-1]


class NoEntriesError(Exception):
    """The module reads a tensor without entries."""


def check_entries(func: Any, values: Any, read: set[Any] | None) -> None:
    """Add the parameters among the values to `read`.

    Raises:
        NoEntriesError: a tensor is on the meta device; torch would return uninitialised memory.
    """
    for each in values:
        if isinstance(each, Implicit):
            if read is not None:
                read.add(each.weight.name)
        elif isinstance(each, Tensor):
            if each.is_meta:
                raise NoEntriesError(f"reads a matrix without entries in {getattr(func, '__name__', func)}")
            if read is not None and isinstance(each, nn.Parameter):
                read.add(id(each))
        elif isinstance(each, list | tuple):
            check_entries(func, each, read)


def where_parameters_are_read(module: nn.Module, measure: Measure) -> dict[str, str]:
    """Return where parameters were read, by name: before the first block, or inside the blocks."""
    places = {}
    for name, parameter in module.named_parameters():
        keys = {name, id(parameter)}
        if keys & measure.inside_blocks:
            places[name] = BEFORE if keys & measure.before_blocks else INSIDE
    return places


def median(x: Tensor) -> Tensor:
    """Return the lower median of each sample (S, ·) without NaN, as `torch.median`, which is six times slower."""
    x = x.float() if x.dtype == torch.bfloat16 else x  # NumPy has no bfloat16
    middle = (x.shape[1] - 1) // 2
    return torch.from_numpy(np.partition(x.cpu().numpy(), middle, axis=1)[:, middle]).to(x.device)


def norm(x: Tensor) -> Tensor:
    """Return |x| of each sample (S, ·)."""
    x = x if x.is_floating_point() else x.double()
    return torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
