"""Rules by which an optimiser updates each parameter, and their groups in words."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from limitformer.base.errors import require
from limitformer.stepping.updates import MOST_RATE, UpdateRule, is_number

OTHER_KEYS = ("optimizer", "lr", "parameters", "weights")  # of a group, which are not options
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
            rule, by = rules[name], zip(("lr", "weight_decay", "eps"), factors[name], strict=True)
            known = {key: getattr(rule, key) * factor for key, factor in by if key in ("lr", *rule.options)}
            rules[name] = replace(rule, **known)
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
            "optimizer": rule.title,
            "lr": [each.rules[names[0]].lr for each in every],
            **{key: getattr(rule, key) for key in rule.options},
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
        known = [key for key in group if key not in OTHER_KEYS and group[key] is not False]
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
