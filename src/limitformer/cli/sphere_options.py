"""Options shared by the commands for tokens on the sphere: grids of numbers, and the model that they declare."""

from decimal import Decimal
from math import isfinite
from typing import Annotated, Any

import typer

from limitformer.base.errors import require

BEYOND = "Beyond [CT]: attention of real networks"
QueryKey = Annotated[
    str | None,
    typer.Option(help="gaussian draws queries and keys in each layer.", rich_help_panel=BEYOND, show_default="fixed"),
]
Tau = Annotated[
    float | None,
    typer.Option(help="Standard deviation τ of the entries of a drawn QᵀK.", rich_help_panel=BEYOND, show_default="1"),
]
HeadDim = Annotated[
    int | None,
    typer.Option(help="Rows of drawn Q and K.", rich_help_panel=BEYOND, show_default="none: QᵀK itself is normal"),
]
Heads = Annotated[
    int | None,
    typer.Option(
        help="Number of heads; each draws its own queries and keys.", rich_help_panel=BEYOND, show_default="1"
    ),
]
Mask = Annotated[str | None, typer.Option(help="none or causal.", rich_help_panel=BEYOND, show_default="none")]
EXTENSIONS = ("query_key", "tau", "head_dim", "heads", "mask")

MOST_VALUES = 10_000  # in one range
MOST_CELLS = 100_000
LARGEST_COUNT = 2**53  # larger whole numbers may not be doubles


def parse_grid(name: str, text: str) -> list[float]:
    """Parse a list such as "4,6,8" or "0:2:0.25,5": values and ranges (with both ends), separated by commas.

    Ranges are computed in decimals, so 0:1:0.1 contains exactly 0.3 and 1.

    Raises:
        InputError: the text has another form, no values, or too many values.

    >>> parse_grid("beta", "0:1:0.5,3")
    [0.0, 0.5, 1.0, 3.0]
    """
    values = [value for part in text.split(",") for value in parse_part(name, part.strip(), text)]
    distinct = list(dict.fromkeys(values))
    require(len(distinct) == len(values), f"--{name} has a value twice; got {text!r}.")
    return values


def parse_part(name: str, part: str, text: str) -> list[float]:
    """Parse one value or one range of the option's `text`."""
    try:
        numbers = [float(number) for number in part.split(":")]
    except ValueError:
        numbers = []
    known = len(numbers) in (1, 3) and all(map(isfinite, numbers))
    came = repr(text) if part == text.strip() else f"{part!r} in {text!r}"
    require(known, f"--{name} must be finite numbers or ranges start:stop:step, separated by commas; got {came}.")
    if len(numbers) == 1:
        return numbers
    start, stop, step = (Decimal(repr(number)) for number in numbers)
    require(step > 0, f"--{name} needs a positive step in start:stop:step; got {came}.")
    require(start <= stop, f"--{name} has no value: the range ends before it begins; got {came}.")
    steps = (stop - start) / step
    require(steps < MOST_VALUES, f"--{name} takes at most {MOST_VALUES:,} values in a range; got {came}.")
    return [float(start + k * step) for k in range(int(steps) + 1)]


def parse_counts(name: str, text: str) -> list[int]:
    """Parse a grid of whole numbers as `parse_grid` does."""
    values = parse_grid(name, text)
    whole = all(value == int(value) and abs(value) <= LARGEST_COUNT for value in values)
    require(whole, f"--{name} must be whole numbers, at most 2**53; got {text!r}.")
    return [int(value) for value in values]


def sphere_model(chosen: dict[str, Any], **first: Any) -> Any:
    """Build the model from the options: hybrid with --epsilon, stochastic without."""
    from limitformer.models import HybridTransformer, StochasticTransformer

    common: dict[str, Any] = {name: chosen[name] for name in ("layers_per_unit_time", "attention") if name in chosen}
    if chosen["values"] is not None:
        common["values"] = chosen["values"]
    more = {name: chosen[name] for name in EXTENSIONS if chosen.get(name) is not None}
    if more.get("query_key") == "fixed":
        del more["query_key"]
    if "epsilon" in first:
        unused = ", ".join(f"--{name.replace('_', '-')}" for name in more)
        require(
            not more,
            f"{unused} would change nothing: only the stochastic model has such options. Nearest: no --epsilon.",
        )
        require(chosen["sigma"] is None, "--sigma would change nothing: a hybrid model has --epsilon instead.")
        return HybridTransformer(**common, **first)
    sigma = 1.0 if chosen["sigma"] is None else chosen["sigma"]
    return StochasticTransformer(**common, **first, **more, sigma=sigma)
