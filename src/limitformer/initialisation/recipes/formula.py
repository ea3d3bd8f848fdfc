"""Laws as text, such as `normal(std / sqrt(2 * depth))`, and their evaluation for given sizes.

The text that is printed is the text that is evaluated. It is an expression of Python with numbers, names, `+ - * / **`,
comparisons, `a if b else c` and the functions below; nothing else is evaluated. A name is a size of the weight or a
setting of the recipe. In `values(…)`, `i` is the index of an entry in its row, `j` that of its row.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from limitformer.base.errors import InputError, nearest, require
from limitformer.weightless import laws
from limitformer.weightless.laws import Law

# The sizes that a formula may use, and what each is.
SIZES = {
    "width": "of the stream of the weight's stack",
    "depth": "number of blocks of its stack",
    "layer": "index of its block, from 0",
    "heads": "number of heads",
    "head_dim": "dimension of a head",
    "hidden": "width of the feed-forward layer of its block",
    "fan_in": "inputs of the weight",
    "fan_out": "outputs of the weight",
    "rows": "of the tensor",
    "columns": "of the tensor",
    "vocabulary": "rows of the embedding of tokens",
}
INDICES = ("i", "j")
LOGARITHM, SOFTPLUS = "log of uniform", "inverse softplus"
VALUES, SORTED = "values", "sorted values"

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg,
    ast.Gt: operator.gt, ast.Lt: operator.lt, ast.GtE: operator.ge, ast.LtE: operator.le, ast.Eq: operator.eq,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sqrt": np.sqrt, "log": np.log, "exp": np.exp, "abs": np.abs, "min": np.minimum, "max": np.maximum,
    "round": np.round, "where": np.where,
}  # fmt: skip


@dataclass(frozen=True)
class RecipeLaw:
    """The law that a recipe gives one weight.

    Attributes:
        kind: normal, uniform, truncated normal, constant, or one of the kinds of this module.
        mean: of an entry.
        std: of an entry; of `values`, over the entries.
        law: the law as this package draws it, where it has the kind.
        values: the numbers themselves, where they are not random.
    """

    kind: str
    mean: float
    std: float
    law: Law | None = None
    values: np.ndarray | None = None

    @property
    def random(self) -> bool:
        """Whether entries are random."""
        return self.kind not in (laws.CONSTANT, VALUES, SORTED)

    def __str__(self) -> str:
        """Return the law as text, such as `normal, std 0.02`."""
        if self.kind == laws.TRUNCATED:
            assert self.law is not None
            cut = f" within ±{self.law.high:.3g} σ" if -self.law.low == self.law.high else ""
            return f"{self.law}{cut}"
        if self.law is not None:
            return str(self.law)
        return f"{self.kind}, mean {self.mean:.3g}, std {self.std:.4g}"


def plain(law: Law) -> RecipeLaw:
    return RecipeLaw(law.kind, law.mean, law.std, law)


def normal(std: float, mean: float = 0.0) -> RecipeLaw:
    """Return N(mean, std²)."""
    return plain(laws.normal(float(std), float(mean)))


def uniform(low: float, high: float | None = None) -> RecipeLaw:
    """Return U(low, high), or U(−low, low)."""
    low, high = (-low, low) if high is None else (low, high)
    return plain(laws.uniform(float(low), float(high)))


def truncated(std: float, cut: float) -> RecipeLaw:
    """Return N(0, std²) between ±cut·std, whose standard deviation is smaller than `std`."""
    return plain(laws.truncated_normal(0.0, float(std), -float(cut * std), float(cut * std)))


def rescaled_truncated(std: float, cut: float) -> RecipeLaw:
    """Return a normal law that is cut at ±`cut` of its own standard deviations, and then has standard deviation std."""
    return truncated(std / laws.truncated_moments(-float(cut), float(cut))[1], cut)


def constant(value: float) -> RecipeLaw:
    """Return the law of entries that all are `value`."""
    return plain(laws.constant(float(value)))


def orthogonal(gain: float, rows: float, columns: float) -> RecipeLaw:
    """Return the law of a Haar matrix times gain: an entry's variance is gain²/max(rows, columns)."""
    return RecipeLaw(laws.ORTHOGONAL, 0.0, float(gain) / math.sqrt(max(rows, columns)))


def log_uniform(low: float, high: float) -> RecipeLaw:
    """Return the law of log u, u ~ U(low, high)."""
    return function_of_uniform(LOGARITHM, np.log, low, high)


def softplus_log_uniform(low: float, high: float) -> RecipeLaw:
    """Return the law of x with softplus(x) = exp(u), u ~ U(log low, log high)."""
    return function_of_uniform(SOFTPLUS, lambda u: np.log(np.expm1(np.exp(u))), math.log(low), math.log(high))


def function_of_uniform(kind: str, function: Callable[[np.ndarray], np.ndarray], low: float, high: float) -> RecipeLaw:
    """Return mean and standard deviation of function(u), u ~ U(low, high), by Gauss-Legendre quadrature."""
    nodes, weights = np.polynomial.legendre.leggauss(64)
    values = function((low + high) / 2 + (high - low) / 2 * nodes)
    mean = float(values @ weights / 2)
    return RecipeLaw(kind, mean, math.sqrt(float((values - mean) ** 2 @ weights / 2)))


def values(numbers: Any) -> RecipeLaw:
    """Return entries that are these numbers."""
    numbers = np.asarray(numbers, dtype=np.float64)
    return RecipeLaw(VALUES, float(numbers.mean()), float(numbers.std()), None, numbers)


def sorted_values(numbers: Any) -> RecipeLaw:
    """Return entries that are these numbers, in any order."""
    return replace(values(numbers), kind=SORTED)


LAWS: dict[str, Callable[..., RecipeLaw]] = {
    each.__name__: each
    for each in (
        *(normal, uniform, truncated, rescaled_truncated, constant, orthogonal, log_uniform, softplus_log_uniform),
        *(values, sorted_values),
    )
}


class NotDefinedError(Exception):
    """A formula has no value for a weight: a size is not known, or it divides by zero."""


def evaluate(text: str, names: Mapping[str, float | None], shape: tuple[int, ...] = ()) -> RecipeLaw:
    """Return the law of a weight.

    Args:
        text: the formula.
        names: sizes and settings by name; None is a size that is not known.
        shape: of the weight, for `values`.

    Raises:
        InputError: the formula cannot be read.
        NotDefinedError: it needs a size that is None, or has no value for these sizes.
    """
    tree = parsed(text)
    known = dict(names)
    if any(isinstance(node, ast.Name) and node.id in INDICES for node in ast.walk(tree)):
        rows, columns = (1, 1, *shape)[-2:]
        indices: dict[str, Any] = {"i": np.arange(columns)[None, :], "j": np.arange(rows)[:, None]}
        known |= indices
    require(isinstance(tree.body, ast.Call), wrong(text, "it is not a law"))
    with np.errstate(all="ignore"):
        result = value_of(tree.body, known, text)
    require(isinstance(result, RecipeLaw), wrong(text, "it is not a law"))
    assert isinstance(result, RecipeLaw)
    if not (math.isfinite(result.mean) and math.isfinite(result.std)):
        raise NotDefinedError(f"the formula {text} has no value for it")
    if result.values is not None and shape:
        full = np.broadcast_to(result.values, (1, 1, *shape)[-2:]).reshape(shape[-2:])
        return replace(result, values=np.broadcast_to(full, shape))
    return result


def parsed(text: str) -> ast.Expression:
    try:
        return ast.parse(text, mode="eval")
    except (SyntaxError, ValueError) as error:
        raise InputError(wrong(text, "it is not an expression")) from error


def wrong(text: str, why: str) -> str:
    return f"the formula {text!r:.120} cannot be used: {why}. Nearest: normal(0.02 / sqrt(2 * depth))."


def value_of(node: ast.AST, names: Mapping[str, Any], text: str) -> Any:
    """Evaluate one node of a formula."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise InputError(wrong(text, f"it has no name {node.id!r}{nearest(node.id, names)}".rstrip(".")))
        if names[node.id] is None:
            raise NotDefinedError(f"its {node.id} is not known")
        return names[node.id]
    if isinstance(node, ast.BinOp | ast.UnaryOp) and type(node.op) in OPERATORS:
        parts = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.operand,)
        try:
            return OPERATORS[type(node.op)](*(value_of(each, names, text) for each in parts))
        except (ZeroDivisionError, OverflowError) as error:
            raise NotDefinedError(f"the formula {text} has no value for it") from error
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPERATORS:
        left, right = (value_of(each, names, text) for each in (node.left, node.comparators[0]))
        return OPERATORS[type(node.ops[0])](left, right)
    if isinstance(node, ast.IfExp):
        return value_of(node.body if value_of(node.test, names, text) else node.orelse, names, text)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        every = {**FUNCTIONS, **LAWS}
        if node.func.id not in every:
            raise InputError(
                wrong(text, f"it has no function {node.func.id!r}{nearest(node.func.id, every)}".rstrip("."))
            )
        arguments = [value_of(each, names, text) for each in node.args]
        options = {str(each.arg): value_of(each.value, names, text) for each in node.keywords}
        try:
            return every[node.func.id](*arguments, **options)
        except (TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(wrong(text, f"{node.func.id} cannot take these arguments")) from error
    raise InputError(wrong(text, "it may hold numbers, names, arithmetic and the functions of laws only"))


def names_in(text: str) -> set[str]:
    """Return the names of sizes and settings that a formula uses."""
    return {node.id for node in ast.walk(parsed(text)) if isinstance(node, ast.Name)} - {*FUNCTIONS, *LAWS, *INDICES}
