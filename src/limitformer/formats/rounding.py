r"""How far a network in a number format is from the same network in float32: its stream and gradient, layer by layer.

A pass runs in the format's type: the module's code casts as it always does, torch rounds each result, and products with
weights are summed in float32, then rounded. Both passes draw the same weights, in float32. In eight bits the type is
bfloat16, and the inputs of products with weights, and the gradients that come back to these products, are rounded to
eight bits with a power of two for each tensor. A network that uses entries of its matrices in other operations has no
answer there. Not modelled: the order of sums inside a kernel, kernels that keep float32 inside, and rounded weights,
whose law differs by the format's relative spacing.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from limitformer.base.errors import InputError, first_line
from limitformer.formats.table import NumberFormat
from limitformer.subjects.inputs import Inputs
from limitformer.subjects.losses import Loss
from limitformer.weightless.blocks import tokens_among
from limitformer.weightless.building import put_parameters
from limitformer.weightless.implicit import Implicit, as_type
from limitformer.weightless.interpreter import Observer
from limitformer.weightless.network import Weightless
from limitformer.weightless.run import ALWAYS, WeightlessRun
from limitformer.weightless.tensors import tensors_in


class Layers(Observer):
    """An observer that keeps the stream before each block and after the last, and its gradients."""

    def __init__(self, network: Weightless) -> None:
        self.arguments = {block.members[0]: block.argument for block in network.layout.blocks}
        self.last = network.layout.blocks[-1].members[-1]
        self.watched = {**self.arguments, self.last: None}
        self.streams: list[Tensor] = []
        self.gradients: dict[int, Tensor] = {}

    def keep(self, x: Tensor) -> None:
        layer = len(self.streams)
        self.streams.append(x.detach().float())
        if x.requires_grad:
            x.register_hook(partial(self.keep_gradient, layer))

    def keep_gradient(self, layer: int, gradient: Tensor) -> None:
        self.gradients[layer] = gradient.detach().float()

    def enter(self, name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        x = tokens_among(args, kwargs, self.arguments.get(name)) if name in self.arguments else None
        if x is not None:
            self.keep(x)

    def leave(self, name: str, part: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if name == self.last and (every := tensors_in(out)):
            self.keep(every[0])


def rounding(
    make: Callable[[], Weightless], layout: Any, inputs: Inputs, loss: Loss | None, formats: Sequence[NumberFormat],
    seed: int, samples: int = 1,
) -> xr.Dataset:  # fmt: skip
    """Return |h′ − h|/|h| of the stream h in float32 and h′ in the format, by format, sample and layer, as `stream`.

    `gradient` is the same of its gradient.

    Args:
        make: returns the network, each time a new one.
        layout: of its blocks, which follow each other along `layer` if there are several stacks: `block` names the one
            that the stream enters.
    """
    count = len(formats)
    result = {key: np.full((count, samples, len(layout.blocks) + 1), np.nan) for key in ("stream", "gradient")}
    exact = layers_of(make(), layout, inputs, loss, None)
    rounded = [layers_of(make(), layout, inputs, loss, each) for each in formats]
    for sample in range(samples):
        one = exact(seed, sample)
        for k in range(count):
            other = rounded[k](seed, sample)
            if other is None:
                continue
            for layer, (a, b) in enumerate(zip(one.streams, other.streams, strict=True)):
                result["stream"][k, sample, layer] = distance(a, b)
                if layer in one.gradients and layer in other.gradients:
                    result["gradient"][k, sample, layer] = distance(one.gradients[layer], other.gradients[layer])
    dims = "format", "sample", "layer"
    names = [*(each.members[0] for each in layout.blocks), "end"]
    coordinates = {"format": [each.name for each in formats], "layer": np.arange(len(names)), "block": ("layer", names)}
    return xr.Dataset({key: (dims, each) for key, each in result.items()}, coordinates)


def distance(exact: Tensor, rounded: Tensor) -> float:
    return float((rounded - exact).norm() / exact.norm())


def layers_of(
    network: Weightless, layout: Any, inputs: Inputs, loss: Loss | None, which: NumberFormat | None
) -> Callable[[int, int], Any]:
    """Return a function of seed and sample that returns the streams and gradients in a format, or in float32.

    It returns None where eight bits have no answer.
    """
    network.layout = layout

    def call(run: WeightlessRun) -> Layers | None:
        layers = Layers(network)
        if which is not None:
            dtype = which.dtype if which.dtype.itemsize == 2 else torch.bfloat16
            to_type(network.module, dtype, every_buffer=network.foreign)
            run.in_format = True
            run.rounds = partial(EightBits.apply, which) if which.dtype.itemsize == 1 else None
        arguments = network.arguments(run, inputs)
        if which is not None:
            arguments = {name: in_type(each, dtype) for name, each in arguments.items()}
        with torch.set_grad_enabled(loss is not None), network.watching(run, layers):
            out = network.call(arguments)
        if loss is not None:
            network.backward(out, arguments, loss, run)
        matrices = {weight.name for weight in network.weights if len(weight.shape) > 1}
        unseen = bool(network.drawn) or bool(matrices & run.operations.keys())
        return None if run.rounds is not None and unseen else layers

    def of_sample(seed: int, sample: int) -> Any:
        try:
            return network.until_it_runs(seed, range(sample, sample + 1), inputs, ALWAYS, loss, call)
        except (RuntimeError, TypeError) as error:  # of the module's own code
            name = "float32" if which is None else which.name
            nearest = "the casts that plain PyTorch needs, too"
            raise InputError(
                f"{network.subject.name} cannot run in {name}: {first_line(error)}. Nearest: {nearest}."
            ) from error

    return of_sample


def in_type(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def to_type(module: nn.Module, dtype: torch.dtype, every_buffer: bool) -> None:
    """Give a module the type, as `module.to(dtype)`.

    Transformers load models in a type and leave buffers that are not stored, such as frequencies, in float32.
    """
    new = dict[int, Any]()
    for one in module.parameters():
        if isinstance(one, Implicit):
            new[id(one)] = as_type(one, dtype)
        elif one.is_floating_point() and one.dtype != dtype:
            new[id(one)] = nn.Parameter(one.detach().to(dtype), one.requires_grad)
    put_parameters(module, new)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and (every_buffer or name not in part._non_persistent_buffers_set):
                part._buffers[name] = in_type(buffer, dtype)


class EightBits(torch.autograd.Function):
    """Rounds what a product takes to eight bits, or what its gradient takes if `backward`."""

    @staticmethod
    def forward(ctx: Any, which: NumberFormat, x: Tensor, backward: bool) -> Tensor:
        ctx.which, ctx.backward_too = which, backward
        return x.clone() if backward else to_eight_bits(which, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        return None, to_eight_bits(ctx.which, gradient) if ctx.backward_too else gradient, None


def to_eight_bits(which: NumberFormat, x: Tensor) -> Tensor:
    """Round a tensor with the largest power of two that keeps it in the format."""
    largest = float(x.abs().max()) if x.numel() else 0.0
    if not 0 < largest < math.inf:
        return x
    scale = 2.0 ** math.floor(math.log2(which.largest / largest))
    return (x * scale).to(which.dtype).to(x.dtype) / scale
