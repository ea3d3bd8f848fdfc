"""Rules by which an optimiser updates each parameter, read from its name or from the user's own code.

The user's function is called with the module and returns an optimiser of torch, or several; its parameter groups are
read, and it never runs. What is not understood is refused by name.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from limitformer.base.errors import InputError, first_line, nearest, require

SGD, ADAM, LION, MUON = "sgd", "adam", "lion", "muon"
MOST_RATE = 100.0
WIDTH, RMS = "width", "rms"  # Muon's scales: √max(1, out/in), and 0.2 √max(out, in)
SCALES = {None: WIDTH, "original": WIDTH, "match_rms_adamw": RMS}
LARGEST_STEPS = 20  # of Newton–Schulz


@dataclass(frozen=True)
class UpdateRule:
    """How one parameter is updated.

    Attributes:
        kind: "sgd", "adam", "lion" or "muon".
        lr: the learning rate.
        weight_decay: the decay of the weight itself if it is `decoupled`, else a part of its gradient.
        momentum, dampening, nesterov: of SGD and Muon.
        betas, eps: of Adam and Lion.
        scale: of Muon: "width" for √max(1, out/in), "rms" for 0.2 √max(out, in).
        iterations, coefficients: of Muon's polynomial.
    """

    kind: str
    lr: float
    weight_decay: float = 0.0
    decoupled: bool = False
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    scale: str = WIDTH
    iterations: int = 5
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class StepRules:
    """The rules of all parameters.

    Attributes:
        rules: by the parameter's name; a parameter without one is not trained.
        clip: the largest norm of all gradients together, as `torch.nn.utils.clip_grad_norm_`; None does not clip.
        schedule: the factor of every learning rate at each step.
        base: the learning rate of the optimiser, to which those of its groups have ratios.
        name: the optimiser in words.
    """

    rules: Mapping[str, UpdateRule]
    clip: float | None
    schedule: tuple[float, ...]
    base: float
    name: str

    def with_rate(self, rate: float) -> "StepRules":
        """Return the rules at another learning rate; the groups keep their ratios.

        Raises:
            InputError: it is not above 0 and at most 100, or the optimiser's own rate is 0.
        """
        require_rate(rate, "a learning rate")
        require(self.base > 0, "the optimiser's own learning rate is 0, so that its groups have no ratios to it.")
        scaled = {name: replace(rule, lr=rule.lr * rate / self.base) for name, rule in self.rules.items()}
        return replace(self, rules=scaled, base=rate)

    def with_factors(self, factors: Mapping[str, tuple[float, float, float]]) -> "StepRules":
        """Return the rules with learning rate, weight decay and ε of some parameters multiplied."""
        unknown = [name for name in factors if name not in self.rules]
        require(not unknown, f"factors name {', '.join(unknown[:3])}, which the optimiser does not train.")
        rules = dict(self.rules)
        for name, (lr, decay, eps) in factors.items():
            rule = rules[name]
            rules[name] = replace(rule, lr=rule.lr * lr, weight_decay=rule.weight_decay * decay, eps=rule.eps * eps)
        return replace(self, rules=rules)


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
    require(
        clip is None or (is_number(clip) and 0 < clip < math.inf),
        f"clip must be a number above 0, or None; got {clip!r}. Nearest: clip=1.0.",
    )
    factors = factors_of(steps, warmup, schedule)
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
    made = call(optimizer, module)
    every = list(made) if isinstance(made, tuple | list) else [made]
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    kernels = kernels_of(module)
    rules: dict[str, UpdateRule] = {}
    for each in every:
        for name, rule in rules_of_optimizer(each, names):
            known = rule.kind != MUON or name not in kernels
            require(known, f"{name} is the kernel of a convolution, for which Muon is not understood. Nearest: AdamW.")
            require(name not in rules, f"{name} is in two groups or optimisers. Nearest: each parameter in one.")
            rules[name] = rule
    require(bool(rules), "the optimiser has no parameters.")
    words = " and ".join(in_words(each) for each in every)
    return StepRules(rules, clip, factors, base_rate(every[0]), words)


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
    kind = {"adamw": ADAM}.get(name, name)
    rule = rule_of(kind, options, name, decoupled=name in ("adamw", "lion", "muon"))
    trained = {key: parameter for key, parameter in module.named_parameters() if parameter.requires_grad}
    require(bool(trained), "the module has no parameters that are trained.")
    rules = dict.fromkeys(trained, rule)
    if name == "muon":
        beside = rule_of(ADAM, options | {"lr": options["adam_lr"]}, "muon's AdamW", decoupled=True)
        rules = {key: rule if hidden_matrix(key, module) else beside for key in trained}
    shown = ", ".join(f"{key} {value}" for key, value in options.items())
    return StepRules(rules, clip, factors, rule.lr, f"{name} ({shown})")


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
    outside = {id(each) for part in module.modules() if isinstance(part, nn.Embedding) for each in part.parameters()}
    find_head = getattr(module, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    if isinstance(head, nn.Module):
        outside |= {id(each) for each in head.parameters()}
    else:
        linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
        rows = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
        outside |= {id(part.weight) for part in linear[-1:] if not rows or part.out_features in rows}
    return id(parameter) not in outside


def call(optimizer: Callable[[nn.Module], Any], module: nn.Module) -> Any:
    """Call the user's function."""
    try:
        return optimizer(module)
    except InputError:
        raise
    except Exception as error:  # the user's own code, which may raise anything
        raise InputError(
            f"the function for the optimizer fails: {type(error).__name__}: {first_line(error)}. Nearest: a function "
            "that takes the module, whose matrices are on the meta device, and returns an optimiser of torch."
        ) from error


def rules_of_optimizer(optimizer: Any, names: Mapping[int, str]) -> Iterable[tuple[str, UpdateRule]]:
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
    require(
        reader is not None,
        f"the optimiser {kind} is not understood; known are SGD, Adam, AdamW and Muon of torch, Lion, and "
        "MuonWithAuxAdam. Nearest: one of them.",
    )
    assert reader is not None
    hooked = any(getattr(optimizer, each, None) for each in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))
    require(not hooked, f"{kind} has hooks on its steps, which are not understood. Nearest: without them.")
    for group in optimizer.param_groups:
        check_flags(group, kind)
        rule = reader(group, kind)
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                shape = tuple(parameter.shape)
                raise InputError(
                    f"{kind} has a parameter {shape} that the module does not have. Nearest: the module's."
                )
            if rule.kind == MUON:
                matrix = parameter.dim() in (2, 3)
                require(
                    matrix, f"{kind} has {name} {tuple(parameter.shape)}, which is no matrix. Nearest: AdamW for it."
                )
            if parameter.requires_grad:
                yield name, rule


def check_flags(group: Mapping[str, Any], kind: str) -> None:
    """Raise `InputError` for options that change what a step does in a way that is not understood."""
    for flag in ("fused", "capturable", "differentiable", "amsgrad", "maximize", "sparse", "use_orthogonalized"):
        require(not group.get(flag), f"{kind} has {flag}=True, which is not understood. Nearest: without it.")


Reader = Callable[[Mapping[str, Any], str], UpdateRule]


def reader_of(kind: type) -> Reader | None:
    """Return the function that reads a parameter group of optimisers of this class; None if it is not understood."""
    readers: dict[type, Reader] = {
        torch.optim.SGD: lambda group, name: rule_of(SGD, group, name, decoupled=False),
        torch.optim.Adam: lambda group, name: rule_of(ADAM, group, name, group.get("decoupled_weight_decay", False)),
        torch.optim.AdamW: lambda group, name: rule_of(ADAM, group, name, decoupled=True),
    }
    muon = getattr(torch.optim, "Muon", None)
    if muon is not None:
        readers[muon] = torchs_muon
    for known, reader in readers.items():
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
    return replace(rule, iterations=iterations, coefficients=(a, b, c))


def lion(group: Mapping[str, Any], name: str) -> UpdateRule:
    """Read a group of Lion as in its paper; other options are those of other algorithms."""
    require_only(group, ("lr", "betas", "weight_decay", "decoupled_weight_decay"), name)
    coupled = group.get("decoupled_weight_decay")  # of lion_pytorch, which then divides the decay by the first rate
    require(not coupled, f"{name} has decoupled_weight_decay=True, which is not understood. Nearest: without it.")
    return rule_of(LION, group, name, decoupled=True)


def require_only(group: Mapping[str, Any], known: Sequence[str], name: str) -> None:
    """Raise `InputError` if a group has options that are not known, and are set."""
    other = [key for key, value in group.items() if key not in ("params", "initial_lr", *known) and value]
    require(not other, f"{name} has {', '.join(other)}, which is not understood. Nearest: without it.")


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
    value = float(value) if one else value
    require(is_number(value), f"{name} has {key}={value!r}, which is no number.")
    return float(value)


def require_rate(rate: float, what: str) -> None:
    """Raise `InputError` unless a learning rate is above 0 and at most `MOST_RATE`."""
    good = is_number(rate) and 0 < rate <= MOST_RATE
    require(good, f"{what} must be above 0 and at most {MOST_RATE:g}; got {rate!r}. Nearest: 1e-3.")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def in_words(optimizer: torch.optim.Optimizer) -> str:
    """Return the class and the main options of an optimiser."""
    shown: dict[str, Any] = {
        key: value for key, value in optimizer.defaults.items() if isinstance(value, int | float | tuple)
    }
    shown = {key: value for key, value in shown.items() if not isinstance(value, bool) or value}
    rates = sorted({group["lr"] for group in optimizer.param_groups})
    if len(rates) > 1:
        shown["lr"] = f"{rates[0]:g} to {rates[-1]:g}"
    return f"{type(optimizer).__name__} ({', '.join(f'{key} {value}' for key, value in shown.items())})"
