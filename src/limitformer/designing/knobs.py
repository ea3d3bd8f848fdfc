r"""Knobs: what can be set before training, and which weights or fields of a family it concerns.

  initializer_range   the field of the configuration by which its code draws weights (T5's is initializer_factor), or
                      the argument of a function of that name;
  embedding           × the std of the tables of tokens and positions, outside the blocks;
  output              × the std of what writes to the stream: the last matrix of each branch (`matrix_uses`);
  logits              × the std of attention logits: queries and keys each by its root; queries alone if keys share a
                      matrix with the values, not a knob if queries do; if their sizes, std times √columns, differ by
                      more than a factor of two, that one alone which is farther from the values'
  a pattern           × the std of the weights of these names, such as "*.mlp.up_proj.weight"
  gamma, tau0         fields of a `limitformer.Transformer`

Weights whose product is normalised at once are not knobs, because their size has no effect (`trials.check_effect`):
queries and keys of Qwen 3, outputs of Gemma 2, embeddings of BERT. Factors multiply what the code draws at that
initializer_range, and keep the kind of its law (normal, truncated, …).
"""

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf, log, nan, sqrt
from typing import Any

from torch import nn

from limitformer.base.errors import InputError, require, require_real
from limitformer.designing.matrix_uses import MatrixUses
from limitformer.designing.names import FIELD, SCALES, SHAPED, distinct, is_pattern, no_knob
from limitformer.models import Transformer
from limitformer.subjects.subject import arguments_of
from limitformer.weightless.law import LawTable
from limitformer.weightless.network import Weightless

FIELDS = ("initializer_range", "initializer_factor", "init_std")  # names in families
STEPS = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)  # of a grid, times the present setting
APART = 2.0  # ratio of the sizes of queries and keys, from which the logits are due to one of them
GAMMAS = (0.1, 0.1778, 0.3162, 0.5623, 1.0)


class NoKnobError(InputError):
    """A family does not have this knob."""


@dataclass(frozen=True)
class Knob:
    """One thing that can be set.

    Attributes:
        name: the user's name for it.
        present: its present value.
        field: of the configuration or Transformer, or the function's argument; None: a factor on standard deviations.
        weights: names of the weights that it multiplies.
        power: the power of the factor in their standard deviation.
        most: its largest value; families refuse an initializer_range above 1.
    """

    name: str
    present: float
    field: str | None = None
    weights: tuple[str, ...] = ()
    power: float = 1.0
    most: float = inf


def knobs_of(names: Iterable[str], network: Weightless, uses: MatrixUses) -> list[Knob]:
    """Return the knobs of a network that a configuration or a function makes.

    Raises:
        InputError: its family does not have a knob of that name, or two knobs set the same weight.
    """
    every = []
    for name in distinct(names):
        if name != FIELD and name not in SCALES and not is_pattern(name) and name not in network.laws:
            raise no_knob(name, (FIELD, *SCALES))
        every.append(field_knob(network) if name == FIELD else factor_knob(name, network, uses))
    owners: dict[str, str] = {}
    for knob in every:
        for weight in knob.weights:
            other = owners.setdefault(weight, knob.name)
            require(other == knob.name, f"{other} and {knob.name} both set {weight}.")
    return every


def field_knob(network: Weightless) -> Knob:
    """Return the field of the configuration, or the argument of the function, by which weights are drawn."""
    config, factory = network.subject.config, network.subject.factory
    values = arguments_of(factory) if config is None else {field: getattr(config, field, None) for field in FIELDS}
    known = {field: float(values[field] or 0) for field in FIELDS if isinstance(values.get(field), float | int)}
    if not known:
        has = "its fields are its own" if config is not None else "it has no argument of that name with a default"
        raise NoKnobError(f"{network.subject.name} has no knob initializer_range; {has}.")
    field, present = next(iter(known.items()))
    require(present > 0, f"{field} is {present:g}, so that nothing is drawn. Nearest: settings={{{field!r}: 0.02}}.")
    return Knob("initializer_range", present, field, most=inf if field == "initializer_factor" else 1.0)


def factor_knob(name: str, network: Weightless, uses: MatrixUses) -> Knob:
    """Return a factor on standard deviations of weights, which are recognised by their names, place or use."""
    chosen, power = logits_of(network, uses) if name == "logits" else (uses.outputs, 1.0)
    if name in ("output", "logits"):
        weights = random_names(network, lambda each, parameter: each in chosen and parameter.dim() >= 2)
    else:
        weights = (embeddings if name == "embedding" else named(name))(network)
    if not weights:
        raise NoKnobError(
            f"{network.subject.name} has no knob {name}: {WHY.get(name, 'no random weight has such a name')}. "
            f"Nearest: a pattern of names, such as {next(iter(network.weights)).name!r}."
        )
    return Knob(name, 1.0, weights=tuple(weights), power=power)


WHY = {
    "embedding": "no table of tokens stands outside its blocks",
    "output": "no random matrix writes to the stream of its blocks",
    "logits": "its queries are not a separate matrix",
}


def embeddings(network: Weightless) -> list[str]:
    """Return tables that are looked up, outside the blocks."""
    inside = {id(parameter) for block in network.blocks for parameter in block.parameters()}
    tables = [part.weight for part in network.module.modules() if isinstance(part, nn.Embedding)]
    outside = {id(table) for table in tables} - inside
    return random_names(network, lambda name, parameter: id(parameter) in outside)


def logits_of(network: Weightless, uses: MatrixUses) -> tuple[Set[str], float]:
    """Return the matrices that logits are made of, and the power of a factor in each, without those of values."""
    if uses.queries & uses.values:
        return set(), 1.0
    if uses.keys & uses.values:
        return uses.queries, 1.0
    query, key, value = (log_size(network, names) for names in (uses.queries, uses.keys, uses.values))
    if abs(query - key) > log(APART) and value == value:  # NaN without values
        return (uses.queries if abs(query - value) > abs(key - value) else uses.keys), 1.0
    return uses.queries | uses.keys, 0.5


def log_size(network: Weightless, names: Set[str]) -> float:
    """Return the mean logarithm of the size of random matrices; NaN without any."""
    columns = {name: each.shape[-1] for name, each in network.module.named_parameters() if name in names}
    known = random_names(network, lambda name, _: name in columns and network.laws[name].std > 0)
    return sum(log(network.laws[name].std * sqrt(columns[name])) for name in known) / len(known) if known else nan


def named(pattern: str) -> Any:
    """Return a function that selects weights by a pattern of names."""
    return lambda network: random_names(network, lambda name, _: fnmatchcase(name, pattern))


def random_names(network: Weightless, fits: Any) -> list[str]:
    known = {weight.name for weight in network.weights}
    return [name for name, parameter in network.module.named_parameters() if name in known and fits(name, parameter)]


def shaped_knobs(names: Iterable[str], model: Transformer) -> list[Knob]:
    """Return γ and τ₀ of a Transformer.

    Raises:
        InputError: the name is another, or a τ₀ is asked of a model without attention.
    """
    knobs = []
    for name in distinct(names):
        require(name in SHAPED, f"a Transformer has the knobs gamma and tau0; got {name!r}.")
        attention = model.attention
        if name == "gamma":
            require(model.uniform, "gamma differs by layer or sublayer here; the knob gamma needs it to be a number.")
        if name == "tau0":
            require(hasattr(attention, "tau0"), "there is no attention to have a tau0.")
        present = model.branch if attention is None or name == "gamma" else attention.tau0
        knobs.append(Knob(name, float(present), name, most=1.0 if name == "gamma" else inf))
    return knobs


def axes_of(knobs: list[Knob], grid: Mapping[str, Any] | None) -> dict[str, list[float]]:
    """Return ascending values of each knob: the user's, or some around its present value.

    Raises:
        InputError: values of a knob that does not vary, or that are not positive numbers.
    """
    valid = grid is None or (isinstance(grid, Mapping) and all(isinstance(each, Iterable) for each in grid.values()))
    require(valid, f'grid must map names of knobs to lists, such as {{"output": [0.5, 1]}}; got {grid!r}.')
    strange = [name for name in grid or {} if name not in [knob.name for knob in knobs]]
    require(not strange, f"grid has {strange[:1]}, which is not a knob of this design.")
    return {knob.name: axis_of(knob, (grid or {}).get(knob.name)) for knob in knobs}


def axis_of(knob: Knob, grid: Any) -> list[float]:
    if grid is None:
        if knob.field == "gamma":
            return list(GAMMAS)
        return [value for step in STEPS if (value := float(f"{knob.present * step:.4g}")) <= knob.most]
    values = sorted({require_real(f"grid[{knob.name!r}]", value) for value in grid})
    fits = bool(values) and values[0] > 0 and values[-1] <= knob.most
    upper = "" if knob.most == inf else f", at most {knob.most:g}"
    require(fits, f"grid[{knob.name!r}] must be positive numbers{upper}; got {values}.")
    return values


def factors_at(knobs: list[Knob], setting: Mapping[str, float]) -> dict[str, float]:
    """Return the factor on the standard deviation of each weight."""
    return {name: setting[knob.name] ** knob.power for knob in knobs for name in knob.weights}


def patterns_of(factors: Mapping[str, float], table: LawTable) -> dict[str, tuple[float, float, float]]:
    """Return, by pattern of names, the factor, and the std before and after it.

    `layers.3.up.weight` counts as `layers.*.up.weight`, with * for every number or else for the first, if no weight
    with another factor or another law matches that pattern; otherwise weights have their full names.
    """
    rows = {name: (factor, table[name].std, table[name].std * factor) for name, factor in factors.items()}
    result: dict[str, tuple[float, float, float]] = {}
    for name, row in rows.items():
        shorts = [re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name, count=count) for count in (0, 1)]
        alike = (s for s in shorts if all(rows.get(other) == row for other in table.laws if fnmatchcase(other, s)))
        result[next(alike, name)] = row
    return result


def scale_laws(network: Weightless, factors: Mapping[str, float]) -> None:
    """Set the laws of the network's weights to these factors times what its code draws.

    Raises:
        InputError: its laws are not understood.
    """
    name, unknown = network.subject.name, network.drawn | network.rebuilt
    require(not unknown, f"the laws of {name} are not all understood: {next(iter(unknown.items()), None)}.")
    for weight in network.weights:
        weight.law = network.laws[weight.name].times(factors.get(weight.name, 1.0))
