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
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from limitformer.formats.table import NumberFormat
from limitformer.formats.tally import Tally
from limitformer.stepping.updates import CoreUpdate, TensorUpdate, UpdateRule
from limitformer.weightless.implicit import ANSWERS, addmm, batched, linear, matmul
from limitformer.weightless.interpreter import Observer, Op
from limitformer.weightless.laws import ORTHOGONAL, normal
from limitformer.weightless.numbers import entries
from limitformer.weightless.observers.stream import Streams
from limitformer.weightless.ops import COPY, ENTRIES, SUM, kind_of
from limitformer.weightless.run import RandomWeight
from limitformer.weightless.tensors import storage, tensors_in

FORWARD, BACKWARD, WEIGHT, GRADIENT, UPDATE = DIRECTIONS = (
    *("forward", "backward", "weight", "weight gradient", "update"),
)
ROOT = "root"  # the module itself, in names
MOST_COUNTED = 2**18  # entries of the gradient of a product; of larger matrices evenly spaced rows are counted
PRODUCTS = {each.__name__ for each, answer in ANSWERS.items() if answer in (linear, matmul, batched, addmm)}
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
        self.uses: dict[tuple[str, int | None], Uses] = {}
        self.handles = [
            one.register_hook(partial(self.add_whole, name, one))
            for name, one in module.named_parameters()
            if one.requires_grad and not hasattr(one, "weight")
        ]

    def add(self, direction: str, name: str, x: Tensor) -> None:
        """Count the numbers of a tensor."""
        if not x.is_floating_point() or not x.numel() or x.is_meta:
            return
        tally = self.tallies.setdefault((direction, name), Tally(self.formats))
        tally.add(x)
        if direction == FORWARD and not tally.count and not bool(x.any()):
            self.silent.add(name)

    def enter(self, name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        if self.running:
            self.own_nodes(self.running[-1] or ROOT, tensors_in((args, kwargs)))
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
            self.own_nodes(name or ROOT, outputs)

    def see(self, op: Op) -> None:
        for weight in op.weights:
            self.note_use(op, weight)
        whole = not self.running or self.running[-1] in self.whole
        if whole or op.kind in (COPY, ENTRIES) or getattr(op.func, "is_view", False):
            return
        name = f"{self.running[-1] or ROOT} {name_of(op.func)}"
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
        """Give every node behind these tensors that has no owner this one; gradients of nodes of "" do not count."""
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
        function = getattr(op.func, "__name__", "")
        every = [each for each in op.out if each.requires_grad]
        if weight.frozen or not every:
            return
        if op.kind == ENTRIES:
            for each in every:
                if each.shape == weight.shape and all(each is not one for one in op.args):
                    each.register_hook(partial(self.add_whole, weight.weight.name, each.detach()))
            return
        uses = self.uses.setdefault((weight.weight.name, weight.part), Uses(weight.weight))
        if function in PRODUCTS:
            out, inputs = every[0], weight.shape[-1 if function == "linear" else -2]
            factors = [x for x in op.args if x.shape[:-1] == out.shape[:-1] and x.shape[-1:] == (inputs,)]
            if factors:
                uses.waiting += 1
                rows_are_outputs = (function == "linear") != weight.turned
                out.register_hook(partial(self.add_product, uses, rows_are_outputs, factors[0].detach()))
        elif function == "embedding":
            uses.waiting += 1
            every[0].register_hook(partial(self.add_lookup, uses, op.args[0].detach()))

    def add_product(self, uses: "Uses", rows_are_outputs: bool, x: Tensor, d: Tensor) -> None:
        """Add the factors of the gradient of a product of x, which has the gradient d."""
        d, x = d.detach(), x.to(d.dtype)
        if x.dim() < 3 or len(uses.weight.shape) < 3:
            d, x = (each.reshape(-1, each.shape[-1]) for each in (d, x))
        uses.products.append((d, x) if rows_are_outputs else (x, d))
        self.settle(uses)

    def add_lookup(self, uses: "Uses", ids: Tensor, d: Tensor) -> None:
        """Add the gradient of rows of a table that were looked up."""
        uses.lookups.append((ids.flatten(), d.detach().reshape(-1, d.shape[-1])))
        self.settle(uses)

    def settle(self, uses: "Uses") -> None:
        """Count the gradient and the update of a weight after the gradient of its last use."""
        uses.waiting -= 1
        if uses.waiting == 0:
            weight, rule = uses.weight, self.rules.get(uses.weight.name)
            rows, gradient = uses.gradient()
            self.add(GRADIENT, weight.name, gradient)
            change = None
            if rule is not None and rule.of_matrices:
                if len(weight.shape) > 2 or not uses.products:
                    rule = None  # only a whole matrix shows its update
                else:
                    change = -matrix_update(rule, *uses.factors(), rows)
            if rule is not None:
                self.add_update(weight.name, rule, gradient, sample_of(weight, gradient.shape), change)
            uses.products, uses.lookups = [], []

    def add_whole(self, name: str, values: Tensor, gradient: Tensor) -> None:
        """Count a whole gradient, and the update of the weight, whose entries are `values`."""
        gradient = gradient.detach()
        self.add(GRADIENT, name, gradient)
        if name in self.rules:
            self.add_update(name, self.rules[name], gradient, values.detach(), None)

    def add_update(self, name: str, rule: UpdateRule, gradient: Tensor, values: Tensor, change: Tensor | None) -> None:
        """Count what a step subtracts from the weight, and which of its entries stay as they are once rounded.

        The decay of the weight itself is rounded first, as in torch.
        """
        if change is None:
            change = -TensorUpdate(rule).step(torch.zeros_like(gradient), gradient, 1.0)
        self.add(UPDATE, name, change)
        for which in self.formats if (UPDATE, name) in self.tallies else ():
            if which.dtype.itemsize == 2:
                start = values.to(which.dtype)
                if rule.decoupled:
                    after = ((1 - rule.lr * rule.weight_decay) * start.float()).to(which.dtype) - change
                else:
                    after = TensorUpdate(rule).step(start.to(gradient.dtype), gradient, 1.0)
                some = self.tallies[UPDATE, name].lost.setdefault(which.name, [0.0, 0.0])
                some[0] += float(((after.to(which.dtype) == start) & (change != 0)).sum())
                some[1] += float((change != 0).sum())

    def finish(self) -> None:
        """Count what is left of weights of which some use has no gradient, and let the module go."""
        for uses in self.uses.values():
            if uses.products or uses.lookups:
                uses.waiting = 1
                self.settle(uses)
        for each in self.handles:
            each.remove()
        self.nodes.clear()


@dataclass(eq=False)
class Uses:
    """The uses of a weight in one pass, by products and lookups; `waiting` of them have had no gradient so far."""

    weight: RandomWeight
    waiting: int = 0
    products: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # factors of the gradient leftᵀ right
    lookups: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # ids, and the gradients of their rows

    def factors(self) -> tuple[Tensor, Tensor]:
        left, right = zip(*self.products, strict=True)
        return torch.cat(left, -2), torch.cat(right, -2)

    def gradient(self) -> tuple[Tensor, Tensor]:
        """Return numbers of rows, and these rows of the gradient: evenly spaced ones, or those that were looked up."""
        rows = torch.unique(torch.cat([ids for ids, _ in self.lookups])) if self.lookups else torch.zeros(0)
        if not self.products:
            gradient = self.lookups[0][1].new_zeros(len(rows), self.weight.shape[-1])
        else:
            left, right = self.factors()
            count = min(left.shape[-1], max(1, MOST_COUNTED // right.shape[-1] // math.prod(right.shape[:-2])))
            rows = torch.linspace(0, left.shape[-1] - 1, count, dtype=torch.float64).round().long().to(left.device)
            gradient = left[..., rows].mT @ right
        for ids, d in self.lookups:
            place = torch.searchsorted(rows, ids).clamp(max=len(rows) - 1)
            known = rows[place] == ids
            gradient.index_add_(0, place[known], d[known])
        return rows, gradient


def sample_of(weight: RandomWeight, shape: tuple[int, ...]) -> Tensor:
    """Return entries by the law of a weight (of an orthogonal matrix: nearly normal ones)."""
    law = normal(weight.law.std) if weight.law.kind == ORTHOGONAL else weight.law
    drawn = entries(law, 0, f"{weight.name}: formats", range(1), range(math.prod(shape[:-1])), shape[-1], torch.float32)
    return drawn.reshape(shape)


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
