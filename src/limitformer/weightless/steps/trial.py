"""Steps of a user's optimiser on small tensors, compared with the rule that its name and its groups say.

A name proves nothing: there are many classes called Lion. The gradients are of very different sizes, so that rules that
differ in their means, or that clip, take other steps. Muon's bfloat16 is float64 here.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from limitformer.base.errors import InputError, first_line, require
from limitformer.weightless.steps.rules import UpdateRule
from limitformer.weightless.steps.updates import TensorUpdate

RATE = 0.1  # of the trial, so that changes are not lost in the rounding of the tensors
SHAPES: dict[int, list[tuple[int, ...]]] = {
    0: [()],
    1: [(9,)],
    2: [(8, 3), (3, 8)],
    3: [(2, 8, 3)],
    4: [(2, 3, 2, 2)],
    5: [(2, 3, 2, 2, 2)],
}
LEAST_STEPS, MOST_STEPS = 3, 20
CLOSE = 1e-6  # times the rate


class Float64(TorchDispatchMode):
    """A mode in which a tensor that is cast to another floating type becomes float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and getattr(kwargs.get("dtype"), "is_floating_point", False):
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def require_same_steps(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], rule: UpdateRule, steps: int
) -> None:
    """Raise `InputError` unless an optimiser changes small tensors as the rule of a group does."""
    kind, generator = type(optimizer), torch.Generator().manual_seed(0)
    name = f"{kind.__module__}.{kind.__qualname__}"
    twin = object.__new__(kind)
    twin.__dict__.update(vars(optimizer))
    shapes = [shape for dim in sorted({each.dim() for each in group["params"]}) for shape in SHAPES.get(dim, [])]
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    parameters = [torch.nn.Parameter(each.clone()) for each in values]
    twin.param_groups, twin.state = [{**group, "params": parameters, "lr": RATE}], defaultdict(dict)
    tried = UpdateRule(**{**vars(rule), "lr": RATE})
    updates = [TensorUpdate(tried) for _ in values]
    for step in range(min(max(steps, LEAST_STEPS), MOST_STEPS)):
        gradients = [spread(each.shape, generator) for each in values]
        for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
            parameter.data.copy_(value)  # so that errors of earlier steps do not count
            parameter.grad = gradient.clone()
        try:
            with Float64():
                twin.step()
        except Exception as error:  # the user's own code, which may raise anything
            raise InputError(
                f"the step of {name} fails on small tensors: {type(error).__name__}: {first_line(error)}. Nearest: an "
                "optimiser of torch, or SingleDeviceMuonWithAuxAdam for MuonWithAuxAdam."
            ) from error
        values = [each.step(value, g, 1.0) for each, value, g in zip(updates, values, gradients, strict=True)]
        apart = [float((a - b.detach()).abs().max()) for a, b in zip(values, parameters, strict=True)]
        require(
            max(apart, default=0.0) <= CLOSE * RATE,
            f"step {step + 1} of {name} is not that of the {rule.kind} that is understood: small tensors differ. "
            "Nearest: an optimiser of torch.",
        )


def spread(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Draw entries of sizes from 1e-3 to 1e3."""
    size = torch.rand(shape, generator=generator, dtype=torch.float64) * 6.0 - 3.0
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0**size
