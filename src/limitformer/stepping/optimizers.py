"""Rules by which an optimiser updates each parameter, read from its name or from the user's own code.

The user's function is called with the module and returns an optimiser, or several, whose parameter groups are read.
Those of `updates` that torch has are known by their class; any other is not understood, and trains drawn networks.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torchs

from limitformer.base.errors import InputError, first_line, nearest, require
from limitformer.stepping.rules import StepRules
from limitformer.stepping.updates import OPTIMIZERS, AdamW, UpdateRule, is_number, number_in

READERS = {kind: rule.read_group for rule in OPTIMIZERS.values() if (kind := rule.in_torch())}
LABELS = ("params", "param_names", "name", "initial_lr")  # keys of a group that change no step
FLAGS = ("fused", "capturable", "differentiable", "amsgrad", "maximize")  # that change what a step does
CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


def read_optimizer(
    optimizer: Any, module: nn.Module, *, steps: int, clip: float | None = None, warmup: int = 0, schedule: Any = None
) -> StepRules:
    """Read an optimiser.

    Args:
        optimizer: a name in `OPTIMIZERS`; a dictionary with such a "name" and options; or a function that takes the
            module and returns an optimiser of torch, or several with different parameters.
        module: the user's module with ordinary parameters, which may be on the meta device.
        steps: the number of steps.
        clip: the largest norm of all gradients together.
        warmup: the number of steps over which the learning rate rises linearly.
        schedule: a function of the step, or numbers, that multiply the learning rates.

    Raises:
        InputError: something is not understood, or cannot be used.
    """
    clip = valid_clip(clip)
    factors = factors_of(steps, warmup, schedule)
    sparse = [name for name, each in module.named_modules() if getattr(each, "sparse", False) is True]
    require(not sparse, f"{', '.join(sparse[:3])} has sparse=True: gradients that are sparse. Nearest: sparse=False.")
    if isinstance(optimizer, str):
        optimizer = {"name": optimizer}
    if isinstance(optimizer, Mapping):
        return by_name(dict(optimizer), module, clip, factors)
    is_function = callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer)
    require(
        is_function,
        f"optimizer must be one of {', '.join(OPTIMIZERS)}, a dictionary, or a function that takes the module and "
        f"returns an optimiser of torch; got {type(optimizer).__name__}. Nearest: optimizer=lambda module: "
        "torch.optim.AdamW(module.parameters(), lr=1e-3).",
    )
    try:
        several = made_by(optimizer, module)
        rules = rules_of_optimizers(several, module)
    except UsersError:
        raise
    except InputError as error:
        raise NotUnderstoodError(str(error)) from error
    return StepRules(rules, clip, factors, base_rate(several[0]), " and ".join(type(each).__name__ for each in several))


def with_groups(optimizer: Any, after_groups: Any) -> Any:
    """Return the user's function for the optimiser, followed by that of the training loop for keys of groups.

    Args:
        after_groups: a function that receives what `optimizer` returned, such as one that multiplies each group's lr by
            its "lr_scale"; keys that torch does not know have no further use, and are removed. None: there is none.
    """
    if after_groups is None:
        return optimizer
    functions = callable(after_groups) and callable(optimizer)
    require(functions, "after_groups must be a function, of what the function for the optimizer returns.")

    def make(module: nn.Module) -> Any:
        made = optimizer(module)
        after_groups(made)
        for each in made_by(lambda _: made, module):
            for group in each.param_groups if type(each) in READERS else ():
                for key in strange_keys(each, group):
                    del group[key]
        return made

    return make


def strange_keys(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> list[str]:
    """Return the keys of a group that torch's own optimiser does not know."""
    known = (*LABELS, *inspect.signature(type(optimizer)).parameters, "decoupled_weight_decay")
    return [key for key, value in group.items() if key not in known and value is not None and value is not False]


class NotUnderstoodError(InputError):
    """A user's function for the optimiser is not understood; drawn networks can be trained by what it returns."""

    @property
    def reason(self) -> str:
        """The error without its repair."""
        return str(self).partition(" Nearest:")[0].rstrip(".")


class UsersError(InputError):
    """An error that drawn networks would have, too: a key for a training loop, or parameters of another module."""


def made_by(optimizer: Callable[[nn.Module], Any], module: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimisers that a user's function makes.

    Raises:
        InputError: it fails, or returns something else.
    """
    try:
        optimizers = optimizer(module)
    except InputError:
        raise
    except Exception as error:  # the user's own code, which may raise anything
        what = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"the function for the optimizer fails: {what}.") from error
    every = list(optimizers) if isinstance(optimizers, tuple | list) else [optimizers]
    other = next((type(each).__name__ for each in every if not isinstance(each, torch.optim.Optimizer)), None)
    returned = "nothing" if not every else other
    require(
        returned is None,
        f"the function for the optimizer must return an optimiser of torch, or several; got {returned}.",
    )
    return every


def rules_of_optimizers(every: Sequence[torch.optim.Optimizer], module: nn.Module) -> dict[str, UpdateRule]:
    """Return the rule of each trained parameter.

    Raises:
        InputError: an optimiser, or one of its options, is not understood.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    rules: dict[str, UpdateRule] = {}
    for optimizer in every:
        kind, reader = type(optimizer).__name__, READERS.get(type(optimizer))
        if reader is None:
            raise InputError(
                f"the optimiser {kind} is not understood; known are {', '.join(each.__name__ for each in READERS)} of "
                "torch. Nearest: one of them."
            )
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        strange = {
            "hooks on its steps": hooks or torchs._global_optimizer_pre_hooks or torchs._global_optimizer_post_hooks,
            "a step that is replaced, as by a scheduler": "step" in vars(optimizer),
            "a state already": optimizer.state,
        }
        strange |= {f"{flag}=True": any(group.get(flag) for group in optimizer.param_groups) for flag in FLAGS}
        has = next((what for what, present in strange.items() if present), None)
        require(has is None, f"{kind} has {has}, which is not understood. Nearest: without it.")
        for group in optimizer.param_groups:
            if other := strange_keys(optimizer, group):
                raise UsersError(
                    f"a group of {kind} has {', '.join(other)}, which is not understood. Nearest: after_groups "
                    "(--after-groups) with the function of the training loop that uses it; or a factor in lr."
                )
            rule = reader(group, kind)
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    what = f"{kind} has a parameter {tuple(parameter.shape)}"
                    raise UsersError(f"{what} that the module does not have. Nearest: the module's.")
                require(name not in rules, f"{name} is in two groups or optimisers. Nearest: each parameter in one.")
                if parameter.requires_grad:
                    rules[name] = rule
    if not rules:
        raise UsersError("the optimiser has no parameters that are trained.")
    return rules


def valid_clip(clip: float | None) -> float | None:
    good = clip is None or (is_number(clip) and 0 < clip < math.inf)
    require(good, f"clip must be a number above 0, or None; got {clip!r}. Nearest: clip=1.0.")
    return clip


def base_rate(optimizer: torch.optim.Optimizer) -> float:
    """Return the default learning rate of an optimiser, or that of its first group if no group has the default."""
    rates = [group["lr"] for group in optimizer.param_groups]
    default = optimizer.defaults.get("lr")
    return number_in({"lr": default if default in rates else rates[0]}, "lr", type(optimizer).__name__)


def factors_of(steps: int, warmup: int, schedule: Any) -> tuple[float, ...]:
    """Return the factor of the learning rates at each step."""
    require(
        isinstance(warmup, int) and not isinstance(warmup, bool) and warmup >= 0,
        f"warmup must be a number of steps; got {warmup!r}.",
    )
    rising = [min(1.0, (step + 1) / warmup) if warmup else 1.0 for step in range(steps)]
    if schedule is None:
        return tuple(rising)
    if callable(schedule):
        values = [schedule(step) for step in range(steps)]
    else:
        require(
            isinstance(schedule, Sequence) and not isinstance(schedule, str) and len(schedule) >= steps,
            f"schedule must be a function of the step, or {steps} numbers; got {schedule!r:.60}.",
        )
        values = list(schedule[:steps])
    good = all(is_number(value) and 0 <= value < math.inf for value in values)
    require(good, f"schedule must give numbers of at least 0; got {values!r:.60}.")
    return tuple(factor * float(value) for factor, value in zip(rising, values, strict=True))


def by_name(given: dict[str, Any], module: nn.Module, clip: float | None, factors: tuple[float, ...]) -> StepRules:
    """Return the rules of an optimiser that was named, for all parameters."""
    name = given.pop("name", None)
    known = isinstance(name, str) and name.lower() in OPTIMIZERS
    require(known, f"unknown optimizer {name!r}; there are {', '.join(OPTIMIZERS)}.{nearest(str(name), OPTIMIZERS)}")
    kind = OPTIMIZERS[str(name).lower()]
    options = kind.names()
    for key in given:
        require(
            key in options, f"{kind.name} has no option {key!r}; it has {', '.join(options)}.{nearest(key, options)}"
        )
    rule = kind.read(given, kind.name)
    trained = {key: parameter for key, parameter in module.named_parameters() if parameter.requires_grad}
    require(bool(trained), "the module has no parameters that are trained.")
    rules = dict.fromkeys(trained, rule)
    if kind.of_matrices:
        others = {key: given.get(key, own) for key, own in kind.others.items()} | {"weight_decay": rule.weight_decay}
        adamw = AdamW.read(others | {"lr": others["adam_lr"]}, f"{kind.name}'s AdamW")
        hidden = hidden_matrices(module)
        rules = {key: rule if key in hidden else adamw for key in trained}
    return StepRules(rules, clip, factors, rule.lr, kind.name)


def hidden_matrices(module: nn.Module) -> set[str]:
    """Return the names of matrices, or stacked matrices, that neither look up tokens nor give the output."""
    parts = list(module.modules())
    tables = [part for part in parts if isinstance(part, nn.Embedding)]
    last = [part for part in parts if isinstance(part, nn.Linear)][-1:]
    find_head = getattr(module, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    outside: list[nn.Module] = [*tables, *(part for part in parts if isinstance(part, CONVOLUTIONS))]
    outside += [head] if isinstance(head, nn.Module) else []
    if not tables or (
        not isinstance(head, nn.Module) and last and last[0].out_features in {t.num_embeddings for t in tables}
    ):
        outside += last
    ids = {id(each) for part in outside for each in part.parameters()}
    return {name for name, each in module.named_parameters() if each.dim() in (2, 3) and id(each) not in ids}
