r"""Phase diagrams: the outcomes of a model over a grid of its fields, simulated and, where it is known, exact.

Each cell has a seed of its own, made from the seed and the cell's model: cells are independent, and a cell's numbers do
not depend on the grid around it.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from math import nan
from typing import Any

import numpy as np
import xarray as xr

from limitformer.engine import process_of, simulate
from limitformer.errors import InputError, require, require_count, require_real
from limitformer.limits.overlap import overlap
from limitformer.models import HybridTransformer, StochasticTransformer, to_json
from limitformer.outcomes import OUTCOMES, outcomes
from limitformer.progress import tracked
from limitformer.results import stamp
from limitformer.sphere.process import SphereOptions

SphereKind = StochasticTransformer | HybridTransformer


def phase_diagram(
    base: SphereKind,
    over: Mapping[str, Sequence[Any]],
    *,
    horizon: float,
    samples: int,
    seed: int,
    tolerance: float = 1e-3,
    early_stop: float | None = 1e-9,
    level: float = 0.95,
    threads: int | None = None,
    progress: bool = True,
) -> xr.Dataset:
    """The outcomes of `base` at time `horizon`, with the fields in `over` set to each of their values.

    Args:
        base: the model whose fields are varied.
        over: values, numbers or words, of each field, such as `{"dim": [4, 6], "beta": [0.5, 1.0]}`.
        horizon, samples, seed, tolerance, early_stop, threads: as in `simulate`; samples is that of a cell.
        level: coverage of the intervals.
        progress: whether work of more than two seconds shows on the terminal.

    Returns:
        `probability`, `low`, `high` (…, outcome), the simulated probabilities with Wilson intervals; `exact` (…), the
        probability of the antipodal state in the limit, NaN where none is known (other than two tokens, QᵀK ≠ I, or
        an `overlap` that is out of range).

    Raises:
        InputError: a field that the model has not, an axis without values, or a value that the model or `simulate`
            refuses, before any work is done; the message names the cell.

    >>> import limitformer as lf
    >>> base = lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=50)
    >>> grid = lf.phase_diagram(base, {"beta": [0.0, 2.0]}, horizon=50.0, samples=400, seed=0)
    >>> [round(float(p), 4) for p in grid.exact]
    [0.0, 0.2811]
    """
    options: dict[str, Any] = {"horizon": horizon, "keep": "outcome", "tolerance": tolerance, "early_stop": early_stop}
    check_run(options, samples=samples, level=level, threads=threads)
    cells = list(cells_of(base, over, lambda model: process_of(model, None, [horizon], options)))
    shape = tuple(len(values) for values in over.values())
    found = [
        outcomes(
            simulate(
                model,
                samples=samples,
                seed=cell_seed(seed, model),
                record=[horizon],
                threads=threads,
                progress=False,
                **options,
            ),
            level=level,
        ).isel(time=0)
        for model in (tracked(cells, "cells") if progress else cells)
    ]
    variables = {
        name: ((*over, "outcome"), np.stack([cell[name].values for cell in found]).reshape(*shape, len(OUTCOMES)))
        for name in ("probability", "low", "high")
    }
    exact = np.array([exact_probability(model) for model in cells]).reshape(shape)
    settings = {"horizon": horizon, "samples": samples, "seed": seed, "tolerance": tolerance, "level": level}
    if early_stop is not None:
        settings["early_stop"] = early_stop
    return xr.Dataset(
        {**variables, "exact": (tuple(over), exact)},
        {**{name: list(values) for name, values in over.items()}, "outcome": list(OUTCOMES)},
        {"base": to_json(base), **settings, **stamp()},
    )


def check_run(options: Mapping[str, Any], *, samples: int, level: float, threads: int | None) -> None:
    """`InputError` about what has nothing to do with the cells."""
    SphereOptions(**options)
    require_count("samples", samples)
    require(0 < require_real("level", level) < 1, f"level must lie in (0, 1); got {level}.")
    if threads is not None:
        require_count("threads", threads)


def cells_of(
    base: SphereKind, over: Mapping[str, Sequence[Any]], check: Callable[[SphereKind], object] = lambda _: None
) -> Iterator[SphereKind]:
    """The model of every cell, the last field fastest; `InputError` names the cell that it, or `check`, refuses."""
    require(isinstance(base, SphereKind), f"A phase diagram needs a model on the sphere; got {type(base).__name__}.")
    require(len(over) > 0, "A phase diagram needs at least one field to vary; got none.")
    known = [field.name for field in fields(base)]
    for name, values in over.items():
        require(name in known, f"{type(base).__name__} has no field {name!r}; it has {', '.join(known)}.")
        check_axis(name, values)
    for values in product(*over.values()):
        changes = dict(zip(over, values, strict=True))
        try:
            model = replace(base, **changes)
            check(model)
        except InputError as error:
            cell = ", ".join(f"{name} = {value}" for name, value in changes.items())
            raise InputError(f"Cell {cell}: {error}") from error
        yield model


def check_axis(name: str, values: Any) -> None:
    """`InputError` unless the values are some different numbers or words."""
    several = isinstance(values, Sequence | np.ndarray) and not isinstance(values, str)
    require(several, f"The axis {name!r} must be a list of values; got {values!r}.")
    require(len(values) > 0, f"The axis {name!r} has no value; a grid needs at least one on each axis.")
    strange = {type(value).__name__ for value in values if not isinstance(value, str | int | float | np.number)}
    require(not strange, f"The axis {name!r} must be numbers or words; got {', '.join(sorted(strange))}.")
    distinct = len(set(values)) == len(values)
    require(distinct, f"The values of {name!r} must differ; got {', '.join(map(str, values))}.")


def cell_seed(seed: int, model: SphereKind) -> int:
    """A seed for one cell, 63 bits."""
    whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    require(whole and 0 <= seed < 2**63, f"seed must be a whole number from 0 to 2**63 - 1; got {seed!r}.")
    digest = hashlib.sha256(f"{seed} {to_json(model)}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def exact_probability(model: SphereKind) -> float:
    """Of the antipodal state, from a uniform start; NaN where it is not known."""
    if model.tokens != 2 or not model.is_isotropic:
        return nan
    try:
        return float(overlap(model).antipodal_probability())
    except InputError:  # a beta beyond the doubles of its quadrature: no reason not to simulate
        return nan
