"""The overhead of sweeps: time per cell on processes and on Dask, efficiency, memory."""

import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import limitformer as lf
from limitformer.sweep.describe import compute


def tiny(cells: int) -> lf.Sweep:
    """Return a grid of cells that take about a millisecond."""
    base = lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=10)
    over = {"beta": [k / cells for k in range(cells)]}
    return lf.Sweep(base, over=over, simulate={"samples": 8, "horizon": 1.0}, reduce={"outcomes": True})


def seconds_long(cells: int) -> lf.Sweep:
    """Return a grid of cells that take about a second each."""
    base = lf.StochasticTransformer(tokens=8, dim=16, beta=1.0, layers_per_unit_time=100)
    over = {"beta": [1 + k / cells for k in range(cells)]}
    return lf.Sweep(base, over=over, simulate={"samples": 256, "horizon": 100.0}, reduce={"outcomes": True})


def cell_seconds(sweep: lf.Sweep, cells: int) -> float:
    """Return seconds per cell, without a sweep, on one thread."""
    some = [cell for cell, _ in zip(sweep.cells(), range(cells), strict=False)]
    compute(sweep, some[0])
    began = time.perf_counter()
    for cell in some:
        compute(sweep, cell)
    return (time.perf_counter() - began) / len(some)


def run(sweep: lf.Sweep, **options: Any) -> float:
    """Return the seconds of a whole run into a new store."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        report = lf.run_sweep(sweep, Path(folder) / "sweep", progress=False, **options)
        taken = time.perf_counter() - began
    assert report.done == report.cells
    return taken


def on_dask(sweep: lf.Sweep, workers: int) -> float:
    """Return the seconds of a run on a Dask cluster of this machine, without the start of the cluster."""
    from distributed import LocalCluster

    loopback = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}  # the default is port 8787, open to all
    with LocalCluster(n_workers=workers, threads_per_worker=1, **loopback) as cluster:
        return run(sweep, dask=cluster.scheduler_address)


def overhead(cells: int, workers: int) -> list[dict[str, Any]]:
    """Return rows with the milliseconds per cell and worker beyond the cell itself."""
    sweep = tiny(cells)
    cell = cell_seconds(sweep, 500)
    rows = []
    for what, wanted, taken in (
        ("one process", 5, lambda: run(sweep, workers=1, threads=1)),
        (f"{workers} processes", 5, lambda: run(sweep, workers=workers)),
        (f"Dask, {workers} workers", 20, lambda: on_dask(sweep, workers)),
    ):
        share = 1 if what == "one process" else workers
        per_cell = taken() * share / cells
        rows.append(
            {
                "what": what,
                "cells": cells,
                "wanted_ms": wanted,
                "overhead_ms": (per_cell - cell) * 1e3,
                "cell_ms": cell * 1e3,
                "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    return rows


def efficiency(cells: int, workers: int) -> list[dict[str, Any]]:
    """Return the time on one process over the time on `workers`, divided by their number; wanted 0.9."""
    sweep = seconds_long(cells)
    run(tiny(4), workers=1)
    one, several = run(sweep, workers=1, threads=1), run(sweep, workers=workers)
    return [
        {
            "what": f"{workers} processes, cells of {one / cells:.2g} s",
            "wanted": 0.9,
            "efficiency": one / several / workers,
        }
    ]
