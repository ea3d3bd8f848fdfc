"""Measure a module that exists through hooks, in one pass forward and backward, without changing it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from limitformer.base.errors import InputError, first_line, require
from limitformer.subjects.inputs import Inputs, call_with, with_targets
from limitformer.subjects.losses import Loss
from limitformer.weightless.arrays import (
    Arrays,
    blocks_in_words,
    dataset,
    output_arrays,
    sizes_of_stacks,
    stream_arrays,
)
from limitformer.weightless.blocks import UnclearAxisError, mixed_sequences
from limitformer.weightless.interpreter import Interpreter, NoEntriesError, Observer
from limitformer.weightless.layout import Chosen
from limitformer.weightless.network import output_sizes, random_states
from limitformer.weightless.observers.attention import UnclearHeadsError
from limitformer.weightless.observers.stream import Streams, UnclearBlocksError, where_parameters_are_read
from limitformer.weightless.reachable import State, stray_tensors
from limitformer.weightless.run import gradient_norm
from limitformer.weightless.simulate import equal_up_to_rounding
from limitformer.weightless.structure import Structure
from limitformer.weightless.threads import one_thread

REPEATS = 1e-4  # relative difference allowed between two calls


def measure_module(
    module: nn.Module, inputs: Inputs, loss: Loss | None, blocks: Chosen | None = None,
    more: Callable[[Streams], Observer] | None = None, passes: "Passes | None" = None,
) -> xr.Dataset:  # fmt: skip
    """Measure one network that exists, as `weightless.simulate` measures its law: one sample.

    Args:
        module: any module, trained or not. Dropout is off while it is measured, and its gradients are not touched.
        inputs: the inputs it is called with.
        loss: a function of output and inputs that returns one number for each sequence; None: no gradients.
        blocks: the modules to measure, as in `weightless.simulate`.
        more: makes one more observer of the pass.
        passes: the passes through this module, whose shapes may choose the loss; None: new ones.

    Raises:
        InputError: the module has no blocks, or it cannot run.
    """
    every = [*module.named_parameters(), *module.named_buffers(), *stray_tensors(module)]
    missing = [name for name, each in every if isinstance(each, Tensor) and each.is_meta]
    require(not missing, f"{''.join(missing[:1])} of {type(module).__name__} is on the meta device and has no values.")
    weights = {name: each for name, each in module.named_parameters() if each.requires_grad}
    frozen = loss is not None and not weights
    require(not frozen, f"no weight of {type(module).__name__} has a gradient. Nearest: gradients=False.")
    arguments = placed(inputs, module)
    with one_thread(), evaluating(module):
        passes = passes or Passes(module, blocks)
        try:
            if not hasattr(getattr(module, "config", None), "to_dict"):
                passes.check(inputs)
            passes.more = more
            out, measure = passes.call_once(inputs, arguments, gradients=loss is not None)
            with torch.set_grad_enabled(loss is not None):
                arrays = output_arrays(out, 1)
                if loss is not None:
                    arrays |= gradients(loss_value(loss, out, arguments), weights)
                arrays |= stream_arrays(measure, gradients=loss is not None)
        finally:
            passes.state.restore()
    dimensions = {name: each.dim() for name, each in weights.items()}
    about = {"description": "a module that exists", "samples": 1, "blocks": blocks_in_words(passes.stacks, module)}
    about |= {"opaque": ", ".join(sorted(passes.opaque))} if passes.opaque else {}
    return dataset([arrays], dimensions, where_parameters_are_read(module, measure), passes.stacks, inputs, about)


def settle_module(module: nn.Module, inputs: Inputs, own_loss: bool, blocks: Chosen | None = None) -> Inputs:
    """Return the first of the proposed inputs that a module takes.

    Args:
        own_loss: whether a user's module is given targets, so that it computes its own loss.
    """
    if own_loss and not inputs.proposed:
        return with_targets(inputs, module)
    state = State(module)

    def call(each: Inputs) -> None:
        state.restore()
        with torch.no_grad(), evaluating(module):
            call_with(module, placed(each, module))

    try:
        return inputs.first_accepted(call, lambda each: measure_module(module, each, None, blocks))
    finally:
        state.restore()


class Passes(Structure):
    """Passes through a module that exists, which is restored before each."""

    def __init__(self, module: nn.Module, blocks: Chosen | None) -> None:
        super().__init__(module, blocks, heads_first=None)
        self.state = State(module)

    def call_once(self, inputs: Inputs, arguments: dict[str, Any], gradients: bool) -> tuple[Any, Streams]:
        """Call the module once; return its output and the measurement. The first call finds blocks and axes."""
        return self.until_clear(inputs, lambda: self.measured(inputs, arguments, gradients), self.observed)

    def observed(self, inputs: Inputs, make: Callable[[], Observer]) -> Observer:
        """Return the observer that `make` makes, after a pass."""
        self.state.restore()
        observer = make()
        with torch.no_grad():
            called(self.module, placed(inputs, self.module), observer)
        return observer

    def measured(self, inputs: Inputs, arguments: dict[str, Any], gradients: bool) -> tuple[Any, Streams]:
        self.state.restore()
        used = set[Any]()
        measure = self.measure(1, inputs, used)
        before, name = random_states(), self.name
        with torch.set_grad_enabled(gradients):
            out = called(self.module, arguments, *self.observers(measure), read=used)
            measure.finish()
            self.stacks = sizes_of_stacks(measure)
        require(random_states() == before, f"{name} draws random numbers of its own when it runs.")
        changed = self.state.changed_weight()
        require(changed is None, f"{name} changes its parameter {changed} when it runs.")
        return out, measure

    def check(self, inputs: Inputs) -> None:
        """Call the module twice, with gradients if sequences could influence each other.

        Raises:
            InputError: sequences influence each other, or the calls differ.
        """
        several = inputs.rows > 1
        out, first = self.call_once(inputs, placed(inputs, self.module), gradients=several)
        if several and first.mixes():
            raise mixed_sequences(self.name, inputs.batch_dim)
        out_again, again = self.call_once(inputs, placed(inputs, self.module), gradients=False)
        before, after = ([*covariances(one), output_sizes(each)] for each, one in ((out, first), (out_again, again)))
        pairs = [(a.cpu().numpy(), b.cpu().numpy()) for a, b in zip(before, after, strict=False)]
        alike = len(before) == len(after) and all(equal_up_to_rounding(*pair, REPEATS) for pair in pairs)
        require(alike, f"{self.name} gives other numbers when it is called again with the same inputs.")


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of the module, whose parameters have the attributes that `deepcopy` leaves out."""
    other = deepcopy(module)
    for parameter, copy in zip(module.parameters(), other.parameters(), strict=True):
        vars(copy).update(vars(parameter))
    return other


def placed(inputs: Inputs, module: nn.Module) -> dict[str, Any]:
    """Return the arguments on the module's device."""
    some = next((one for one in module.parameters() if one.is_floating_point()), torch.zeros(()))
    arguments = inputs.of(0, range(1), some.dtype)
    return {name: each.to(some.device) if isinstance(each, Tensor) else each for name, each in arguments.items()}


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Turn dropout off within the block."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def covariances(measure: Streams) -> list[Tensor]:
    return [each for stack in measure.stacks for each in stack.covariance]


def called(module: nn.Module, arguments: dict[str, Any], *observers: Observer, read: set[Any] | None = None) -> Any:
    """Return the module's output, seen by observers; any exception becomes one line."""
    try:
        with Interpreter(module, *observers, read=read):
            out = call_with(module, arguments)
    except (InputError, MemoryError, UnclearAxisError, UnclearBlocksError, UnclearHeadsError):
        raise
    except NoEntriesError as error:
        raise InputError(f"{type(module).__name__} {error}.") from error
    except Exception as error:  # the user's own code, which may raise anything
        what = f"{type(error).__name__}: {first_line(error)}"
        types = sorted({str(each.dtype) for each in module.parameters() if each.is_floating_point()})
        if len(types) > 1:
            what += f". Its weights are of the types {', '.join(types)}. Nearest: module.float()."
        raise InputError(f"{type(module).__name__} cannot run with these inputs: {what}") from error
    return out


def loss_value(loss: Loss, out: Any, arguments: Any) -> Tensor:
    """Return the loss; an exception of the user's function is an `InputError` of one line."""
    try:
        return loss(out, arguments)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # the user's own code, which may raise anything
        raise InputError(f"the loss cannot be computed: {type(error).__name__}: {first_line(error)}") from error


def gradients(value: Tensor, weights: dict[str, nn.Parameter]) -> Arrays:
    """Return the loss and the norms of its gradients, without changing `.grad`."""
    depends = isinstance(value, Tensor) and value.requires_grad
    require(depends, "the loss must be a tensor that depends on the module's output.")
    whole = value.mean()
    try:
        gradient = torch.autograd.grad(whole, list(weights.values()), allow_unused=True)
    except RuntimeError as error:  # such as a change in place of a tensor that the gradient needs
        reentrant = "use_reentrant" in str(error)
        what = "a checkpoint is reentrant. Nearest: use_reentrant=False in it." if reentrant else first_line(error)
        raise InputError(f"the loss cannot be differentiated: {what}") from error
    norms = [torch.nan if each is None else float(gradient_norm(each)) for each in gradient]
    return {
        "loss": np.array([float(whole.detach())]),
        "weight_gradient": np.array([norms]),
    }
