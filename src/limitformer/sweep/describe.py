r"""`Sweep`: the declaration of a grid of simulations and of the results to keep of each cell.

A cell's seed is made from the sweep's seed and the cell's own model and start. Hence a cell gives the same bits on any
grid, on any machine, at any time.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from math import prod
from typing import Any

import numpy as np
import xarray as xr

from limitformer.base.errors import InputError, about, require, require_count, set_fields
from limitformer.covariance.limit import CovarianceFlow, CovarianceLimit
from limitformer.models import SphereModel, Transformer, equicorrelated, to_json
from limitformer.models.kinds import with_display
from limitformer.numerics.random import checked_seed
from limitformer.sampling.process import Process
from limitformer.simulation.processes import limit, process_of
from limitformer.simulation.simulate import simulate
from limitformer.sphere.limit import TokenLimit
from limitformer.sweep.grid import SEED, START, Cell, cells, check_axes, name_of
from limitformer.sweep.reduce import Reduced, Work, checked_keep, reduced

OWN_SETTINGS = ("samples", "seed", "start", "record", "as", "common_seed")
START_FIELDS = ("tokens", "correlation", "variance")
MOST_CHECKED = 5_000  # models that are checked when a sweep is declared


def settings_of(simulate: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked `simulate` argument of a sweep, with defaults filled in, without what depends on the cell.

    `start` is None for the model's own, a number, a matrix, or {tokens, correlation, variance}; `record` is "last",
    "all", or a list of layers or times. With `common_seed` all cells use the sweep's seed, so that differences between
    cells are less noisy.
    """
    require("samples" in simulate, "A sweep needs samples: how many in each cell.")
    process = simulate.get("as", "chain")
    require(process in ("chain", "limit"), f'"as" must be "chain" or "limit"; got {process!r}.')
    record = simulate.get("record", "last")
    good = record in ("last", "all") if isinstance(record, str) else isinstance(record, Sequence | np.ndarray)
    require(good, f'record must be "last", "all" or a list; got {record!r}.')
    seed, common_seed = checked_seed(simulate.get("seed", 0)), simulate.get("common_seed", False)
    require(isinstance(common_seed, bool | np.bool_), f"common_seed must be true or false; got {common_seed!r}.")
    reserved = sorted({"threads", "chunk", "progress", "keep"} & set(simulate))
    require(not reserved, f"A sweep sets {', '.join(reserved)} itself; leave it out.")
    return {
        "samples": require_count("samples", simulate["samples"]),
        "seed": seed,
        "start": json_value(simulate.get("start")),
        "record": record if isinstance(record, str) else json_value(record),
        "as": process,
        "common_seed": bool(common_seed),
        **{name: json_value(value) for name, value in simulate.items() if name not in OWN_SETTINGS},
    }


def json_value(value: Any) -> Any:
    """Return `value` with arrays, NumPy numbers, tuples and ranges as the lists and numbers of JSON."""
    if type(value) in (int, float, str):  # most of a long list
        return value
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): json_value(inner) for name, inner in value.items()}
    return [json_value(inner) for inner in value] if isinstance(value, list | tuple | range) else value


@with_display
@dataclass(frozen=True)
class Sweep:
    """A grid of simulations.

    Args:
        base: the model whose fields are varied.
        over: the values of each field; dotted names for fields of parts (`attention.tau0`), `seed`, and `start.…`.
        simulate: the options of `simulate` (`samples` is required), `as` = "limit" for the SDE, `common_seed`.
        reduce: the results to keep of each cell (`sweep.reduce`): samples, moments, quantiles, outcomes,
            stopping_times, exits, ks.

    Raises:
        InputError: some cell cannot run; the message names the cell, and no cell has run before. If the grid has more
            than 5,000 models, only some are checked here; others that cannot run fail in the run.

    >>> import limitformer as lf
    >>> base = lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=10)
    >>> sweep = lf.Sweep(base, over={"beta": [0.0, 1.0]}, simulate={"samples": 8, "horizon": 1.0})
    >>> sweep.shape
    (2,)
    """

    base: Any
    over: Mapping[str, Sequence[Any]]
    simulate: Mapping[str, Any]
    reduce: Mapping[str, Any] = field(default_factory=lambda: {"moments": {}})
    settings: dict[str, Any] = field(init=False, repr=False)  # `simulate`, checked
    unchecked: InitVar[bool] = False  # for a part of a sweep that was checked

    def __post_init__(self, unchecked: bool) -> None:
        require(
            isinstance(self.base, Transformer | SphereModel), f"A sweep needs a model; got {type(self.base).__name__}."
        )
        for name in ("over", "simulate", "reduce"):
            table = getattr(self, name)
            require(isinstance(table, Mapping), f"{name} of a sweep must be a mapping; got {table!r}.")
            strange = [repr(key) for key in table if not isinstance(key, str)]
            message = f"{name} of a sweep must have texts as keys; got {', '.join(strange[:1])}."
            require(not strange, f"{message} Nearest: the name of a field or option.")
        over = {name: json_value(list(values)) if is_list(values) else values for name, values in self.over.items()}
        set_fields(self, over=over, reduce=checked_keep(self.reduce), settings=settings_of(self.simulate))
        if not unchecked:
            check_cells(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of values on each axis."""
        return tuple(len(values) for values in self.over.values())

    def cells(self) -> Iterator[Cell]:
        """Yield all cells, the last axis fastest."""
        return cells(self.base, self.over)

    def cell(self, index: tuple[int, ...]) -> Cell:
        """Return the cell at `index`."""
        chosen = {name: [values[k]] for (name, values), k in zip(self.over.items(), index, strict=True)}
        cell = next(cells(self.base, chosen))
        return Cell(index, cell.model, cell.changes)

    def record(self) -> dict[str, Any]:
        """Return all that determines the numbers, for JSON."""
        return {
            "base": json.loads(to_json(self.base)),
            "over": dict(self.over),
            "simulate": self.settings,
            "keep": {name: options or True for name, options in self.reduce.items()},
        }


def is_list(values: Any) -> bool:
    return isinstance(values, Sequence | np.ndarray) and not isinstance(values, str)


def start_of(sweep: Sweep, cell: Cell) -> Any:
    """Return the start of a cell as `simulate` takes it."""
    own = {name.removeprefix(START): value for name, value in cell.changes.items() if name.startswith(START)}
    start = sweep.settings["start"]
    if not own and not isinstance(start, Mapping):
        return start
    mergeable = start is None or isinstance(start, Mapping)
    require(mergeable, f"The axes start.… vary a start that is a table; here it is {start!r}.")
    merged = {**(start or {}), **own}
    if isinstance(sweep.base, SphereModel):
        require(set(merged) == {"overlap"}, f"A start on the sphere has the field overlap; got {', '.join(merged)}.")
        return merged["overlap"]
    strange = sorted(set(merged) - set(START_FIELDS))
    require(not strange, f"A start has no field {', '.join(strange)}; it has {', '.join(START_FIELDS)}.")
    return equicorrelated(**{"tokens": 2, "correlation": 0.0, **merged})


def seed_of(sweep: Sweep, cell: Cell) -> int:
    """Return the seed of a cell, 63 bits."""
    seed = checked_seed(cell.changes.get(SEED, sweep.settings["seed"]))
    if sweep.settings["common_seed"]:
        return seed
    own = {name: value for name, value in cell.changes.items() if name != SEED}
    start = sweep.settings["start"]
    text = json.dumps([start, own], sort_keys=True) if own or start is not None else ""
    return model_seed(seed, cell.model, text)


def model_seed(seed: int, model: Any, start: str = "") -> int:
    """Return 63 bits that depend on the model and the start, and not on their place on a grid."""
    text = f"{seed} {to_json(model)} {start}".rstrip()
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def simulated_model(sweep: Sweep, cell: Cell) -> Any:
    """Return the model of a cell, or its limit."""
    return limit(cell.model) if sweep.settings["as"] == "limit" else cell.model


def options_of(sweep: Sweep, model: Any) -> dict[str, Any]:
    """Return the options of `simulate` for a model, `record` and `keep` among them."""
    options = {name: value for name, value in sweep.settings.items() if name not in OWN_SETTINGS}
    record = sweep.settings["record"]
    if record == "last":
        options["record"] = [last_point(model, options)]
    elif record != "all":
        options["record"] = record
    counted = set(sweep.reduce) == {"outcomes"}
    if isinstance(model, SphereModel | TokenLimit):
        options["keep"] = "outcome" if counted else "overlap"
    return options


def last_point(model: Any, options: Mapping[str, Any]) -> float:
    """Return the last layer, or the horizon."""
    if isinstance(model, Transformer):
        return model.depth
    if isinstance(model, CovarianceLimit | CovarianceFlow):
        return model.horizon
    require("horizon" in options, "A model on the sphere needs a horizon: how many units of time.")
    return options["horizon"]


def evenly(values: Sequence[Any], most: int | None) -> Sequence[Any]:
    """Return at most `most` of the values, evenly spaced, with the first and the last."""
    if most is None or len(values) <= most:
        return values
    return [values[k * (len(values) - 1) // (most - 1)] for k in range(most)]


def check_cells(sweep: Sweep) -> None:
    """Raise `InputError` if some cell cannot run or has another shape than the others.

    Of a grid of more than `MOST_CHECKED` models only a part is checked, with the ends of each axis. Each seed is
    checked only once, as it is valid in all cells or in none.
    """
    number = prod(len(values) for name, values in sweep.over.items() if name != SEED and is_list(values))
    most = max(2, int(MOST_CHECKED ** (1 / len(sweep.over)))) if number > MOST_CHECKED else None
    over = {name: evenly(values, most) for name, values in sweep.over.items()}
    check_axes(over)
    firsts = {name: values[0] for name, values in over.items()}
    for seed in over.get(SEED, ()):
        with about(f"Cell {name_of({**firsts, SEED: seed})}"):
            checked_seed(seed)
    models = {name: values[:1] if name == SEED else values for name, values in over.items()}
    first: tuple[int, int] | None = None
    for cell in cells(sweep.base, models):
        changes = {name: values[k] for (name, values), k in zip(models.items(), cell.index, strict=True)}
        with about(f"Cell {name_of(changes)}"):
            process = process_at(sweep, cell)
        shape = len(process.points), process.tokens
        first = first or shape
        if shape[0] != first[0] or (shape[1] != first[1] and "samples" in sweep.reduce):
            raise InputError(
                f"Cell {name_of(changes)} has {shape[0]} points of {shape[1]} tokens, and the first cell {first[0]} of "
                f'{first[1]}: they do not fit one array. Nearest: record="last", and reductions instead of samples.'
            )


def process_at(sweep: Sweep, cell: Cell) -> Process:
    """Make the process of a cell without running it."""
    model = simulated_model(sweep, cell)
    options = options_of(sweep, model)
    record = options.pop("record", None)
    return process_of(model, start_of(sweep, cell), record, options)


def where(sweep: Sweep, index: tuple[int, ...]) -> str:
    """Return the name of a cell for messages."""
    return name_of({name: values[k] for (name, values), k in zip(sweep.over.items(), index, strict=True)})


def compute(sweep: Sweep, cell: Cell, *, samples: int | None = None, threads: int | None = 1) -> dict[str, Reduced]:
    """Simulate a cell and reduce it; two samples are enough to learn the shapes."""
    model, start = simulated_model(sweep, cell), start_of(sweep, cell)
    count = sweep.settings["samples"] if samples is None else samples
    settings = {"samples": count, "seed": seed_of(sweep, cell), "threads": threads, **options_of(sweep, model)}
    dataset: xr.Dataset = simulate(model, start, progress=False, **settings)
    own = {name: value for name, value in settings.items() if name != "record"}
    return reduced(Work(model, start, own, dataset), sweep.reduce)
