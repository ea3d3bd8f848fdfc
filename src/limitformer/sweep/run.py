"""Run a sweep: compute the cells that its store lacks, in this process, on processes of this machine, or on Dask."""

import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Never

import numpy as np
import xarray as xr

from limitformer.base.errors import InputError, MissingExtraError, PicklesArguments, first_line, require, require_count
from limitformer.base.interrupts import interrupts_wait
from limitformer.base.progress import track
from limitformer.sampling.replicas import usable_cores
from limitformer.sweep.describe import Sweep, compute, where
from limitformer.sweep.grid import Index
from limitformer.sweep.store import CELLS, DONE, FAILED, Store, gathered, store_for

CONNECT_SECONDS = 10
MOST_TRIALS = 10  # cells that fail before the trial of a new store ends
TOGETHER, ALONE = 2, 2  # deaths in a cell: among others, then alone, before it has failed
MOST_DEATHS = 6  # of workers in a row, in which no cell ends
GONE = {  # arguments of version 0.2
    "cluster": ' Nearest: dask="tcp://…", the address of a Dask scheduler.',
    **dict.fromkeys(("any_version", "tries", "shuffle"), " Nearest: leave it out."),
}
ERROR_LENGTH = 1000  # characters of a stored error
Outcomes = Generator[tuple[Index, str], None, None]  # of cells as they end: the error, empty if the cell is done


@dataclass(frozen=True)
class SweepReport:
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
    dask: Any = None,
    extend: bool = False,
    retry_failed: bool = True,
    progress: bool = True,
    **gone: Never,
) -> SweepReport:
    """Compute the cells of `sweep` that its store does not have yet.

    Args:
        sweep: the grid.
        store: the folder of the store; it is made if it does not exist.
        workers: number of processes; None takes one per core, 1 runs in this process.
        threads: threads of each worker; None takes its share of the cores, and 1 on Dask.
        dask: the address "tcp://…" of a Dask scheduler, or a `Client`, instead of processes.
        extend: whether the axes of the store may get new values.
        retry_failed: whether cells that failed before are tried again.
        progress: whether to show progress when work takes more than two seconds.
        gone: arguments of version 0.2, refused with their replacement.

    Raises:
        InputError: the store belongs to another sweep, is in use by another process, or cannot be written.
        SweepInterrupted: Ctrl-C; finished cells stay, and a new run continues.
    """
    for name in gone:
        raise TypeError(f"run_sweep has no argument {name!r}.{GONE.get(name, '')}")
    require(isinstance(sweep, Sweep), f"run_sweep needs a Sweep; got {type(sweep).__name__}.")
    workers = usable_cores() if workers is None else require_count("workers", workers)
    share = 1 if dask is not None else max(1, usable_cores() // workers)
    threads = share if threads is None else require_count("threads", threads)
    there = store_for(sweep, store, extend=extend)
    if not there.is_described():
        check_some_cell_runs(sweep)
    elif (there.status() == DONE).all():  # perhaps on a disk that is read-only
        return SweepReport(there.path, cells := prod(there.shape), cells, 0, cells, {})
    with engine(workers, dask) as (parallel, died), there.locked():
        there = store_for(sweep, store, extend=extend)  # another run may have ended meanwhile
        there.describe()
        status = there.status()
        skipped, errors = int((status == DONE).sum()), {} if retry_failed else there.errors(status)
        asked = (status != DONE) & ((status != FAILED) | retry_failed)
        missing = {index: name for index, name in there.names() if asked[index]}
        work, before = partial(tasks, sweep, there, missing, threads), status.size - len(missing)
        try:
            with closing(outcomes(list(missing), work, parallel, died)) as ended:
                for index, error in track(ended, "cells", status.size, before) if progress else ended:
                    status[index] = FAILED if error else DONE
                    errors |= {index: error} if error else {}
        except (InputError, CancelledError) as error:  # the latter if the scheduler is gone
            line = first_line(error).rstrip(".")
            raise InputError(f"{line}. What is finished stays; start it again.") from error
        except KeyboardInterrupt as interrupt:
            raise SweepInterrupted(there.path, int((there.status() == DONE).sum()), status.size) from interrupt
    done, failed = int((status == DONE).sum()), int((status == FAILED).sum())
    return SweepReport(there.path, status.size, done, failed, skipped, dict(sorted(errors.items())))


def check_some_cell_runs(sweep: Sweep) -> None:
    """Raise `InputError` unless one of a few cells can run, with two samples; any other that fails is recorded."""
    failures = []
    for place in sorted({*np.linspace(0, prod(sweep.shape) - 1, MOST_TRIALS).astype(int).tolist()}):
        index = tuple(map(int, np.unravel_index(place, sweep.shape)))
        try:
            compute(sweep, sweep.cell(index), samples=min(2, sweep.settings["samples"]))
            return
        except Exception as error:  # noqa: BLE001  # another cell may run
            failures.append(f"Cell {where(sweep, index)}: {reason(error)}")
    raise InputError(f"No cell can run of the {len(failures)} that were tried. {failures[0]}")


def reason(error: Exception) -> str:
    return str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"


def tasks(
    sweep: Sweep, store: Store, names: Mapping[Index, str], threads: int, cells: Iterable[Index], begun: list[Index]
) -> Iterator[Any]:
    """Yield a task for each cell, with a sweep of this cell alone; note in `begun` that it is handed out."""
    from joblib import delayed

    place, axes = os.path.abspath(store.path), store.record["over"].items()
    for index in cells:
        begun.append(index)
        over = {name: [values[k]] for (name, values), k in zip(axes, index, strict=True)}
        part = pickle.dumps(replace(sweep, over=over, unchecked=True))
        yield delayed(run_cell)(place, names[index], index, part, threads)


def run_cell(place: str, name: str, index: Index, task: bytes, threads: int) -> tuple[Index, str]:
    """Compute a cell in any process and write its file; return why it failed, or an empty text.

    Raises:
        InputError: the store cannot be seen or written, or the sweep has user functions that differ here.
    """
    store = Store(Path(place), {})
    require((store.path / CELLS).is_dir(), f"A worker does not see {store.path / CELLS}, which all of them must share.")
    try:
        sweep = pickle.loads(task)
    except ImportError as error:
        raise InputError(f"A worker cannot import the sweep's functions: {first_line(error)}.") from error
    began = time.perf_counter()
    try:
        results = compute(sweep, sweep.cell((0,) * len(sweep.over)), threads=threads)
    except Exception as error:  # noqa: BLE001  # other cells may still succeed
        message = reason(error)[:ERROR_LENGTH]
        store.fail(name, message)
        return index, message
    store.save(name, results, time.perf_counter() - began)
    return index, ""


def outcomes(
    cells: Sequence[Index], work: Callable[..., Iterator[Any]], parallel: Any, died: tuple[type[BaseException], ...]
) -> Outcomes:
    """Yield the outcome of each cell as it ends, whatever workers die.

    A death ends all cells in work. They run again: together after the others, and then alone, which shows the cause.

    Raises:
        InputError: workers die before any cell ends, again and again.
    """
    deaths, in_vain = dict.fromkeys(cells, 0), 0
    while deaths:
        fewest = min(deaths.values())
        batch = [index for index, count in deaths.items() if count == fewest][: None if fewest < TOGETHER else 1]
        begun: list[Index] = []
        try:
            with interrupts_wait():  # processes that start here ignore Ctrl-C
                results = parallel(work(batch, begun))
            with closed_quietly(results) as ended:
                for outcome in ended:
                    in_vain = 0
                    del deaths[outcome[0]]
                    yield outcome
        except died:
            in_vain += 1
            require(in_vain < MOST_DEATHS, f"{in_vain} workers died before a cell ended. Nearest: fewer workers, or 1.")
            for index in {*begun} & deaths.keys():
                deaths[index] += 1
            if fewest + 1 == TOGETHER + ALONE:
                in_vain = 0
                del deaths[batch[0]]
                yield batch[0], f"the worker died {fewest + 1} times in this cell (out of memory? fewer need less)"


@contextmanager
def closed_quietly(results: Any) -> Iterator[Any]:
    """Close the results at the end, without the warning of joblib that work is lost."""
    try:
        yield results
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.close()


@contextmanager
def engine(workers: int, dask: Any) -> Iterator[tuple[Any, tuple[type[BaseException], ...]]]:
    """Yield joblib's `Parallel` for processes or Dask, and the errors by which it reports that a worker died.

    Raises:
        InputError: no scheduler answers at the address.
    """
    from joblib import Parallel, parallel_config

    if dask is None:
        watch = {"initializer": end_with, "initargs": (os.getpid(), time.monotonic_ns())}  # no worker of an earlier run
        yield Parallel(n_jobs=workers, return_as="generator_unordered", max_nbytes=None, **watch), (BrokenProcessPool,)
        return
    try:
        import distributed
    except ImportError as error:
        raise MissingExtraError("distributed", "cluster") from error
    try:
        options = {"timeout": CONNECT_SECONDS, "set_as_default": False}
        client = nullcontext(dask) if isinstance(dask, distributed.Client) else distributed.Client(dask, **options)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"No Dask scheduler answers at {dask}: {first_line(error).rstrip('.')}.") from error
    with client as there, parallel_config("dask", client=there, wait_for_workers_timeout=CONNECT_SECONDS):
        require(bool(there.ncores()), "The Dask scheduler has no workers. Nearest: start some.")
        yield Parallel(n_jobs=-1, return_as="generator_unordered"), (distributed.KilledWorker,)


def end_with(parent: int, _: int) -> None:
    """End this worker when its parent is gone, also if that was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def compute_sweep(sweep: Sweep, *, threads: int | None = None, progress: bool = True) -> xr.Dataset:
    """Compute all cells in this process, without a store; the Dataset is that of `load_sweep`, with the same bits.

    Raises:
        InputError: a cell that cannot run.
    """
    cells = list(sweep.cells())
    tracked = track(cells, "cells") if progress else cells
    return gathered(sweep.record(), ((cell.index, compute(sweep, cell, threads=threads)) for cell in tracked))
