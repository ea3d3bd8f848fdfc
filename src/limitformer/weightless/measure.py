r"""`Measure`, which watches the stream, its branches and the heads while tokens go through a module.

*Blocks* map tokens (B, M, n) to tokens of the same shape (`layout`); those that pass one stream on are a stack. The
*stream* is their input. Inside a block, an addition x + f of the stream x and a tensor f of the same shape ends a
sublayer, whose branch is f. The sum, or a norm of it, is the new stream; λx counts as x. A softmax of logits
(B, heads, M, ·) is attention; only summaries by head are stored.

  covariance   V = X Xᵀ/n of the stream before each block and after the last (S, layers + 1, T, T);
  inside       V after each sublayer (S, layers, sublayers, T, T);
  branch       √(|f|²/(T n)) (S, layers, sublayers);
  step         |X' − X|/|X| from block to block (S, layers);
  largest      largest |x| of the stream, and typical: its median (S, layers + 1);
  entropy      of a row of attention, mean over those that see two tokens or more (S, layers, heads);
  seen         number of tokens that such a row sees;
  spread       √ of the mean variance of a row's logits, and the largest logit of a visible pair;
  of_block     the load of a block's experts, and the memory of its state-space heads (`block_parts`).

All by stack. S samples; T tokens of all sequences of a sample, without padding. A stream (M, B, n) is transposed first.
"""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from limitformer.base.errors import InputError, first_line, require
from limitformer.base.memory import check_scratch
from limitformer.weightless.block_parts import DECAYS, ROUTER, expert_counts, half_lives, load_of_experts
from limitformer.weightless.blocks import is_norm, stream_axis, tokens_among
from limitformer.weightless.heads import FUSED, SOFTMAX, by_sequence_and_head, is_over_last
from limitformer.weightless.implicit import METADATA, Implicit
from limitformer.weightless.layout import (
    CHANNELS_FIRST,
    STREAMS_FIRST,
    STREAMS_LAST,
    STREAMS_OUTSIDE,
    Layout,
    form_of,
    wide_tensors,
)
from limitformer.weightless.masks import VIEWS, Visible, attention_formula, visible_by_masks, visible_by_size
from limitformer.weightless.roots import gram
from limitformer.weightless.run import OneSampleOnlyError
from limitformer.weightless.tensors import Fingerprint, fingerprint, same_memory, tensors_in

ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__}
SCALINGS = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
CHOICES = {torch.topk, Tensor.topk}
LARGEST = {torch.argmax, Tensor.argmax, torch.max, Tensor.max}
PLACES = 3  # covariances of a block: before it, and after two sublayers
ROWS = 64  # of the attention of a sequence, the last ones, whose logits are kept
BEFORE, INSIDE = "before the blocks", "inside the blocks"  # where a parameter was read


@dataclass(eq=False)
class MeasuredStack:
    """Blocks that pass one stream on, and what was measured of it; lists are by layer or by block.

    Attributes:
        name: of the list of blocks.
        shape: of the stream.
        form: how its entries are ordered.
        axis: the dimension of the stream in which the sequences lie; None if there is one sequence.
    """

    name: str
    shape: torch.Size
    form: str
    axis: int | None
    first: Tensor
    last: Tensor
    before: Tensor | None = None  # the stream a block ago, by sample
    covariance: list[Tensor] = field(default_factory=list)
    size: dict[str, list[Tensor]] = field(default_factory=lambda: {"step": [], "largest": [], "typical": []})
    inside: list[list[Tensor]] = field(default_factory=list)
    branch: list[list[Tensor]] = field(default_factory=list)
    heads: list[dict[str, Tensor]] = field(default_factory=list)
    of_block: list[dict[str, Tensor]] = field(default_factory=list)
    gradient: dict[int, Tensor] = field(default_factory=dict)
    streams: list[Tensor] = field(default_factory=list)  # by layer (S, T · n), if `Measure.keeps` them
    branches: list[list[Tensor]] = field(default_factory=list)  # by block and sublayer
    logits: list[list[Tensor]] = field(default_factory=list)  # by block: some rows of attention (heads, rows, tokens)
    pulls: list[list[Tensor]] = field(default_factory=list)  # the loss's gradients by these logits, if it has any
    sums: bool = False  # whether the network adds something made of a block's output to the block's input
    changed: bool = False  # whether a block receives something other than what the last one returned
    places: set[int] = field(default_factory=set)  # of the blocks that have run


class UnclearBlocksError(Exception):
    """The modules that were taken for blocks may not be the blocks.

    Attributes:
        measured: whether they receive a stream and return it, so that they are blocks if no others are found.
    """

    def __init__(self, measured: bool = False) -> None:
        super().__init__()
        self.measured = measured


class Measure(TorchFunctionMode):
    """A mode that measures one pass of `samples` samples, of `rows` sequences each, through the blocks of a module.

    Args:
        counted: which tokens (B, M) are not padding; None: all.
        axes: by block of the layout, the dimension of the stream in which the sequences lie; a block without one is
            not measured. None: the sizes show it.
        length: the number of ids in a sequence; None if the inputs are not ids.
        heads_first: whether attention weights have heads before sequences, if their sizes do not show it; None: not
            known.
    """

    def __init__(
        self, module: nn.Module, layout: Layout, samples: int, rows: int = 1, counted: Tensor | None = None,
        axes: Mapping[int, int] | None = None, length: int | None = None, heads_first: bool | None = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.module, self.layout, self.samples, self.rows, self.counted = module, layout, samples, rows, counted
        self.axes, self.length, self.heads_first = axes, length, heads_first
        self.stacks: list[MeasuredStack] = []
        self.sources: Any = WeakTensorKeyDictionary()  # by tensor between blocks: the stacks that it was made from
        self.attended: tuple[int, torch.Size, bool] | None = None  # sublayer and form of the block's first single head
        self.stack: MeasuredStack | None = None  # of the running block
        self.place = -1  # of the running block in the layout, if it has several modules; the module that began it
        self.begun_by, self.running = "", 0  # and how many of its modules are running
        self.output: Tensor | None = None  # of the last module of that block
        self.unclear = False  # whether a block returned something other than the stream
        self.parts: list[nn.Module] = []  # the modules of the running block
        self.experts: dict[int, set[int]] = {}  # the possible numbers of experts, by the first module of a block
        self.stream: list[Tensor] = []  # the tensors of the block that are the stream
        self.input: Tensor = torch.empty(0)  # of the running block, or of the last one
        self.sum_after: Tensor | None = None  # the last sum of the last block's input with another tensor
        self.ended: tuple[MeasuredStack, Tensor] | None = None  # the last block's stack and input, until another begins
        self.sum: tuple[Tensor, Fingerprint, Tensor] | None = None  # the last sum, its fingerprint and its covariance
        self.hooks: list[Any] = []
        self.keeps = False  # whether stacks keep streams, branches and logits
        self.used: set[Any] = set()  # parameters that were read: ids, and names of those without entries
        self.before_blocks: frozenset[Any] = frozenset()  # those that were read before the first block
        self.inside_blocks: frozenset[Any] = frozenset()  # those that were read up to the end of the last block
        self.visible = Visible()

    def __enter__(self) -> "Measure":
        members = set()
        for place, block in enumerate(self.layout.blocks):
            if self.axes is not None and place not in self.axes:
                continue
            parts = [(name, self.module.get_submodule(name)) for name in block.members]
            for name, part in parts:
                before: Any = partial(self.before_member, place, name)
                after: Any = self.after_member
                if len(parts) == 1:
                    before, after = partial(self.before_block, place), partial(self.after_block, place)
                self.hooks.append(part.register_forward_pre_hook(before, with_kwargs=True))
                self.hooks.append(part.register_forward_hook(after, with_kwargs=True))
                members |= {id(each) for each in part.modules()}
            for _, part in parts:
                for name, inner in part.named_modules():
                    if is_norm(name, inner):
                        self.hooks.append(inner.register_forward_hook(self.after_norm))
        if any(len(block.members) > 1 for block in self.layout.blocks):
            for part in self.module.modules():
                if id(part) not in members and list(part.parameters(recurse=False)):
                    self.hooks.append(part.register_forward_pre_hook(self.before_outside))
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
        stack = self.stack
        if stack is None and self.ended is not None and func in ADDITIONS:
            out = func(*args, **kwargs)
            self.note_sources((args, kwargs), out)
            self.extend_block(*self.ended, args, out)
            return out
        if func is FUSED and stack is not None:
            return self.dot_product_attention(*args, **kwargs)
        if func is functional.multi_head_attention_forward and stack is not None:
            with self.inside_multi_head_attention(args, kwargs):
                return func(*args, **kwargs)
        visible = None if stack is None else self.visible.before(func, args, kwargs)
        out = func(*args, **kwargs)
        if visible is not None:
            self.visible.note(out, visible, func in VIEWS)
        if stack is None or self.place >= 0:
            self.note_sources((args, kwargs), out)
        if stack is not None and (func in CHOICES or func in LARGEST):
            self.note_choice(stack, func, args, kwargs, out)
        elif stack is not None and isinstance(out, Tensor):
            if func in ADDITIONS:
                if "alpha" in kwargs and len(args) > 1:
                    args = args[0], args[1] * kwargs["alpha"]
                self.end_sublayer(stack, args, out)
            elif func in SCALINGS and any(a is x for a in args for x in self.stream):
                if any(isinstance(a, float | int) or (isinstance(a, Tensor) and a.dim() < 2) for a in args):
                    self.stream.append(out)  # a multiple λx of the stream counts as the stream
            elif func in SOFTMAX and is_over_last(out, args, kwargs):
                logits = args[0] if args else kwargs["input"]
                self.summarise_attention(stack, logits, out, self.visible.of(logits))
        return out

    def before_block(self, place: int, part: nn.Module, args: Any, kwargs: Any) -> None:
        """Measure the stream before a block."""
        x = tokens_among(args, kwargs, self.layout.blocks[place].argument)
        if x is None:
            return
        self.before_blocks = self.before_blocks or frozenset(self.used)
        self.stack, self.ended, self.attended = self.stack_of(place, part, x), None, None
        if self.stack.covariance:
            self.stack.sums = self.stack.sums or x is self.sum_after
            passed_on = x is self.stack.last or same_memory(x, self.stack.last) or x is self.sum_after
            self.stack.changed = self.stack.changed or not passed_on
        self.measure_stream(self.stack, x)
        self.stream, self.input = [x], x
        self.stack.inside.append([])
        self.stack.branch.append([])
        self.stack.branches.append([])
        self.stack.heads.append({})
        self.stack.logits.append([])
        self.stack.pulls.append([])
        self.stack.of_block.append({})
        self.parts = [self.module.get_submodule(name) for name in self.layout.blocks[place].members]

    def stack_of(self, place: int, part: nn.Module, x: Tensor) -> MeasuredStack:
        """Return the stack of a block that receives the stream `x`.

        If a block runs again, its stack is the one that produced x. If there is none, as in a network
        that sends two inputs through the same blocks, a new stack begins.
        """
        block, sources = self.layout.blocks[place], self.sources.get(x, frozenset())
        alike = [each for each in self.stacks if each.name == block.stack and each.shape == x.shape]
        same = [each for each in alike if x is each.last or same_memory(x, each.last)]
        own = [each for each in alike if each in sources]
        new = [[each for each in some if place not in each.places] for some in (own, alike)]
        stack = next((some[-1] for some in (same, new[0], own, new[1]) if some), None)
        if stack is None:
            stack = self.new_stack(place, part, x)
            self.stacks.append(stack)
        stack.places.add(place)
        return stack

    def new_stack(self, place: int, part: nn.Module, x: Tensor) -> MeasuredStack:
        block = self.layout.blocks[place]
        axis = self.axes[place] if self.axes else stream_axis(x.shape, self.rows, self.samples, self.length)
        if axis == 1 and self.samples > 1:
            raise OneSampleOnlyError
        form = form_of(x, part, self.length, axis)
        tokens = in_rows(x.detach(), form).shape[:-1].numel() // self.samples
        blocks = sum(each.stack == block.stack for each in self.layout.blocks)
        needed = PLACES * blocks * self.samples * 8 * tokens**2
        what = f"The covariances of {tokens:,} tokens in {blocks} blocks of {block.stack}"
        check_scratch(needed, what, "shorter or smaller inputs, or other blocks")
        return MeasuredStack(block.stack, x.shape, form, axis, x, x)

    def note_sources(self, values: Any, out: Any) -> None:
        """Note the stacks whose outputs the results of a function between blocks were made from."""
        if not self.stacks:
            return
        sets = [self.sources.get(each) for each in tensors_in(values)]
        sources = frozenset().union(*(each for each in sets if each))
        for each in tensors_in(out) if sources else ():
            self.sources[each] = sources | self.sources.get(each, frozenset())

    def after_block(self, place: int, part: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """Take the output of a block as the end of its stack, until another block begins."""
        if self.stack is None:  # without tokens it is not a block
            return
        block, shape = self.layout.blocks[place], tuple(self.stack.shape)
        stream = stream_among(out, self.stack.shape, block.output)
        wrong = f"{block.members[0]} receives tokens {shape} and returns none of that shape. Nearest: other blocks."
        require(stream is not None or not self.layout.certain, wrong)
        self.unclear = self.unclear or stream is None
        self.end_block(self.stack.last if stream is None else stream)

    def end_block(self, last: Tensor) -> None:
        assert self.stack is not None
        self.stack.last, self.sources[last] = last, frozenset({self.stack})
        if (lives := half_lives(self.parts)) is not None:
            every = [lives.max(), lives.median()]
            self.stack.of_block[-1] |= {
                name: each.reshape(1).repeat(self.samples) for name, each in zip(DECAYS, every, strict=True)
            }
        self.inside_blocks = frozenset(self.used)
        self.ended = self.stack, self.input
        self.stack, self.stream = None, []

    def extend_block(self, stack: MeasuredStack, x: Tensor, args: Any, out: Any) -> None:
        """Let a block that has ended include a sum with its input `x`: the network adds its branch to the stream.

        The other term is the block's output, unless the sums of earlier blocks had others and were the next input.
        """
        terms = args[:2]
        if not stack.sums and not any(term is stack.last for term in terms):
            self.sum_after = out if any(term is x for term in terms) else self.sum_after
            return
        if isinstance(out, Tensor) and out.shape == stack.shape:
            self.stream = [x]
            self.end_sublayer(stack, args, out)
            if self.stream[0] is out:
                stack.last, self.ended = out, None
                self.inside_blocks = frozenset(self.used)
            self.stream = []

    def before_member(self, place: int, name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a block of several modules with the first of them that is called."""
        self.running += 1
        if self.place == place and self.stack is not None and name != self.begun_by:
            return
        self.end_of_members()
        self.before_block(place, part, args, kwargs)
        if self.stack is not None:
            self.place, self.begun_by = place, name

    def after_member(self, part: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """Note the output of a module of a block: the stream, unless a sum with the stream follows."""
        self.running -= 1
        if self.stack is not None:
            self.output = stream_among(out, self.stack.shape)
            for each in wide_tensors(out):
                self.sources[each] = frozenset({self.stack})
            self.inside_blocks = frozenset(self.used)

    def before_outside(self, *_: Any) -> None:
        """End a block of several modules, unless one of them calls this module, as it does a bias of positions."""
        if not self.running:
            self.end_of_members()

    def end_of_members(self) -> None:
        """End a block of several modules: its stream is the last sum or the norm of it, else the last output."""
        if self.place >= 0 and self.stack is not None:
            last = self.stream[-1] if self.stack.inside[-1] else self.output
            if last is None:
                names = ", ".join(self.layout.blocks[self.place].members)
                returned = f"{names} receive tokens {tuple(self.stack.shape)} and return none of that shape"
                raise InputError(f"{returned}. Nearest: other blocks.")
            self.end_block(last)
        self.place = -1

    def finish(self) -> None:
        """Measure the streams after their last blocks.

        Raises:
            UnclearBlocksError: the modules do not pass a stream on, and neither the user nor a search has chosen them.
        """
        self.end_of_members()
        rows = [(stack.name, stack.shape[1:]) for stack in self.stacks if len(stack.shape) == 2]
        parted = len(set(rows)) < len(rows)  # modules of one list with other numbers of rows may be experts
        if (self.unclear or parted or not self.stacks) and not self.layout.certain:
            raise UnclearBlocksError
        if any(stack.changed for stack in self.stacks) and not self.layout.certain:
            raise UnclearBlocksError(measured=True)
        has_stacks = bool(self.stacks) or not self.layout.blocks
        require(has_stacks, "no block receives tokens. Nearest: blocks='…' with the names of its blocks.")
        for stack in self.stacks:
            self.measure_stream(stack, stack.last)
            stack.before = None
        self.sum = None

    def mixes(self) -> bool:
        """Whether the last token of a stack depends on sequences other than its own; needs a pass with gradients."""
        return any(self.mixes_in(stack) for stack in self.stacks)

    def mixes_in(self, stack: MeasuredStack) -> bool:
        first, last, axis = stack.first, stack.last, stack.axis or 0
        if not last.requires_grad or not first.requires_grad or first.dim() != 3 or last.dim() != 3:
            return False
        direction = torch.linspace(-1.0, 2.0, last.shape[-1], dtype=last.dtype, device=last.device)
        try:
            (gradient,) = torch.autograd.grad(last[-1, -1] @ direction, first, allow_unused=True, retain_graph=True)
        except RuntimeError as error:  # such as a change in place of a tensor that the gradient needs
            raise InputError(f"the network cannot be differentiated: {first_line(error)}") from error
        if gradient is None:
            return False
        own = gradient.shape[axis] // self.rows  # indices along the dimension that one sequence has
        others = gradient.movedim(axis, 0)[:-own]
        return bool((others.isfinite() & (others != 0)).any())  # that of a network that overflows is NaN everywhere

    def measure_stream(self, stack: MeasuredStack, x: Tensor) -> None:
        """Measure V and sizes of the stream, and hook the norm of its gradient."""
        place = len(stack.covariance)
        known = self.sum[2] if self.sum and self.sum[0] is x and self.sum[1] == fingerprint(x) else None
        stack.covariance.append(self.gram(stack, x) if known is None else known)
        tokens = self.by_sample(stack, x).flatten(1)
        if stack.before is not None and stack.before.shape == tokens.shape:
            stack.size["step"].append(norm(tokens - stack.before) / norm(stack.before))
        size = tokens.abs()
        largest = size.amax(1)
        stack.size["largest"].append(largest.double())
        stack.size["typical"].append(torch.where(largest.isnan(), largest, median(size)).double())
        stack.before = tokens
        if self.keeps:
            stack.streams.append(tokens.clone())
        if x.requires_grad:
            # A hook of x that held the stack, and so the last stream and its graph, would never be freed.
            measure, measured = weakref.ref(self), weakref.ref(stack)

            def note_gradient(gradient: Tensor) -> None:
                if (one := measure()) is not None and (into := measured()) is not None:
                    into.gradient[place] = one.by_sample(into, gradient).double().square().sum((-1, -2)).sqrt()

            x.register_hook(note_gradient)

    def end_sublayer(self, stack: MeasuredStack, args: Any, out: Tensor) -> None:
        """End a sublayer if the stream is a term of the sum `out`; tokens may be flattened."""
        if len(args) < 2 or not all(isinstance(a, Tensor) for a in args[:2]) or args[0].shape != args[1].shape:
            return
        if out.numel() != stack.shape.numel() or out.shape[-1] != stack.shape[-1]:
            return
        stream = next((a for a in args[:2] if any(a is x for x in self.stream)), None)
        if stream is None and out.shape != stack.shape:
            stream = next((a for a in args[:2] if any(same_memory(a, x) for x in self.stream)), None)
        if stream is None:
            return
        branch = args[1] if stream is args[0] else args[0]
        branch = out - stream if branch is out else branch  # f += x
        f, covariance = self.by_sample(stack, branch.reshape(stack.shape)).flatten(1), self.gram(stack, out)
        stack.branch[-1].append(norm(f) / f.shape[1] ** 0.5)
        if self.keeps:
            stack.branches[-1].append(f.clone())
        stack.inside[-1].append(covariance)
        self.stream, self.sum = [out], (out, fingerprint(out), covariance)

    def after_norm(self, part: nn.Module, args: Any, out: Any) -> None:
        """Count a norm of the stream as the stream: the next sum may be with it."""
        if self.stack is not None and args and any(args[0] is x for x in self.stream) and self.stack.inside[-1]:
            self.stream.append(out)

    def note_choice(self, stack: MeasuredStack, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Summarise the choice of experts: the last k largest of a block, or without any the first largest."""
        scores = args[0] if args else kwargs["input"]
        place, first_choice = (1, func in LARGEST) if func in LARGEST else (2, False)
        dimension = args[place] if len(args) > place else kwargs.get("dim", None if first_choice else -1)
        known = stack.of_block[-1].keys() & set(ROUTER)
        last = isinstance(dimension, int) and dimension in (-1, scores.dim() - 1)
        if scores.dim() == 0 or not last or (first_choice and known):
            return
        experts, parts = scores.shape[-1], self.parts
        if id(parts[0]) not in self.experts:
            self.experts[id(parts[0])] = expert_counts(parts)
        tokens = in_rows(self.input.detach(), stack.form).shape[:-1].numel()
        if experts not in self.experts[id(parts[0])] or scores.numel() != tokens * experts:
            return
        counted = self.counted
        if counted is not None and stack.axis == 1:
            counted = counted.T
        choices = out if isinstance(out, Tensor) else out[1]
        choices = choices[..., None] if first_choice else choices
        stack.of_block[-1] |= load_of_experts(choices.detach(), experts, self.samples, counted)

    def summarise_attention(
        self, stack: MeasuredStack, logits: Tensor, weights: Tensor, visible: Tensor | None, ordered: bool = False,
        fused: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Summarise the first attention of a block by head; unknown visibility follows from the sizes of logits.

        A loop over heads has several softmaxes of one head each, before the next sum with the stream.

        Args:
            ordered: whether sequences and heads are the first two dimensions, in this order.
            fused: the output of torch's fused attention, which has the gradient that the weights do not, and values.
        """
        source, values = (weights, None) if fused is None else fused
        kind, heads = (len(stack.inside[-1]), logits.shape, visible is None), stack.heads[-1]
        if heads and kind != self.attended:
            return
        tensors = [logits, weights, *([] if visible is None else [visible.expand(logits.shape)])]
        sequences = self.samples * self.rows
        tokens = stack.shape[:-1].numel() // sequences
        if not ordered:
            split = [by_sequence_and_head(x, sequences, self.samples, tokens, self.heads_first) for x in tensors]
            tensors = [each for each in split if each is not None]
        if not tensors:
            return
        logits, weights, *masks = (each.detach() for each in tensors)
        visible = masks[0] & (logits > -torch.inf) if masks else visible_by_size(logits)
        summary = self.by_head(logits.float(), weights.float(), visible)
        stack.heads[-1] = {key: torch.cat([heads[key], each], 1) for key, each in summary.items()} if heads else summary
        if self.keeps:
            mask = visible.expand(logits.shape)[0, :, -ROWS:]
            rows = logits[0, :, -ROWS:].masked_fill(~mask, 0.0)
            stack.logits[-1].append(rows / mask.sum((-1, -2), keepdim=True).clamp(min=1).sqrt())
            stack.pulls[-1].append(torch.zeros_like(rows))
            if source.requires_grad:  # its hook must not hold the stack, as above
                a, pulls, place = weights[0, :, -ROWS:], stack.pulls[-1], len(stack.pulls[-1]) - 1
                order = sequences, self.samples, tokens, self.heads_first
                plain = None if values is None else values.detach()

                def note_gradient(g: Tensor) -> None:
                    g = g if plain is None else g @ plain.mT
                    split = g if ordered else by_sequence_and_head(g, *order)
                    if split is not None:
                        g = split[0, :, -ROWS:]
                        pulls[place] = a * (g - (a * g).sum(-1, keepdim=True))

                source.register_hook(note_gradient)
        if not heads and logits.shape[1] == 1:
            self.attended = kind

    def by_head(self, logits: Tensor, weights: Tensor, visible: Tensor) -> dict[str, Tensor]:
        """Summarise logits (S·B, h, M, ·) and their softmax; each summary is (S, h)."""
        most = logits.amax(-1, keepdim=True)
        seen = visible.sum(-1)
        rows = (seen > 1).double()
        if self.counted is not None and self.counted.shape[-1] == rows.shape[-1]:
            rows = rows * self.counted.to(rows.device).repeat(self.samples, 1)[:, None]
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
            return mean.unflatten(0, (self.samples, -1)).mean(1)

        return {
            "entropy": over_rows(entropy),
            "effective_tokens": over_rows(entropy.exp()),
            "tokens_seen": over_rows(seen.double()),
            "logit_std": over_rows(square).sqrt(),
            "largest_logit": largest.unflatten(0, (self.samples, -1)).amax(1),
        }

    def dot_product_attention(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Call torch's fused attention, and summarise logits and weights of its formula."""
        out = FUSED(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if q.dim() in (3, 4) and self.stack is not None:
            with torch.no_grad():
                visible = None if attn_mask is None else self.visible.of(attn_mask)
                formula = attention_formula(q, k, attn_mask, is_causal, scale, visible)
                shared = 1 if v.dim() == 3 else q.shape[-3] // v.shape[-3]
                self.summarise_attention(self.stack, *formula, fused=(out, v.repeat_interleave(shared, -3)))
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
                visible = visible_by_masks(logits, attention, padding)
                if self.stack is not None:
                    self.summarise_attention(self.stack, logits, weights, visible, ordered=True)
            return out

        replaced: Any = functional
        replaced.softmax, replaced.scaled_dot_product_attention = softmax, self.dot_product_attention
        try:
            yield
        finally:
            replaced.softmax, replaced.scaled_dot_product_attention = softmax_of_torch, FUSED

    def by_sample(self, stack: MeasuredStack, x: Tensor) -> Tensor:
        """Reshape the stream to (S, T, n), without padding."""
        x = x.detach()
        if x.shape != stack.shape and x.numel() == stack.shape.numel():
            x = x.reshape(stack.shape)
        x = x.transpose(0, 1) if stack.axis == 1 and x.dim() == 3 else x
        x = in_rows(x, stack.form)
        tokens = x.reshape(self.samples, -1, x.shape[-1])
        if self.counted is None or self.counted.numel() != tokens.shape[1]:
            return tokens
        return tokens[:, self.counted.flatten()]

    def gram(self, stack: MeasuredStack, x: Tensor) -> Tensor:
        tokens = self.by_sample(stack, x)
        return gram(tokens) / tokens.shape[-1]


def in_rows(x: Tensor, form: str) -> Tensor:
    """Return the stream with each token's entries in the last dimension."""
    if form == CHANNELS_FIRST:
        return x.movedim(1, -1)
    if form == STREAMS_FIRST:
        return x.transpose(1, 2).flatten(2)
    if form == STREAMS_OUTSIDE:
        return x.movedim(0, 2).flatten(2)
    return x.flatten(2) if form == STREAMS_LAST else x


def stream_among(out: Any, shape: torch.Size, place: int | None = None) -> Tensor | None:
    """Return the tensor at this place in the output of a block, if it has this shape; else the first that has it."""
    if isinstance(out, Tensor):
        return out if out.shape == shape else None
    tensors = wide_tensors(out)
    if place is not None and place < len(tensors) and tensors[place].shape == shape:
        return tensors[place]
    return next((each for each in tensors if each.shape == shape), None)


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
