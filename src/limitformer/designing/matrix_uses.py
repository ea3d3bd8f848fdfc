"""`MatrixUses`, an observer that finds matrices by their use: those that write to the stream, queries, keys and values.

A tensor is *written by* the matrices of the last products that it was made from: a product by its own matrix, if it has
the width of the stream (a router's scores have not); a softmax by none, fused attention by those of its values; any
other result by those of all its arguments. The matrices that write a branch, where it is added to the stream, are the
outputs of the block, whatever their names are.

Queries and keys are the last matrices, of any width, before a product of pairs whose result reaches a softmax; values
are those before its product with the softmax. Fused attention shows all three.
"""

from collections.abc import Iterable

from torch import Tensor

from limitformer.weightless.interpreter import ByMemory, Observer, Op
from limitformer.weightless.observers.stream import Streams
from limitformer.weightless.ops import CONVOLUTION, ENTRIES, FUSED, PAIRS, PRODUCT, SOFTMAX, SUM
from limitformer.weightless.tensors import tensors_in

Names = frozenset[str]
NONE: Names = frozenset()
WEIGHTS = NONE, NONE  # in place of queries and keys, after their softmax


class MatrixUses(Observer):
    """An observer of the pass that `stream` measures, which finds parameters by their use.

    Attributes:
        outputs: names of those that write to the stream, in any block.
        queries, keys, values: names of those that make these.
    """

    def __init__(self, stream: Streams) -> None:
        self.stream, self.outputs = stream, set[str]()
        self.queries, self.keys, self.values = set[str](), set[str](), set[str]()
        self.written, self.matrices = ByMemory(), ByMemory()
        self.made, self.scores = ByMemory(), ByMemory()  # last matrices of any width; queries and keys of logits
        self.input: Tensor | None = None
        self.sums = 0
        for name, one in stream.module.named_parameters():
            if one.dim() > 1 and not hasattr(one, "weight"):
                self.matrices.put(one, frozenset({name}))

    def see(self, op: Op) -> None:
        """Follow which matrices wrote the results of an operation; a sum with the stream ends a branch."""
        stream, outputs = self.stream, tensors_in(op.out)
        own = frozenset(each.weight.name for each in op.weights if len(each.weight.shape) > 1)
        if op.kind == ENTRIES:
            left, several = [each.weight for each in op.weights], len(op.weights) > 1
            for each in outputs:  # of several weights in their order, and of other arguments
                k = next((k for k, one in enumerate(left) if not several or one.shape == tuple(each.shape)), None)
                if k is not None:
                    self.matrices.put(each, own & {(left.pop(k) if several else left[k]).name})
            return
        if stream.stack is not None and stream.input is not self.input:  # a block begins
            self.input = stream.input
            self.written.put(self.input, NONE)
            self.made.put(self.input, NONE)
        tensors = tensors_in(op.args[2] if op.kind == FUSED else () if op.kind == SOFTMAX else (op.args, op.kwargs))
        if op.kind in (PRODUCT, CONVOLUTION, PAIRS):
            own = own.union(*(self.matrices.get(each) or NONE for each in tensors))
        self.see_attention(op, own, outputs)
        if own:
            axis = 1 if "conv" in str(op.func) else -1
            names = own if any(each.shape[axis] == stream.input.shape[-1] for each in outputs) else NONE
        else:
            names = NONE.union(*(self.written.get(each) or NONE for each in tensors))
        sums = sum(len(each) for stack in stream.stacks for each in stack.inside)
        if op.kind == SUM and sums > self.sums:
            self.outputs |= names
            names = NONE
            for each in outputs:
                self.made.put(each, NONE)
        self.sums = sums
        for each in outputs:
            self.written.put(each, names)

    def see_attention(self, op: Op, own: Names, outputs: Iterable[Tensor]) -> None:
        """Follow the last matrices of each tensor to the attention that it enters."""
        tensors = tensors_in((op.args, op.kwargs))
        made = [self.made.get(each) or NONE for each in tensors]
        scores = [each for each in map(self.scores.get, tensors) if each]
        result, pair = own or NONE.union(*made), None
        if op.kind == FUSED:
            self.note(*made[:3])
            result = NONE
        elif op.kind == SOFTMAX:
            for queries, keys in scores:
                self.note(queries, keys)
            result, pair = NONE, WEIGHTS if scores else None
        elif op.kind == PAIRS and not own and len(tensors) >= 2:
            if WEIGHTS in scores:
                self.values |= result
            elif made[-2]:
                pair = made[-2], made[-1]
            result = NONE
        elif not own and scores:
            queries, keys = zip(*scores, strict=True)
            pair = WEIGHTS if WEIGHTS in scores else (NONE.union(*queries), NONE.union(*keys))
        for each in outputs:
            self.made.put(each, result)
            self.scores.put(each, pair)

    def note(self, queries: Names, keys: Names, values: Names = NONE) -> None:
        self.queries |= queries
        self.keys |= keys
        self.values |= values
