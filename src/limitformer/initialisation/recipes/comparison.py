"""The law of a model's own code, weight by weight, compared with a published recipe.

Laws are compared, not numbers that were drawn: the ratio is that of the standard deviations, or of the constants. Both
are exact, so that a ratio that is not 1 is a difference of the code.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from limitformer.initialisation.like_layers import pattern as like_pattern
from limitformer.initialisation.recipes.law import ComparedLaw, Weight, compared_law, values
from limitformer.initialisation.recipes.recipe import Recipe, recipe_of
from limitformer.initialisation.recipes.roles import is_embedding, owner_of, places_of
from limitformer.initialisation.report import aligned
from limitformer.subjects.subject import resolve
from limitformer.weightless import laws
from limitformer.weightless.law import LawTable, build_without_weights, table_of

EXACT = 1e-4  # relative difference of two laws that rounded constants may cause
LEFT = 5  # spaces before the cells of a row that takes several lines
SAME, FORM, DIFFERS = ORDER = "=", "~", "≠"
NO_RULE = "the recipe has no rule for "


@dataclass(frozen=True)
class RecipeRow:
    """One kind of weight: the law of this code, that of the recipe, and their ratio.

    Attributes:
        kind: the role of the weights.
        names: patterns of their names, in which `*` is any number.
        count: how many weights.
        code: the law of this code.
        recipe: the law of the recipe.
        ratio: the smallest and the largest std of this code over that of the recipe, or ratio of constants. 0/0 is 1.
        mark: `≠` where size or mean differ, `~` where only the form of the law does, else `=`.
        remark: the difference in words.
    """

    kind: str
    names: tuple[str, ...]
    count: int
    code: str
    recipe: str
    ratio: tuple[float, float]
    mark: str
    remark: str

    @property
    def ratio_text(self) -> str:
        """The ratio as text, such as `4.899` or `0.5 to 2`."""
        low, high = self.ratio
        return number(low) if high - low <= EXACT * high or low == high else f"{number(low)} to {number(high)}"


@dataclass(frozen=True)
class Uncovered:
    """Weights that the recipe says nothing about, or whose role is not clear."""

    names: str
    count: int
    shape: str
    reason: str


@dataclass(frozen=True)
class RecipeComparison:
    """The law of a model's code compared with a recipe.

    Attributes:
        name: of the model.
        recipe: the recipe.
        rows: the weights that the recipe covers, by kind.
        uncovered: all other weights.
        remarks: about ties.
    """

    name: str
    recipe: Recipe
    rows: tuple[RecipeRow, ...]
    uncovered: tuple[Uncovered, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[RecipeRow, ...]:
        """The kinds of weight whose size or mean differs from the recipe's."""
        return tuple(row for row in self.rows if row.mark == DIFFERS)

    @property
    def summary(self) -> str:
        """One line: how many kinds of weight differ, and which."""
        off = list(dict.fromkeys(row.kind for row in self.differences))
        every = list(dict.fromkeys(row.kind for row in self.rows))
        missing = sum(each.count for each in self.uncovered)
        tail = f"; {missing} weights are not covered by it" if missing else ""
        if not self.rows:
            return f"recipe {self.recipe.name} covers none of {missing} weights"
        start = f"{len(off)} of {len(every)} kinds of weight differ from recipe {self.recipe.name}"
        return f"{start}{': ' if off else ''}{', '.join(off)}{tail}"

    def record(self) -> dict[str, Any]:
        """Return the comparison as JSON holds it; an infinite ratio is the text `inf`."""
        rows = [
            {**asdict(row), "ratio": [each if math.isfinite(each) else str(each) for each in row.ratio]}
            for row in self.rows
        ]
        return {
            "recipe": self.recipe.name,
            "settings": dict(self.recipe.settings),
            "source": self.recipe.source,
            "summary": self.summary,
            "rows": rows,
            "uncovered": [asdict(each) for each in self.uncovered],
            "remarks": list(self.remarks),
        }

    def table(self, columns: int = 10**6) -> list[str]:
        """Return the lines of a table: kind of weight, this code, recipe, ratio. A longer row takes several lines."""
        cells = [(row.mark, row.kind, row.code, row.recipe, row.ratio_text) for row in self.rows]
        head = ("", "kind of weight", "this code, std", "recipe, std", "ratio")
        widths = [max(len(row[column]) for row in [head, *cells]) for column in range(len(head))]
        widths[1] = min(widths[1], max(columns - 11 - sum(widths[2:]), 18))
        lines = []
        for row in [head, *cells] if cells else []:
            first, rest = f"  {aligned(row[:2], (1, widths[1]))}", aligned(row[2:], widths[2:])
            both = f"  {aligned(row, (1, *widths[1:]))}"
            if len(row[1]) <= widths[1] and len(both) <= columns:
                lines.append(both)
                continue
            parts = [rest] if len(rest) <= columns - LEFT else [each for each in row[2:] if each]
            lines += [first, *(f"{'':{LEFT}}{each}" for each in parts)]
        return lines

    def __str__(self) -> str:
        """Return the summary, the table, the differences by name, and the weights that are not covered."""
        lines = [f"{self.name}: {self.summary}", f"  {self.recipe.title}; {self.recipe.source}", *self.table()]
        for row in self.rows:
            if row.remark:
                lines.append(f"  {row.mark} {row.kind}: {row.remark} ({names_text(row)})")
        lines += [f"  {remark}" for remark in self.remarks]
        lines += [f"  not covered: {each.names} ×{each.count}: {each.reason}" for each in self.uncovered]
        return "\n".join(lines)


def names_text(row: RecipeRow) -> str:
    more = f" and {len(row.names) - 1} more" if len(row.names) > 1 else ""
    return f"{row.names[0]}{more}"


@dataclass(frozen=True)
class ComparedWeight:
    """One weight, its law in the code and in the recipe."""

    name: str
    kind: str
    code: ComparedLaw
    recipe: ComparedLaw
    ratio: float
    mark: str
    remark: str


def compare_with_recipe(model: Any, recipe: Recipe | Callable[..., ComparedLaw | None] | str) -> RecipeComparison:
    """Compare the law that a model's own code draws with a published recipe.

    Args:
        model: a configuration of transformers, its folder, JSON or public name, or a function that builds a module.
        recipe: a recipe, its name, its name with settings, such as `megatron,std=0.006`, or a function that takes a
            weight and returns its law, or None where it says nothing.

    Raises:
        InputError: the model cannot be built, or the recipe is unknown.

    >>> from limitformer.initialisation.recipes import compare_with_recipe
    >>> print(compare_with_recipe("gpt2", "gpt2").summary)
    1 of 9 kinds of weight differ from recipe gpt2: position embedding
    """
    recipe = recipe_of(recipe)
    subject = resolve(model)
    module, known = build_without_weights(subject, torch.float32)
    return compare_law(recipe, module, table_of(subject, module, known), subject.config)


def compare_law(recipe: Recipe, module: nn.Module, table: LawTable, config: Any) -> RecipeComparison:
    """Compare a table of laws with a recipe.

    Args:
        recipe: the recipe.
        module: the module whose laws these are, for classes and computed numbers.
        table: the laws.
        config: of transformers, or None.
    """
    places = places_of(module, table.shapes, recipe.names, config)
    published = {name: published_laws(place, recipe) for name, place in places.items()}
    named = {name: each for name, each in published.items() if isinstance(each, dict)}
    codes = codes_of(module, table, list(named))
    single: list[ComparedWeight] = []
    missing: list[tuple[str, str]] = []
    for name, each in published.items():
        if not isinstance(each, dict) or name not in codes:
            missing.append(
                (name, f"its law is not known: {table.laws[name].reason}" if isinstance(each, dict) else each)
            )
            continue
        part = " (part of a fused matrix)" if len(each) > 1 else ""
        single += [compare_sizes(name, f"{role}{part}", codes[name], law) for role, law in each.items()]
    heads = [
        (first, name)
        for first, names in table.tied.items()
        if places[first].roles == ("embedding",)
        for name in names
        if not is_embedding(owner_of(module, name))  # where it multiplies the stream, rather than being looked up
    ]
    for first, name in heads if not recipe.tied else ():
        rows, columns = (*places[first].shape, 1)[:2]
        head = replace(places[first], roles=("head",))
        head.sizes = head.sizes | {"fan_in": columns, "fan_out": rows}
        law = recipe.law_of(head)
        if first in codes and isinstance(law, ComparedLaw):
            one = compare_sizes(name, "head", codes[first], law)
            single.append(replace(one, remark="; ".join(filter(None, (f"tied to {first}", one.remark)))))
    groups = Counter((pattern(name), "×".join(map(str, table.shapes[name])), reason) for name, reason in missing)
    uncovered = tuple(Uncovered(name, count, shape, reason) for (name, shape, reason), count in groups.items())
    remarks = []
    if recipe.tied is False and heads:
        remarks.append(f"{heads[0][1]} shares the weights of {heads[0][0]}; in the recipe the head has its own")
    if recipe.tied and not heads and any(each.kind == "head" for each in single):
        remarks.append("the head has weights of its own; in the recipe it shares those of the embedding")
    return RecipeComparison(table.name, recipe, rows_of(single), uncovered, tuple(remarks))


def published_laws(place: Weight, recipe: Recipe) -> dict[str, ComparedLaw] | str:
    """Return the recipe's laws of one weight, several of a fused one if they differ; or why it has none."""
    if not place.roles:
        return place.reason
    if len(place.roles) > 1:  # the shape does not tell the outputs of each part
        place = replace(place, sizes={**place.sizes, "fan_out": None})
    every = {role: recipe.law_of(replace(place, roles=(role,))) for role in place.roles}
    reason = next((each for each in every.values() if isinstance(each, str)), None)
    if reason is not None:
        return f"{NO_RULE}{' and '.join(place.roles)}" if reason.startswith(NO_RULE) else reason
    laws = {role: each for role, each in every.items() if isinstance(each, ComparedLaw)}
    equal = len({(each.kind, each.mean, each.std, each.cut) for each in laws.values()}) == 1
    return {", ".join(laws): next(iter(laws.values()))} if equal else laws


def codes_of(module: nn.Module, table: LawTable, names: list[str]) -> dict[str, ComparedLaw]:
    """Return the law of each weight in the code, if it is known."""
    codes: dict[str, ComparedLaw] = {}
    for name in names:
        law, parameter = table.laws[name], module.get_parameter(name)
        if law.random or law.kind == laws.CONSTANT:
            codes[name] = compared_law(law)
        elif law.kind == laws.GIVEN and not parameter.is_meta:
            codes[name] = values(parameter.detach().double().cpu().numpy())
    return codes


def compare_sizes(name: str, kind: str, size: ComparedLaw, law: ComparedLaw) -> ComparedWeight:
    ratio, why = ratio_of(size, law)
    form = form_of(size, law)
    mark = DIFFERS if why else FORM if form else SAME
    return ComparedWeight(name, kind, size, law, ratio, mark, "; ".join(filter(None, (why, form))))


def ratio_of(size: ComparedLaw, law: ComparedLaw) -> tuple[float, str]:
    """Return the ratio of sizes, and the difference in words; empty if there is none."""
    if law.values is not None and not size.random:
        numbers, published = np.full(law.values.shape, size.mean) if size.values is None else size.values, law.values
        if numbers.size != published.size:
            return math.nan, f"{numbers.size} numbers, where the recipe has {published.size}"
        root = float(np.sqrt((published**2).mean()))
        off = float(np.abs(numbers.ravel() - published.ravel()).max())
        differs = off > EXACT * max(root, off * 1e-3)
        return over(float(np.sqrt((numbers**2).mean())), root), f"other numbers, off by up to {number(off)}" * differs
    if law.values is not None:
        return over(size.rms, law.rms), "drawn, where the recipe has numbers"
    drawn = size.random or size.values is not None
    if not drawn and not law.random:
        same = math.isclose(size.mean, law.mean, rel_tol=EXACT, abs_tol=1e-12)
        ratio = size.mean / law.mean if law.mean else 1.0 if same else math.inf
        return ratio, "" if same else f"{number(size.mean)}, where the recipe has {number(law.mean)}"
    if not law.random:
        return over(size.rms, abs(law.mean)), f"drawn, where the recipe has {law}"
    if not drawn:
        return over(abs(size.mean), law.rms), f"{number(size.mean)} everywhere, where the recipe draws"
    ratio = over(size.std, law.std)
    why = []
    if ratio <= 0 or not math.isfinite(ratio) or abs(math.log(ratio)) > EXACT:
        why.append(f"std {number(ratio)} times the recipe's")
    if abs(size.mean - law.mean) > EXACT * max(law.std, abs(law.mean)):
        why.append(f"mean {number(size.mean)}, where the recipe has {number(law.mean)}")
    return ratio, "; ".join(why)


def form_of(size: ComparedLaw, law: ComparedLaw) -> str:
    """Return how the form of two random laws differs: family and truncation."""
    cuts_nothing = size.wide and not law.wide
    noted = f"truncated at ±{number(min(-size.cut[0], size.cut[1]))} σ, which cuts nothing: a normal" * cuts_nothing
    if not size.random or not law.random:
        return "computed, not drawn" if size.values is not None and law.random else noted
    kind, expected = (laws.NORMAL if each.wide else each.kind for each in (size, law))
    if kind != expected:
        return "; ".join(filter(None, (f"{kind}, where the recipe is {expected}", noted)))
    if kind == laws.TRUNCATED and not math.isclose(size.cut[1], law.cut[1], rel_tol=1e-3):
        return f"cut at ±{number(size.cut[1])} σ, where the recipe cuts at ±{number(law.cut[1])} σ"
    return noted


def rows_of(single: list[ComparedWeight]) -> tuple[RecipeRow, ...]:
    """Group equal weights of all layers, then equal rows of several places."""
    by_pattern: dict[tuple[str, str, str], list[ComparedWeight]] = {}
    for each in single:
        by_pattern.setdefault((each.kind, pattern(each.name), each.code.kind), []).append(each)
    rows: dict[tuple[Any, ...], RecipeRow] = {}
    for (kind, name, _), group in by_pattern.items():
        worst = max(group, key=lambda each: (ORDER.index(each.mark), each.remark))
        low, high = (f(each.ratio for each in group) for f in (min, max))
        codes = span([str(each.code) for each in group], [each.code.std or each.code.mean for each in group])
        published = span([str(each.recipe) for each in group], [each.recipe.std or each.recipe.mean for each in group])
        remark = worst.remark
        if low != high and high - low > EXACT * abs(high):
            remark = re.sub(r"^std \S+ times", f"std {number(low)} to {number(high)} times", remark)
        key = (kind, codes, published, round(low, 6), round(high, 6), worst.mark, remark)
        row = RecipeRow(kind, (name,), len(group), codes, published, (low, high), worst.mark, remark)
        if before := rows.get(key):
            names, count = (*before.names, name), before.count + row.count
            row = replace(row, names=names, count=count)
        rows[key] = row
    return tuple(rows.values())


def pattern(name: str) -> str:
    return like_pattern(re.sub(r"(?<![^.])(expert|layer|block)_\d+(?![^.])", r"\1_*", name))


def span(texts: list[str], sizes: list[float]) -> str:
    """Return one text of several layers: the common one, or the least and the largest."""
    if len(set(texts)) == 1:
        return texts[0]
    order = np.argsort(sizes, kind="stable")
    first, last = texts[order[0]], texts[order[-1]]
    words, others = first.rsplit(" ", 1), last.rsplit(" ", 1)
    if len(words) == len(others) == 2 and words[0] == others[0]:
        return f"{first} to {others[1]}"
    return first if first == last else f"{first} to {last}"


def over(size: float, published: float) -> float:
    """Return the ratio of two sizes; 0/0 is 1."""
    return size / published if published else math.inf if size else 1.0


def number(value: float) -> str:
    """Return a number with four digits, `∞` if it is infinite."""
    return "∞" if value == math.inf else f"{value:.4g}"
