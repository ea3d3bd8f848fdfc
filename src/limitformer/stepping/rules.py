"""Rules by which an optimiser updates each parameter, and their groups in words."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from limitformer.base.errors import require

SGD, ADAM, LION, MUON = "sgd", "adam", "lion", "muon"
MOST_RATE = 100.0
WIDTH, RMS = "width", "rms"  # Muon's scales: √max(1, out/in), and 0.2 √max(out, in)
OPTIONS = {  # of each kind, as headings show them
    SGD: ("momentum", "dampening", "nesterov", "weight_decay"),
    ADAM: ("betas", "eps", "weight_decay"),
    LION: ("betas", "weight_decay"),
    MUON: ("momentum", "nesterov", "weight_decay", "scale", "iterations", "least_norm"),
}
KINDS = {SGD: "SGD", LION: "Lion", MUON: "Muon"}


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
        least_norm: of Muon, by which a matrix is divided at least before its polynomial.
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
    least_norm: float = 1e-7


Factors = Mapping[str, tuple[float, float, float]]


@dataclass(frozen=True)
class StepRules:
    """The rules of all parameters.

    Attributes:
        rules: by the parameter's name; a parameter without one is not trained.
        clip: the largest norm of all gradients together, as `torch.nn.utils.clip_grad_norm_`; None does not clip.
        schedule: the factor of every learning rate at each step.
        base: the learning rate of the optimiser, to which those of its groups have ratios.
        name: of the optimiser.
        factors: what multiplies learning rate, weight decay and ε of some parameters, by their names.
        not_understood: why the optimiser has no rules, so that drawn networks are trained; empty if it has.
    """

    rules: Mapping[str, UpdateRule]
    clip: float | None
    schedule: tuple[float, ...]
    base: float
    name: str
    factors: Factors = field(default_factory=dict)
    not_understood: str = ""

    def with_rate(self, rate: float) -> "StepRules":
        """Return the rules at another learning rate; the groups keep their ratios.

        Raises:
            InputError: it is not above 0 and at most 100, or the optimiser's own rate is 0.
        """
        require_rate(rate, "a learning rate")
        require(self.base > 0, "the optimiser's own learning rate is 0, so that its groups have no ratios to it.")
        scaled = {name: replace(rule, lr=rule.lr * rate / self.base) for name, rule in self.rules.items()}
        return replace(self, rules=scaled, base=rate)

    def with_factors(self, factors: Factors) -> "StepRules":
        """Return the rules with learning rate, weight decay and ε of some parameters multiplied."""
        rules = dict(self.rules)
        for name in factors.keys() & rules.keys():
            (lr, decay, eps), rule = factors[name], rules[name]
            rules[name] = replace(rule, lr=rule.lr * lr, weight_decay=rule.weight_decay * decay, eps=rule.eps * eps)
        return replace(self, rules=rules, factors=factors)


def groups_of(every: Sequence[StepRules]) -> list[dict[str, Any]]:
    """Return the options of each group of parameters that have one rule, at one or several learning rates.

    `lr` has its rate at each of them; `weights` are the names, with * for numbers.
    """
    groups: dict[UpdateRule, list[str]] = {}
    for name, rule in every[0].rules.items():
        groups.setdefault(rule, []).append(name)
    return [
        {
            "optimizer": KINDS.get(rule.kind, "AdamW" if rule.decoupled else "Adam"),
            "lr": [each.rules[names[0]].lr for each in every],
            **{key: getattr(rule, key) for key in OPTIONS[rule.kind]},
            "parameters": len(names),
            "weights": list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names)),
        }
        for rule, names in groups.items()
    ]


def in_words(every: Sequence[StepRules]) -> str:
    """Return the optimiser with the options of its groups; at several learning rates with their ratios to these.

    A group has the rate of the table, times its ratio.
    """
    groups, rules = groups_of(every), every[0]
    if not groups:
        return f"{rules.name}, as the user's function makes it"
    several, kinds = len(groups) > 1, {group["optimizer"] for group in groups}
    parts = []
    for group in groups:
        ratio = group["lr"][0] / rules.base if rules.base else 1.0
        rate = f"lr {group['lr'][0]:g}" if len(every) == 1 else f"lr × {ratio:g}" if several or ratio != 1.0 else ""
        known = [key for key in group if any(key in keys for keys in OPTIONS.values()) and group[key] is not False]
        options = ", ".join([*([rate] if rate else []), *(f"{key} {option_text(group[key])}" for key in known)])
        count = f"{group['parameters']} weight{'' if group['parameters'] == 1 else 's'}"
        by = f" by {group['optimizer']}" if len(kinds) > 1 else ""
        parts.append(f"{count}{by} with {options}" if several else options)
    return f"{rules.name} ({f'{len(groups)} groups: ' if several else ''}{'; '.join(parts)})"


def option_text(value: Any) -> str:
    """Return an option in words: numbers without trailing zeros."""
    if isinstance(value, tuple):
        return f"({', '.join(map(option_text, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def require_rate(rate: float, what: str) -> None:
    """Raise `InputError` unless a learning rate is above 0 and at most `MOST_RATE`."""
    good = is_number(rate) and 0 < rate <= MOST_RATE
    require(good, f"{what} must be above 0 and at most {MOST_RATE:g}; got {rate!r}. Nearest: 1e-3.")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
