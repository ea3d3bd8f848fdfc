r"""`Heads`, which summarises the first attention of each block by head.

Attention is a softmax over the last dimension whose shape shows sequences and heads: (sequences, heads, M, M) or
(heads, sequences, M, M), (·, M, M) where both are one dimension, or five dimensions where heads are in groups. If the
sizes leave the order open, `heads_come_first` compares weights of sequences that are there twice.

The size of a logit does not show whether it is masked: some modules have large logits. Hence all operations between
the products of pairs and the softmax run twice, the second time with zeros for the products. What is left
are *offsets*: masks, and biases of positions. A pair is hidden if its offset is

* 30 or more below the row's largest, as e⁻³⁰ = 10⁻¹³ has no weight, or in a row of −30 or less throughout; where
  they are biases (positive ones, or some between −30 and 0) it must be so for all heads;
* −∞, or so low that no bias is: below −9000, or 1000 below the row's largest.

Without offsets (no products of pairs, or weights in between) only the second rule holds, for the logits.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from limitformer.weightless.interpreter import ByMemory, Observer, Op
from limitformer.weightless.observers.stream import ROWS, MeasuredStack, Streams
from limitformer.weightless.ops import CONVOLUTION, FUSED, PAIRS, PRODUCT, SOFTMAX
from limitformer.weightless.tensors import mapped, storage, tensors_in

WEIGHTLESS = 30.0  # logits that much below the others have no weight
FAR, BELOW = -9e3, 1e3  # a mask of unknown kind is below FAR, or this much below its row's largest
COMPARED = 8  # attention weights
AGREEMENT = 1e-3  # of equal sequences, of which rounding may make other numbers


class UnclearHeadsError(Exception):
    """The sizes of attention weights do not show whether heads or sequences come first."""


class Waiting(NamedTuple):
    """A tensor that has no gradient yet while its operation is seen, and what notes its gradient."""

    source: Tensor  # the weights, or the output of fused attention
    values: Tensor | None  # of fused attention
    note: Callable[[Tensor], None]  # the gradient by the weights


class Heads(Observer):
    """An observer of the blocks that `stream` measures.

    Args:
        heads_first: whether attention weights have heads before sequences, if their sizes do not show it; None: not
            known.
    """

    def __init__(self, stream: Streams, module: nn.Module, heads_first: bool | None) -> None:
        self.stream, self.heads_first = stream, heads_first
        self.watched = [name for name, part in module.named_modules() if isinstance(part, nn.MultiheadAttention)]
        self.heads: int | None = None  # of the running attention of torch, whose weights are (sequences · heads, M, M)
        self.offsets = ByMemory()  # tensors of which a view of a tensor takes the same view
        self.kind: Any = None  # sublayer and form of the block's first attention of one head
        self.waiting: Waiting | None = None

    def enter(self, name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        assert isinstance(part, nn.MultiheadAttention)
        self.heads = part.num_heads

    def leave(self, name: str, part: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        self.heads = None

    def see(self, op: Op) -> None:
        """Follow the offsets, and summarise a softmax."""
        stack = self.stream.stack
        self.note_gradient(op)
        if stack is None or (stack.heads[-1] and self.kind is None):
            if self.offsets.known:
                self.offsets = ByMemory()
            return
        if op.kind == SOFTMAX:
            if op.args[1] in (-1, op.out.dim() - 1):
                self.summarise(stack, op.args[0], op.out)
        elif op.kind == PAIRS:
            self.offsets.forget_freed()
            zeros = torch.zeros_like(op.out)
            beta = op.kwargs.get("beta", 1)
            self.offsets.put(op.out, zeros.add_(op.args[0], alpha=beta) if len(op.args) > 2 and beta else zeros)
        elif op.kind not in (PRODUCT, CONVOLUTION) and self.offsets.known:
            self.follow(op)

    def follow(self, op: Op) -> None:
        """Run an operation on the offsets of its arguments; one in place changes the offset that a tensor has."""
        tensors = tensors_in((op.args, op.kwargs))
        if not isinstance(op.out, Tensor) or not any(storage(each) in self.offsets.known for each in tensors):
            return
        known = self.offsets.get(op.out) is not None
        if not known and (not op.out.is_floating_point() or storage(op.out) in map(storage, tensors)):
            return
        with suppress(RuntimeError):  # zeros may have no inverse
            out = op.func(*mapped(op.args, self.offset_or_entries), **mapped(op.kwargs, self.offset_or_entries))
            if not known:
                self.offsets.forget_freed()
                self.offsets.put(op.out, out)

    def offset_or_entries(self, x: Any) -> Any:
        whole = self.offsets.get(x) if isinstance(x, Tensor) else None
        return x if whole is None else whole.as_strided(x.shape, x.stride(), x.storage_offset())

    def note_gradient(self, op: Op) -> None:
        """Note the gradient by the last softmax, or of fused attention, whose parts have none."""
        if self.waiting is None:
            return
        source, values, note = self.waiting
        if source.requires_grad:
            source.register_hook(note if values is None else lambda g: note(g @ values.mT))
        if source.requires_grad or self.stream.stack is None:
            self.waiting = None
        elif op.kind == FUSED:
            heads = op.args[0].shape[-3] // op.args[2].shape[-3]  # that share values
            self.waiting = Waiting(op.out[0], op.args[2].detach().repeat_interleave(heads, -3), note)

    def summarise(self, stack: MeasuredStack, logits: Tensor, weights: Tensor) -> None:
        """Summarise the first attention of a block by head.

        A loop over heads has several softmaxes of one head each, before the next sum with the stream.
        """
        offsets = self.offsets.get(logits)
        kind, heads = (len(stack.inside[-1]), logits.shape, offsets is None), stack.heads[-1]
        if heads and kind != self.kind:
            return
        every = [logits, weights, *([] if offsets is None else [self.offset_or_entries(logits)])]
        by_head = self.split(stack)
        split = [each for each in map(by_head, [x.detach() for x in every]) if each is not None]
        if not split:
            return
        source = weights
        logits, weights, *offset = split
        visible = visible_by_offset(offset[0]) & (logits > -torch.inf) if offset else visible_by_size(logits)
        summary = self.by_head(logits.float(), weights.float(), visible)
        stack.heads[-1] = {key: torch.cat([heads[key], each], 1) for key, each in summary.items()} if heads else summary
        if self.stream.keeps:
            mask = visible.expand(logits.shape)[0, :, -ROWS:]
            rows = logits[0, :, -ROWS:].masked_fill(~mask, 0.0)
            stack.logits[-1].append(rows / mask.sum((-1, -2), keepdim=True).clamp(min=1).sqrt())
            pulls = stack.pulls[-1]  # what notes gradients must not hold the stack
            pulls.append(torch.zeros_like(rows))
            note = partial(note_pull, pulls, len(pulls) - 1, weights[0, :, -ROWS:], by_head)
            self.waiting = Waiting(source, None, note)
        if not heads:
            self.kind = kind if logits.shape[1] == 1 else None

    def split(self, stack: MeasuredStack) -> Callable[[Tensor], Tensor | None]:
        """Return the function that reshapes logits or weights to (sequences, heads, M, ·)."""
        stream, heads = self.stream, self.heads
        samples, sequences = stream.samples, stream.samples * stream.rows
        tokens, heads_first = stack.shape[:-1].numel() // sequences, self.heads_first

        def by_head(x: Tensor) -> Tensor | None:
            if heads is not None and x.dim() == 3 and len(x) % (heads * samples) == 0:
                return x.unflatten(0, (-1, heads))
            return by_sequence_and_head(x, sequences, samples, tokens, heads_first)

        return by_head

    def by_head(self, logits: Tensor, weights: Tensor, visible: Tensor) -> dict[str, Tensor]:
        """Summarise logits (S·B, h, M, ·) and their softmax; each summary is (S, h)."""
        most = logits.amax(-1, keepdim=True)
        seen = visible.sum(-1)
        rows, counted, samples = (seen > 1).double(), self.stream.counted, self.stream.samples
        if counted is not None and counted.shape[-1] == rows.shape[-1]:
            rows = rows * counted.to(rows.device).repeat(samples, 1)[:, None]
        mask = visible.to(logits.dtype)
        below = (logits - most).clamp_(min=torch.finfo(logits.dtype).min)  # log(weight/largest weight)
        entropy = -((weights * below).sum(-1) + weights.sum(-1) * weights.amax(-1).log()).double()
        below.mul_(mask)
        mean = below.sum(-1, keepdim=True) / seen[..., None].clamp(min=1)
        square = torch.linalg.vector_norm((below - mean).mul_(mask), dim=-1).double().square() / seen.clamp(min=1)
        largest = logits.masked_fill(~visible, -torch.inf).amax((-1, -2)).double()

        def over_rows(values: Tensor) -> Tensor:
            counted = torch.where(rows > 0, values, 0.0)  # a row without visible tokens has no entropy
            mean = counted.sum(-1) / rows.sum(-1).clamp(min=1)
            return mean.unflatten(0, (samples, -1)).mean(1)

        return {
            "entropy": over_rows(entropy),
            "effective_tokens": over_rows(entropy.exp()),
            "tokens_seen": over_rows(seen.double()),
            "logit_std": over_rows(square).sqrt(),
            "largest_logit": largest.unflatten(0, (samples, -1)).amax(1),
        }


def note_pull(
    pulls: list[Tensor], place: int, weights: Tensor, by_head: Callable[[Tensor], Tensor | None], g: Tensor
) -> None:
    """Note the gradient by rows of logits, from that by the weights of their softmax."""
    split = by_head(g)
    if split is not None:
        g = split[0, :, -ROWS:]
        pulls[place] = weights * (g - (weights * g).sum(-1, keepdim=True))


def by_sequence_and_head(
    x: Tensor, sequences: int, samples: int, tokens: int, heads_first: bool | None
) -> Tensor | None:
    """Return logits or weights as (sequences, heads, M, ·), None of another softmax than that of attention.

    Weights of three dimensions (·, M, M) may be those of experts unless both M are the number of tokens. Those of
    windows of an image have more than one entry a sequence in their first dimension.

    Args:
        sequences: of all samples.
        heads_first: the order if the sizes do not show it; None: not known.

    Raises:
        UnclearHeadsError: the order is needed and not known.
    """
    if x.dim() == 3 and x.shape[1] == x.shape[2] == tokens and x.shape[0] % sequences == 0:
        heads = x.shape[0] // sequences
        if min(heads, sequences) > 1 and known(heads_first):
            return x.unflatten(0, (heads, sequences)).transpose(0, 1)
        return x.unflatten(0, (sequences, heads))
    if x.dim() == 5 and x.shape[0] == sequences and x.shape[3] == tokens:
        doubt = sequences > 1 and sequences in x.shape[1:3]
        return None if doubt and known(heads_first) else x.flatten(1, 2)
    if x.dim() != 4:
        return None
    usual = x.shape[0] == sequences if x.shape[2] == tokens else x.shape[0] % sequences == 0
    if x.shape[1] == sequences and (not usual or (x.shape[0] > 1 and known(heads_first))):
        return x.transpose(0, 1)
    return x if x.shape[0] % samples == 0 else None


def known(heads_first: bool | None) -> bool:
    if heads_first is None:
        raise UnclearHeadsError
    return heads_first


def visible_by_offset(x: Tensor) -> Tensor:
    """Return which pairs are visible by their offsets (sequences, heads, M, ·)."""
    most = x.amax(-1, keepdim=True)
    hidden = (x <= most - WEIGHTLESS) | (most <= -WEIGHTLESS)
    if x.shape[1] > 1 and (float(x.amax()) != 0 or bool(((x > -WEIGHTLESS) & (x < 0)).any())):  # not a mask alone
        hidden = hidden.all(1, keepdim=True)
    return ~hidden & visible_by_size(x)


def visible_by_size(x: Tensor) -> Tensor:
    """Return the visibility that follows from the sizes of logits."""
    most = x.amax(-1, keepdim=True)
    return (x > -torch.inf) & (most >= FAR) & ((x >= FAR) | (x >= most - BELOW))


class FirstWeights(Observer):
    """An observer that keeps the first softmaxes over the last dimension, and results of torch's own attention."""

    def __init__(self) -> None:
        self.results: list[Tensor] = []

    def see(self, op: Op) -> None:
        if op.kind not in (SOFTMAX, FUSED) or len(self.results) == COMPARED:
            return
        out = op.out if op.kind == SOFTMAX else op.out[0]
        if out.dim() in (3, 4, 5) and (op.kind == FUSED or op.args[1] in (-1, out.dim() - 1)):
            self.results.append(out.detach())


def heads_come_first(results: list[Tensor], sequences: int) -> bool:
    """Whether heads come before sequences, of which the second half repeats the first.

    Results that fit both orders, such as uniform weights, decide nothing.
    """
    for each in results:
        turned = each.unflatten(0, (-1, sequences)) if each.dim() == 3 and each.shape[0] % sequences == 0 else each
        usual, first = repeats(each, 0), repeats(turned, 1)
        if usual != first:
            return first
    return False


def repeats(x: Tensor, dimension: int) -> bool:
    """Whether the second half of x along a dimension is equal to the first."""
    if x.shape[dimension] % 2:
        return False
    first, second = x.chunk(2, dimension)
    return torch.allclose(first, second, atol=AGREEMENT)
