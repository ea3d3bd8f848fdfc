"""Grids of a figure, computed as sweeps: an interrupted figure resumes them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import xarray as xr

from limitformer.base.errors import require
from limitformer.sweep import OtherSweepError, Sweep, compute_sweep, load_sweep, run_sweep
from limitformer_papers.common.claims import FigureRun

T = TypeVar("T")


def resumable(compute: Callable[[Path | None], T], run: FigureRun, name: str) -> T:
    """Call `compute` with a store for its sweep, if the run has a folder; the store of another sweep is removed."""
    if run.stores is None:
        return compute(None)
    store = run.stores / name
    try:
        return compute(store)
    except OtherSweepError:
        shutil.rmtree(store)
        return compute(store)


def on_grid(sweep: Sweep, run: FigureRun, name: str) -> xr.Dataset:
    """Return all cells of the sweep, computed on the run's threads."""

    def compute(store: Path | None) -> xr.Dataset:
        if store is None:
            return compute_sweep(sweep, threads=run.threads)
        report = run_sweep(sweep, store, workers=1, threads=run.threads)
        require(report.failed == 0, f"{report.failed} cells failed: {next(iter(report.errors.values()), '')}")
        return load_sweep(store)

    return resumable(compute, run, name)
