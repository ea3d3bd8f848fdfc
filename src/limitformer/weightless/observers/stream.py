r"""`Streams`, which measures the stream and its branches while tokens go through a module.

*Blocks* map tokens (B, M, n) to tokens of the same shape (`layout`); those that pass one stream on are a stack. The
*stream* is their input. Inside a block, an addition x + f of the stream x and a tensor f of the same shape ends a
sublayer, whose branch is f. The sum, or a norm of it, is the new stream; λx counts as x. Other observers add what they
see of a block: `attention`, of which only summaries by head are stored, and `experts`.

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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from limitformer.base.errors import InputError, first_line, require
from limitformer.base.memory import check_scratch
from limitformer.weightless.block_parts import DECAYS, half_lives
from limitformer.weightless.blocks import is_norm, stream_axis, tokens_among
from limitformer.weightless.interpreter import ByMemory, Observer, Op
from limitformer.weightless.layout import (
    CHANNELS_FIRST,
    STREAMS_FIRST,
    STREAMS_LAST,
    STREAMS_OUTSIDE,
    Layout,
    form_of,
    wide_tensors,
)
from limitformer.weightless.ops import MULTIPLE, SUM
from limitformer.weightless.roots import gram
from limitformer.weightless.tensors import Fingerprint, fingerprint, same_memory, storage, tensors_in

PLACES = 3  # covariances of a block: before it, and after two sublayers
ROWS = 64  # of the attention of a sequence, the last ones, whose logits are kept
OWN = "aten", "prim", "prims"  # torch's namespaces of operations
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
    streams: list[Tensor] = field(default_factory=list)  # by layer (S, T · n), if `Streams.keeps` them
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


class Streams(Observer):
    """An observer that measures one pass of `samples` samples, of `rows` sequences each, through blocks.

    Args:
        counted: which tokens (B, M) are not padding; None: all.
        axes: by block of the layout, the dimension of the stream in which the sequences lie; a block without one is
            not measured. None: the sizes show it.
        length: the number of ids in a sequence; None if the inputs are not ids.
        used: the parameters that the pass reads, as `Interpreter.read`.
    """

    def __init__(
        self, module: nn.Module, layout: Layout, samples: int, rows: int, counted: Tensor | None,
        axes: Mapping[int, int] | None, length: int | None, used: set[Any],
    ) -> None:  # fmt: skip
        self.module, self.layout, self.samples, self.rows, self.counted = module, layout, samples, rows, counted
        self.axes, self.length, self.used = axes, length, used
        self.places: dict[str, list[int]] = {}  # by the name of a module: the blocks that it is part of
        self.norms, self.outside = set[str](), set[str]()  # inside blocks, and modules outside those of several modules
        self.find_watched()
        self.stacks: list[MeasuredStack] = []
        self.opaque: set[str] = set()  # operations of other packages, whose parts no observer sees
        self.sources = ByMemory()  # of tensors between blocks: the stacks that they were made from
        self.stack: MeasuredStack | None = None  # of the running block
        self.place = -1  # of the running block in the layout, if it has several modules; the module that began it
        self.begun_by, self.running = "", 0  # and how many of its modules are running
        self.output: Tensor | None = None  # of the last module of that block
        self.unclear = False  # whether a block returned something other than the stream
        self.parts: list[nn.Module] = []  # the modules of the running block
        self.stream: list[Tensor] = []  # the tensors of the block that are the stream
        self.input: Tensor = torch.empty(0)  # of the running block, or of the last one
        self.sum_after: Tensor | None = None  # the last sum of the last block's input with another tensor
        self.ended: tuple[MeasuredStack, Tensor] | None = None  # the last block's stack and input, until another begins
        self.sum: tuple[Tensor, Fingerprint, Tensor] | None = None  # the last sum, its fingerprint and its covariance
        self.keeps = False  # whether stacks keep streams, branches and logits
        self.before_blocks: frozenset[Any] = frozenset()  # those that were read before the first block
        self.inside_blocks: frozenset[Any] = frozenset()  # those that were read up to the end of the last block

    def find_watched(self) -> None:
        members = set()
        for place, block in enumerate(self.layout.blocks):
            if self.axes is not None and place not in self.axes:
                continue
            for name in block.members:
                self.places.setdefault(name, []).append(place)
                for inner_name, inner in self.module.get_submodule(name).named_modules():
                    members.add(id(inner))
                    if is_norm(inner_name, inner):
                        self.norms.add(f"{name}.{inner_name}".rstrip("."))
        if any(len(block.members) > 1 for block in self.layout.blocks):
            parts = self.module.named_modules()
            own = ((name, part) for name, part in parts if list(part.parameters(recurse=False)))
            self.outside = {name for name, part in own if id(part) not in members}
        self.watched = dict.fromkeys([*self.places, *self.norms, *self.outside])

    def enter(self, name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a block, or end one of several modules."""
        for place in self.places.get(name, ()):
            if len(self.layout.blocks[place].members) == 1:
                self.before_block(place, part, args, kwargs)
            else:
                self.before_member(place, name, part, args, kwargs)
        if name in self.outside and not self.running:  # such a module may be called by a member: a bias of positions
            self.end_of_members()

    def leave(self, name: str, part: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """End a block; a norm of the stream counts as the stream: the next sum may be with it."""
        for place in self.places.get(name, ()):
            if len(self.layout.blocks[place].members) == 1:
                self.after_block(place, out)
            else:
                self.after_member(out)
        after_sum = self.stack is not None and bool(self.stack.inside[-1])
        if after_sum and name in self.norms and args and any(args[0] is x for x in self.stream):
            self.stream.append(out)

    def see(self, op: Op) -> None:
        """Look at sums with the stream, at what is made of blocks' outputs, and at operations of other packages."""
        stack, args = self.stack, op.args
        if getattr(op.func, "namespace", OWN[0]) not in OWN:
            self.opaque.add(str(op.func))
        if stack is None or self.place >= 0:
            self.note_sources((args, op.kwargs), op.out)
        if op.kind == SUM and (stack is not None or self.ended is not None):
            if "alpha" in op.kwargs:
                args = args[0], args[1] * op.kwargs["alpha"]
            if stack is not None:
                self.end_sublayer(stack, args, op.out)
            elif self.ended is not None:
                self.extend_block(*self.ended, args, op.out)
        elif op.kind == MULTIPLE and stack is not None and any(a is x for a in args for x in self.stream):
            by_number = any(isinstance(a, float | int) or (isinstance(a, Tensor) and a.dim() < 2) for a in args)
            self.stream += [op.out] if by_number else []  # a multiple λx of the stream counts as the stream

    def before_block(self, place: int, part: nn.Module, args: Any, kwargs: Any) -> None:
        """Measure the stream before a block."""
        x = tokens_among(args, kwargs, self.layout.blocks[place].argument)
        if x is None:
            return
        self.before_blocks = self.before_blocks or frozenset(self.used)
        self.stack, self.ended = self.stack_of(place, part, x), None
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
        block, sources = self.layout.blocks[place], self.sources.get(x) or ()
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
            self.sources.put(each, sources | (self.sources.get(each) or frozenset()))

    def after_block(self, place: int, out: Any) -> None:
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
        self.stack.last = last
        self.sources.put(last, frozenset({self.stack}))
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

    def after_member(self, out: Any) -> None:
        """Note the output of a module of a block: the stream, unless a sum with the stream follows."""
        self.running -= 1
        if self.stack is not None:
            self.output = stream_among(out, self.stack.shape)
            for each in wide_tensors(out):
                self.sources.put(each, frozenset({self.stack}))
            self.inside_blocks = frozenset(self.used)

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
        branch = out - stream if storage(branch) == storage(out) else branch  # f += x
        f, covariance = self.by_sample(stack, branch.reshape(stack.shape)).flatten(1), self.gram(stack, out)
        stack.branch[-1].append(norm(f) / f.shape[1] ** 0.5)
        if self.keeps:
            stack.branches[-1].append(f.clone())
        stack.inside[-1].append(covariance)
        self.stream, self.sum = [out], (out, fingerprint(out), covariance)

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


def where_parameters_are_read(module: nn.Module, measure: Streams) -> dict[str, str]:
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
