"""A module whose random weights have laws and no entries, ready for passes forward and backward."""

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from limitformer.base.errors import InputError, require
from limitformer.weightless.arrays import Arrays, output_arrays, stream_arrays
from limitformer.weightless.implicit import Implicit
from limitformer.weightless.inputs import Inputs, Loss
from limitformer.weightless.law import make, table_of, with_overrides
from limitformer.weightless.laws import CONSTANT, UNKNOWN
from limitformer.weightless.measure import Measure, blocks_of
from limitformer.weightless.models import Blueprint
from limitformer.weightless.run import KeepWeightError, OneSampleOnlyError, Run, Weight
from limitformer.weightless.threads import one_thread
from limitformer.weightless.watching import put_parameters

BETWEEN_TIDYING = 4  # blocks


class Weightless:
    """A module whose random weights have laws and no entries, ready for passes."""

    def __init__(
        self, blueprint: Blueprint, dtype: torch.dtype, device: torch.device, overrides: dict[str, Any] | None = None
    ) -> None:
        self.blueprint, self.dtype, self.device = blueprint, dtype, device
        module, found = make(blueprint, dtype)
        self.laws = with_overrides(found, overrides)
        self.table = table_of(blueprint, module, self.laws)
        unknown = {name: law for name, law in self.laws.items() if law.kind == UNKNOWN}
        for name, law in unknown.items():
            raise InputError(
                f"the law of {name} is not understood: {law.reason}. Nearest: overrides={{{name!r}: std}}."
            )
        for name, buffer in module.named_buffers():
            require(not buffer.is_meta, f"the buffer {name} has no values: it was made by an operation on matrices.")
        self.kept: dict[str, str] = {}
        self.weights = self.replace(module)
        self.module = module.eval()
        self.blocks = blocks_of(module)
        require(bool(self.blocks), f"{blueprint.name} has no list of blocks (ModuleList or Sequential) to look at.")
        self.tidies = False  # whether a pass is so large that memory is given back on the way
        self.uses: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def replace(self, module: nn.Module) -> list[Weight]:
        """Put implicit weights in the place of random parameters, and overridden constants."""
        waiting = Run(0, range(1), 1, self.dtype, self.device)
        weights, new = [], dict[int, Any]()
        for name, parameter in module.named_parameters():
            law = self.laws[name]
            if law.random:
                weights.append(Weight(name, law, tuple(parameter.shape), waiting, trained=parameter.requires_grad))
                new[id(parameter)] = Implicit(weights[-1])
            else:
                constant = law.kind == CONSTANT
                values = torch.full(parameter.shape, law.shift) if constant else parameter.detach()
                new[id(parameter)] = nn.Parameter(self.on_device(values), parameter.requires_grad)
        put_parameters(module, new)
        self.kept |= copies(weights)
        for part in module.modules():
            part._buffers.update({name: self.on_device(b) for name, b in part._buffers.items() if b is not None})
        return weights

    def on_device(self, values: Tensor) -> Tensor:
        """With the pass's device, and its type where they are not whole numbers."""
        return values.to(self.device, self.dtype) if values.is_floating_point() else values.to(self.device)

    def width_of_activations(self) -> int:
        """Numbers that a token leaves behind in a pass, as the outputs of its linear maps."""
        return sum(min(weight.shape[0], 10**6) for weight in self.weights if len(weight.shape) >= 2)

    @contextmanager
    def tidying(self) -> Iterator[None]:
        """Give memory back on the way: what stays of a layer would break up what the next ones could use again."""
        tidied = self.blocks[::BETWEEN_TIDYING] if self.tidies else []
        hooks = [block.register_forward_pre_hook(lambda *_: give_back_memory()) for block in tidied]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def recompute(self) -> None:
        """Blocks run again in the backward pass rather than keep what they computed."""
        owners: dict[str, int] = {}
        for block in self.blocks:
            for name in names_in(block):
                owners[name] = owners.get(name, 0) + 1
        for block in self.blocks:
            names = names_in(block)
            if all(owners[name] == 1 for name in names):
                block.forward = self.running_again(block.forward, names)

    def running_again(self, forward: Callable[..., Any], names: set[str]) -> Callable[..., Any]:
        """`forward`, whose weights count as unused when it begins again."""

        def again(*args: Any, **kwargs: Any) -> Any:
            give_back_memory()
            self.weights[0].run.forget(names)
            return forward(*args, **kwargs)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return wrapped

    def run(self, seed: int, samples: range, inputs: Inputs, draw: str, loss: Loss | None) -> Arrays:
        """One pass, with its weights kept where that turns out to be needed."""
        while True:
            run = Run(seed, samples, inputs.rows, self.dtype, self.device, draw, loss is not None, dict(self.kept))
            for weight in self.weights:
                weight.run = run
            for parameter in self.module.parameters():
                parameter.grad = None
            try:
                with one_thread():
                    return self.attempt(run, inputs, loss)
            except KeepWeightError as needed:
                self.kept[needed.name] = needed.reason

    def attempt(self, run: Run, inputs: Inputs, loss: Loss | None) -> Arrays:
        """One pass; `KeepWeightError` or `OneSampleOnlyError` if it cannot be as `run` has it."""
        arguments = {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in inputs.of(run.seed, run.samples, self.dtype).items()
        }
        measure = Measure(self.blocks, len(run.samples), inputs.counted)
        chance = torch.get_rng_state()
        with torch.set_grad_enabled(loss is not None):
            with self.tidying(), measure:
                out = self.call(arguments)
            measure.finish()
            if not torch.equal(chance, torch.get_rng_state()):
                raise InputError(f"{self.blueprint.name} draws random numbers of its own when it runs.")
            found = stream_arrays(measure) | output_arrays(out, len(run.samples))
            self.uses, self.reasons = run.found, {**run.reasons, **self.kept}
            if loss is not None:
                found |= self.backward(out, arguments, loss, run, measure)
        return found

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """The module's output; what has no name is its first argument."""
        named = {name: value for name, value in arguments.items() if name}
        return self.module(arguments[""], **named) if "" in arguments else self.module(**named)

    def backward(self, out: Any, arguments: Mapping[str, Any], loss: Loss, run: Run, measure: Measure) -> Arrays:
        """The loss and its gradients."""
        value = loss(out, arguments)
        known = isinstance(value, Tensor) and value.requires_grad
        require(known, "the loss must be a tensor that depends on the module's output.")
        if value.dim() == 0 and len(run.samples) > 1:
            raise OneSampleOnlyError
        by_sample = value.reshape(len(run.samples), -1).mean(1)
        by_sample.sum().backward()
        norms = run.gradient_norms()
        places = range(len(measure.covariance))
        none = torch.full((len(run.samples),), torch.nan)
        names = [weight.name for weight in self.weights]
        return {
            "loss": by_sample.detach().double().cpu().numpy(),
            "weight_gradient": np.stack([norms.get(name, none).cpu().numpy() for name in names], -1),
            "stream_gradient": np.stack([measure.gradient.get(place, none).cpu().numpy() for place in places], -1),
        }


def copies(weights: list[Weight]) -> dict[str, str]:
    """Weights that are copies of each other draw the same numbers, and are kept; why."""
    first: dict[int, Weight] = {}
    kept: dict[str, str] = {}
    for weight in weights:
        original = first.setdefault(weight.law.source, weight)
        if original is not weight and weight.law.source >= 0:
            weight.numbers = original.name
            kept |= {original.name: f"{weight.name} is a copy of it", weight.name: f"a copy of {original.name}"}
    return kept


def give_back_memory() -> None:
    """Return free memory to the system: between the inputs of blocks, which stay, glibc would keep the holes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def names_in(block: nn.Module) -> set[str]:
    """Of the implicit weights in a block."""
    return {p.weight.name for p in block.parameters() if isinstance(p, Implicit)}
