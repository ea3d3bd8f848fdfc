"""A trial before a store is made: it gives the shapes of a cell's results and shows that some cell can run."""

from collections.abc import Mapping

import numpy as np

from limitformer.base.errors import InputError
from limitformer.sweep.cells import Kind, kinds_from
from limitformer.sweep.describe import Sweep, check_memory, compute, where
from limitformer.sweep.grid import Cell
from limitformer.sweep.reduce import Reduced

MOST_TRIALS = 10  # cells that fail before the trial ends


def kinds_of(sweep: Sweep) -> dict[str, Kind]:
    """Return the results of a cell, from two samples of the first cell that can run.

    Raises:
        InputError: no cell can run, or the first ones that are tried fail.
    """
    count = sweep.settings.samples
    record = {}
    for name, result in compute_first(sweep, min(2, count)).items():
        values = np.asarray(result.values)
        sizes = zip(result.dims, values.shape, strict=True)
        shape = [count if dim == "sample" else size for dim, size in sizes]
        record[name] = [list(result.dims), shape, values.dtype.newbyteorder("<").str]
    return kinds_from(record)


def compute_first(sweep: Sweep, samples: int) -> Mapping[str, Reduced]:
    """Compute the first cell that can run, with a few samples; a cell that fails here is recorded later.

    To refuse a cell that does not fit the memory costs nothing, so all of them may be tried.
    """
    refusal, failures = "", []
    for cell in sweep.cells():
        try:
            check_memory(sweep, cell)
        except InputError as error:
            refusal = refusal or failure(sweep, cell, error)
            continue
        try:
            return compute(sweep, cell, samples=samples)
        except Exception as error:  # noqa: BLE001  # another cell has the same shapes
            failures.append(failure(sweep, cell, error))
        if len(failures) == MOST_TRIALS:
            raise InputError(f"The first cells fail. {failures[-1]}")
    raise InputError(f"No cell of the grid can run. {failures[-1] if failures else refusal}")


def failure(sweep: Sweep, cell: Cell, error: Exception) -> str:
    """Name the cell and the error."""
    reason = error if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    return f"Cell {where(sweep, cell)}: {reason}"
