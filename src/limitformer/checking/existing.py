"""A module that exists, measured through hooks in one pass forward and backward; nothing of it is changed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from limitformer.base.errors import InputError, first_line, require
from limitformer.weightless.arrays import Arrays, dataset, output_arrays, stream_arrays
from limitformer.weightless.inputs import Inputs, Loss
from limitformer.weightless.measure import Measure, blocks_of
from limitformer.weightless.threads import one_thread


def measured(module: nn.Module, inputs: Inputs, loss: Loss | None) -> xr.Dataset:
    """What `weightless.simulate` gives, of one network that exists: one sample.

    Args:
        module: any, trained or not. Dropout is off while it is measured; its gradients are not touched.
        inputs: what it is called with.
        loss: from its output and its inputs to one number a sequence; None: no gradients.

    Raises:
        InputError: it has no list of blocks, it cannot run, or what it computes is NaN or ∞.
    """
    blocks = blocks_of(module)
    require(bool(blocks), f"{type(module).__name__} has no list of blocks (ModuleList or Sequential) to look at.")
    weights = {name: each for name, each in module.named_parameters() if each.requires_grad}
    frozen = loss is not None and not weights
    require(not frozen, f"no weight of {type(module).__name__} has a gradient. Nearest: gradients=False.")
    some = next(module.parameters())
    arguments = placed(inputs, some.device, some.dtype)
    measure = Measure(blocks, 1, inputs.counted)
    with one_thread(), evaluating(module), torch.set_grad_enabled(loss is not None):
        out = called(module, arguments, measure)
        found = stream_arrays(measure) | output_arrays(out, 1)
        check_finite(found)
        if loss is not None:
            found |= gradients(loss(out, arguments), weights, measure)
    return dataset([found], list(weights), inputs, {"description": "a module that exists", "samples": 1})


def placed(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments, on the module's device."""
    given = inputs.of(0, range(1), dtype)
    return {name: each.to(device) if isinstance(each, Tensor) else each for name, each in given.items()}


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Without dropout, inside the block only."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def called(module: nn.Module, arguments: dict[str, Any], measure: Measure) -> Any:
    """The module's output, seen by `measure`; what it raises becomes one line."""
    named = {name: value for name, value in arguments.items() if name}
    first = [arguments[""]] if "" in arguments else []
    try:
        with measure:
            out = module(*first, **named)
        measure.finish()
    except (InputError, MemoryError):
        raise
    except Exception as error:  # the user's own code, which may raise anything
        what = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{type(module).__name__} cannot run with these inputs: {what}") from error
    return out


def check_finite(found: Arrays) -> None:
    """`InputError` that names the first layer whose tokens are NaN or ∞."""
    bad = ~np.isfinite(found["covariance"][0]).all((-1, -2))
    require(
        not bad.any(), f"the stream is NaN or infinite from layer {int(bad.argmax())} on (0: before the first block)."
    )


def gradients(value: Tensor, weights: dict[str, nn.Parameter], measure: Measure) -> Arrays:
    """The loss, and norms of its gradients; `.grad` stays as it was."""
    known = isinstance(value, Tensor) and value.requires_grad
    require(known, "the loss must be a tensor that depends on the module's output.")
    whole = value.mean()
    found = torch.autograd.grad(whole, list(weights.values()), allow_unused=True)
    norms = [torch.nan if each is None else float(torch.linalg.vector_norm(each.double())) for each in found]
    none = torch.full((1,), torch.nan)
    stream = [float(measure.gradient.get(place, none)) for place in range(len(measure.covariance))]
    return {
        "loss": np.array([float(whole.detach())]),
        "weight_gradient": np.array([norms]),
        "stream_gradient": np.array([stream]),
    }
