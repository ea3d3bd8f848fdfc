r"""Run a sweep: what is missing in its store, on processes or a cluster, until all of it is there."""

import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from limitformer.base.errors import InputError, PicklesArguments, require, require_count
from limitformer.base.progress import advance, progress_bar, track
from limitformer.paths.replicas import usable_cores
from limitformer.sweep.describe import Sweep, check_rest, compute
from limitformer.sweep.layout import Index
from limitformer.sweep.opening import open_store, ready, store_path
from limitformer.sweep.processes import in_this_process, on_processes
from limitformer.sweep.store import DONE, FAILED, Store, coordinates_of, shortened
from limitformer.sweep.work import Engine, Finished, Job, StoreError, job_of, save

SOONEST = 1.0  # seconds between two times that finished cells are gathered, at least
TIMES_AS_LONG = 50  # as gathering has taken: so it takes two hundredths of the time


@dataclass(frozen=True)
class Report:
    """What a run did.

    Attributes:
        store: the folder.
        cells: of the whole grid.
        done: cells that are done now.
        failed: that have failed.
        skipped: that were done before.
        errors: of failed cells, by their index.
    """

    store: Path
    cells: int
    done: int
    failed: int
    skipped: int
    errors: dict[Index, str]


class SweepInterrupted(PicklesArguments, KeyboardInterrupt):
    """Ctrl-C during a sweep; what was finished is in the store."""

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
    """Compute the cells of `sweep` that its store has not yet.

    Args:
        sweep: what to compute.
        store: folder of the Zarr store; it is made if it is not there.
        workers: processes; None takes one a core, 1 runs in this one.
        threads: of each worker; None takes its share of the cores.
        cluster: an address "tcp://…", or a Dask `Client`, instead of processes.
        extend: whether the store may get new values on its axes.
        retry_failed: whether cells that failed before are tried again.
        tries: how often a cell is tried.
        any_version: whether cells of different code, libraries or processors may be mixed; each keeps which made it.
        shuffle: whether the cells run in random order; the numbers are the same.
        progress: whether work of more than two seconds shows on the terminal.

    Raises:
        InputError: a store of another sweep, one that another process is at work on, or that cannot be written.
        SweepInterrupted: Ctrl-C; the store can be gone on with.
    """
    path = store_path(store)
    workers = usable_cores() if workers is None else require_count("workers", workers)
    require_count("tries", tries)
    with (
        chosen_engine(workers, threads, cluster) as engine,
        ready(path, sweep, extend=extend, any_version=any_version) as kept,
    ):
        job = job_of(kept, threads=threads_each(workers, threads), tries=tries, any_version=any_version)
        return completed(kept, engine, job, retry_failed=retry_failed, shuffle=shuffle, progress=progress)


def completed(kept: Store, engine: Engine, job: Job, *, retry_failed: bool, shuffle: bool, progress: bool) -> Report:
    """Run the cells that are missing, and say what there is then."""
    found = kept.survey()
    status, skipped = found.status, int((found.status == DONE).sum())
    asked = (status != DONE) & ((status != FAILED) | retry_failed)
    missing = [tuple(index) for index in np.argwhere(asked).tolist()]
    errors = {} if retry_failed else found.errors
    if kept.read_only:
        require(not missing, f"Cannot write the store {kept.path}: {kept.read_only}. {len(missing)} cells are missing.")
    else:
        if shuffle:
            random.Random(0).shuffle(missing)
        before = status.size - len(missing)
        with clear_ends(kept, status), gathering(kept, found.broken) as gather, closing(engine(job, missing)) as ends:
            for one in tracked_cells(ends if missing else (), status.size, before, progress):
                status[one.index] = one.status
                if one.status == FAILED:
                    errors[one.index] = shortened(one.message)
                gather()
    done, failed = int((status == DONE).sum()), int((status == FAILED).sum())
    return Report(kept.path, status.size, done, failed, skipped, dict(sorted(errors.items())))


def tracked_cells(finished: Iterable[Finished], cells: int, before: int, progress: bool) -> Iterator[Finished]:
    """The cells as they finish, on a bar that begins with those that were there before."""
    shown = progress_bar("cells", cells, before) if progress else None
    try:
        for count, one in enumerate(finished, before + 1):
            yield one
            advance(shown, count)
    finally:
        advance(shown, -1)


@contextmanager
def clear_ends(kept: Store, status: np.ndarray) -> Iterator[None]:
    """A store that cannot be written ends with one line, and Ctrl-C with how far the sweep is."""
    try:
        yield
    except StoreError as error:
        raise InputError(
            f"Cannot write the store {kept.path}: {error}. What is finished stays; start it again."
        ) from error
    except KeyboardInterrupt as interrupt:
        raise SweepInterrupted(kept.path, int((status == DONE).sum()), status.size) from interrupt


@contextmanager
def gathering(kept: Store, broken: set[Index]) -> Iterator[Callable[[], None]]:
    """Gather finished cells into the arrays: what earlier runs have left, what there is whenever the function that is
    given is called and enough time has passed, and the rest at the end."""
    save(lambda: kept.gather(broken))
    due = time.monotonic() + SOONEST

    def gather() -> None:
        nonlocal due
        began = time.monotonic()
        if began >= due:
            save(kept.gather)
            ended = time.monotonic()
            due = ended + max(SOONEST, TIMES_AS_LONG * (ended - began))

    try:
        yield gather
    except StoreError:
        raise
    except BaseException:
        with suppress(StoreError):  # what went wrong first is what is said; loose cells are as good
            save(kept.gather)
        raise
    save(kept.gather)


@contextmanager
def chosen_engine(workers: int, threads: int | None, cluster: Any) -> Iterator[Engine]:
    """Where the cells run."""
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
    """Of a worker: its share of the cores, or as many as are asked for."""
    return max(1, usable_cores() // workers) if threads is None else require_count("threads", threads)


def compute_sweep(sweep: Sweep, *, threads: int | None = None, progress: bool = True) -> xr.Dataset:
    """All cells, in this process and without a store; as `load_sweep` gives them, the same bits."""
    check_rest(sweep)
    cells = list(sweep.cells())
    found = [compute(sweep, cell, threads=threads) for cell in (track(cells, "cells") if progress else cells)]
    axes, variables = tuple(sweep.over), {}
    for name, first in found[0].items():
        values = np.stack([np.asarray(one[name].values) for one in found])
        variables[name] = ((*axes, *first.dims), values.reshape(*sweep.shape, *values.shape[1:]))
    dims = {dim for first in found[0].values() for dim in first.dims}
    return xr.Dataset(variables, coordinates_of(sweep, dims), {"sweep": json.dumps(sweep.record())})


def load_sweep(store: str | Path) -> xr.Dataset:
    """What a store has, in memory: the results over the axes, `status` (0 missing, 1 done, 2 failed, 3 damaged),
    `code` and `seconds`.

    Every checksum is compared: a cell that is damaged has no results. `code` says what made a cell; the attribute
    `codes` has the versions and the processor of each number in it, as JSON.

    Raises:
        InputError: not the store of a sweep, or one whose description makes no sense.
    """
    return open_store(store_path(store)).load()
