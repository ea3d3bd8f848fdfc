"""Rules by which an optimiser updates each parameter, read from its name or from the user's own code.

The user's function is called with the module and returns an optimiser, or several, whose parameter groups are read. A
class of torch's own is known by its object. Any other (Lion, MuonWithAuxAdam, a subclass) takes steps on small tensors,
which must be those of the rule (`trial`). Anything else is refused by name.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torchs
from torch.utils._python_dispatch import TorchDispatchMode

from limitformer.base.errors import InputError, first_line, nearest, require
from limitformer.weightless.steps.rules import (
    ADAM,
    LION,
    MOST_RATE,
    MUON,
    RMS,
    SGD,
    WIDTH,
    StepRules,
    UpdateRule,
    is_number,
)
from limitformer.weightless.steps.trial import require_same_steps
from limitformer.weightless.tensors import storage, tensors_in

SCALES = {None: WIDTH, "original": WIDTH, "match_rms_adamw": RMS}
LARGEST_STEPS = 20  # of Newton–Schulz
LABELS = ("params", "param_names", "name", "initial_lr")  # keys of a group that change no step


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
        rules, every = rules_of_function(optimizer, module, steps)
    except UsersError:
        raise
    except InputError as error:
        raise NotUnderstoodError(str(error)) from error
    outside = [name for name in tables_and_heads(module) if name in rules and rules[name].kind == MUON]
    kinds = " and ".join(type(each).__name__ for each in every)
    return StepRules(rules, clip, factors, base_rate(every[0]), kinds, tuple(outside))


class NotUnderstoodError(InputError):
    """A user's function for the optimiser is not understood; drawn networks can be trained by what it returns."""

    @property
    def reason(self) -> str:
        """The error without its repair."""
        return str(self).partition(" Nearest:")[0].rstrip(".")


class UsersError(InputError):
    """An error that drawn networks would have, too: a key for a training loop, or parameters of another module."""


def rules_of_function(
    optimizer: Callable[[nn.Module], Any], module: nn.Module, steps: int
) -> tuple[dict[str, UpdateRule], list[Any]]:
    """Return the rule of each parameter, and the optimisers that a user's function returns."""
    made = call(optimizer, module)
    every = list(made) if isinstance(made, tuple | list) else [made]
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    kernels = kernels_of(module)
    rules: dict[str, UpdateRule] = {}
    for each in every:
        for name, rule in rules_of_optimizer(each, names, steps):
            known = rule.kind != MUON or name not in kernels
            require(known, f"{name} is the kernel of a convolution, for which Muon is not understood. Nearest: AdamW.")
            require(name not in rules, f"{name} is in two groups or optimisers. Nearest: each parameter in one.")
            rules[name] = rule
    if not rules:
        raise UsersError("the optimiser has no parameters that are trained.")
    return rules, every


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
    plain = options.get("nesterov") and name == "sgd" and (not options["momentum"] or options["dampening"])
    require(not plain, "sgd has nesterov, which needs momentum and no dampening, as in torch. Nearest: momentum=0.9.")
    kind = {"adamw": ADAM}.get(name, name)
    rule = rule_of(kind, options, name, decoupled=name in ("adamw", "lion", "muon"))
    trained = {key: parameter for key, parameter in module.named_parameters() if parameter.requires_grad}
    require(bool(trained), "the module has no parameters that are trained.")
    rules = dict.fromkeys(trained, rule)
    if name == "muon":
        beside = rule_of(ADAM, options | {"lr": options["adam_lr"]}, "muon's AdamW", decoupled=True)
        rules = {key: rule if hidden_matrix(key, module) else beside for key in trained}
    return StepRules(rules, clip, factors, rule.lr, name)


def kernels_of(module: nn.Module) -> set[str]:
    """Return the names of the kernels of convolutions."""
    kinds = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
    own = {id(part.weight) for part in module.modules() if isinstance(part, kinds)}
    return {name for name, each in module.named_parameters() if id(each) in own}


def hidden_matrix(name: str, module: nn.Module) -> bool:
    """Whether a parameter is a matrix, or stacked matrices, that neither looks up tokens nor gives the output."""
    parameter = dict(module.named_parameters())[name]
    if parameter.dim() not in (2, 3) or name in kernels_of(module):
        return False
    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    tables = any(isinstance(part, nn.Embedding) for part in module.modules())
    last = not tables and bool(linear) and parameter is linear[-1].weight
    return not last and name not in tables_and_heads(module)


def tables_and_heads(module: nn.Module) -> list[str]:
    """Return the names of the parameters of tables, and of the head of a module that has tables."""
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    outside = {id(each) for part in tables for each in part.parameters()}
    find_head = getattr(module, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    if isinstance(head, nn.Module):
        outside |= {id(each) for each in head.parameters()}
    else:
        linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
        rows = {part.num_embeddings for part in tables}
        outside |= {id(part.weight) for part in linear[-1:] if part.out_features in rows}
    return [name for name, each in module.named_parameters() if id(each) in outside]


class Writes(TorchDispatchMode):
    """A mode that notes the storages that operations write to."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`."""
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[place] if place < len(args) else kwargs.get(argument.name)
                self.storages |= {storage(each) for each in tensors_in(written)}
        return func(*args, **kwargs)


def hooks_of(owner: Any) -> tuple[Any, ...]:
    """Return the hooks of a tensor or a module."""
    names = [*vars(owner)] if isinstance(owner, nn.Module) else ["_backward_hooks", "_post_accumulate_grad_hooks"]
    return tuple(hook for name in names if name.endswith("_hooks") for hook in (getattr(owner, name) or {}).values())


def call(optimizer: Callable[[nn.Module], Any], module: nn.Module) -> Any:
    """Call the user's function.

    Raises:
        InputError: it fails, or changes the module's tensors.
    """

    def state() -> dict[str, tuple[Any, ...]]:
        every = (*module.named_parameters(), *module.named_buffers())
        found = {name: (id(each), storage(each), each.requires_grad, hooks_of(each)) for name, each in every}
        return found | {f"the hooks of {name or 'the module'}": hooks_of(each) for name, each in module.named_modules()}

    before = state()
    try:
        with Writes() as writes:
            made = optimizer(module)
    except InputError:
        raise
    except Exception as error:  # the user's own code, which may raise anything
        raise InputError(
            f"the function for the optimizer fails: {type(error).__name__}: {first_line(error)}. Nearest: a function "
            "that takes the module, whose matrices are on the meta device, and returns an optimiser of torch."
        ) from error
    after, every = state(), (*module.named_parameters(), *module.named_buffers())
    changed = [name for name, each in before.items() if each != after.get(name)]
    changed += [name for name, each in every if storage(each) in writes.storages]
    require(
        not changed and len(before) == len(after),
        f"the function for the optimizer changes {', '.join(changed[:3]) or 'the parameters'} of the module. "
        "Nearest: initialise and freeze weights, and register hooks, in the function that builds it.",
    )
    return made


def rules_of_optimizer(optimizer: Any, names: Mapping[int, str], steps: int) -> Iterable[tuple[str, UpdateRule]]:
    """Yield the rule of each parameter of an optimiser.

    Raises:
        InputError: the optimiser, or one of its options, is not understood.
    """
    require(
        isinstance(optimizer, torch.optim.Optimizer),
        f"the function for the optimizer must return an optimiser of torch, or several; got "
        f"{type(optimizer).__name__}.",
    )
    kind = type(optimizer).__name__
    reader = reader_of(type(optimizer))
    parent = next((each.__name__ for each in type(optimizer).__mro__ if each in READERS), None)
    why = f": its step is not that of {parent}" if parent else ""
    require(
        reader is not None,
        f"the optimiser {kind} is not understood{why}; known are SGD, Adam, AdamW and Muon of torch, Lion, and "
        "MuonWithAuxAdam. Nearest: one of them.",
    )
    assert reader is not None
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    hooked = own or torchs._global_optimizer_pre_hooks or torchs._global_optimizer_post_hooks
    require(not hooked, f"{kind} has hooks on its steps, which are not understood. Nearest: without them.")
    replaced = [key for key in vars(optimizer) if callable(getattr(type(optimizer), key, None))]
    require(
        not replaced,
        f"{', '.join(replaced)} of this {kind} is replaced, as by a scheduler, which is not understood. Nearest: "
        "without it; schedule= multiplies the rates.",
    )
    require(not optimizer.state, f"{kind} has a state already; the steps begin without one. Nearest: a new {kind}.")
    for group in optimizer.param_groups:
        check_flags(group, kind)
        known = next((each for each in READERS if isinstance(optimizer, each)), None)
        if known is not None:
            require_only(group, (*inspect.signature(known).parameters, "decoupled_weight_decay"), kind)
        rule = reader(group, kind)
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                shape = tuple(parameter.shape)
                raise UsersError(
                    f"{kind} has a parameter {shape} that the module does not have. Nearest: the module's."
                )
            if rule.kind == MUON:
                matrix = parameter.dim() in (2, 3)
                require(
                    matrix,
                    f"{kind} has {name} {tuple(parameter.shape)}, which is not a matrix. Nearest: give it to AdamW.",
                )
            if parameter.requires_grad:
                yield name, rule
        if type(optimizer) not in READERS:
            require_same_steps(optimizer, group, rule, steps)


def check_flags(group: Mapping[str, Any], kind: str) -> None:
    """Raise `InputError` for options that change what a step does in a way that is not understood."""
    for flag in ("fused", "capturable", "differentiable", "amsgrad", "maximize", "sparse", "use_orthogonalized"):
        require(not group.get(flag), f"{kind} has {flag}=True, which is not understood. Nearest: without it.")


Reader = Callable[[Mapping[str, Any], str], UpdateRule]


def reader_of(kind: type) -> Reader | None:
    """Return the function that reads a parameter group of optimisers of this class; None if it is not understood."""
    for known, reader in READERS.items():
        if issubclass(kind, known):
            return reader if step_of(kind) is step_of(known) else None
    if kind.__name__ == "Lion":
        return lion
    if kind.__name__ in ("MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam"):
        return muon_with_adam
    return None


def step_of(kind: Any) -> Any:
    """Return the function `step` of a class, without the wrapper that torch gives it at the first instance."""
    return inspect.unwrap(kind.step)


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


READERS: dict[type, Reader] = {
    torch.optim.SGD: lambda group, name: rule_of(SGD, group, name, decoupled=False),
    torch.optim.Adam: lambda group, name: rule_of(ADAM, group, name, group.get("decoupled_weight_decay", False)),
    torch.optim.AdamW: lambda group, name: rule_of(ADAM, group, name, decoupled=True),
}
if hasattr(torch.optim, "Muon"):
    READERS[torch.optim.Muon] = torchs_muon


def lion(group: Mapping[str, Any], name: str) -> UpdateRule:
    """Read a group of Lion as in its paper; other options are those of other algorithms."""
    require_only(group, ("lr", "betas", "weight_decay"), name)
    return rule_of(LION, group, name, decoupled=True)


def require_only(group: Mapping[str, Any], known: Sequence[str], name: str) -> None:
    """Raise `InputError` if a group has options that are not known, and are set."""
    unset = (None, False)
    other = [k for k, value in group.items() if k not in (*LABELS, *known) and not any(value is each for each in unset)]
    if other:
        raise UsersError(
            f"a group of {name} has {', '.join(other)}, which is not understood. Nearest: without it; a factor of the "
            "learning rate belongs in lr."
        )


def muon_with_adam(group: Mapping[str, Any], name: str) -> UpdateRule:
    """Read a group of Keller Jordan's optimisers, which has `use_muon`."""
    require("use_muon" in group, f"a group of {name} has no use_muon, so that its rule is not known.")
    if group["use_muon"]:
        require_only(group, ("use_muon", "lr", "momentum", "weight_decay"), name)
        return rule_of(MUON, {"nesterov": True, **group, "scale": WIDTH}, name, decoupled=True)
    require_only(group, ("use_muon", "lr", "betas", "eps", "weight_decay"), name)
    return rule_of(ADAM, group, name, decoupled=True)


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
    require(is_number(value), f"{name} has {key}={value!r}, which is no number.")
    return float(value)
