"""What a worker does, wherever it runs: compute cells of a store and write them down."""

import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from limitformer.base.errors import InputError
from limitformer.sweep.describe import compute
from limitformer.sweep.layout import Index
from limitformer.sweep.metadata import GROUP
from limitformer.sweep.opening import check_code, open_store
from limitformer.sweep.store import DONE, FAILED, Store


class StoreError(Exception):
    """The store cannot be written; the sweep ends, and what is written stays."""


@dataclass(frozen=True)
class Finished:
    """What became of a cell."""

    index: Index
    status: int
    seconds: float
    message: str = ""


@dataclass(frozen=True)
class Job:
    """What a worker has to know.

    Attributes:
        path: of the store.
        stamp: changes when the store is extended.
        threads: of the worker.
        tries: how often a cell is tried.
        any_version: whether the worker's code may be another than that of the store's other cells.
    """

    path: str
    stamp: int
    threads: int
    tries: int
    any_version: bool


Results = Generator[Finished, None, None]
Engine = Callable[[Job, Sequence[Index]], Results]


def job_of(store: Store, *, threads: int, tries: int, any_version: bool) -> Job:
    """For the workers of a run."""
    stamp = (store.path / GROUP).stat().st_mtime_ns
    return Job(os.path.abspath(store.path), stamp, threads, tries, any_version)


@cache
def store_at(path: str, stamp: int, any_version: bool) -> Store:
    """The store, opened once by each worker.

    Raises:
        StoreError: the worker's code is none of those that began or went on with the store.
    """
    try:
        store = open_store(Path(path), imports=True)  # somebody runs it
        check_code(store.path, store.codes.values(), any_version)
    except InputError as error:
        raise StoreError(str(error)) from error
    return store


def store_of(job: Job) -> Store:
    """The store of a job."""
    return store_at(job.path, job.stamp, job.any_version)


def run_cell(job: Job, index: Index) -> Finished:
    """Compute a cell and write it; a failure is tried again, then written down as well.

    Raises:
        StoreError: the store cannot be written.
    """
    began = time.perf_counter()
    store = store_of(job)
    message = ""
    for _ in range(job.tries):
        try:
            results = compute(store.sweep, store.sweep.cell(index), threads=job.threads)
            row = store.done(results, time.perf_counter() - began)
        except InputError as error:  # the same again
            message = str(error)
            break
        except Exception as error:  # noqa: BLE001  # whatever it is, the other cells go on
            message = f"{type(error).__name__}: {error}"
            continue
        save(partial(store.write, index, row))
        return Finished(index, DONE, time.perf_counter() - began)
    return given_up(store, index, message, time.perf_counter() - began)


def given_up(store: Store, index: Index, message: str, seconds: float = 0.0) -> Finished:
    """A cell that has failed, and is written down as such."""
    save(partial(store.write, index, store.failed(message)))
    return Finished(index, FAILED, seconds, message)


def save(write: Callable[[], None]) -> None:
    """Write, or say why the store cannot be written."""
    try:
        write()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        place = f" ({error.filename})" if error.filename else ""  # a full disk does not say for which file
        raise StoreError(f"{reason}{place}") from error
