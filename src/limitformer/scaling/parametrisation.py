"""`parametrise`: a rule of parametrisation put into effect on a model at a size.

Laws of weights are those of the base, times the rule's factors; they go into `overrides` of `weightless.simulate`.
Multipliers of the forward pass are changes of the module after it is built (`branches`). Rates, weight decay and ε are
factors by the name of a parameter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import log
from typing import Any

import torch
from torch import nn

from limitformer.base.errors import InputError, nearest, require
from limitformer.scaling.multipliers import Effect
from limitformer.scaling.roles import Role, Shape, is_table_by_shape, kind_of, partners, roles_of
from limitformer.scaling.rules import (
    FIXED,
    INPUT,
    ONE,
    OUTPUT,
    RULES,
    SGD,
    VECTOR,
    ScalingRule,
    StepTable,
)
from limitformer.scaling.sizes import DEPTH, WIDTH, at_size, present_size, shapes_of
from limitformer.stepping.updates import OPTIMIZERS, UpdateRule
from limitformer.subjects.subject import Subject
from limitformer.weightless.law import build_without_weights
from limitformer.weightless.laws import CONSTANT, Law


@dataclass(frozen=True)
class Parametrisation:
    """A model at a size with a rule in effect.

    Attributes:
        model: what `limitformer.weightless.simulate` takes; its multipliers are in effect.
        overrides: laws by a pattern of names, for `simulate`.
        lr_factors: factors of the learning rate of the base, by the name of a parameter.
        decay_factors: factors of the weight decay.
        eps_factors: factors of ε.
        multipliers: what was put into effect in the forward pass: factors by module or place.
        roles: input, hidden, output, vector or fixed, by the name of a parameter.
        notes: what the rule assumes, and what this model does not allow.
        stays: fields that stay, though they may be meant to grow (`sizes.fields_that_stay`).
        laws: those of the model's own code at this size.
        lines: code that puts the multipliers into effect, where `part` is `get_submodule` of the model.
        heads_unseen: whether the rule divides logits by d, and no module shows its size of heads d.
    """

    model: Any
    overrides: dict[str, Law]
    lr_factors: dict[str, float]
    decay_factors: dict[str, float]
    eps_factors: dict[str, float]
    multipliers: dict[str, float]
    roles: dict[str, str]
    notes: list[str]
    stays: tuple[str, ...]
    laws: dict[str, Law]
    lines: list[str]
    heads_unseen: bool = False

    def laws_in_effect(self) -> dict[str, Law]:
        """Return the law of each parameter: that of `overrides`, or else its own."""
        result = dict(self.laws)
        for pattern, law in self.overrides.items():
            result |= {name: law for name in self.laws if fnmatchcase(name, pattern)}
        return result


def parametrise(
    model: Any, over: str, size: int, base: int, rule: str, optimizer_kind: str | Mapping[str, str] = "adamw"
) -> Parametrisation:
    """Put a rule into effect on a model at a size.

    Args:
        model: as in `at_size`.
        over: "width", "depth", one field of the configuration, or one argument of the function.
        size: of that.
        base: the size at which every factor is 1.
        rule: "standard", "mup", "completep" or "depth-mup".
        optimizer_kind: the name of an optimiser; or one for each trained parameter, by its name.

    Raises:
        InputError: the rule or size is unknown, or the rule has no entry for the optimiser.
    """
    table, at = rule_of(rule), at_size(model, over, size)
    subject = at.model
    module, laws = build_without_weights(subject, torch.float32)
    names = [name for name, _ in module.named_parameters()]
    kinds = optimizers_of(table, optimizer_kind, names)
    if rule == "standard":
        ones = dict.fromkeys(names, 1.0)
        return Parametrisation(subject, {}, ones, dict(ones), dict(ones), {}, {}, [], at.stays, laws, [])
    require(
        subject.transformer is None,
        f"a Transformer of limitformer divides by √width in its code, which is another parametrisation than {rule}. "
        'Nearest: rule="standard".',
    )
    at_base = at_size(model, over, base).model
    base_module, base_laws = build_without_weights(at_base, torch.float32)
    shapes, base_shapes = shapes_in(module), matched(shapes_in(base_module), names)
    roles = roles_of(module, base_module, shapes, base_shapes, wider_shapes(subject, shapes, base_shapes))
    ratio = depth_ratio(over, size, base, names, [name for name, _ in base_module.named_parameters()])
    effect = Effect(table, roles, ratio, module, base_module, subject, at_base)
    overrides, law_notes = laws_for(table, roles, ratio, laws, base_laws, effect.folded)
    factors = dict.fromkeys(names, (1.0, 1.0, 1.0))
    for name, kind in kinds.items():
        factors[name] = step_factors(table.steps[kind.column], roles[name], ratio)
        if name in effect.folded:
            factors[name] = folded(factors[name], kind, effect.theta(name))
    notes = [f"{table.name}: {table.source}", *([table.limits] if ratio != 1.0 else [])]
    notes += [note for note in dict.fromkeys(kind.column_note for kind in kinds.values()) if note]
    rates, decays, epsilons = ({name: each[k] for name, each in factors.items()} for k in range(3))
    return Parametrisation(
        effect.subject(),
        overrides,
        rates,
        decays,
        epsilons,
        effect.multipliers,
        {name: each.role for name, each in roles.items()},
        [
            *notes,
            *(f"at {over} {size}: {note}" for note in effect.notes),
            *law_notes,
            *tie_notes(module, roles),
            *table_notes(module, roles),
        ],
        at.stays,
        laws,
        effect.lines,
        effect.heads_unseen,
    )


def rule_of(name: Any) -> ScalingRule:
    """Return a rule by its name."""
    known = isinstance(name, str) and name in RULES
    require(known, f"rule must be one of {', '.join(RULES)}; got {name!r}.{nearest(name, RULES)}")
    return RULES[name]


def optimizers_of(rule: ScalingRule, kinds: str | Mapping[str, str], names: list[str]) -> dict[str, type[UpdateRule]]:
    """Return the optimiser of each parameter that is trained; the rule must have an entry for each optimiser."""
    result = {}
    for name, kind in (dict.fromkeys(names, kinds) if isinstance(kinds, str) else kinds).items():
        require(name in names, f"optimizer_kind: the model has no parameter {name!r}.{nearest(name, names)}")
        known, close = kind in OPTIMIZERS, nearest(kind, OPTIMIZERS)
        require(known, f"optimizer_kind must be one of {', '.join(OPTIMIZERS)}; got {kind!r}.{close}")
        result[name] = one = OPTIMIZERS[kind]
        entries = ", ".join(name for name, each in OPTIMIZERS.items() if each.column in rule.steps)
        has = one.column in rule.steps
        require(has, f"the rule {rule.name} has no entry for {kind} ({rule.source}). Nearest: one of {entries}.")
    return result


def shapes_in(module: nn.Module) -> dict[str, Shape]:
    return {name: tuple(each.shape) for name, each in module.named_parameters(remove_duplicate=False)}


def wider_shapes(subject: Subject, shapes: dict[str, Shape], base: dict[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of a network of another width: the base, or a wider one if the base has the same width."""
    if any(shapes[name] != shape for name, shape in base.items()) or subject.config is None:
        return base
    try:
        width = present_size(subject, WIDTH)
        assert width is not None
        return shapes_of(at_size(subject, WIDTH, 2 * width).model)
    except InputError:  # the roles are unknown, and no factor needs them
        return base


def matched(base: dict[str, Shape], names: list[str]) -> dict[str, Shape]:
    return {name: base[other] for name, other in partners(list(base), names).items()}


def depth_ratio(over: str, size: int, base: int, names: list[str], base_names: list[str]) -> float:
    """Return the depth over that of the base: 1 if the sizes have the same layers."""
    return size / base if over == DEPTH or len(names) != len(base_names) else 1.0


def step_factors(table: StepTable, role: Role, depth: float) -> tuple[float, float, float]:
    """Return the factors of learning rate, weight decay and ε."""
    ratios = role.fan_in, role.fan_out, depth
    rate, decay = (each.get(role.role, ONE).factor(*ratios) for each in (table.rate, table.decay))
    width = max(role.fan_in, role.fan_out, key=lambda ratio: abs(log(ratio)))
    if role.inside:
        return rate * table.rate_inside.factor(*ratios), decay, table.eps.factor(width, 1.0, depth)
    return rate, decay, table.eps.factor(width, 1.0, 1.0)


def folded(factors: tuple[float, float, float], kind: type[UpdateRule], theta: float) -> tuple[float, float, float]:
    """Return the factors of a weight that has its multiplier θ in itself: w = θ v.

    Steps of v are those of the table. SGD steps of w are θ² times those of v's rate, of Adam and Lion θ times; rate
    times decay does not change, and gradients and ε of w are 1/θ times those of v (Tensor Programs V, Lemma J.1).
    """
    rate, decay, eps = factors
    power = theta**2 if kind.column == SGD else theta
    return rate * power, decay / power, eps / theta


def laws_for(
    rule: ScalingRule, roles: dict[str, Role], depth: float, mine: dict[str, Law], theirs: dict[str, Law],
    in_law: list[str],
) -> tuple[dict[str, Law], list[str]]:  # fmt: skip
    """Return the laws that differ from those of the code at this size, and notes on those that are not known.

    Args:
        mine, theirs: laws of the code at this size, and at the base.
        in_law: weights whose multiplier is in their law.
    """
    names = [name for name in roles if name in mine]
    partner, changed, notes = partners(list(theirs), names), dict[str, Law](), list[str]()
    for name in names:
        role, known = roles[name], theirs[partner[name]]
        factor = rule.std.get(role.role, ONE).factor(role.fan_in, role.fan_out, depth)
        if name in in_law:
            factor *= rule.multiplier.get(OUTPUT, ONE).factor(role.fan_in, role.fan_out, depth)
        if not known.random and known.kind != CONSTANT:
            if factor != 1.0:
                notes.append(f"{kind_of(name)} keeps its law ({known}), which the rule cannot change")
            continue
        target = known if known.kind == CONSTANT and role.role in (VECTOR, FIXED) else known.times(factor)
        if not same_law(target, mine[name]):
            changed[name] = target
    return grouped(changed, names), list(dict.fromkeys(notes))


def same_law(a: Law, b: Law) -> bool:
    close = abs(a.std - b.std) <= 1e-9 * max(a.std, b.std) and abs(a.mean - b.mean) <= 1e-9 * max(abs(a.mean), 1e-300)
    return a.kind == b.kind and close


def grouped(laws: dict[str, Law], names: list[str]) -> dict[str, Law]:
    """Return the laws by patterns: one for all layers, if they have the same law."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(kind_of(name), []).append(name)
    result: dict[str, Law] = {}
    for kind, every in kinds.items():
        own = [laws[name] for name in every if name in laws]
        alike = len(own) == len(every) > 1 and all(
            replace(each, source=-1) == replace(own[0], source=-1) for each in own
        )
        if alike and sum(fnmatchcase(name, kind) for name in names) == len(every):
            result[kind] = own[0]
        else:
            result |= {name: laws[name] for name in every if name in laws}
    return result


def table_notes(module: nn.Module, roles: dict[str, Role]) -> list[str]:
    """Return a note on the user's own parameters that their shapes alone show as tables, since a head looks alike."""
    notes = []
    for name in (name for name, role in roles.items() if role.role == INPUT):
        path, _, attribute = name.rpartition(".")
        if is_table_by_shape(module.get_submodule(path), attribute, path, module.get_parameter(name).dim()):
            notes.append(
                f"{kind_of(name)} is taken for a table that is looked up or added. If it maps to the output it needs "
                "another rule: make it the weight of an nn.Linear"
            )
    return list(dict.fromkeys(notes))


def tie_notes(module: nn.Module, roles: dict[str, Role]) -> list[str]:
    """Return a note on each parameter with several names, one of which may be a head."""
    first = {id(each): name for name, each in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    tied = [(name, first[id(each)]) for name, each in every if first[id(each)] != name]
    heads = {name for name, part in module.named_modules() if not isinstance(part, nn.Embedding)}
    outer = [(name, own) for name, own in tied if roles[own].role != FIXED and name.rpartition(".")[0] in heads]
    outer = [(name, own) for name, own in outer if kind_of(name) != kind_of(own)]
    return [f"{name} is tied to {own}: it has one law and one rate, and its own multiplier" for name, own in outer]
