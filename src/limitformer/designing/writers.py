"""`Writers`, an observer that finds the matrices which write to the stream: the last one of each branch.

A tensor is *written by* the matrices of the last products that it was made from: a product by its own matrix, if it has
the width of the stream (a router's scores have not); a softmax by none, fused attention by those of its values; any
other result by those of all its arguments. The matrices that write a branch, where it is added to the stream, are the
outputs of the block, whatever their names are.
"""

from torch import Tensor

from limitformer.weightless.interpreter import ByMemory, Observer, Op
from limitformer.weightless.observers.stream import Streams
from limitformer.weightless.ops import CONVOLUTION, ENTRIES, FUSED, PAIRS, PRODUCT, SOFTMAX, SUM
from limitformer.weightless.tensors import tensors_in

NONE = frozenset[str]()


class Writers(Observer):
    """An observer of the pass that `stream` measures; `names` are those of the matrices.

    Attributes:
        names: of parameters that write to the stream of any block.
    """

    def __init__(self, stream: Streams) -> None:
        self.stream, self.names = stream, set[str]()
        self.written, self.matrices = ByMemory(), ByMemory()
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
        tensors = tensors_in(op.args[2] if op.kind == FUSED else () if op.kind == SOFTMAX else (op.args, op.kwargs))
        if op.kind in (PRODUCT, CONVOLUTION, PAIRS):
            own = own.union(*(self.matrices.get(each) or NONE for each in tensors))
        if own:
            axis = 1 if "conv" in str(op.func) else -1
            names = own if any(each.shape[axis] == stream.input.shape[-1] for each in outputs) else NONE
        else:
            names = NONE.union(*(self.written.get(each) or NONE for each in tensors))
        sums = sum(len(each) for stack in stream.stacks for each in stack.inside)
        if op.kind == SUM and sums > self.sums:
            self.names |= names
            names = NONE
        self.sums = sums
        for each in outputs:
            self.written.put(each, names)
