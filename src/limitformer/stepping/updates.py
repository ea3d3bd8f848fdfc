r"""The optimisers whose updates are computed: one class each, with all that is about this optimiser alone.

A rule is an optimiser with its options, as it updates one parameter. Its class has the name of torch's; in small
letters this is the name for `--optimizer`. All other code asks the class, so that a new optimiser is a class here.
Torch is imported only where it computes, because the command line reads the names.

`TensorUpdate` is one step in the arithmetic of torch. A matrix W = a W₀ + QᵀK P, of which Q and P are known and W₀ is
not, changes by the gradient QᵀG P: for SGD, which is linear, and for Muon, whose iteration maps QᵀG P to Qᵀφ(G) P,
because Q and P have orthonormal rows. So the same law changes K (`CoreUpdate`). Adam and Lion are functions of entries,
for which `entrywise` has kernels.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from types import SimpleNamespace
from typing import Any, ClassVar, Self

from limitformer.base.errors import require

MOST_RATE = 100.0
WIDTH, RMS = "width", "rms"  # Muon's scales: √max(1, out/in), and 0.2 √max(out, in)
SCALES = {None: WIDTH, "original": WIDTH, "match_rms_adamw": RMS}  # by torch's names
NOT_NEGATIVE = (lambda x: x >= 0, "at least 0")
RANGES: Mapping[str, tuple[Any, str]] = {
    "lr": (lambda x: 0 <= x <= MOST_RATE, f"above 0 and at most {MOST_RATE:g}"),
    "momentum": (lambda x: 0 <= x < 1, "at least 0 and below 1"),
    "iterations": (lambda x: 1 <= x <= 20, "1 to 20"),
    "weight_decay": NOT_NEGATIVE,
    "eps": NOT_NEGATIVE,
}
OPTIMIZERS: dict[str, type["UpdateRule"]] = {}  # by name


@dataclass(frozen=True)
class UpdateRule:
    """How an optimiser updates one parameter. A subclass adds its options, with their defaults by name.

    Attributes:
        lr: the learning rate.
        weight_decay: the decay of the weight itself if the optimiser is `decoupled`, else a part of its gradient.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    package: ClassVar[str] = "torch.optim"  # from which pasted lines import the class
    options: ClassVar[tuple[str, ...]]  # besides lr, as headings show them
    decoupled: ClassVar[bool] = True
    means: ClassVar[int] = 0  # of each entry, if its update is a function of its gradients: 1 or 2
    of_matrices: ClassVar[bool] = False  # whether it is made for hidden matrices, whose entries it updates together
    others: ClassVar[Mapping[str, Any]] = {}  # then: options of the AdamW that updates other parameters
    # Of tables of parametrisation: "sgd" if updates are linear in gradients, "adam" if the gradients' size cancels.
    column: ClassVar[str | None] = None
    column_note: ClassVar[str] = ""

    lr: float
    weight_decay: float = 0.0

    def __init_subclass__(cls) -> None:
        cls.title, cls.name = cls.__name__, cls.__name__.lower()
        OPTIMIZERS[cls.name] = cls

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the options that one may give by name."""
        return ("lr", *cls.options, *cls.others)

    @classmethod
    def in_torch(cls) -> Any:
        """Return the class of torch, or None if this torch has none."""
        import torch

        return getattr(torch.optim, cls.title, None) if cls.package == "torch.optim" else None

    @classmethod
    def read(cls, options: Mapping[str, Any], title: str) -> Self:
        """Return the rule with these options.

        Raises:
            InputError: an option is out of its range.
        """
        known = [key for key in ("lr", *cls.options) if key in options]
        return cls(**{key: option_in(options, key, title, getattr(cls, key)) for key in known})

    @classmethod
    def read_group(cls, group: Mapping[str, Any], title: str) -> "UpdateRule":
        """Return the rule of a group of torch's optimiser, as `torch_options` makes them."""
        return cls.read(group, title)

    def torch_options(self) -> dict[str, Any]:
        """Return the options of a group."""
        return {key: getattr(self, key) for key in ("lr", *self.options)}

    @property
    def needs_entries(self) -> bool:
        """Whether the update depends on entries of the weight: weight decay is part of Adam's gradient."""
        return self.means > 0 and not self.decoupled and self.weight_decay != 0.0

    def change(self, state: "TensorUpdate", gradient: Any, rate: float) -> Any:
        """Return what a step subtracts from a weight, and change the state."""
        raise NotImplementedError

    def numbers(self, step: int, rate: float) -> list[float]:
        """Return what the kernels of `entrywise` need: β₁, β₂, what m, v and ε are multiplied by, and their law."""
        raise NotImplementedError


@dataclass(frozen=True)
class SGD(UpdateRule):
    """SGD of torch. The buffer of its momentum begins with the first gradient, without dampening."""

    options = ("momentum", "dampening", "nesterov", "weight_decay")
    decoupled = False
    column = "sgd"

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        needs = "momentum and no dampening, as in torch. Nearest: momentum=0.9."
        possible = not self.nesterov or (self.momentum > 0 and self.dampening == 0)
        require(possible, f"{self.name} has nesterov, which needs {needs}")

    def change(self, state: "TensorUpdate", gradient: Any, rate: float) -> Any:
        if self.momentum:
            fresh = 1.0 - self.dampening
            state.first = gradient if state.first is None else self.momentum * state.first + fresh * gradient
            gradient = gradient + self.momentum * state.first if self.nesterov else state.first
        return rate * gradient


@dataclass(frozen=True)
class Adam(UpdateRule):
    """Adam of torch, whose weight decay is part of the gradient."""

    options = ("betas", "eps", "weight_decay")
    decoupled = False
    means = 2
    column = "adam"

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    @classmethod
    def read_group(cls, group: Mapping[str, Any], title: str) -> UpdateRule:
        return (AdamW if group.get("decoupled_weight_decay") else cls).read(group, title)

    def change(self, state: "TensorUpdate", gradient: Any, rate: float) -> Any:
        b1, b2 = self.betas
        # In place where a tensor is the state's own: the same roundings, without the memory of a copy each.
        first, second = (zeros(gradient) if mean is None else mean for mean in (state.first, state.second))
        state.first = first.mul_(b1).add_((1.0 - b1) * gradient)
        state.second = second.mul_(b2).add_(gradient.square().mul_(1.0 - b2))
        change, size = state.first / (1.0 - b1**state.steps), state.second / (1.0 - b2**state.steps)
        return change.mul_(rate).div_(size.sqrt_().add_(self.eps))

    def numbers(self, step: int, rate: float) -> list[float]:
        b1, b2 = self.betas
        return [b1, b2, rate / (1 - b1**step), 1 / (1 - b2**step), self.eps, 0.0]


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with a decay of the weight itself."""

    decoupled = True

    weight_decay: float = 1e-2


@dataclass(frozen=True)
class Lion(UpdateRule):
    """Lion (arXiv 2302.06675), which steps by signs."""

    package = "lion_pytorch"
    options = ("betas", "weight_decay")
    means = 1
    column = "adam"
    column_note = "Lion steps by signs, as Adam's first step does; the tables have its column for Adam"

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)

    def change(self, state: "TensorUpdate", gradient: Any, rate: float) -> Any:
        first, (b1, b2) = zeros(gradient) if state.first is None else state.first, self.betas
        state.first = b2 * first + (1.0 - b2) * gradient
        return rate * (b1 * first + (1.0 - b1) * gradient).sign()

    def numbers(self, step: int, rate: float) -> list[float]:
        return [*self.betas, rate, 0.0, 0.0, 1.0]


@dataclass(frozen=True)
class SignSGD(UpdateRule):
    """The signs of a mean of gradients (Signum, arXiv 1802.04434): Lion with two equal betas."""

    package = "pytorch_optimizer"
    options = ("momentum", "weight_decay")
    means = 1
    column = "adam"
    column_note = "SignSGD steps by signs, as Adam's first step does; the tables have its column for Adam"

    lr: float = 1e-4
    momentum: float = 0.9

    def change(self, state: "TensorUpdate", gradient: Any, rate: float) -> Any:
        return Lion(betas=(self.momentum, self.momentum)).change(state, gradient, rate)

    def numbers(self, step: int, rate: float) -> list[float]:
        return [self.momentum, self.momentum, rate, 0.0, 0.0, 1.0]


@dataclass(frozen=True)
class Muon(UpdateRule):
    """Muon (github.com/KellerJordan/Muon) of torch.

    Attributes:
        scale: "width" for √max(1, out/in), "rms" for 0.2 √max(out, in).
        iterations, coefficients: of the polynomial.
        least_norm: by which a matrix is divided at least before the polynomial.
    """

    options = ("momentum", "nesterov", "weight_decay", "scale", "iterations", "least_norm")
    of_matrices = True
    others = {"adam_lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10}  # noqa: RUF012 (a ClassVar of the base)

    lr: float = 0.02
    momentum: float = 0.95
    nesterov: bool = True
    scale: str = WIDTH
    iterations: int = 5
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    least_norm: float = 1e-7

    @classmethod
    def read_group(cls, group: Mapping[str, Any], title: str) -> UpdateRule:
        scale = group["adjust_lr_fn"]
        require(scale in SCALES, f"{title} has adjust_lr_fn={scale!r}, which is not understood.")
        own = {"scale": SCALES[scale], "iterations": group["ns_steps"], "least_norm": group["eps"]}
        a, b, c = (float(each) for each in group["ns_coefficients"])
        return replace(cls.read({**group, **own}, title), coefficients=(a, b, c))

    def torch_options(self) -> dict[str, Any]:
        options, names = super().torch_options(), {of: name for name, of in SCALES.items()}
        scale, steps, eps = (options.pop(key) for key in ("scale", "iterations", "least_norm"))
        if self.coefficients != type(self).coefficients:  # else torch has its own, by which a witness tests ours
            options["ns_coefficients"] = self.coefficients
        return options | {"ns_steps": steps, "eps": eps, "adjust_lr_fn": names[scale]}

    def change(self, state: "TensorUpdate", gradient: Any, rate: float) -> Any:
        known = zeros(gradient) if state.first is None else state.first
        state.first = known.lerp(gradient, 1.0 - self.momentum)
        mean = gradient.lerp(state.first, self.momentum) if self.nesterov else state.first
        if mean.dim() == 2:
            return rate * self.direction(mean, state.shape or mean.shape)
        change = zeros(mean)
        for k, each in enumerate(mean):  # of stacked matrices
            change[k] = self.direction(each, each.shape)
        return rate * change

    def direction(self, mean: Any, shape: tuple[int, ...]) -> Any:
        """Return the scaled direction of a matrix of this shape (out, in), or of its core.

        The matrix is divided by its norm, and Newton–Schulz's polynomial then brings its singular values near 1. Torch
        computes it in bfloat16; this is the formula in the precision of `mean`.
        """
        if not mean.numel():
            return mean
        a, b, c = self.coefficients
        x = mean / mean.norm().clamp(min=self.least_norm)
        wide = x if x.shape[0] <= x.shape[1] else x.mT
        for _ in range(self.iterations):
            gram = wide @ wide.mT
            wide = a * wide + (b * gram + c * gram @ gram) @ wide
        out, into = shape
        scale = math.sqrt(max(1.0, out / into)) if self.scale == WIDTH else 0.2 * math.sqrt(max(out, into))
        return scale * (wide if x.shape[0] <= x.shape[1] else wide.mT)


class TensorUpdate:
    """The optimiser of one tensor with entries.

    Attributes:
        a: the factor that weight decay, where it is linear, gives the start W₀ of the tensor a W₀ + U.
        shape: (out, in) of the matrix of which the tensor is the core; None if it is the weight itself.
    """

    shape: tuple[int, int] | None = None

    def __init__(self, rule: UpdateRule) -> None:
        self.rule, self.steps, self.a = rule, 0, 1.0
        self.first: Any = None  # momentum
        self.second: Any = None  # Adam's mean square
        self.of_start: Any = SimpleNamespace(first=None)  # momentum along W₀

    def step(self, value: Any, gradient: Any, factor: float) -> Any:
        """Return the value after a step at the rule's learning rate times `factor`."""
        self.steps += 1
        rule, rate = self.rule, self.rule.lr * factor
        if rule.decoupled:
            keeps = 1.0 - rate * rule.weight_decay
            value, self.a = keeps * value, keeps * self.a
        elif rule.weight_decay:
            gradient = gradient + rule.weight_decay * value
            self.a -= 0.0 if rule.means else rule.change(self.of_start, rule.weight_decay * self.a, rate)
        return value - rule.change(self, gradient, rate)


class CoreUpdate(TensorUpdate):
    """The optimiser of a matrix W = a W₀ + QᵀK P of this shape (out, in), which is not one of entries.

    Attributes:
        core: K (k, l) in float64; Q and P may have more rows than that.
    """

    def __init__(self, rule: UpdateRule, shape: tuple[int, int]) -> None:
        import torch

        super().__init__(rule)
        self.shape, self.core = shape, torch.zeros(0, 0, dtype=torch.float64)

    def add(self, gradient: Any, factor: float) -> None:
        """Change the matrix by the gradient QᵀG P, of which G (k, l) is given."""
        g = gradient.double()
        self.first = None if self.first is None else padded(self.first, g)
        self.core = self.step(padded(self.core, g), g, factor)


def zeros(like: Any) -> Any:
    return like.new_zeros(like.shape)


def padded(matrix: Any, like: Any) -> Any:
    """Fill up a core with zeros, for a basis that has grown."""
    result = zeros(like)
    result[: matrix.shape[0], : matrix.shape[1]] = matrix
    return result


def option_in(options: Mapping[str, Any], key: str, title: str, like: Any) -> Any:
    """Return an option, which must lie in its range, with the type of `like`."""
    value = options[key]
    if isinstance(like, bool):
        return bool(value)
    if key == "scale":
        require(value in (WIDTH, RMS), f'{title} has scale={value!r}; it must be "{WIDTH}" or "{RMS}".')
        return value
    if key == "betas":
        good = isinstance(value, tuple | list) and len(value) == 2 and all(is_number(b) and 0 <= b < 1 for b in value)
        require(good, f"{title} has betas={value!r}; they must be two numbers of at least 0 and below 1.")
        return float(value[0]), float(value[1])
    number, (fits, words) = number_in(options, key, title), RANGES.get(key, (math.isfinite, ""))
    require(fits(number), f"{title} has {key}={number}; it must be {words}.")
    return type(like)(number)


def number_in(options: Mapping[str, Any], key: str, title: str) -> float:
    """Return an option that must be a number, or a tensor of one."""
    value = options[key]
    tensor = hasattr(value, "is_meta") and value.numel() == 1 and not value.is_meta
    value = float(value) if tensor or (isinstance(value, Real) and not isinstance(value, bool)) else value
    require(is_number(value), f"{title} has {key}={value!r}, which is not a number.")
    return float(value)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
