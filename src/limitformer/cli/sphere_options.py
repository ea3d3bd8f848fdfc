"""Options of the commands for tokens on the sphere: grids of numbers, and a model from them."""

from math import floor, isfinite
from typing import Any

from limitformer.errors import InputError, require

MOST_VALUES = 10_000  # of one axis


def parse_grid(name: str, text: str) -> list[float]:
    """The numbers in a list such as "4,6,8" or "0:2:0.25,5": values and ranges (with their ends) between commas.

    Raises:
        InputError: not of that form, without a value, or more values than anybody means.

    >>> parse_grid("beta", "0:1:0.5,3")
    [0.0, 0.5, 1.0, 3.0]
    """
    values = [value for part in text.split(",") for value in parse_part(name, part.strip())]
    distinct = list(dict.fromkeys(values))
    require(len(distinct) == len(values), f"--{name} has a value twice; got {text!r}.")
    return values


def parse_part(name: str, part: str) -> list[float]:
    """One value, or the values of one range."""
    try:
        numbers = [float(number) for number in part.split(":")]
    except ValueError:
        numbers = []
    known = len(numbers) in (1, 3) and all(map(isfinite, numbers))
    require(known, f"--{name} must be numbers or ranges start:stop:step with commas between; got {part!r}.")
    if len(numbers) == 1:
        return numbers
    start, stop, step = numbers
    require(step > 0, f"--{name} needs a positive step in start:stop:step; got {part!r}.")
    count = floor((stop - start) / step + 1e-9) + 1
    require(count >= 1, f"--{name} has no value: {part!r} ends before it begins.")
    require(count <= MOST_VALUES, f"--{name} has {count:,} values; at most {MOST_VALUES:,} are taken.")
    return [round(start + k * step, 12) for k in range(count)]


def parse_counts(name: str, text: str) -> list[int]:
    """As `parse_grid`, whole numbers."""
    values = parse_grid(name, text)
    whole = all(value == int(value) for value in values)
    require(whole, f"--{name} must be whole numbers; got {text!r}.")
    return [int(value) for value in values]


def sphere_model(chosen: dict[str, Any], **first: Any) -> Any:
    """The model that the options declare: hybrid with --epsilon, stochastic without."""
    from limitformer.models import HybridTransformer, StochasticTransformer

    common = {name: chosen[name] for name in ("layers_per_unit_time", "attention") if name in chosen}
    if chosen["values"] is not None:
        common["values"] = chosen["values"]
    if "epsilon" in first:
        require(chosen["sigma"] is None, "--sigma would change nothing: a hybrid model has --epsilon instead.")
        return HybridTransformer(**common, **first)
    sigma = 1.0 if chosen["sigma"] is None else chosen["sigma"]
    return StochasticTransformer(**common, **first, sigma=sigma)


def parse_clusters(text: str | None) -> tuple[int, int] | None:
    """Two whole numbers with a comma between."""
    if text is None:
        return None
    try:
        first, second = (int(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"--clusters must be two whole numbers with a comma between; got {text!r}.") from error
    return first, second
