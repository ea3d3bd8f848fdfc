"""Rules by which an optimiser updates each parameter, read from its name or from the user's own code.

The user's function is called with the module and returns an optimiser, or several, whose parameter groups are read.
SGD, Adam, AdamW and Muon of torch are known by their class; any other is not understood, and trains drawn networks.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torchs

from limitformer.base.errors import InputError, first_line, nearest, require
from limitformer.stepping.rules import (
    ADAM,
    MOST_RATE,
    MUON,
    RMS,
    SGD,
    WIDTH,
    StepRules,
    UpdateRule,
    is_number,
)

SCALES = {None: WIDTH, "original": WIDTH, "match_rms_adamw": RMS}
LARGEST_STEPS = 20  # of Newton–Schulz
LABELS = ("params", "param_names", "name", "initial_lr")  # keys of a group that change no step
FLAGS = ("fused", "capturable", "differentiable", "amsgrad", "maximize")  # that change what a step does
CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d

DEFAULTS: Mapping[str, Mapping[str, Any]] = {  # of optimisers by name: those of torch, of Lion's paper, and of Muon's
    "sgd": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0},
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
    "muon": {
        "lr": 0.02, "momentum": 0.95, "nesterov": True, "weight_decay": 0.0, "scale": WIDTH,
        "adam_lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10,
    },
}  # fmt: skip


def read_optimizer(
    optimizer: Any, module: nn.Module, *, steps: int, clip: float | None = None, warmup: int = 0, schedule: Any = None
) -> StepRules:
    """Read an optimiser.

    Args:
        optimizer: a name in `DEFAULTS`; a dictionary with such a "name" and options; or a function that takes the
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
        f"optimizer must be one of {', '.join(DEFAULTS)}, a dictionary, or a function that takes the module and "
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
                f"the optimiser {kind} is not understood; known are SGD, Adam, AdamW and Muon of torch. Nearest: one "
                "of them."
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
    known = isinstance(name, str) and name.lower() in DEFAULTS
    require(known, f"unknown optimizer {name!r}; there are {', '.join(DEFAULTS)}.{nearest(str(name), DEFAULTS)}")
    name = str(name).lower()
    for key in given:
        require(
            key in DEFAULTS[name],
            f"{name} has no option {key!r}; it has {', '.join(DEFAULTS[name])}.{nearest(key, DEFAULTS[name])}",
        )
    options = {**DEFAULTS[name], **given}
    useless = options.get("nesterov") and name == "sgd" and (not options["momentum"] or options["dampening"])
    require(not useless, "sgd has nesterov, which needs momentum and no dampening, as in torch. Nearest: momentum=0.9.")
    kind = {"adamw": ADAM}.get(name, name)
    rule = rule_of(kind, options, name, decoupled=name in ("adamw", "lion", "muon"))
    trained = {key: parameter for key, parameter in module.named_parameters() if parameter.requires_grad}
    require(bool(trained), "the module has no parameters that are trained.")
    rules = dict.fromkeys(trained, rule)
    if name == "muon":
        adamw = rule_of(ADAM, options | {"lr": options["adam_lr"]}, "muon's AdamW", decoupled=True)
        hidden = hidden_matrices(module)
        rules = {key: rule if key in hidden else adamw for key in trained}
    return StepRules(rules, clip, factors, rule.lr, name)


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


def torchs_muon(group: Mapping[str, Any], name: str) -> UpdateRule:
    """Read a group of `torch.optim.Muon`."""
    scale = group.get("adjust_lr_fn")
    require(scale in SCALES, f"{name} has adjust_lr_fn={scale!r}, which is not understood.")
    rule = rule_of(MUON, {**group, "scale": SCALES[scale]}, name, decoupled=True)
    iterations = int(group.get("ns_steps", rule.iterations))
    require(0 < iterations <= LARGEST_STEPS, f"{name} has ns_steps={iterations}; known are 1 to {LARGEST_STEPS}.")
    a, b, c = (float(each) for each in group.get("ns_coefficients", rule.coefficients))
    least = number_in(group, "eps", name, rule.least_norm)
    return replace(rule, iterations=iterations, coefficients=(a, b, c), least_norm=least)


READERS: dict[type, Callable[[Mapping[str, Any], str], UpdateRule]] = {
    torch.optim.SGD: lambda group, name: rule_of(SGD, group, name, decoupled=False),
    torch.optim.Adam: lambda group, name: rule_of(ADAM, group, name, group.get("decoupled_weight_decay", False)),
    torch.optim.AdamW: lambda group, name: rule_of(ADAM, group, name, decoupled=True),
}
if hasattr(torch.optim, "Muon"):
    READERS[torch.optim.Muon] = torchs_muon


def rule_of(kind: str, options: Mapping[str, Any], name: str, decoupled: bool) -> UpdateRule:
    """Return the rule with these options, whose ranges are checked."""
    lr = number_in(options, "lr", name)
    require(0 <= lr <= MOST_RATE, f"{name} has the learning rate {lr}; it must be above 0 and at most {MOST_RATE:g}.")
    decay = number_in(options, "weight_decay", name, 0.0)
    require(0 <= decay < math.inf, f"{name} has weight_decay={decay}; it must be at least 0.")
    rule = UpdateRule(kind, lr, decay, decoupled)
    if kind in (SGD, MUON):
        momentum, dampening = number_in(options, "momentum", name, 0.0), number_in(options, "dampening", name, 0.0)
        require(0 <= momentum < 1, f"{name} has momentum={momentum}; it must be at least 0 and below 1.")
        scale = options.get("scale", WIDTH)
        require(scale in (WIDTH, RMS), f'{name} has scale={scale!r}; it must be "{WIDTH}" or "{RMS}".')
        nesterov = bool(options.get("nesterov", False))
        return replace(rule, momentum=momentum, dampening=dampening, nesterov=nesterov, scale=scale)
    betas = options.get("betas")
    good = isinstance(betas, tuple | list) and len(betas) == 2 and all(is_number(b) and 0 <= b < 1 for b in betas)
    require(good, f"{name} has betas={betas!r}; they must be two numbers of at least 0 and below 1.")
    eps = number_in(options, "eps", name, 1e-8)
    require(0 <= eps < math.inf, f"{name} has eps={eps}; it must be at least 0.")
    assert isinstance(betas, tuple | list)
    return replace(rule, betas=(float(betas[0]), float(betas[1])), eps=eps)


def number_in(options: Mapping[str, Any], key: str, name: str, default: float | None = None) -> float:
    """Return an option that must be a number."""
    value = options.get(key, default)
    one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta
    value = float(value) if one or isinstance(value, np.floating) else value
    require(is_number(value), f"{name} has {key}={value!r}, which is not a number.")
    return float(value)
