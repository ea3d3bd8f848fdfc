"""Options of the commands for tokens on the sphere: grids of numbers, and a model from them."""

from decimal import Decimal
from math import isfinite
from typing import Annotated, Any

import typer

from limitformer.base.errors import InputError, require

BEYOND = "Beyond [CT]: attention as people build it"
QueryKey = Annotated[
    str | None,
    typer.Option(help="gaussian: queries and keys drawn in each layer.", rich_help_panel=BEYOND, show_default="fixed"),
]
Tau = Annotated[
    float | None,
    typer.Option(help="Deviation τ of the entries of a drawn QᵀK.", rich_help_panel=BEYOND, show_default="1"),
]
HeadDim = Annotated[
    int | None,
    typer.Option(help="Rows of drawn Q and K.", rich_help_panel=BEYOND, show_default="none: QᵀK itself is normal"),
]
Heads = Annotated[int | None, typer.Option(help="Heads, each drawn.", rich_help_panel=BEYOND, show_default="1")]
Mask = Annotated[str | None, typer.Option(help="none or causal.", rich_help_panel=BEYOND, show_default="none")]
LATER = ("query_key", "tau", "head_dim", "heads", "mask")

MOST_VALUES = 10_000  # of one range
MOST_CELLS = 100_000
LARGEST_COUNT = 2**53  # beyond it not every whole number is a double


def parse_grid(name: str, text: str) -> list[float]:
    """The numbers in a list such as "4,6,8" or "0:2:0.25,5": values and ranges (with their ends) between commas.

    The values of a range are added up as decimals: 0:1:0.1 holds 0.3 and 1, not their neighbours.

    Raises:
        InputError: not of that form, without a value, or more values than anybody means.

    >>> parse_grid("beta", "0:1:0.5,3")
    [0.0, 0.5, 1.0, 3.0]
    """
    values = [value for part in text.split(",") for value in parse_part(name, part.strip(), text)]
    distinct = list(dict.fromkeys(values))
    require(len(distinct) == len(values), f"--{name} has a value twice; got {text!r}.")
    return values


def parse_part(name: str, part: str, text: str) -> list[float]:
    """One value, or the values of one range, of the option's `text`."""
    try:
        numbers = [float(number) for number in part.split(":")]
    except ValueError:
        numbers = []
    known = len(numbers) in (1, 3) and all(map(isfinite, numbers))
    given = repr(text) if part == text.strip() else f"{part!r} in {text!r}"
    require(known, f"--{name} must be finite numbers or ranges start:stop:step with commas between; got {given}.")
    if len(numbers) == 1:
        return numbers
    start, stop, step = (Decimal(repr(number)) for number in numbers)
    require(step > 0, f"--{name} needs a positive step in start:stop:step; got {given}.")
    require(start <= stop, f"--{name} has no value: a range must not end before it begins; got {given}.")
    steps = (stop - start) / step
    require(steps < MOST_VALUES, f"--{name} takes at most {MOST_VALUES:,} values in a range; got {given}.")
    return [float(start + k * step) for k in range(int(steps) + 1)]


def parse_counts(name: str, text: str) -> list[int]:
    """As `parse_grid`, whole numbers."""
    values = parse_grid(name, text)
    whole = all(value == int(value) and abs(value) <= LARGEST_COUNT for value in values)
    require(whole, f"--{name} must be whole numbers, at most 2**53; got {text!r}.")
    return [int(value) for value in values]


def sphere_model(chosen: dict[str, Any], **first: Any) -> Any:
    """The model that the options declare: hybrid with --epsilon, stochastic without."""
    from limitformer.models import HybridTransformer, StochasticTransformer

    common: dict[str, Any] = {name: chosen[name] for name in ("layers_per_unit_time", "attention") if name in chosen}
    if chosen["values"] is not None:
        common["values"] = chosen["values"]
    more = {name: chosen[name] for name in LATER if chosen.get(name) is not None}
    if more.get("query_key") == "fixed":
        del more["query_key"]
    if "epsilon" in first:
        strange = ", ".join(f"--{name.replace('_', '-')}" for name in more)
        require(not more, f"{strange} would change nothing: the hybrid model is that of [CT]. Nearest: no --epsilon.")
        require(chosen["sigma"] is None, "--sigma would change nothing: a hybrid model has --epsilon instead.")
        return HybridTransformer(**common, **first)
    sigma = 1.0 if chosen["sigma"] is None else chosen["sigma"]
    return StochasticTransformer(**common, **first, **more, sigma=sigma)


def parse_clusters(text: str | None) -> tuple[int, int] | None:
    """Two whole numbers with a comma between."""
    if text is None:
        return None
    try:
        first, second = (int(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"--clusters must be two whole numbers with a comma between; got {text!r}.") from error
    return first, second
