"""`Experts`, which summarises the choices of a block's router."""

from torch import Tensor

from limitformer.weightless.block_parts import ROUTER, expert_counts, load_of_experts
from limitformer.weightless.interpreter import Observer, Op
from limitformer.weightless.observers.stream import Streams, in_rows
from limitformer.weightless.ops import CHOICE, LARGEST


class Experts(Observer):
    """An observer of the blocks that `stream` measures: the last k largest of a block, or else its first largest."""

    def __init__(self, stream: Streams) -> None:
        self.stream = stream
        self.counts: dict[int, set[int]] = {}  # the possible numbers of experts, by the first module of a block

    def see(self, op: Op) -> None:
        """Look at choices along the last dimension of the scores of each token."""
        stream, stack = self.stream, self.stream.stack
        if stack is None or op.kind not in (CHOICE, LARGEST):
            return
        scores, first_choice = op.args[0], op.kind == LARGEST
        place = 1 if first_choice else 2
        dimension = op.args[place] if len(op.args) > place else op.kwargs.get("dim", None if first_choice else -1)
        known = stack.of_block[-1].keys() & set(ROUTER)
        last = isinstance(dimension, int) and dimension in (-1, scores.dim() - 1)
        if scores.dim() == 0 or not last or (first_choice and known):
            return
        experts, parts = scores.shape[-1], stream.parts
        if id(parts[0]) not in self.counts:
            self.counts[id(parts[0])] = expert_counts(parts)
        tokens = in_rows(stream.input.detach(), stack.form).shape[:-1].numel()
        if experts not in self.counts[id(parts[0])] or scores.numel() != tokens * experts:
            return
        counted = stream.counted
        if counted is not None and stack.axis == 1:
            counted = counted.T
        choices = op.out if isinstance(op.out, Tensor) else op.out[1]
        choices = choices[..., None] if first_choice else choices
        stack.of_block[-1] |= load_of_experts(choices.detach(), experts, stream.samples, counted)
