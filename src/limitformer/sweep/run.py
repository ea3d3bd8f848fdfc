r"""Run a sweep: what is missing in its store, on processes or a cluster, until all of it is there."""

import json
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from limitformer.errors import InputError, require, require_count
from limitformer.progress import advance, announced, bar, tracked
from limitformer.replicas import usable_cores
from limitformer.sweep.describe import Sweep, compute
from limitformer.sweep.processes import Engine, in_this_process, on_processes
from limitformer.sweep.store import DONE, FAILED, Index, Store, coordinates_of, create, open_store, resume
from limitformer.sweep.work import StoreError


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


class SweepInterrupted(KeyboardInterrupt):
    """Ctrl-C during a sweep; what was finished is in the store."""

    resumes = True

    def __init__(self, path: Path, done: int, cells: int) -> None:
        super().__init__(f"Interrupted with {done} of {cells} cells done; start it again to go on: {path}")


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
        any_version: whether a store that other code began may be gone on with.
        shuffle: whether the cells run in random order; the numbers are the same.
        progress: whether work of more than two seconds shows on the terminal.

    Raises:
        InputError: a store of another sweep, or one that cannot be written.
        SweepInterrupted: Ctrl-C; the store can be gone on with.
    """
    path = Path(store)
    workers = usable_cores() if workers is None else require_count("workers", workers)
    with chosen_engine(workers, threads, cluster, require_count("tries", tries)) as engine:
        kept = prepared(path, sweep, extend=extend, any_version=any_version)
        return completed(kept, engine, retry_failed=retry_failed, shuffle=shuffle, progress=progress)


def completed(kept: Store, engine: Engine, *, retry_failed: bool, shuffle: bool, progress: bool) -> Report:
    """Run the cells that are missing, and say what there is then."""
    path, status = kept.path, kept.verified()
    missing = [index for index in kept.indices() if is_missing(status[index], retry_failed)]
    if shuffle:
        random.Random(0).shuffle(missing)
    shown = bar("cells", status.size) if progress else None
    skipped = int((status == DONE).sum())
    try:
        with closing(engine(path, missing)) as finished:
            for count, one in enumerate(finished if missing else (), status.size - len(missing) + 1):
                status[one.index] = one.status
                advance(shown, count)
    except StoreError as error:
        raise InputError(f"Cannot write the store {path}: {error}. What is finished stays; start it again.") from error
    except KeyboardInterrupt as interrupt:
        raise SweepInterrupted(path, int((status == DONE).sum()), status.size) from interrupt
    finally:
        advance(shown, -1)
    return report_of(kept, status, skipped)


def prepared(path: Path, sweep: Sweep, *, extend: bool, any_version: bool) -> Store:
    """The store, made or opened."""
    if (path / "zarr.json").exists():
        return resume(path, sweep, extend=extend, any_version=any_version)
    empty = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    require(empty, f"{path} is there and is not the store of a sweep. Choose another folder.")
    with announced("Compiling kernels for this machine (the first time only)"):
        return create(path, sweep)


def is_missing(status: Any, retry_failed: bool) -> bool:
    """Whether a cell is to be computed."""
    return bool(status != DONE and (status != FAILED or retry_failed))


@contextmanager
def chosen_engine(workers: int, threads: int | None, cluster: Any, tries: int) -> Iterator[Engine]:
    """Where the cells run."""
    share = max(1, usable_cores() // workers) if threads is None else require_count("threads", threads)
    if cluster is not None:
        from limitformer.sweep.cluster import connected, on_cluster

        with connected(cluster) as client:
            yield partial(on_cluster, client=client, tries=tries)
    elif workers == 1:
        yield partial(in_this_process, threads=share, tries=tries)
    else:
        yield partial(on_processes, workers=workers, threads=share, tries=tries)


def report_of(store: Store, status: np.ndarray, skipped: int) -> Report:
    """In numbers."""
    failed = [index for index in store.indices() if status[index] == FAILED]
    errors = {index: store.error(index) for index in failed}
    return Report(store.path, status.size, int((status == DONE).sum()), len(failed), skipped, errors)


def compute_sweep(sweep: Sweep, *, threads: int | None = None, progress: bool = True) -> xr.Dataset:
    """All cells, in this process and without a store; as `load_sweep` gives them, the same bits."""
    cells = list(sweep.cells())
    found = [compute(sweep, cell, threads=threads) for cell in (tracked(cells, "cells") if progress else cells)]
    axes, variables = tuple(sweep.over), {}
    for name, first in found[0].items():
        values = np.stack([np.asarray(one[name].values) for one in found])
        variables[name] = ((*axes, *first.dims), values.reshape(*sweep.shape, *values.shape[1:]))
    dims = {dim for first in found[0].values() for dim in first.dims}
    return xr.Dataset(variables, coordinates_of(sweep, dims), {"sweep": json.dumps(sweep.record())})


def load_sweep(store: str | Path) -> xr.Dataset:
    """What a store has, in memory: the results over the axes, `status` (0 missing, 1 done, 2 failed) and `seconds`.

    Raises:
        InputError: not the store of a sweep.
    """
    return open_store(Path(store)).load()
