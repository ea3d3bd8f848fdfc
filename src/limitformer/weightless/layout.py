"""The blocks of a network, and the stacks that they form.

A *block* receives the stream and returns it; it is one module, or several that the network calls in turn (an attention
and a feed-forward network in a list of lists, or in parallel lists). A *stack* is a sequence of blocks that pass one
stream on, such as an encoder or a vision tower.

The one outermost list of most networks needs no search, if each of its modules receives what the last one returned. For
the others, `search` watches a pass: a module is a block if its output has the shape of one of its inputs.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import Tensor, nn

from limitformer.base.errors import InputError, require
from limitformer.weightless.blocks import Argument, is_norm, tokens_among
from limitformer.weightless.interpreter import ByMemory, Observer, Op
from limitformer.weightless.tensors import same_memory, tensors_in

ROWS, CHANNELS_FIRST = "rows", "channels first"  # orders of the entries of a stream
STREAMS_LAST, STREAMS_FIRST, STREAMS_OUTSIDE = "streams last", "streams first", "streams outside"

Chosen = str | Sequence[str] | Callable[[nn.Module], Sequence[nn.Module]]  # the argument `blocks` of public functions


@dataclass(frozen=True)
class BlockModules:
    """One block.

    Attributes:
        stack: the name of its stack.
        members: the names of its modules; several if the network calls them in turn.
        argument: the argument that is its stream; None: the first of three dimensions, if there is one.
        output: the place of the stream among the tensors that it returns; None: the first of the stream's shape.
    """

    stack: str
    members: tuple[str, ...]
    argument: Argument | None = None
    output: int | None = None


@dataclass(frozen=True)
class Layout:
    """The blocks of a network.

    Attributes:
        certain: whether the user chose them, or a pass has shown that they receive the stream and return it.
    """

    blocks: tuple[BlockModules, ...]
    certain: bool = False


def outermost_list(module: nn.Module) -> Layout:
    """Return the modules of the outermost lists; it is certain to be the blocks only after a pass has shown so."""
    lists: list[tuple[str, nn.Module]] = []
    for name, part in module.named_modules():
        if is_list(part) and not any(name.startswith(f"{outer}.") for outer, _ in lists):
            lists.append((name, part))
    blocks = [BlockModules(name, (each,)) for name, part in lists for each, _ in children_of(name, part)]
    return Layout(tuple(blocks))


def needs_search(layout: Layout, module: nn.Module) -> bool:
    """Whether the outermost lists leave open which modules are blocks."""
    one = len({block.stack for block in layout.blocks}) == 1
    return not layout.certain and not (
        one and all(is_callable(module.get_submodule(block.members[0])) for block in layout.blocks)
    )


def chosen_layout(module: nn.Module, blocks: Chosen) -> Layout:
    """Return the blocks that the user chose.

    Raises:
        InputError: a module is missing.
    """
    names = {id(part): name for name, part in module.named_modules()}
    if callable(blocks):
        parts = list(blocks(module))
        known = all(isinstance(part, nn.Module) and id(part) in names for part in parts)
        require(known, f"blocks must return modules of {type(module).__name__}; got {parts!r:.80}.")
        chosen = [names[id(part)] for part in parts]
    else:
        patterns = [blocks] if isinstance(blocks, str) else list(blocks)
        valid = all(isinstance(pattern, str) for pattern in patterns)
        require(valid, f"blocks must be a pattern of names such as 'h.*', or a function; got {blocks!r:.80}.")
        chosen = [name for name in names.values() if any(fnmatchcase(name, pattern) for pattern in patterns)]
        inside = {name for name in chosen if any(name.startswith(f"{outer}.") for outer in chosen)}
        chosen = [name for name in chosen if name not in inside]  # `h.*` matches `h.0.mlp` too
    lists = ", ".join(f"{name}.*" for name, part in module.named_modules() if is_list(part)) or "none"
    require(bool(chosen), f"blocks: no module of {type(module).__name__} fits {blocks!r:.60}. Its lists: {lists:.200}.")
    return Layout(tuple(BlockModules(name.rpartition(".")[0], (name,)) for name in chosen), certain=True)


def is_list(part: nn.Module) -> bool:
    """Whether a module is a list of others, or a sequence of similar ones.

    A dictionary of different modules by their names, such as `wte`, `h` and `ln_f`, only holds them.
    """
    if isinstance(part, nn.ModuleDict):
        numbered = all(any(map(str.isdigit, key)) for key in part)
        return numbered or len({type(each) for each in part.values()}) == 1
    parts = list(part.children())
    similar = len({type(each) for each in parts}) == 1 < len(parts) and all(list(each.children()) for each in parts)
    return not is_callable(part) or (isinstance(part, nn.Sequential) and similar)


def is_callable(part: nn.Module) -> bool:
    return not isinstance(part, nn.ModuleList | nn.ModuleDict)


def children_of(name: str, part: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the full names and modules of a list, without those that do nothing."""
    return [
        (f"{name}.{key}" if name else key, child)
        for key, child in part.named_children()
        if not isinstance(child, nn.Identity)
    ]


def callable_members(name: str, part: nn.Module) -> list[str]:
    """Return the name of a module, or those of the modules in a list."""
    if is_callable(part):
        return [name]
    return [member for child in children_of(name, part) for member in callable_members(*child)]


@dataclass
class Call:
    """One call of a module, between two readings of a counter.

    Attributes:
        sources: by argument, the modules whose last output it is, with its place in that output.
        made_of: the modules of lists from whose outputs the inputs were computed.
        partners: the modules with the same key in another list that received the same tensor.
        argument: the input with the shape of the output, if there is one.
        form: how the entries of the stream that enters are ordered; empty if none does.
        entering, leaving: the shapes of the stream and of the output; empty if there is none.
    """

    start: int
    sources: dict[Argument, list[tuple[str, int]]]
    made_of: frozenset[str]
    partners: frozenset[str]
    form: str
    entering: torch.Size
    leaving: torch.Size = torch.Size()  # noqa: RUF009 (it is immutable)
    end: int = 0
    argument: Argument | None = None


def form_of(x: Tensor, part: nn.Module, length: int | None, axis: int | None) -> str:
    """Return how the entries of a stream are ordered.

    Convolutions take channels first (B, n, …), and so do modules that turn such a stream for a recurrent layer.
    Hyper-connections have several streams a token, which are one long vector here: (B, M, streams, n),
    (B, streams, M, n) or, with axis 1, (streams, B, M, n).
    """
    if x.dim() == 4 and length is not None and length in x.shape[1:3]:
        several = STREAMS_LAST if x.shape[1] == length else STREAMS_FIRST
        return STREAMS_OUTSIDE if axis == 1 else several
    leaf = next((each for each in part.modules() if list(each.parameters(recurse=False))), None)
    channels: int | None = None
    if isinstance(leaf, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        channels = leaf.in_channels
    elif isinstance(leaf, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        channels = leaf.num_features
    elif isinstance(leaf, nn.GroupNorm):
        channels = leaf.num_channels
    elif isinstance(leaf, nn.RNNBase):
        channels = leaf.input_size
    first = channels == x.shape[1] and (x.dim() > 3 or (x.dim() == 3 and channels != x.shape[-1]))
    return CHANNELS_FIRST if first else ROWS


class Recorder(Observer):
    """The calls of a network's modules in one pass by name, and from whose outputs tensors were made."""

    def __init__(self, module: nn.Module) -> None:
        self.calls: dict[str, list[Call]] = {}
        self.outputs: dict[str, tuple[str, list[Tensor]]] = {}  # by list: its last module and output
        self.clock = 0
        self.origins = ByMemory()  # modules in lists
        self.entered: dict[str, dict[str, Any]] = {}  # by key and module in a list: its last input
        lists = [(name, part) for name, part in module.named_modules() if is_list(part)]
        listed = {id(child) for _, part in lists for child in part.modules()}
        self.members = {full for name, part in lists for full, _ in children_of(name, part)}
        named = module.named_modules()
        self.watched = [name for name, part in named if name and (id(part) in listed or list(part.children()))]

    def see(self, op: Op) -> None:
        """Note the origins of the results."""
        self.add(op.out, self.origins_of((op.args, op.kwargs)))

    def origins_of(self, values: Any) -> frozenset[str]:
        return frozenset[str]().union(*(each for each in map(self.origins.get, tensors_in(values)) if each))

    def add(self, values: Any, origins: frozenset[str]) -> None:
        for each in tensors_in(values) if origins else ():
            self.origins.put(each, origins | (self.origins.get(each) or frozenset()))

    def enter(self, name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        """Note a call, and where its inputs come from."""
        x, arguments = tokens_among(args, kwargs), [*enumerate(args), *kwargs.items()]
        sources = {key: self.sources_of(each) for key, each in arguments if is_wide(each)}
        form = "" if x is None else form_of(x, part, None, None)
        shape = torch.Size() if x is None else x.shape
        made_of, partners = self.origins_of((args, kwargs)), self.partners_of(name, x)
        self.clock += 1
        self.calls.setdefault(name, []).append(Call(self.clock, sources, made_of, partners, form, shape))

    def leave(self, name: str, part: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """Note the end of a call, and its output."""
        call = next(each for each in reversed(self.calls[name]) if not each.end)
        outputs, x = wide_tensors(out), tokens_among(args, kwargs)
        inputs = [*enumerate(args), *kwargs.items()]
        like = [(key, each) for key, each in inputs if outputs and is_wide(each) and each.shape == outputs[0].shape]
        self.clock += 1
        call.end = self.clock
        if name in self.members:
            self.add(outputs, frozenset({name}))
        call.leaving = outputs[0].shape if outputs else torch.Size()
        if like:
            call.argument = next((key for key, each in like if each is x), like[0][0])
            self.outputs[name.rpartition(".")[0]] = name, outputs

    def partners_of(self, name: str, x: Tensor | None) -> frozenset[str]:
        """Return the modules with the same key in other lists that received `x` too, and note that this one has."""
        if x is None or name not in self.members:
            return frozenset()
        others = self.entered.setdefault(name.rpartition(".")[2], {})
        inputs = {other: reference() for other, reference in others.items()}
        others[name] = weakref.ref(x)
        return frozenset(other for other, each in inputs.items() if each is not None and each is x)

    def sources_of(self, x: Tensor) -> list[tuple[str, int]]:
        """Return the modules that returned `x` last, and its place in their outputs."""
        every = ((name, k, each) for name, outputs in self.outputs.values() for k, each in enumerate(outputs))
        return [(name, k) for name, k, each in every if x is each or same_memory(x, each)]


def wide_tensors(values: Any) -> list[Tensor]:
    """Return the floating-point tensors of two dimensions or more in arguments or outputs."""
    if not isinstance(values, Tensor | list | tuple | dict):
        values = list(vars(values).values()) if hasattr(values, "__dict__") else ()
    return [each for each in tensors_in(values) if is_wide(each)]


def is_wide(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1


def kinds_of(names: Sequence[str], module: nn.Module) -> str:
    """Return the classes of modules, such as `BertLayer` or `LayerNorm, Linear`."""
    return ", ".join(dict.fromkeys(type(module.get_submodule(name)).__name__ for name in names))


def search(module: nn.Module, calls: dict[str, list[Call]], otherwise: Layout | None = None) -> Layout:
    """Find the blocks of a network by the calls of one pass, or return the other layout if there are none.

    Raises:
        InputError: no module receives a stream and returns it, and no other layout is given.
    """
    finder = Search(module, calls)
    stacks = finder.inside("", module) or list(finder.attributes())
    if not stacks and otherwise is not None:
        return replace(otherwise, certain=True)
    if not stacks:
        raise InputError(
            f"{type(module).__name__} has no blocks: no module of a list receives tokens and returns as many. "
            "Nearest: blocks='…' with the names of its blocks."
        )
    stacks = finder.joined(stacks)
    # If there are stacks of tokens, ignore convolutional stacks and lists of single layers.
    stacks = [stack for stack in stacks if calls[stack[0].members[0]][0].form != CHANNELS_FIRST] or stacks
    stacks = [
        stack
        for stack in stacks
        if any(len(block.members) > 1 or list(module.get_submodule(block.members[0]).children()) for block in stack)
    ] or stacks
    blocks = [block for stack in stacks for block in stack]
    streams = [finder.stream_of(block.members[0]) if len(block.members) == 1 else (None, None) for block in blocks]
    pairs = zip(blocks, streams, strict=True)
    return Layout(tuple(replace(block, argument=a, output=b) for block, (a, b) in pairs), certain=True)


@dataclass(frozen=True)
class Search:
    """The candidates for stacks, each a list of blocks, by the calls of one pass."""

    module: nn.Module
    calls: dict[str, list[Call]]

    def inside(self, name: str, part: nn.Module) -> list[list[BlockModules]]:
        """Return the stacks inside a module."""
        children = children_of(name, part)
        lists = {full: child for full, child in children if is_list(child)}
        zipped, stacks = self.parallel(name, lists), []
        if zipped:
            stacks.append(zipped)
        taken = {member.rpartition(".")[0] for block in zipped for member in block.members}
        for full, child in children:
            if full in lists and full not in taken:
                stacks += self.in_list(full, child)
            elif full not in lists:
                stacks += self.inside(full, child)
        return stacks

    def in_list(self, name: str, part: nn.Module) -> list[list[BlockModules]]:
        """Return the stacks of a list: its modules, its lists, or what is inside them."""
        units = children_of(name, part)
        if units and not any(is_callable(child) for _, child in units):
            if all(self.passes_on(*unit) for unit in units):
                return [stack for unit in units for stack in self.in_list(*unit)]
            groups = [tuple(m for m in callable_members(*unit) if m in self.calls) for unit in units]
            blocks = [BlockModules(name, members) for members in groups if members and self.returns(members)]
            return [blocks] if blocks else []
        called = [unit for unit in units if unit[0] in self.calls]
        inner = [tuple(m for m, _ in children_of(*unit) if m in self.calls) for unit in units]
        if not called and inner and all(inner):  # the network calls `block.forward`, which no hook sees
            return [[BlockModules(name, members) for members in inner]]
        if all(is_norm(*unit) or not list(unit[1].parameters()) for unit in called):  # or activations
            return []
        names = {full for full, _ in called}
        calls = [call for full in names for call in self.calls[full] if len(call.entering) == 2]
        rows, widths = ({call.entering[side] for call in calls} for side in (0, 1))
        if len(rows) > 1 and len(widths) == 1 and not any(call.made_of & names for call in calls):
            return []  # experts: rows of one width but not as many, and nothing of each other's outputs
        blocks = [BlockModules(name, (full,)) for full, part in called if self.maps(full) and list(part.parameters())]
        if len(blocks) == len(called):
            return [blocks] if blocks else []
        deeper = [stack for unit in units for stack in (self.in_list if is_list(unit[1]) else self.inside)(*unit)]
        return deeper or ([blocks] if blocks else [])

    def parallel(self, name: str, lists: dict[str, nn.Module]) -> list[BlockModules]:
        """Return blocks of one module of each list, if the lists have equal lengths and the network calls them in turn.

        A list whose modules pass the stream to each other directly is a stack of its own. So are lists that have a
        stream each: a module of one receives neither the input of the others' nor anything made of their output.
        """
        by_length: dict[int, list[list[tuple[str, nn.Module]]]] = {}
        for full, part in lists.items():
            units = children_of(full, part)
            called = units and all(is_callable(child) and unit in self.calls for unit, child in units)
            if called and not self.chained([unit for unit, _ in units]):
                by_length.setdefault(len(units), []).append(units)
        for length, rows in by_length.items():
            blocks = [tuple(row[k][0] for row in rows) for k in range(length)]
            windows = [self.window(members) for members in blocks]
            in_turn = all(end < start for (_, end), (start, _) in pairwise(windows)) and all(map(self.returns, blocks))
            ordered = [tuple(sorted(members, key=lambda each: self.calls[each][0].start)) for members in blocks]
            if length > 1 and len(rows) > 1 and in_turn and all(map(self.share_a_stream, ordered)):
                return [BlockModules(name or "blocks", members) for members in ordered]
        return []

    def share_a_stream(self, members: tuple[str, ...]) -> bool:
        """Whether each module but the first receives the input of an earlier one, or something made of its output."""
        calls = [self.calls[member][0] for member in members]
        return all((call.made_of | call.partners) & set(members[:k]) for k, call in enumerate(calls) if k)

    def attributes(self) -> Iterator[list[BlockModules]]:
        """Yield stacks of modules that are plain attributes: of one class, or one that is called again and again."""
        taken: list[str] = []
        for name, part in self.module.named_modules():
            if any(name.startswith(f"{outer}.") or name == outer for outer in taken):
                continue
            kinds: dict[type, list[str]] = {}
            for full, child in children_of(name, part):
                if list(child.children()) and full in self.calls and self.maps(full):
                    kinds.setdefault(type(child), []).append(full)
            for same in kinds.values():
                if len(same) > 1 or len(self.calls[same[0]]) > 1:
                    taken += same
                    yield [BlockModules(name or "blocks", (full,)) for full in same]

    def joined(self, stacks: list[list[BlockModules]]) -> list[list[BlockModules]]:
        """Join stacks of which one receives the stream that another returns; sort them by their first call."""
        result: list[list[BlockModules]] = []
        for stack in sorted(stacks, key=lambda each: self.window(each[0].members)[0]):
            before = next((each for each in result if self.continues(each, stack)), None)
            if before is None:
                result.append(stack)
            else:
                one, other = before[0].stack, stack[0].stack
                pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one.split("."), other.split("."), strict=False))
                name = ".".join(part for part, _ in pairs) or (one if one == other else f"{one} + {other}")
                before[:] = [replace(block, stack=name) for block in (*before, *stack)]
        return result

    def continues(self, before: list[BlockModules], stack: list[BlockModules]) -> bool:
        last = max(before, key=lambda block: self.window(block.members)[1]).members[-1]
        first = stack[0].members[0]
        return self.follows(first, last) and self.calls[last][-1].end < self.calls[first][0].start

    def chained(self, names: list[str]) -> bool:
        """Whether each module receives the output of the one before it."""
        return all(self.follows(after, before) for before, after in pairwise(names))

    def passes_on(self, name: str, part: nn.Module) -> bool:
        """Whether a list holds blocks of one class that pass the stream on, without a sum outside of them."""
        units = children_of(name, part)
        names = [full for full, _ in units if full in self.calls]
        return len({type(each) for _, each in units}) == 1 and self.chained(names)

    def stream_of(self, name: str) -> tuple[Argument | None, int | None]:
        """Return the argument that is the stream of a module, and the place of the stream in its output.

        The modules of one list pass the stream on, which shows both. Otherwise it is the input with the output's shape.
        """
        siblings = self.siblings[name.rpartition(".")[0]]
        links = Counter(
            (argument, place)
            for sibling in siblings
            for argument, sources in self.calls[sibling][0].sources.items()
            for module, place in sources
            if module in siblings and self.calls[module][0].start < self.calls[sibling][0].start
        )
        if links:
            return links.most_common(1)[0][0]
        return self.calls[name][0].argument, None

    @cached_property
    def siblings(self) -> dict[str, list[str]]:
        """The modules that were called, by the name of their list."""
        result: dict[str, list[str]] = {}
        for name in self.calls:
            result.setdefault(name.rpartition(".")[0], []).append(name)
        return result

    def follows(self, after: str, before: str) -> bool:
        """Whether the stream that enters a module is the output of another; its other inputs do not count."""
        argument, _ = self.stream_of(after)
        sources = [] if argument is None else self.calls[after][0].sources.get(argument, [])
        return any(module == before for module, _ in sources)

    def maps(self, name: str) -> bool:
        return all(call.argument is not None for call in self.calls[name])

    def returns(self, members: tuple[str, ...]) -> bool:
        """Whether a stream enters these modules, and the last output has its shape."""
        calls = [self.calls[member][0] for member in members]
        entering = next((call.entering for call in sorted(calls, key=lambda call: call.start) if call.form), None)
        return entering is not None and max(calls, key=lambda call: call.end).leaving == entering

    def window(self, members: tuple[str, ...]) -> tuple[int, int]:
        """Return the start of the first call and the end of the last one of these modules."""
        every = [call for member in members for call in self.calls[member]]
        return min(call.start for call in every), max(call.end for call in every)
