r"""Phase diagrams: the outcomes of a model over a grid of its fields, simulated and, where known, exact.

A phase diagram is a `Sweep` that counts outcomes, together with the exact probability.
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
from limitformer.sphere.methods import SphereOptions
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
    """Simulate the outcomes of `base` at time `horizon` on the grid `over` of its fields.

    Args:
        base: the model whose fields are varied.
        over: values, numbers or words, of each field, such as `{"dim": [4, 6], "beta": [0.5, 1.0]}`.
        horizon, samples, seed, tolerance, early_stop, threads: as in `simulate`; each cell has `samples` samples.
        level: coverage of the intervals.
        store: the folder of a store, with which an interrupted diagram resumes; None keeps results in memory only.
        progress: whether to show progress when work takes more than two seconds.

    Returns:
        `probability`, `low`, `high` (…, outcome), the simulated probabilities with Wilson intervals; `exact` (…), the
        probability of the antipodal state in the limit. `exact` is NaN where it is not known: unless there are two
        tokens and QᵀK is a multiple of the identity, or if `overlap` refuses the model.

    Raises:
        InputError: an unknown field, an axis without values, or a value that the model or `simulate` refuses; the
            message names the cell, and no cell has run before.

    >>> import limitformer as lf
    >>> base = lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=50)
    >>> grid = lf.phase_diagram(base, {"beta": [0.0, 2.0]}, horizon=50.0, samples=400, seed=0)
    >>> [round(float(p), 4) for p in grid.exact]
    [0.0, 0.2811]
    """
    require(isinstance(base, SphereKind), f"A phase diagram needs a model on the sphere; got {type(base).__name__}.")
    options: dict[str, Any] = {"horizon": horizon, "tolerance": tolerance, "early_stop": early_stop}
    SphereOptions(**options)
    require_count("samples", samples)
    require(0 < require_real("level", level) < 1, f"level must lie in (0, 1); got {level}.")
    if threads is not None:
        require_count("threads", threads)
    settings = {"samples": samples, "seed": seed, **options}
    sweep = Sweep(base, over=over, simulate=settings, reduce={"outcomes": {"level": level}})
    if store is None:
        data = compute_sweep(sweep, threads=threads, progress=progress)
    else:
        report = run_sweep(sweep, store, workers=1, threads=threads, progress=progress)
        require(report.failed == 0, f"{report.failed} cells failed: {next(iter(report.errors.values()), '')}")
        data = load_sweep(store).sel({name: list(values) for name, values in sweep.over.items()})  # the caller's order
    data = data.isel(point=0)[["probability", "low", "high"]]
    exact = np.array([exact_probability(cell.model) for cell in sweep.cells()]).reshape(sweep.shape)
    attributes = {name: value for name, value in settings.items() if value is not None}
    return data.assign(exact=(tuple(over), exact)).assign_attrs(
        base=to_json(base), level=level, **attributes, **stamp()
    )


def exact_probability(model: SphereKind) -> float:
    """Return the probability of the antipodal state from a uniform start, or NaN if it is not known."""
    if model.tokens != 2:
        return nan
    try:
        return float(overlap(model).antipodal_probability())
    except InputError:  # such as a beta beyond the range of its quadrature; the simulation is still possible
        return nan
