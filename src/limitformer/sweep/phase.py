r"""Phase diagrams: the outcomes of a model over a grid of its fields, simulated and, where it is known, exact.

A phase diagram is a `Sweep` that counts outcomes, with the exact probability beside it.
"""

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from limitformer.base.errors import InputError, require, require_count, require_real
from limitformer.models import HybridTransformer, StochasticTransformer, to_json
from limitformer.results.datasets import stamp
from limitformer.sphere.options import SphereOptions
from limitformer.sphere.overlap import overlap
from limitformer.sweep import Sweep, compute_sweep, load_sweep, run_sweep

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
    store: str | Path | None = None,
    progress: bool = True,
) -> xr.Dataset:
    """The outcomes of `base` at time `horizon`, with the fields in `over` set to each of their values.

    Args:
        base: the model whose fields are varied.
        over: values, numbers or words, of each field, such as `{"dim": [4, 6], "beta": [0.5, 1.0]}`.
        horizon, samples, seed, tolerance, early_stop, threads: as in `simulate`; samples is that of a cell.
        level: coverage of the intervals.
        store: folder of a sweep's store, in which an interrupted diagram goes on; None keeps it in memory.
        progress: whether work of more than two seconds shows on the terminal.

    Returns:
        `probability`, `low`, `high` (…, outcome), the simulated probabilities with Wilson intervals; `exact` (…), the
        probability of the antipodal state in the limit, NaN where none is known (other than two tokens, a QᵀK that is
        no multiple of the identity, or an `overlap` that is out of range).

    Raises:
        InputError: a field that the model has not, an axis without values, or a value that the model or `simulate`
            refuses, before any work is done; the message names the cell.

    >>> import limitformer as lf
    >>> base = lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=50)
    >>> grid = lf.phase_diagram(base, {"beta": [0.0, 2.0]}, horizon=50.0, samples=400, seed=0)
    >>> [round(float(p), 4) for p in grid.exact]
    [0.0, 0.2811]
    """
    require(isinstance(base, SphereKind), f"A phase diagram needs a model on the sphere; got {type(base).__name__}.")
    options: dict[str, Any] = {"horizon": horizon, "tolerance": tolerance, "early_stop": early_stop}
    check_run(options, samples=samples, level=level, threads=threads)
    settings = {"samples": samples, "seed": seed, **options}
    sweep = Sweep(base, over=over, simulate=settings, reduce={"outcomes": {"level": level}})
    found = computed(sweep, store, threads, progress).isel(point=0)[["probability", "low", "high"]]
    exact = np.array([exact_probability(cell.model) for cell in sweep.cells()]).reshape(sweep.shape)
    kept = {name: value for name, value in settings.items() if value is not None}
    return found.assign(exact=(tuple(over), exact)).assign_attrs(base=to_json(base), level=level, **kept, **stamp())


def computed(sweep: Sweep, store: str | Path | None, threads: int | None, progress: bool) -> xr.Dataset:
    """The sweep, in its store if there is one; a cell that failed there is an error here."""
    if store is None:
        return compute_sweep(sweep, threads=threads, progress=progress)
    report = run_sweep(sweep, store, workers=1, threads=threads, progress=progress)
    require(report.failed == 0, f"{report.failed} cells failed: {next(iter(report.errors.values()), '')}")
    return load_sweep(store)


def check_run(options: Mapping[str, Any], *, samples: int, level: float, threads: int | None) -> None:
    """`InputError` about what has nothing to do with the cells."""
    SphereOptions(**options)
    require_count("samples", samples)
    require(0 < require_real("level", level) < 1, f"level must lie in (0, 1); got {level}.")
    if threads is not None:
        require_count("threads", threads)


def exact_probability(model: SphereKind) -> float:
    """Of the antipodal state, from a uniform start; NaN where it is not known."""
    if model.tokens != 2:
        return nan
    try:
        return float(overlap(model).antipodal_probability())
    except InputError:  # a beta beyond the doubles of its quadrature: no reason not to simulate
        return nan
