r"""What can be set before training, and where a family has it.

  initializer_range   the field of the configuration by which its code draws weights (T5's is initializer_factor)
  embedding           × the std of the tables of tokens and positions, outside the blocks
  output              × the std of what writes to the stream: the last matrix of each branch
  logits              × the std of attention logits at first: queries and keys each by its root; no knob where these are
                      one matrix with the values
  a pattern           × the std of the weights of these names, such as "*.mlp.up_proj.weight"
  gamma, tau0         fields of a `limitformer.Transformer`

What is normalised at once is no knob, as its size has no effect (`trials.check_effect`): queries and keys of Qwen 3,
outputs of Gemma 2, embeddings of BERT. Factors are on what the code draws at that initializer_range, whose kind of law
(normal, truncated, …) they keep.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf
from typing import Any

from torch import nn

from limitformer.base.errors import InputError, require, require_real
from limitformer.designing.names import FIELD, SCALES, SHAPED, distinct, is_pattern, no_knob
from limitformer.models import Transformer
from limitformer.weightless.law import LawTable
from limitformer.weightless.network import Weightless

FIELDS = ("initializer_range", "initializer_factor", "init_std")  # as families call it
OUTPUT = re.compile(
    r"(^|\.)(o_proj|out_proj|c_proj|down_proj|dense_4h_to_h|fc2|fc_out|w2|Wo|wo|o|out_lin|lin2|linear2|"
    r"output\.dense|(attention|self_attn|self_attention)\.dense)(\.weight)?$"
)
QUERY = re.compile(r"\.(q_proj|q|query|q_lin)\.weight$")
KEY = re.compile(r"\.(k_proj|k|key|k_lin)\.weight$")

STEPS = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)  # of a grid, on the present setting
GAMMAS = (0.1, 0.1778, 0.3162, 0.5623, 1.0)


class NoKnobError(InputError):
    """A family has no knob of a name."""


@dataclass(frozen=True)
class Knob:
    """One thing that can be set.

    Attributes:
        name: as the user has it.
        present: where it stands.
        field: of the configuration or the Transformer; None for a factor on standard deviations.
        weights: names of the weights that it multiplies.
        power: of the factor, in their standard deviation.
        most: what it can be set to; families refuse an initializer_range above 1.
    """

    name: str
    present: float
    field: str | None = None
    weights: tuple[str, ...] = ()
    power: float = 1.0
    most: float = inf


def knobs_of(names: Iterable[str], found: Weightless) -> list[Knob]:
    """The knobs of a network of a configuration.

    Raises:
        InputError: there is none of a name in its family, or two of them set the same weight.
    """
    every = [knob_of(name, found) for name in distinct(names)]
    held: dict[str, str] = {}
    for knob in every:
        for weight in knob.weights:
            other = held.setdefault(weight, knob.name)
            require(other == knob.name, f"{other} and {knob.name} both set {weight}.")
    return every


def knob_of(name: str, found: Weightless) -> Knob:
    """One knob of a network of a configuration."""
    if name == FIELD:
        return field_knob(found)
    if name in SCALES or is_pattern(name):
        return factor_knob(name, found)
    raise no_knob(name, (FIELD, *SCALES))


def field_knob(found: Weightless) -> Knob:
    """The field by which the family draws."""
    config = found.blueprint.config
    field = next((field for field in FIELDS if isinstance(getattr(config, field, None), float | int)), None)
    if field is None:
        raise InputError(f"{found.blueprint.name} has no knob initializer_range; its fields are its own.")
    present = float(getattr(config, field))
    require(present > 0, f"{field} is {present:g}, so that nothing is drawn. Nearest: settings={{{field!r}: 0.02}}.")
    return Knob("initializer_range", present, field, most=inf if field == "initializer_factor" else 1.0)


def factor_knob(name: str, found: Weightless) -> Knob:
    """A factor on standard deviations; what it multiplies is found by name, place and shape."""
    weights = {"embedding": embeddings, "output": outputs, "logits": queries_and_keys}.get(name, named(name))(found)
    if not weights:
        raise NoKnobError(
            f"{found.blueprint.name} has no knob {name}: {WHY.get(name, 'no random weight has such a name')}. "
            f"Nearest: a pattern of names, such as {next(iter(found.weights)).name!r}."
        )
    return Knob(name, 1.0, weights=tuple(weights), power=0.5 if name == "logits" else 1.0)


WHY = {
    "embedding": "no table of tokens stands outside its blocks",
    "output": "no matrix in its blocks is known to write to the stream",
    "logits": "its queries and keys are no matrices of their own",
}


def embeddings(found: Weightless) -> list[str]:
    """Tables that are looked up, outside the blocks."""
    inside = {id(parameter) for block in found.blocks for parameter in block.parameters()}
    tables = [part.weight for part in found.module.modules() if isinstance(part, nn.Embedding)]
    kept = {id(table) for table in tables} - inside
    return random_names(found, lambda name, parameter: id(parameter) in kept)


def outputs(found: Weightless) -> list[str]:
    """The last matrix of each branch: of a known name, in a block, and as wide as the stream on one side."""
    inside = {id(parameter) for block in found.blocks for parameter in block.parameters()}
    width = stream_width(found)
    return random_names(
        found, lambda name, p: id(p) in inside and p.dim() >= 2 and width in p.shape[-2:] and bool(OUTPUT.search(name))
    )


def stream_width(found: Weightless) -> int:
    """Columns of what is embedded, where there is such a table; else of the configuration."""
    config = found.blueprint.config
    return int(getattr(config, "hidden_size", 0) or getattr(config, "d_model", 0) or getattr(config, "n_embd", 0))


def queries_and_keys(found: Weightless) -> list[str]:
    """Both, each by itself."""
    queries = random_names(found, lambda name, _: bool(QUERY.search(name)))
    keys = random_names(found, lambda name, _: bool(KEY.search(name)))
    return [*queries, *keys] if len(queries) == len(keys) else []


def named(pattern: str) -> Any:
    """By a pattern of names."""
    return lambda found: random_names(found, lambda name, _: fnmatchcase(name, pattern))


def random_names(found: Weightless, fits: Any) -> list[str]:
    """Names of random weights that fit."""
    known = {weight.name for weight in found.weights}
    return [name for name, parameter in found.module.named_parameters() if name in known and fits(name, parameter)]


def shaped_knobs(names: Iterable[str], model: Transformer) -> list[Knob]:
    """γ and τ₀ of a Transformer.

    Raises:
        InputError: another name, or no attention to have a τ₀.
    """
    found = []
    for name in distinct(names):
        require(name in SHAPED, f"a Transformer has the knobs gamma and tau0; got {name!r}.")
        attention = model.attention
        if name == "gamma":
            require(model.uniform, "gamma differs by layer or sublayer here; the knob gamma needs it to be a number.")
        if name == "tau0":
            require(hasattr(attention, "tau0"), "there is no attention to have a tau0.")
        present = model.branch if attention is None or name == "gamma" else attention.tau0
        found.append(Knob(name, float(present), name, most=1.0 if name == "gamma" else inf))
    return found


def axes_of(knobs: list[Knob], grid: Mapping[str, Any] | None) -> dict[str, list[float]]:
    """Ascending values of each knob: the user's own, or around its present setting.

    Raises:
        InputError: values of a knob that is not turned, or that are not positive numbers, at least two.
    """
    strange = [name for name in grid or {} if name not in [knob.name for knob in knobs]]
    require(not strange, f"grid has {strange[:1]}, which is no knob of this design.")
    return {knob.name: axis_of(knob, (grid or {}).get(knob.name)) for knob in knobs}


def axis_of(knob: Knob, given: Any) -> list[float]:
    """Of one knob."""
    if given is None:
        if knob.field == "gamma":
            return list(GAMMAS)
        return [value for step in STEPS if (value := float(f"{knob.present * step:.4g}")) <= knob.most]
    values = sorted({require_real(f"grid[{knob.name!r}]", value) for value in given})
    fits = len(values) >= 2 and values[0] > 0 and values[-1] <= knob.most
    upper = "" if knob.most == inf else f", at most {knob.most:g}"
    require(fits, f"grid[{knob.name!r}] must be two or more positive numbers{upper}; got {values}.")
    return values


def factors_at(knobs: list[Knob], setting: Mapping[str, float]) -> dict[str, float]:
    """By weight: the factor on its standard deviation."""
    return {name: setting[knob.name] ** knob.power for knob in knobs for name in knob.weights}


def patterns_of(factors: Mapping[str, float], table: LawTable) -> dict[str, tuple[float, float, float]]:
    """By pattern of names: the factor, and the std that is drawn before and after it.

    `layers.3.up.weight` counts as `layers.*.up.weight` where that pattern matches none that another factor or another
    law holds for; else weights stand by their full names.
    """
    rows = {name: (factor, table[name].std, table[name].std * factor) for name, factor in factors.items()}
    found: dict[str, tuple[float, float, float]] = {}
    for name, row in rows.items():
        short = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        alike = all(rows.get(other) == row for other in table.laws if fnmatchcase(other, short))
        found[short if alike else name] = row
    return found


def scale_laws(found: Weightless, factors: Mapping[str, float]) -> None:
    """Let the network's weights have these factors on what its code draws.

    Raises:
        InputError: its laws are not understood.
    """
    name = found.blueprint.name
    require(not found.drawn, f"the laws of {name} are not all understood: {next(iter(found.drawn.items()), None)}.")
    for weight in found.weights:
        weight.law = found.laws[weight.name].times(factors.get(weight.name, 1.0))
