r"""Gradients of parameters with entries, by sample, such as norm gains, biases and matrices that start at zero.

A parameter p with entries is one tensor that all S samples share, and torch would sum its gradient over them. Instead,
each operation y = f(x, p) receives p without its gradient, which changes no bit of y or of the gradient of x. From the
gradient g of y a hook forms that of p, by sample:

  biases and sums     Σ g         over the sample's tokens;
  gains and products  Σ g x       over the sample's tokens;
  linear maps x Wᵀ    Gᵀ X        G, X the sample's tokens
  norms               Σ g x̂       x̂ the norm of x without its gain

Torch differentiates tensors that are computed from parameters only (`1 + weight`, a slice, a transpose), once for each
sample. Any other operation raises `OneSampleOnlyError`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from limitformer.weightless.implicit import METADATA, Implicit
from limitformer.weightless.run import OneSampleOnlyError, WeightlessRun, add_to
from limitformer.weightless.tensors import tensors_in

MOST_ENTRIES = 2**22  # of the gradients of a matrix, for all samples together
Hook = Callable[[Tensor], None]

SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__}
PRODUCTS = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
PRODUCTS_OF_MATRICES = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
NORMS = {functional.layer_norm, torch.layer_norm, functional.rms_norm, torch.rms_norm}
CONVOLUTIONS = {functional.conv1d, functional.conv2d, functional.conv3d}


class SharedGradients(TorchFunctionMode):
    """A mode that adds the gradients of shared parameters to the run, by sample."""

    def __init__(self, module: nn.Module, run: WeightlessRun) -> None:
        super().__init__()
        self.run = run
        self.leaves: dict[int, tuple[str, Tensor]] = {}  # by id: the name of a parameter, and the parameter
        self.made: dict[int, Tensor] = {}  # by id: a tensor computed from parameters only, with its graph
        self.alive: list[Tensor] = []
        for name, parameter in module.named_parameters():
            if not isinstance(parameter, Implicit) and parameter.requires_grad:
                self.leaves[id(parameter)] = name, parameter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` with shared parameters detached, and hook their gradients to its output."""
        kwargs = kwargs or {}
        if not self.has_shared(args) and not (kwargs and self.has_shared(kwargs.values())):
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") not in METADATA:
            self.run.read.update(id(each) for each in tensors_in((args, kwargs)) if id(each) in self.leaves)
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") in METADATA:
            out = func(*args, **kwargs)
            if not isinstance(out, Tensor):
                return out
        if not any(isinstance(each, Tensor) and not self.is_shared(each) for each in (*args, *kwargs.values())):
            return self.of_shared_only(func, args, kwargs)
        answer = next((answer for functions, answer in ANSWERS if func in functions), None)
        if answer is None:
            raise OneSampleOnlyError
        hook = answer(self, func, *args, **kwargs)
        out = func(*map(self.detached, args), **{name: self.detached(each) for name, each in kwargs.items()})
        if not isinstance(out, Tensor) or out.shape[0] % self.run.side_by_side:
            raise OneSampleOnlyError
        out = out if out.requires_grad else out + self.run.anchor
        out.register_hook(hook)
        return out

    def is_shared(self, value: Any) -> bool:
        return id(value) in self.leaves or id(value) in self.made

    def has_shared(self, values: Any) -> bool:
        """Whether one of the values, or of their lists, is a shared tensor."""
        for each in values:
            if id(each) in self.leaves or id(each) in self.made:
                return True
            if isinstance(each, list | tuple) and self.has_shared(each):
                return True
        return False

    def detached(self, value: Any) -> Any:
        return value.detach() if isinstance(value, Tensor) and self.is_shared(value) else value

    def of_shared_only(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operation on shared tensors only; its result is shared too."""
        if self.has_shared([each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)]):
            raise OneSampleOnlyError
        inner = [self.made.get(id(each), each) for each in args]
        graph = func(*inner, **{name: self.made.get(id(each), each) for name, each in kwargs.items()})
        name = getattr(func, "__name__", "")
        if not isinstance(graph, Tensor) or (name.endswith("_") and not name.endswith("__")):
            raise OneSampleOnlyError
        if self.is_shared(graph) or not graph.requires_grad:
            return graph
        value = graph.detach()
        self.alive += [graph, value]
        self.made[id(value)] = graph
        return value

    def add(self, shared: Tensor, gradient: Tensor) -> None:
        """Add `gradient` (S, *shape) of a shared tensor to the gradients of the parameters that it is computed from."""
        if id(shared) in self.leaves:
            add_to(self.run.constants, self.leaves[id(shared)][0], gradient)
            return
        every = list(self.leaves.values())
        gradients = torch.autograd.grad(
            self.made[id(shared)], [each for _, each in every], gradient.to(shared.dtype),
            retain_graph=True, allow_unused=True, is_grads_batched=True,
        )  # fmt: skip
        for (name, _), each in zip(every, gradients, strict=True):
            if each is not None:
                add_to(self.run.constants, name, each)

    def by_sample(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Sum `values`, shaped as an output, over the dimensions along which a parameter of this shape is repeated."""
        samples = self.run.side_by_side
        spare = values.dim() - len(shape)
        if spare < 0 or (spare == 0 and shape[0] != 1):
            raise OneSampleOnlyError
        values = values.reshape(samples, -1, *values.shape[1:])
        aligned = (1,) * spare + tuple(shape)
        repeated = [k + 1 for k, size in enumerate(aligned) if k and size == 1 and values.shape[k + 1] != 1]
        return values.sum([1, *repeated]).reshape(samples, *shape)

    def rows(self, x: Tensor) -> Tensor:
        """Reshape to tokens (S, T, n)."""
        return x.detach().reshape(self.run.side_by_side, -1, x.shape[-1])


def linear(mode: SharedGradients, func: Any, input: Tensor, weight: Tensor, bias: Any = None) -> Hook:
    x = mode.rows(input) if mode.is_shared(weight) else None
    check_size(mode, weight)

    def hook(g: Tensor) -> None:
        tokens = mode.rows(g)
        if x is not None:
            mode.add(weight, tokens.mT @ x)
        if mode.is_shared(bias):
            mode.add(bias, tokens.sum(1))

    return hook


def matmul(mode: SharedGradients, func: Any, input: Tensor, other: Tensor) -> Hook:
    if mode.is_shared(input) or other.dim() != 2:
        raise OneSampleOnlyError
    check_size(mode, other)
    x = mode.rows(input)
    return lambda g: mode.add(other, x.mT @ mode.rows(g))


def addmm(mode: SharedGradients, func: Any, input: Tensor, mat1: Tensor, mat2: Tensor) -> Hook:
    if mode.is_shared(mat1) or input.dim() != 1:
        raise OneSampleOnlyError
    check_size(mode, mat2)
    x = mode.rows(mat1) if mode.is_shared(mat2) else None

    def hook(g: Tensor) -> None:
        if x is not None:
            mode.add(mat2, x.mT @ mode.rows(g))
        if mode.is_shared(input):
            mode.add(input, mode.rows(g).sum(1))

    return hook


def norm(
    mode: SharedGradients, func: Any, input: Tensor, normalized_shape: Any, weight: Any = None, *more: Any, **named: Any
) -> Hook:
    layer = func in (functional.layer_norm, torch.layer_norm)
    bias, eps = (*more, None, None)[:2] if layer else (None, (*more, None)[0])
    bias, eps = named.get("bias", bias), named.get("eps", eps)
    x, shape = input.detach(), torch.Size(normalized_shape)

    def hook(g: Tensor) -> None:
        if mode.is_shared(weight):
            function = functional.layer_norm if layer else functional.rms_norm
            normed = function(x, list(shape)) if eps is None else function(x, list(shape), eps=eps)
            mode.add(weight, mode.by_sample(g * normed, shape))
        if mode.is_shared(bias):
            mode.add(bias, mode.by_sample(g, shape))

    return hook


def addition(mode: SharedGradients, func: Any, input: Any, other: Any, **named: Any) -> Hook:
    if named or (func in (Tensor.add_, Tensor.__iadd__) and mode.is_shared(input)):
        raise OneSampleOnlyError
    p = input if mode.is_shared(input) else other
    return lambda g: mode.add(p, mode.by_sample(g, p.shape))


def product(mode: SharedGradients, func: Any, input: Any, other: Any) -> Hook:
    p, x = (input, other) if mode.is_shared(input) else (other, input)
    x = x.detach()
    return lambda g: mode.add(p, mode.by_sample(g * x, p.shape))


def convolution(
    mode: SharedGradients, func: Any, input: Tensor, weight: Tensor, bias: Any = None, *more: Any, **named: Any
) -> Hook:
    if mode.is_shared(weight) or mode.is_shared(input):
        raise OneSampleOnlyError
    return lambda g: mode.add(bias, mode.by_sample(g, torch.Size((len(bias), *[1] * (g.dim() - 2)))).flatten(1))


def check_size(mode: SharedGradients, matrix: Tensor) -> None:
    """Raise `OneSampleOnlyError` if the gradients of a shared matrix would take too much memory."""
    if mode.is_shared(matrix) and mode.run.side_by_side * matrix.numel() > MOST_ENTRIES:
        raise OneSampleOnlyError


ANSWERS: list[tuple[set[Any], Callable[..., Hook]]] = [
    ({functional.linear}, linear),
    (PRODUCTS_OF_MATRICES, matmul),
    ({torch.addmm}, addmm),
    (NORMS, norm),
    (SUMS, addition),
    (PRODUCTS, product),
    (CONVOLUTIONS, convolution),
]
