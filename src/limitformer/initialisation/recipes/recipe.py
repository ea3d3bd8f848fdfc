"""`Recipe`: an initialisation as its authors published it, as data; and `recipes`, the table of known ones."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from limitformer.base.errors import InputError, nearest, require, require_real, set_fields
from limitformer.initialisation.recipes.formula import LAWS, SIZES, names_in, parsed

# The roles of weights that are found by structure and by names of many libraries; a recipe may name others itself.
ROLES = (
    *("embedding", "position embedding", "type embedding", "relative bias"),
    *("query", "key", "value", "attention output"),
    *("feed-forward in", "gate", "feed-forward out", "router"),
    *("head", "norm gain", "norm bias", "bias"),
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An initialisation as its authors published it.

    Attributes:
        name: for `limitformer check --recipe`.
        title: what it is.
        source: the paper's section, or files of a repository at a version.
        rules: {role: formula of the law}; several roles are separated by commas. A formula uses the sizes of
            `limitformer.initialisation.recipes.SIZES` and the settings.
        settings: numbers in the formulas that its users choose, with the published defaults.
        names: {role: pattern of weights' names} for roles that this architecture alone has: regular expressions, which
            come before the names that every recipe shares.
        tied: whether the head shares the weights of the embedding; None: both are published.
        notes: what the comparison of weights does not show, and what could not be verified.
    """

    name: str
    title: str
    source: str
    rules: Mapping[str, str]
    settings: Mapping[str, float] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    tied: bool | None = None
    notes: str = ""

    def __post_init__(self) -> None:
        roles = {role.strip(): text for key, text in self.rules.items() for role in key.split(",")}
        count = sum(len(key.split(",")) for key in self.rules)
        require(len(roles) == count, f"recipe {self.name} has two rules for one role. Nearest: one rule for each role.")
        numbers = {
            name: require_real(f"setting {name} of recipe {self.name}", each) for name, each in self.settings.items()
        }
        known, sizes, where = {*ROLES, *self.names}, {*SIZES, *numbers}, f"of recipe {self.name}"
        for role, text in roles.items():
            require(role in known, f"{role!r} {where} is not a role.{nearest(role, known)}")
            strange = sorted(names_in(text) - sizes)
            if strange:
                hint = nearest(strange[0], sizes)
                raise InputError(f"{role} {where}: {strange[0]!r} is not a size or a setting.{hint}")
            called = getattr(getattr(parsed(text).body, "func", None), "id", None)
            require(called in LAWS, f"{role} {where}: {text!r} is not a law. Nearest: normal(0.02).")
        for role, pattern in self.names.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise InputError(f"{role} {where}: {pattern!r} is not a pattern: {error}.") from error
        names = MappingProxyType(dict(self.names))
        set_fields(self, rules=MappingProxyType(roles), settings=MappingProxyType(numbers), names=names)

    def __reduce__(self) -> tuple[Any, ...]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        plain: dict[str, Any] = {
            name: dict(each) if isinstance(each, MappingProxyType) else each for name, each in values.items()
        }
        return partial(type(self), **plain), ()

    def with_settings(self, **settings: float) -> "Recipe":
        """Return the recipe with other numbers.

        Raises:
            InputError: it has no such setting.

        >>> recipes()["megatron"].with_settings(std=0.006).settings["std"]
        0.006
        """
        for name in settings:
            has = name in self.settings
            known = f" It has {', '.join(self.settings)}." if self.settings else " It has none."
            require(has, f"recipe {self.name} has no setting {name!r}.{known if not has else ''}")
        return replace(self, settings={**self.settings, **settings})

    def __str__(self) -> str:
        """Return title, source, rules and notes as text."""
        lines = [f"{self.name}: {self.title}", f"  source: {self.source}"]
        if self.settings:
            lines.append(f"  settings: {', '.join(f'{name} = {value:g}' for name, value in self.settings.items())}")
        same: dict[str, list[str]] = {}
        for role, text in self.rules.items():
            same.setdefault(text, []).append(role)
        lines += [f"  {', '.join(roles)}: {text}" for text, roles in same.items()]
        if self.tied is not None:
            lines.append(f"  head: {'shares the weights of the embedding' if self.tied else 'has weights of its own'}")
        return "\n".join([*lines, *([f"  note: {self.notes}"] if self.notes else [])])


def recipes() -> dict[str, Recipe]:
    """Return the published recipes by name.

    >>> print(recipes()["megatron"].rules["feed-forward out"])
    normal(std / sqrt(2 * depth))
    """
    from limitformer.initialisation.recipes.published import PUBLISHED

    return {each.name: each for each in PUBLISHED}


def recipe_of(recipe: "Recipe | str") -> Recipe:
    """Return a recipe from itself, its name, or its name and settings, such as `megatron,std=0.006`.

    Raises:
        InputError: there is no such recipe or setting.
    """
    if isinstance(recipe, Recipe):
        return recipe
    require(isinstance(recipe, str), f"recipe must be a Recipe or its name; got {type(recipe).__name__}.")
    name, *pairs = (part.strip() for part in recipe.split(","))
    known = recipes()
    if name not in known:
        hint = nearest(name, known) or f" Nearest: {', '.join(list(known)[:3])}, or another of limitformer recipes."
        raise InputError(f"recipe must be one of {len(known)} names; got {name!r:.60}.{hint}")
    settings = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        require(
            bool(equals and key), f"recipe takes NAME,SETTING=NUMBER; got {pair!r:.60}. Nearest: megatron,std=0.006."
        )
        require(key not in settings, f"recipe gives {key} twice; got {recipe!r:.60}.")
        try:
            settings[key] = float(value)
        except ValueError:
            settings[key] = math.nan
        require(math.isfinite(settings[key]), f"setting {key} of recipe {name} must be a number; got {value!r:.60}.")
    return known[name].with_settings(**settings)
