"""The multipliers of a rule put into effect on a model, by changes of the module after it is built.

In a block, a sum x + f of its stream x and a branch f becomes x + λf. The stream is the block's input, a sum with it, a
norm of such a sum, and a multiple of it, as in `weightless.observers.stream`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from limitformer.base.errors import InputError, require
from limitformer.scaling.roles import Role, block_names, kind_of, partners
from limitformer.scaling.rules import (
    ONE,
    OUTPUT,
    ScalingRule,
)
from limitformer.subjects.subject import Subject
from limitformer.weightless.blocks import is_norm, tokens_among
from limitformer.weightless.layout import is_callable
from limitformer.weightless.tensors import same_memory

ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__}
SCALINGS = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
IN_PLACE = {Tensor.add_}


class BranchScaling(TorchFunctionMode):
    """A mode that multiplies the branches of one call of a block by `factor`."""

    def __init__(self, factor: float, x: Tensor) -> None:
        super().__init__()
        self.factor, self.stream, self.sums = factor, [x], 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`; a sum with the stream has a smaller other term."""
        kwargs = kwargs or {}
        if func in ADDITIONS and (place := self.place_of_stream(args)) is not None:
            branch = args[1 - place]
            scaled = branch.mul_(self.factor) if func in IN_PLACE and place == 1 else branch * self.factor
            args = (args[0], scaled, *args[2:]) if place == 0 else (scaled, *args[1:])
            out = func(*args, **kwargs)
            self.stream, self.sums = [out], self.sums + 1
            return out
        out = func(*args, **kwargs)
        by_number = any(isinstance(a, int | float) or (isinstance(a, Tensor) and a.dim() < 2) for a in args)
        if func in SCALINGS and by_number and any(a is x for a in args for x in self.stream):
            self.stream.append(out)
        return out

    def place_of_stream(self, args: Any) -> int | None:
        """Return which term of a sum of two tensors of one shape is the stream."""
        if len(args) < 2 or not all(isinstance(a, Tensor) for a in args[:2]) or args[0].shape != args[1].shape:
            return None
        if args[0].numel() != self.stream[0].numel() or args[0].shape[-1] != self.stream[0].shape[-1]:
            return None
        exact = next((k for k in (0, 1) if any(args[k] is x for x in self.stream)), None)
        if exact is not None or args[0].shape == self.stream[0].shape:
            return exact
        return next((k for k in (0, 1) if any(same_memory(args[k], x) for x in self.stream)), None)  # flattened

    def after_norm(self, x: Any, out: Any) -> None:
        """Count a norm of a sum with the stream as the stream."""
        if self.sums and any(x is each for each in self.stream) and isinstance(out, Tensor):
            self.stream.append(out)


def scale_branches(name: str, block: nn.Module, factor: float) -> None:
    """Multiply the residual branches in a block by `factor`.

    Raises:
        InputError: the block is called, and has no sum with its stream.
    """
    running: list[BranchScaling] = []
    forward = block.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        x = tokens_among(args, kwargs)
        if x is None:
            return forward(*args, **kwargs)
        with BranchScaling(factor, x) as mode:
            running.append(mode)
            try:
                out = forward(*args, **kwargs)
            finally:
                running.pop()
        if not mode.sums:
            raise InputError(
                f"{name} has no sum of its input and a branch, so that the branch has no multiplier. "
                "Nearest: a block that returns x + f(x)."
            )
        return out

    def after(part: nn.Module, args: Any, out: Any) -> None:
        if running and args:
            running[-1].after_norm(args[0], out)

    block.forward = scaled
    for inner_name, inner in block.named_modules():
        if is_norm(inner_name, inner):
            inner.register_forward_hook(after)


def scale_input(part: nn.Module, factor: float) -> None:
    """Multiply the input of a matrix by `factor`, which leaves its bias alone."""

    def before(_: nn.Module, args: Any) -> Any:
        return (args[0] * factor, *args[1:])

    part.register_forward_pre_hook(before)


def scale_output(part: nn.Module, factor: float) -> None:
    """Multiply the output of a module, one tensor, by `factor`."""

    def after(_: nn.Module, args: Any, out: Any) -> Any:
        return out * factor

    part.register_forward_hook(after)


Change = Callable[[nn.Module], None]
SCALED_OUTPUT = "hook(lambda _, args, out: out * {})"

SCALES = ("scaling", "scale", "softmax_scale", "norm_factor", "attn_scale")  # attributes: factors of the logits q·k
HEAD_SIZES = ("head_dim", "attention_head_size", "d_head", "head_size", "key_value_proj_dim")
QUERIES = ("q_proj", "query", "q", "q_lin", "wq")
EMBEDDING_SCALES = ("scalar_embed_scale", "embed_scale")  # attributes of tables: factors of their rows
OWN_BRANCH = "residual_scale"  # an attribute of blocks: the factor that their code gives branches


class Effect:
    """The multipliers of a rule in the forward pass of a model."""

    def __init__(
        self, rule: ScalingRule, roles: dict[str, Role], depth: float, module: nn.Module, base_module: nn.Module,
        subject: Subject, base: Subject,
    ) -> None:  # fmt: skip
        self.rule, self.roles, self.depth, self.module, self.base_module = rule, roles, depth, module, base_module
        self.plain, self.base = subject, base
        self.changes: list[tuple[str, Change]] = []
        self.multipliers: dict[str, float] = {}
        self.lines: list[str] = []  # code that does the same
        self.notes: list[str] = []
        self.folded: list[str] = []
        self.heads_unseen = False
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
        inside: dict[str, None] = {}
        for name, role in self.roles.items():
            if role.role == OUTPUT and role.owner is not None:
                self.multiply_input(role.owner, self.theta(name))
                inside |= {kind_of(role.owner): None} if role.inside else {}
            elif role.role == OUTPUT:
                self.folded.append(name)
        same = "has the rule of an output, as it has the same columns at every width"
        self.notes += [f"{kind} {same}" for kind in inside]
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
        self.changes.append((path, partial(scale_input, factor=factor)))
        self.hook(path, "pre_hook(lambda _, args: (args[0] * {}, *args[1:]))", factor)

    def hook(self, path: str, hook: str, factor: float) -> None:
        """Add the line of code that registers a hook of a module."""
        self.lines.append(f"part({path!r}).register_forward_{hook.format(f'{factor:.12g}')}")

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
                    self.hook(path, SCALED_OUTPUT, factor)

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
        self.lines.append(f"# in the forward pass of your blocks, instead of x + f: x + {factor:.12g} * f")
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
        base, seen = dict(self.base_module.named_modules()), False
        partner = partners([name for name in base if name], [name for name, _ in self.module.named_modules() if name])
        for path, part in self.module.named_modules():
            other = base.get(partner.get(path, ""))
            kind = type(part).__name__.lower()
            if other is None or not ("attention" in kind or "attn" in kind):
                continue
            ratio = head_ratio(part, other)
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
        self.heads_unseen = not seen

    def scale_logits(self, path: str, part: nn.Module, factor: float) -> bool:
        name = next((each for each in SCALES if isinstance(getattr(part, each, None), float)), None)
        if name is not None:

            def change(module: nn.Module) -> None:
                setattr(module, name, getattr(module, name) * factor)

            self.changes.append((path, change))
            self.lines.append(f"part({path!r}).{name} *= {factor:.12g}")
            return True
        query = next((each for each in QUERIES if isinstance(getattr(part, each, None), nn.Linear)), None)
        if query is not None:
            self.changes.append((f"{path}.{query}", partial(scale_output, factor=factor)))
            self.hook(f"{path}.{query}", SCALED_OUTPUT, factor)
        return query is not None

    def subject(self) -> Any:
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


def text_part(subject: Subject) -> Any:
    config: Any = subject.config
    return config.get_text_config()


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
