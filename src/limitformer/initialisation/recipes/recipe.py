"""`Recipe`: an initialisation as its authors published it, a function from a weight to its law; `recipes`, the table.

A recipe takes a `Weight`, and returns its law or None where it says nothing. Its docstring has a title, the source and
notes, in paragraphs; arguments after the weight are its settings, with the published defaults.
"""

import inspect
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from limitformer.base.errors import InputError, nearest, require, require_real
from limitformer.base.foreign import one_line
from limitformer.initialisation.recipes.law import ComparedLaw, UnknownSizeError, Weight
from limitformer.initialisation.recipes.published import PUBLISHED

FUNCTION = "Nearest: def ours(weight): return normal(0.02) if weight.role == 'query' else None"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A function from a weight to its law, and what its docstring, its arguments and `known_as` say.

    Attributes:
        law: the function.
        name: for `limitformer check --recipe`.
        title: what it is.
        source: the paper's section, or files of a repository at a version.
        notes: what the comparison of weights does not show, and what could not be verified.
        settings: numbers that its users choose, with the published defaults.
        tied: whether the head shares the weights of the embedding; None: both are published.
        names: {role: pattern of weights' names} for roles that this architecture alone has.
    """

    law: Callable[..., ComparedLaw | None]
    name: str
    title: str
    source: str = ""
    notes: str = ""
    settings: Mapping[str, float] = field(default_factory=dict)
    tied: bool | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def __new__(cls, **named: Any) -> "Recipe":
        """Refuse the formulas of earlier versions."""
        require("rules" not in named, f"a recipe has no rules; it is a function of a weight. {FUNCTION}.")
        return super().__new__(cls)

    def law_of(self, weight: Weight) -> ComparedLaw | str:
        """Return the law of a weight of one role, or why it has none.

        Raises:
            InputError: the function fails, or returns something else.
        """
        with one_line(f"recipe {self.name} fails for {weight.name}"), np.errstate(all="ignore"):
            try:
                law = self.law(weight, **self.settings)
            except UnknownSizeError as error:
                return str(error)
            except ArithmeticError as error:
                return f"the recipe has no value for it: {error}"
        if law is None:
            return f"the recipe has no rule for {weight.role}"
        require(isinstance(law, ComparedLaw), f"recipe {self.name} gives {law!r:.60}, which is not a law. {FUNCTION}.")
        if not (math.isfinite(law.mean) and math.isfinite(law.std)):
            return "the recipe has no value for it"
        if law.values is None:
            return law
        rows = np.broadcast_to(law.values, (1, 1, *weight.shape)[-2:]).reshape(weight.shape[-2:])
        return replace(law, values=np.broadcast_to(rows, weight.shape))

    def with_settings(self, **settings: float) -> "Recipe":
        """Return the recipe with other numbers.

        Raises:
            InputError: it has no such setting.

        >>> recipes()["megatron"].with_settings(std=0.006).settings["std"]
        0.006
        """
        known = f"It has {', '.join(self.settings)}." if self.settings else "It has none."
        for name in settings:
            require(name in self.settings, f"recipe {self.name} has no setting {name!r}. {known}")
        real = {name: require_real(f"setting {name} of recipe {self.name}", each) for name, each in settings.items()}
        return replace(self, settings={**self.settings, **real})

    @property
    def code(self) -> str:
        """The code of the law, and of what it uses of its own module."""
        body = textwrap.dedent(inspect.getsource(self.law).split('"""')[-1]).strip("\n")
        functions, constants = [self.law], {}
        for function in functions:  # which grows
            for name in function.__code__.co_names:
                used = function.__globals__.get(name)
                if inspect.isfunction(used) and used.__module__ == self.law.__module__ and used not in functions:
                    functions.append(used)
                if isinstance(used, tuple):
                    constants[name] = f"{name} = {used}"
        return "\n".join([body, *map(inspect.getsource, functions[1:]), *constants.values()])

    def __str__(self) -> str:
        """Return title, source, settings, the code and notes as text."""
        lines = [f"{self.name}: {self.title}", *([f"  source: {self.source}"] if self.source else [])]
        if self.settings:
            lines.append(f"  settings: {', '.join(f'{name} = {value:g}' for name, value in self.settings.items())}")
        lines += textwrap.indent(self.code, "    ").splitlines()
        if self.tied is not None:
            lines.append(f"  head: {'shares the weights of the embedding' if self.tied else 'has weights of its own'}")
        return "\n".join([*lines, *([f"  note: {self.notes}"] if self.notes else [])])


def recipes() -> dict[str, Recipe]:
    """Return the published recipes by name.

    >>> recipes()["megatron"].title
    'Megatron-LM'
    """
    return {each.name: each for each in map(recipe_of, PUBLISHED)}


def recipe_of(recipe: "Recipe | Callable[..., ComparedLaw | None] | str", settings: str = "") -> Recipe:
    """Return a recipe from itself, its function, its name, or its name and settings, such as `megatron,std=0.006`.

    Raises:
        InputError: the recipe or a setting is unknown.
    """
    if isinstance(recipe, str):
        name, _, settings = recipe.partition(",")
        known = recipes()
        if name.strip() not in known:
            hint = nearest(name, known) or f" Nearest: {', '.join(list(known)[:3])}, or another of limitformer recipes."
            raise InputError(f"recipe must be one of {len(known)} names; got {name!r:.60}.{hint}")
        recipe = known[name.strip()]
    if not isinstance(recipe, Recipe):
        require(callable(recipe), f"recipe must be a function of a weight, or its name; got {type(recipe).__name__}.")
        name = getattr(recipe, "known_as", getattr(recipe, "__name__", "ours"))
        texts = [" ".join(each.split()) for each in (inspect.getdoc(recipe) or name).split("\n\n", 2)]
        parts: dict[str, Any] = dict(
            zip(("title", "source", "notes"), (texts[0].removesuffix("."), *texts[1:]), strict=False)
        )
        more = {each: getattr(recipe, each) for each in ("tied", "names") if hasattr(recipe, each)}
        defaults = {each.name: each.default for each in list(inspect.signature(recipe).parameters.values())[1:]}
        recipe = Recipe(law=recipe, name=name, settings=defaults, **parts, **more).with_settings(**defaults)
    numbers: dict[str, Any] = {}
    for pair in settings.split(",") if settings else ():
        key, equals, value = (part.strip() for part in pair.partition("="))
        form = f"recipe takes NAME,SETTING=NUMBER; got {pair.strip()!r:.60}. Nearest: megatron,std=0.006."
        require(bool(equals and key), form)
        require(key not in numbers, f"recipe gives {key} twice; got {settings!r:.60}.")
        try:
            numbers[key] = float(value)
        except ValueError:
            numbers[key] = value  # which is refused below
    return recipe.with_settings(**numbers)
