"""The multipliers of a rule put into effect on a model, by changes of the module after it is built."""

from dataclasses import replace
from functools import partial
from math import isclose
from typing import Any

from torch import nn

from limitformer.base.errors import require
from limitformer.scaling.branches import Change, scale_branches, scale_input, scale_output
from limitformer.scaling.roles import Role, block_names, kind_of, partners
from limitformer.scaling.rules import (
    ONE,
    OUTPUT,
    ScalingRule,
)
from limitformer.weightless.layout import is_callable
from limitformer.weightless.models import Blueprint

SCALES = ("scaling", "scale", "softmax_scale", "norm_factor", "attn_scale")  # attributes: factors of the logits q·k
HEAD_SIZES = ("head_dim", "attention_head_size", "d_head", "head_size", "key_value_proj_dim")
QUERIES = ("q_proj", "query", "q", "q_lin", "wq")
EMBEDDING_SCALES = ("scalar_embed_scale", "embed_scale")  # attributes of tables: factors of their rows
OWN_BRANCH = "residual_scale"  # an attribute of blocks: the factor that their code gives branches


class Effect:
    """The multipliers of a rule in the forward pass of a model."""

    def __init__(
        self, rule: ScalingRule, roles: dict[str, Role], depth: float, module: nn.Module, base_module: nn.Module,
        blueprint: Blueprint, base: Blueprint,
    ) -> None:  # fmt: skip
        self.rule, self.roles, self.depth, self.module, self.base_module = rule, roles, depth, module, base_module
        self.plain, self.base = blueprint, base
        self.changes: list[tuple[str, Change]] = []
        self.multipliers: dict[str, float] = {}
        self.notes: list[str] = []
        self.folded: list[str] = []
        self.scale_outputs()
        self.scale_branches()
        if rule.scales_attention:
            self.scale_attention()
        self.cancel_scaled_embeddings()

    def theta(self, name: str) -> float:
        """Return the multiplier of an output weight."""
        role = self.roles[name]
        return self.rule.multiplier.get(OUTPUT, ONE).factor(role.fan_in, role.fan_out, self.depth)

    def scale_outputs(self) -> None:
        every = {id(each): name for name, each in self.module.named_parameters()}
        tables = {id(part.weight) for part in self.module.modules() if isinstance(part, nn.Embedding)}
        for path, part in self.module.named_modules():
            weight = getattr(part, "weight", None)
            name = every.get(id(weight), "")
            tied = id(weight) in tables and isinstance(part, nn.Linear)
            if tied and self.roles[name].fan_out != 1.0:  # a head that is the table of embeddings: Table 8 allows it
                factor = self.rule.multiplier.get(OUTPUT, ONE).factor(self.roles[name].fan_out, 1.0, self.depth)
                self.multiply_input(path, factor)
        for name, role in self.roles.items():
            if role.role == OUTPUT and role.owner is not None:
                self.multiply_input(role.owner, self.theta(name))
            elif role.role == OUTPUT:
                self.folded.append(name)
        for kind in dict.fromkeys(map(kind_of, self.folded)):
            self.notes.append(f"{kind} is used by the code of its own module: its multiplier is in its law and rate")

    def multiply_input(self, path: str, factor: float) -> None:
        at_head = path == self.head()
        if at_head and (own := self.own_output()) != 1.0:
            self.notes.append(f"{self.plain.name} multiplies the input of {path} by {own:g} itself")
            factor /= own
        if isclose(factor, 1.0):
            return
        self.multipliers[path] = factor
        self.notes.append(f"multiply the input of {path} by {factor:g} in your own code")
        self.changes.append((path, partial(scale_input, factor=factor)))

    def own_output(self) -> float:
        """Return the multiplier that the family's own code gives the head, over that of the base."""
        if self.plain.config is None:
            return 1.0
        config, base = text_part(self.plain), text_part(self.base)
        if getattr(config, "scale_decoder_outputs", False):  # the code of T5: the stream times d_model^-½
            return float((config.hidden_size / base.hidden_size) ** -0.5)
        if isinstance(getattr(type(config), "logits_scaling", None), property):  # MiniCPM's: computed from the width
            return float(base.logits_scaling / config.logits_scaling)
        return 1.0

    def cancel_scaled_embeddings(self) -> None:
        """Let tables that the code multiplies by √width keep the factor of the base, as their rule is the law alone."""
        base = dict(self.base_module.named_modules())
        for path, part in self.module.named_modules():
            other = base.get(path)
            name = next((each for each in EMBEDDING_SCALES if isinstance(getattr(part, each, None), float)), None)
            if isinstance(part, nn.Embedding) and other is not None and name is not None:
                factor = getattr(other, name) / getattr(part, name)
                if factor != 1.0:
                    self.multipliers[path] = factor
                    self.notes.append(f"multiply the output of {path} by {factor:g}: its code multiplies by √width")
                    self.changes.append((path, partial(scale_output, factor=factor)))

    def head(self) -> str:
        """Return the name of the head of a model of transformers; empty if there is none."""
        head = getattr(self.module, "get_output_embeddings", lambda: None)()
        return (
            next((name for name, part in self.module.named_modules() if part is head), "") if head is not None else ""
        )

    def scale_branches(self) -> None:
        factor = self.rule.branch.factor(1.0, 1.0, self.depth)
        if (own := self.own_branch()) != 1.0 and factor != 1.0:
            self.notes.append(f"{self.plain.name} multiplies its branches by {own:g} itself")
            factor /= own
        if isclose(factor, 1.0):
            return
        self.multipliers["residual branches"] = factor
        self.notes.append(f"multiply residual branches by {factor:g} in your own code")
        for name in block_names(self.module, self.base_module):
            called = is_callable(self.module.get_submodule(name))
            require(
                called,
                f"{name} is a list of modules, and its sums with the stream are outside of it, where they have no "
                "multiplier. Nearest: a module for each block, that returns x + f(x).",
            )
            self.changes.append((name, partial(scale_branches, name, factor=factor)))

    def own_branch(self) -> float:
        """Return the multiplier that the family's own code gives branches, over that of the base."""
        pair = []
        for module in (self.module, self.base_module):
            scales = (getattr(part, OWN_BRANCH, None) for part in module.modules())
            pair.append(next((each for each in scales if isinstance(each, float)), 1.0))
        return pair[0] / pair[1]

    def scale_attention(self) -> None:
        """Let logits be q·k/d times a constant, if heads have another size d than those of the base."""
        base, seen, any_attention = dict(self.base_module.named_modules()), False, False
        partner = partners([name for name in base if name], [name for name, _ in self.module.named_modules() if name])
        for path, part in self.module.named_modules():
            other = base.get(partner.get(path, ""))
            if other is None or not is_attention(part):
                continue
            any_attention, ratio = True, head_ratio(part, other)
            seen = seen or ratio is not None
            if ratio is None or ratio == 1.0:
                continue
            factor = 1 / ratio / (scale_ratio(part, other) or ratio**-0.5)
            if isclose(factor, 1.0):
                continue
            self.multipliers[f"{path} logits"] = factor
            if not self.scale_logits(path, part, factor):
                self.multipliers.pop(f"{path} logits")
                note = f"{kind_of(path)} keeps logits q·k/√d: it has no factor and no map of queries to change"
                self.notes += [note] if note not in self.notes else []
        if any_attention and not seen:
            self.notes.append("the size of heads is not visible, so that logits keep their factor: the rule has 1/d")

    def scale_logits(self, path: str, part: nn.Module, factor: float) -> bool:
        name = next((each for each in SCALES if isinstance(getattr(part, each, None), float)), None)
        if name is not None:

            def change(module: nn.Module) -> None:
                setattr(module, name, getattr(module, name) * factor)

            self.changes.append((path, change))
            return True
        query = next((each for each in QUERIES if isinstance(getattr(part, each, None), nn.Linear)), None)
        if query is not None:
            self.changes.append((f"{path}.{query}", partial(scale_output, factor=factor)))
        return query is not None

    def blueprint(self) -> Any:
        """Return the model with its multipliers in effect."""
        plain = self.plain
        if not self.changes:
            return plain
        factory, changes = plain.factory, self.changes

        def build() -> nn.Module:
            module = factory()
            for path, change in changes:
                change(module.get_submodule(path))
            return module

        return replace(plain, factory=build)


def text_part(blueprint: Blueprint) -> Any:
    config: Any = blueprint.config
    return config.get_text_config()


def is_attention(part: nn.Module) -> bool:
    return "attention" in type(part).__name__.lower() or "attn" in type(part).__name__.lower()


def head_ratio(part: nn.Module, base: nn.Module) -> float | None:
    """Return the size of a head over that of the base; None if it is not visible."""
    for name in HEAD_SIZES:
        size, other = getattr(part, name, None), getattr(base, name, None)
        if isinstance(size, int) and isinstance(other, int) and other > 0:
            return size / other
    own = scale_ratio(part, base)
    return None if own is None else own**-2


def scale_ratio(part: nn.Module, base: nn.Module) -> float | None:
    """Return the factor of the code's own logits over that of the base; None if it is not visible."""
    for name in SCALES:
        scale, before = getattr(part, name, None), getattr(base, name, None)
        if isinstance(scale, float) and isinstance(before, float) and scale > 0 and before > 0:
            return scale / before
    return None
