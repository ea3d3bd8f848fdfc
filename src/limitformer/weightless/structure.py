"""`Structure`: what passes have shown of a module, and what must be known of it before its stream can be measured."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import nn

from limitformer.subjects.inputs import Inputs
from limitformer.subjects.losses import Choice, loss_of_shapes
from limitformer.weightless.arrays import StackSize
from limitformer.weightless.blocks import Entries, UnclearAxisError, grown_axes
from limitformer.weightless.interpreter import Observer
from limitformer.weightless.layout import (
    Call,
    Chosen,
    Layout,
    Recorder,
    chosen_layout,
    needs_search,
    outermost_list,
    search,
)
from limitformer.weightless.observers.attention import FirstWeights, Heads, UnclearHeadsError, heads_come_first
from limitformer.weightless.observers.experts import Experts
from limitformer.weightless.observers.stream import Streams, UnclearBlocksError
from limitformer.weightless.run import POSITIONS

T = TypeVar("T")


class Structure:
    """The blocks of a module, and the order of sequences, tokens and heads.

    Args:
        heads_first: whether attention weights have heads before sequences, if their sizes do not show it; None: not
            known, and not needed so far.
    """

    def __init__(self, module: nn.Module, blocks: Chosen | None, heads_first: bool | None) -> None:
        self.module, self.heads_first = module, heads_first
        self.stacks: dict[str, StackSize] = {}  # of the last pass
        self.first_layout = outermost_list(module) if blocks is None else chosen_layout(module, blocks)
        self.layout = self.first_layout  # until a pass shows another
        self.needs_blocks = True  # whether a module without blocks is refused
        self.axes: tuple[Inputs, dict[int, int]] | None = None  # by block, the dimension with these inputs' sequences
        self.opaque: set[str] = set()  # operations of the last pass whose parts are not seen
        self.recorded: tuple[Any, dict[str, list[Call]]] = None, {}  # the last inputs that were tried, and the calls
        self.more: Callable[[Streams], Observer] | None = None  # makes one more observer of each pass

    @property
    def name(self) -> str:
        """The name of the module in errors."""
        return type(self.module).__name__

    def tables(self) -> list[tuple[int, int]]:
        """Return rows and columns of the tables that are looked up, without those of positions."""
        parts = {name: part for name, part in self.module.named_modules() if isinstance(part, nn.Embedding)}
        lookups = {f"{name}.weight": (part.num_embeddings, part.embedding_dim) for name, part in parts.items()}
        return [sizes for name, sizes in (self.lookups() | lookups).items() if not POSITIONS.search(name)]

    def lookups(self) -> dict[str, tuple[int, int]]:
        """Return rows and columns of the parameters of which the last pass read rows, by name, as far as known."""
        return {}

    def loss_of_shapes(self, batch_dim: int, otherwise: Choice | None = None) -> Choice:
        """Return `losses.loss_of_shapes` of this module; it needs a pass before the loss is chosen."""

        def choose(out: Any, inputs: Any) -> Any:
            tables = self.tables()
            widths = {columns for _, columns in tables} | {size.width for size in self.stacks.values()}
            return loss_of_shapes(self.name, {rows for rows, _ in tables}, widths, batch_dim, otherwise)(out, inputs)

        return choose

    def measure(self, samples: int, inputs: Inputs, used: set[Any]) -> Streams:
        """Return an observer of the stream; `used` are the parameters that the pass reads."""
        axes = self.axes[1] if self.axes is not None and self.axes[0] is inputs else None
        if inputs.tokens is not None:  # sequences that a Transformer draws itself lie in the first dimension
            axes = dict.fromkeys(range(len(self.layout.blocks)), 0)
        result = Streams(self.module, self.layout, samples, inputs.rows, inputs.counted, axes, inputs.length, used)
        self.opaque = result.opaque
        return result

    def observers(self, stream: Streams) -> list[Observer]:
        """Return all observers of a pass that is measured."""
        more = [] if self.more is None else [self.more(stream)]
        return [stream, Experts(stream), Heads(stream, self.module, self.heads_first), *more]

    def until_clear(self, inputs: Inputs, call: Callable[[], T], observed: Callable[..., Any]) -> T:
        """Return what `call` returns; it begins again after passes that show what it could not see.

        Args:
            observed: runs a pass with these inputs and an observer, given by the function that makes it; returns it.
        """
        while True:
            try:
                if needs_search(self.layout, self.module):
                    raise UnclearBlocksError
                return call()
            except UnclearBlocksError as unclear:
                self.find_blocks(inputs, observed, unclear.measured)
            except UnclearAxisError:  # sequences lie in the dimension that grows with their number
                blocks = [(block.members[0], block.argument) for block in self.layout.blocks]
                shapes = [observed(inputs.repeated(times), partial(Entries, blocks)).shapes for times in (1, 2)]
                self.axes = inputs, grown_axes(*shapes)
            except UnclearHeadsError:  # a pass with each sequence twice
                twice = inputs.repeated(2)
                self.heads_first = heads_come_first(observed(twice, FirstWeights).results, twice.rows)

    def find_blocks(self, inputs: Inputs, observed: Callable[..., Any], measured: bool) -> None:
        """Find the blocks in a pass; if there are none, those that were measured remain.

        Raises:
            InputError: no module receives tokens and returns as many, and blocks are needed.
        """
        known, calls = self.recorded
        if known is None or known is not inputs.fixed:
            calls = observed(inputs, lambda: Recorder(self.module)).calls
        otherwise = self.layout if measured else None if self.needs_blocks else Layout(())
        self.layout, self.axes = search(self.module, calls, otherwise), None
