r"""`NumberCounts`, an observer that counts the numbers of every tensor of a pass, forward and backward.

A tensor is named after the module that makes it. A module without parts counts as one operation, since its code may
compute in float32 inside. Inside all others each operation counts by its name: "h.0.attn softmax". Views and copies of
tensors do not count. Results of an attention kernel that keeps its logits to itself are seen as those of plain
attention.

Gradients are those of the same tensors. Nodes of torch's graph belong to the innermost module that made them: a walk
back from the inputs and outputs of each module finds them.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from limitformer.formats.table import NumberFormat
from limitformer.formats.tally import Tally
from limitformer.stepping.updates import CoreUpdate, TensorUpdate, UpdateRule
from limitformer.weightless.interpreter import Observer, Op
from limitformer.weightless.observers.stream import Streams
from limitformer.weightless.ops import COPY, ENTRIES, SUM, kind_of
from limitformer.weightless.run import RandomWeight
from limitformer.weightless.tensors import storage, tensors_in

FORWARD, BACKWARD, WEIGHT, GRADIENT, UPDATE = DIRECTIONS = (
    *("forward", "backward", "weight", "weight gradient", "update"),
)
MOST_COUNTED = 2**18  # entries of the gradient of a product; of larger matrices evenly spaced rows are counted
PRODUCTS = ("linear", "matmul", "mm", "__matmul__", "bmm", "addmm")  # of `implicit.ANSWERS`
OWN_FUNCTIONS = r"^(NeverDrawnMap|RedrawnMap|RepeatedUse|OrthogonalMap|TrainedMap)$"

Tallies = dict[tuple[str, str], Tally]  # by direction and tensor


class NumberCounts(Observer):
    """An observer of the pass that `stream` measures; it looks into blocks even if they have no parts.

    Args:
        rules: by weight, of the optimiser whose first step is counted; none without one.
    """

    def __init__(self, stream: Streams, formats: Sequence[NumberFormat], rules: Mapping[str, UpdateRule]) -> None:
        self.stream, self.formats, self.rules = stream, formats, rules
        module, blocks = stream.module, {name for block in stream.layout.blocks for name in block.members}
        self.watched = [name for name, _ in module.named_modules()]
        self.whole = {name for name, part in module.named_modules() if not list(part.children())} - {"", *blocks}
        self.tallies: Tallies = {}
        self.silent: set[str] = set()  # tensors of which every number is zero
        self.running: list[str] = []
        self.nodes: dict[int, Any] = {}  # of torch's graph that have an owner, kept so that no other has their id
        self.handles = [
            one.register_hook(partial(self.add_gradient, name, whole=True))
            for name, one in module.named_parameters()
            if one.requires_grad and not hasattr(one, "weight")
        ]

    def add(self, direction: str, name: str, x: Tensor) -> None:
        """Count the numbers of a tensor."""
        if not x.is_floating_point() or not x.numel() or x.is_meta:
            return
        tally = self.tallies.setdefault((direction, name), Tally(self.formats))
        tally.add(x)
        if direction == FORWARD and not tally.count:
            self.silent.add(name)

    def enter(self, name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        if self.running:
            self.own_nodes(self.running[-1], tensors_in((args, kwargs)))
        self.running.append(name)

    def leave(self, name: str, part: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        self.running.pop()
        outputs = tensors_in(out)
        if name in self.whole:
            known = {storage(each) for each in tensors_in((args, kwargs))}
            new = [each for each in outputs if storage(each) not in known]
            for each in new:
                self.add(FORWARD, name, each)
                if each.grad_fn is not None:
                    self.own(each.grad_fn, name)
            self.own_nodes("", outputs)
        else:
            self.own_nodes(name, outputs)

    def see(self, op: Op) -> None:
        for weight in op.weights:
            self.note_use(op, weight)
        whole = not self.running or self.running[-1] in self.whole
        if whole or op.kind in (COPY, ENTRIES) or getattr(op.func, "is_view", False):
            return
        name = f"{self.running[-1]} {name_of(op.func)}".strip()
        for each in tensors_in(op.out):
            self.add(FORWARD, name, each)
        tensors = len(op.args) > 1 and all(isinstance(each, Tensor) for each in op.args[:2])
        if op.kind == SUM and tensors and self.stream.stack is not None and op.out.shape == self.stream.input.shape:
            self.note_sum(name, op)

    def note_sum(self, name: str, op: Op) -> None:
        """Count which numbers change nothing where they are added to the stream, once they and the sum are rounded."""
        added, out = op.args[1] * op.kwargs.get("alpha", 1), op.out
        stream = op.args[0] if op.args[0] is not out else out - added  # the sum is in its place
        if not added.shape == stream.shape == out.shape:
            return
        lost = self.tallies[FORWARD, name].lost
        for which in self.formats:
            if which.dtype.itemsize == 2:  # nobody adds in eight bits
                a, b = (each.to(which.dtype) for each in (stream, added))
                large = torch.where(a.abs() >= b.abs(), a, b)
                both = (a != 0) & (b != 0)
                some = lost.setdefault(which.name, [0.0, 0.0])
                some[0] += float(((a + b == large) & both).sum())
                some[1] += float(both.sum())

    # Gradients

    def own_nodes(self, owner: str, tensors: Sequence[Tensor]) -> None:
        """Give every node behind these tensors that has no owner this one; none is interested in those of "" ."""
        waiting = [each.grad_fn for each in tensors if each.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if id(node) in self.nodes:
                continue
            operation = "" if not owner else operation_of(node.name())
            self.own(node, f"{owner} {operation}" if operation else "")
            waiting += [each for each, _ in node.next_functions if each is not None]

    def own(self, node: Any, name: str) -> None:
        if id(node) not in self.nodes:
            self.nodes[id(node)] = node
            if name:
                node.register_prehook(partial(self.add_gradients_of, name))

    def add_gradients_of(self, name: str, gradients: Sequence[Tensor | None]) -> None:
        for each in gradients:
            if each is not None:
                self.add(BACKWARD, name, each)

    # Weights

    def note_use(self, op: Op, weight: Any) -> None:
        """Wait for the gradient of a weight without entries, or of its entries if they were drawn."""
        name, function = weight.weight.name, getattr(op.func, "__name__", "")
        every = [each for each in op.out if each.requires_grad]
        if weight.frozen or not every:
            return
        if op.kind == ENTRIES:
            for each in every:
                if each.shape == weight.shape and all(each is not one for one in op.args):
                    each.register_hook(partial(self.add_gradient, name, whole=True))
        elif function in PRODUCTS:
            factors = [each for each in op.args if each.dim() > 1 and each.shape[:-1] == every[0].shape[:-1]]
            rows_are_outputs = (function == "linear") != weight.turned
            every[0].register_hook(partial(self.add_product, weight.weight, rows_are_outputs, factors[0].detach()))
        elif function == "embedding":
            every[0].register_hook(partial(self.add_rows, name, op.args[0].detach()))

    def add_product(self, weight: RandomWeight, rows_are_outputs: bool, x: Tensor, d: Tensor) -> None:
        """Count rows of the gradient of a product of x, which has the gradient d, and of the update."""
        d, x = d.detach(), x.to(d.dtype)
        stacked = len(weight.shape) > 2
        left, right = (each if stacked else each.flatten(0, -2) for each in ((d, x) if rows_are_outputs else (x, d)))
        rows = min(left.shape[-1], max(1, MOST_COUNTED // right.shape[-1] // math.prod(right.shape[:-2])))
        chosen = torch.linspace(0, left.shape[-1] - 1, rows, dtype=torch.float64).round().long().to(d.device)
        self.add_gradient(weight.name, left[..., chosen].mT @ right)
        rule = self.rules.get(weight.name)
        if rule is not None and rule.of_matrices and not stacked:
            self.add(UPDATE, weight.name, matrix_update(rule, left, right, chosen))

    def add_rows(self, name: str, ids: Tensor, d: Tensor) -> None:
        """Count the gradient of the rows of a table that were looked up, and their update."""
        distinct, place = torch.unique(ids, return_inverse=True)
        sums = d.new_zeros(len(distinct), d.shape[-1]).index_add_(0, place.flatten(), d.detach().flatten(0, -2))
        self.add_gradient(name, sums)

    def add_gradient(self, name: str, gradient: Tensor, whole: bool = False) -> None:
        """Count a gradient, and its update unless the rule needs the `whole` matrix."""
        self.add(GRADIENT, name, gradient)
        rule, gradient = self.rules.get(name), gradient.detach()
        if rule is not None and (whole or not rule.of_matrices):
            self.add(UPDATE, name, TensorUpdate(rule).step(torch.zeros_like(gradient), gradient, 1.0))

    def finish(self) -> None:
        for each in self.handles:
            each.remove()
        self.nodes.clear()


def matrix_update(rule: UpdateRule, left: Tensor, right: Tensor, rows: Tensor) -> Tensor:
    """Return rows of the first update of a matrix by the gradient leftᵀ right, of a rule for whole matrices."""
    (q, of_left), (p, of_right) = (torch.linalg.qr(each.double().mT) for each in (left, right))
    core = CoreUpdate(rule, (left.shape[-1], right.shape[-1]))
    core.add(of_left @ of_right.mT, 1.0)
    return q[rows] @ core.core @ p.mT


def name_of(func: Any) -> str:
    name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else func.__name__
    return str(name).strip("_")


@cache
def operation_of(node: str) -> str:
    """Return the name of the operation of a node of torch's graph; empty for views, copies, and those of weights."""
    name = re.sub(r"Backward\d*$", "", node)
    if re.match(OWN_FUNCTIONS, name):
        return "linear"
    if "::" in name or not name:
        return ""
    spelled = re.sub(r"(?<!^)(?<![_A-Z])(?=[A-Z])", "_", name).lower()
    for each in (spelled, f"_{spelled}"):
        packet = getattr(torch.ops.aten, each, None)
        if packet is not None:
            first = getattr(packet, packet.overloads()[0])
            return "" if first.is_view or kind_of(first) == COPY else spelled
    return spelled
