"""`Lines`: what to set at a size, as a table and as code for torch: groups of the optimiser, stds and multipliers.

The code is written from the rules of steps that ran, the laws and the multipliers of `parametrise`. Groups and laws are
by the name of a parameter, with * for numbers of layers, unless layers differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isclose
from typing import Any

from limitformer.scaling.parametrisation import Parametrisation
from limitformer.scaling.roles import kind_of
from limitformer.stepping.rules import StepRules
from limitformer.stepping.updates import UpdateRule

HEAD = ("weights", "optimiser", "lr", "weight decay", "eps", "initial std", "multiplier")
CODE = """\
# {title}
import torch
{imports}
GROUPS = [  # optimiser, options, parameters
{groups}
]
FACTORS = {{  # of what your code draws
{factors}
}}


def kind(name):
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def optimizer(model):
    every = {{}}
    for method, options, names in GROUPS:
        params = [each for name, each in model.named_parameters() if name in names or kind(name) in names]
        every.setdefault(method, []).append({{"params": params, **options}})
    made = [method(groups) for method, groups in every.items()]
    return made[0] if len(made) == 1 else made


def initialise(model):
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.mul_(FACTORS.get(name, FACTORS.get(kind(name), 1.0)))


def multiply(model):
    part = model.get_submodule
{multipliers}
"""


@dataclass(frozen=True)
class Lines:
    """The settings of a rule at a size, as a table and as code.

    Attributes:
        title: the size, rule and base.
        rows: a row for each kind of parameter, in the order of `HEAD`.
        code: `optimizer(model)`, `initialise(model)` after your own code has drawn the weights, `multiply(model)`.
    """

    title: str
    rows: list[list[str]]
    code: str

    def record(self) -> dict[str, Any]:
        """Return the lines as JSON holds them."""
        return {
            "at": self.title,
            "settings": [dict(zip(HEAD, row, strict=True)) for row in self.rows],
            "code": self.code,
        }


def lines_of(title: str, put: Parametrisation, rules: StepRules) -> Lines:
    """Return what a rule sets at a size; `rules` have its factors."""
    laws, factors = put.laws_in_effect(), dict[str, float]()
    for name, law in laws.items():
        own = put.laws[name].std
        factors[name] = law.std / own if own else 1.0
    each = {name: (rules.rules.get(name), factors.get(name, 1.0)) for name in put.lr_factors}
    of_kind: dict[str, set[Any]] = {}
    for name, settings in each.items():
        of_kind.setdefault(kind_of(name), set()).add(settings)
    words = {name: kind_of(name) if len(of_kind[kind_of(name)]) == 1 else name for name in each}
    groups: dict[UpdateRule, dict[str, None]] = {}
    rows: dict[str, list[str]] = {}
    scales = {f"{kind_of(place)}.weight": factor for place, factor in put.multipliers.items()}
    for name, (rule, _) in each.items():
        if rule is not None:
            groups.setdefault(rule, {})[words[name]] = None
        std = f"{laws[name].std:.4g}" if name in laws and laws[name].random else "–"
        cells = ["frozen", "–", "–", "–"] if rule is None else cells_of(rule)
        rows[words[name]] = [words[name], *cells, std, "–"]
    for place, factor in scales.items():
        row = rows.setdefault(place, [place.removesuffix(".weight"), *["–"] * 6])
        row[-1] = f"{factor:.4g}"
    changed = {words[name]: factor for name, factor in factors.items() if not isclose(factor, 1.0, rel_tol=1e-9)}
    kinds = dict.fromkeys(type(rule) for rule in groups)
    code = CODE.format(
        title=title,
        imports="".join(f"from {one.package} import {one.title}\n" for one in kinds if not one.in_torch()),
        groups="\n".join(
            f"    ({method_of(rule)}, {options_of(rule)}, [{listed(each)}])," for rule, each in groups.items()
        ),
        factors="\n".join(f"    {word!r}: {factor:.12g}," for word, factor in changed.items()),
        multipliers="\n".join(f"    {line}" for line in put.lines) or "    pass",
    )
    return Lines(title, [*rows.values()], code)


def listed(words: Iterable[str]) -> str:
    return "".join(f"\n        {word!r}," for word in words) + "\n    "


def method_of(rule: UpdateRule) -> str:
    return f"torch.optim.{rule.title}" if rule.in_torch() else rule.title


def cells_of(rule: UpdateRule) -> list[str]:
    eps = f"{rule.torch_options()['eps']:.4g}" if "eps" in rule.options else "–"
    return [rule.title, f"{rule.lr:.4g}", f"{rule.weight_decay:.4g}", eps]


def options_of(rule: UpdateRule) -> str:
    """Return the options of a group as torch names them."""
    options = rule.torch_options()
    short = {key: float(f"{value:.12g}") if isinstance(value, float) else value for key, value in options.items()}
    return repr(short)
