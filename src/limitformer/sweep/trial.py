"""A trial before a store is made: which shapes the results of a cell have, and whether any cell can run at all."""

import numpy as np

from limitformer.base.errors import InputError
from limitformer.sweep.describe import Sweep, check_memory, compute, where
from limitformer.sweep.grid import Cell
from limitformer.sweep.layout import Kind, Layout, layout_from
from limitformer.sweep.reduce import Reduced

MOST_TRIALS = 10  # of cells that do not end well


def layout_of(sweep: Sweep) -> Layout:
    """From two samples of the first cell that can run.

    Raises:
        InputError: no cell can, or the first few that are tried fail.
    """
    count = sweep.settings.samples
    found = compute_first(sweep, min(2, count))
    layout = Layout({name: full_kind(result, count) for name, result in found.items()})
    return layout_from(layout.record())


def compute_first(sweep: Sweep, samples: int) -> dict[str, Reduced]:
    """The results of the first cell that can run, with so many samples; one that fails is recorded later, as any is.

    A cell that does not fit the memory costs nothing to refuse, so that all of them are asked.
    """
    refused: list[str] = []
    trials = 0
    for cell in sweep.cells():
        try:
            check_memory(sweep, cell)
        except InputError as error:
            refused = refused or [f"Cell {where(sweep, cell)}: {error}"]
            continue
        try:
            return compute(sweep, cell, samples=samples)
        except Exception as error:  # noqa: BLE001  # whatever it is, another cell has the same shapes
            trials, trouble = trials + 1, said(sweep, cell, error)
        if trials == MOST_TRIALS:
            raise InputError(f"The first cells fail. {trouble}")
    raise InputError(f"No cell of the grid can run. {refused[0] if not trials else trouble}")


def said(sweep: Sweep, cell: Cell, error: Exception) -> str:
    """What went wrong in a cell."""
    reason = error if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    return f"Cell {where(sweep, cell)}: {reason}"


def full_kind(result: Reduced, samples: int) -> Kind:
    """Dimensions, shape and type of a result, with all samples."""
    values = np.asarray(result.values)
    sizes = zip(result.dims, values.shape, strict=True)
    return result.dims, tuple(samples if dim == "sample" else size for dim, size in sizes), values.dtype
