"""Run a sweep: compute the cells that its store lacks, on processes or a cluster."""

import json
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from limitformer.base.errors import InputError, PicklesArguments, require, require_count
from limitformer.base.progress import advance, print_line, progress_bar, track
from limitformer.paths.replicas import usable_cores
from limitformer.sweep.cells import DONE, ERROR_LENGTH, FAILED
from limitformer.sweep.describe import Sweep, check_rest, compute, too_large
from limitformer.sweep.grid import Index
from limitformer.sweep.opening import open_store, ready, store_path
from limitformer.sweep.processes import in_this_process, on_processes
from limitformer.sweep.store import Store, Survey, coordinates_of
from limitformer.sweep.work import Engine, Finished, Results, StoreError, job_of


@dataclass(frozen=True)
class Report:
    """The result of a run.

    Attributes:
        store: the folder.
        cells: number of cells in the grid.
        done: cells that are done now.
        failed: cells that have failed.
        skipped: cells that were done before.
        errors: messages of failed cells, by their index.
    """

    store: Path
    cells: int
    done: int
    failed: int
    skipped: int
    errors: dict[Index, str]


class SweepInterrupted(PicklesArguments, KeyboardInterrupt):
    """Ctrl-C during a sweep; finished cells are in the store."""

    resumes = True

    def __init__(self, path: Path, done: int, cells: int) -> None:
        super().__init__(f"Interrupted with {done} of {cells} cells done; start it again to go on: {path}")
        self.pickled_arguments = path, done, cells


def run_sweep(
    sweep: Sweep,
    store: str | Path,
    *,
    workers: int | None = None,
    threads: int | None = None,
    cluster: Any = None,
    extend: bool = False,
    retry_failed: bool = True,
    tries: int = 2,
    any_version: bool = False,
    shuffle: bool = False,
    progress: bool = True,
) -> Report:
    """Compute the cells of `sweep` that its store does not have yet.

    Args:
        sweep: the grid.
        store: the folder of the store; it is made if it does not exist.
        workers: number of processes; None takes one per core, 1 runs in this process.
        threads: threads of each worker; None takes its share of the cores.
        cluster: an address "tcp://…" or a Dask `Client`, instead of processes.
        extend: whether the axes of the store may get new values.
        retry_failed: whether cells that failed before are tried again.
        tries: how often a cell is tried.
        any_version: whether cells of different code, libraries or processors may be mixed; each cell records its own.
        shuffle: whether the cells run in random order; the numbers are the same.
        progress: whether to show progress when work takes more than two seconds.

    Raises:
        InputError: the store belongs to another sweep, is in use by another process, or cannot be written.
        SweepInterrupted: Ctrl-C; finished cells stay, and a new run continues.
    """
    require(isinstance(sweep, Sweep), f"run_sweep needs a Sweep; got {type(sweep).__name__}.")
    path = store_path(store)
    workers = usable_cores() if workers is None else require_count("workers", workers)
    require_count("tries", tries)
    with (
        chosen_engine(workers, threads, cluster) as engine,
        ready(path, sweep, extend=extend, any_version=any_version) as (there, survey),
    ):
        if cluster is None and progress and bool((survey.status != DONE).any()):
            announce_large_cells(there.sweep)
        job = job_of(there, threads=threads_each(workers, threads), tries=tries, any_version=any_version)
        options = {"retry_failed": retry_failed, "shuffle": shuffle, "progress": progress}
        return completed(there, survey, partial(engine, job), **options)


def announce_large_cells(sweep: Sweep) -> None:
    """Print a line before any work about cells that do not fit into the memory: they fail, and the others run."""
    reasons = too_large(sweep)
    if reasons:
        which = "A model does" if len(reasons) == 1 else f"{len(reasons)} models do"
        print_line(f"{which} not fit into the memory, and will fail. {reasons[0]}")


def completed(
    store: Store,
    survey: Survey,
    run: Callable[[list[Index]], Results],
    *,
    retry_failed: bool,
    shuffle: bool,
    progress: bool,
) -> Report:
    """Run the missing cells and report on all of them."""
    status, skipped = survey.status, int((survey.status == DONE).sum())
    asked = (status != DONE) & ((status != FAILED) | retry_failed)
    missing = [tuple(index) for index in np.argwhere(asked).tolist()]
    errors = {} if retry_failed else survey.errors
    if store.read_only:
        require(
            not missing, f"Cannot write the store {store.path}: {store.read_only}. {len(missing)} cells are missing."
        )
    if shuffle:
        random.Random(0).shuffle(missing)
    if missing:
        with clear_ends(store, status), closing(run(missing)) as ends:
            for cell in tracked_cells(ends, status.size, status.size - len(missing), progress):
                status[cell.index] = cell.status
                if cell.status == FAILED:
                    errors[cell.index] = cell.message[:ERROR_LENGTH]
    done, failed = int((status == DONE).sum()), int((status == FAILED).sum())
    return Report(store.path, status.size, done, failed, skipped, dict(sorted(errors.items())))


def tracked_cells(finished: Iterable[Finished], cells: int, before: int, progress: bool) -> Iterator[Finished]:
    """Yield the cells as they finish, and show them on a bar on which `before` of them are done at the start."""
    bar = progress_bar("cells", cells, before) if progress else None
    try:
        for count, cell in enumerate(finished, before + 1):
            yield cell
            advance(bar, count)
    finally:
        advance(bar, -1)


@contextmanager
def clear_ends(store: Store, status: np.ndarray) -> Iterator[None]:
    """End a run with one line: why the store cannot be written, or how far the sweep was at Ctrl-C."""
    try:
        yield
    except StoreError as error:
        raise InputError(
            f"Cannot write the store {store.path}: {error}. What is finished stays; start it again."
        ) from error
    except KeyboardInterrupt as interrupt:
        raise SweepInterrupted(store.path, int((status == DONE).sum()), status.size) from interrupt


@contextmanager
def chosen_engine(workers: int, threads: int | None, cluster: Any) -> Iterator[Engine]:
    """Yield the function that runs cells; a client of a cluster is closed at the end."""
    threads_each(workers, threads)
    if cluster is not None:
        from limitformer.sweep.cluster import connected, on_cluster

        with connected(cluster) as client:
            yield partial(on_cluster, client=client)
    elif workers == 1:
        yield in_this_process
    else:
        yield partial(on_processes, workers=workers)


def threads_each(workers: int, threads: int | None) -> int:
    """Return the threads of a worker: the requested number, or its share of the cores."""
    return max(1, usable_cores() // workers) if threads is None else require_count("threads", threads)


def compute_sweep(sweep: Sweep, *, threads: int | None = None, progress: bool = True) -> xr.Dataset:
    """Compute all cells in this process, without a store; the Dataset is that of `load_sweep`, with the same bits.

    Raises:
        InputError: a cell that cannot run.
    """
    check_rest(sweep)
    cells = list(sweep.cells())
    results = [compute(sweep, cell, threads=threads) for cell in (track(cells, "cells") if progress else cells)]
    axes, variables = tuple(sweep.over), {}
    for name, first in results[0].items():
        values = np.stack([np.asarray(one[name].values) for one in results])
        variables[name] = ((*axes, *first.dims), values.reshape(*sweep.shape, *values.shape[1:]))
    dims = {dim for first in results[0].values() for dim in first.dims}
    return xr.Dataset(variables, coordinates_of(sweep, dims), {"sweep": json.dumps(sweep.record())})


def load_sweep(store: str | Path) -> xr.Dataset:
    """Gather a store in memory: its results over the axes, `status` (0 missing, 1 done, 2 failed, 3 damaged), `code`
    and `seconds`.

    Every checksum is compared; a damaged cell has no results. `code` is the number of the code that made a cell. The
    attribute `codes` has the versions and the processor for each number, as JSON.

    Raises:
        InputError: not the store of a sweep, one of an older version, or one whose description makes no sense.
    """
    return open_store(store_path(store)).load()
