"""The work of a worker, in this process or elsewhere: compute cells of a store and write them."""

import hashlib
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from limitformer.base.errors import InputError
from limitformer.models.frozen import functions_of
from limitformer.sweep.cells import DONE, FAILED
from limitformer.sweep.describe import compute
from limitformer.sweep.files import read_regular
from limitformer.sweep.grid import Index
from limitformer.sweep.opening import check_code, open_store
from limitformer.sweep.store import DESCRIPTION, LARGEST_DESCRIPTION, Store


class StoreError(Exception):
    """The store cannot be written; the sweep ends and finished cells stay."""


@dataclass(frozen=True)
class Finished:
    """The end of a cell: DONE, or FAILED with a message."""

    index: Index
    status: int
    message: str = ""


@dataclass(frozen=True)
class Job:
    """The task of all workers of a run.

    Attributes:
        path: the store.
        stamp: a hash of the description, which changes when the store is extended: workers then open it again.
        functions: names and hashes of the user functions in the model, as they were when the parts were made.
        threads: threads of the worker.
        tries: how often a cell is tried.
        any_version: whether the worker's code may differ from that of the store's other cells.
    """

    path: str
    stamp: str
    functions: tuple[tuple[str, str], ...]
    threads: int
    tries: int
    any_version: bool


Results = Generator[Finished, None, None]
Engine = Callable[[Job, Sequence[Index]], Results]


def job_of(store: Store, *, threads: int, tries: int, any_version: bool) -> Job:
    description = read_regular(store.path / DESCRIPTION, LARGEST_DESCRIPTION) or b""  # a read-only store may have none
    stamp = hashlib.sha256(description).hexdigest()
    return Job(os.path.abspath(store.path), stamp, functions_of(store.sweep.base), threads, tries, any_version)


@lru_cache(maxsize=1)
def store_at(path: str, stamp: str, functions: tuple[tuple[str, str], ...], any_version: bool) -> Store:
    """Open the store, once in each worker.

    Raises:
        StoreError: the worker's code is none of the store's, or its user functions differ from those of the sweep.
    """
    try:
        store = open_store(Path(path), imports=True)  # a user runs it here, so it is trusted
        check_code(store.path, store.codes.values(), any_version)
    except InputError as error:
        raise StoreError(str(error)) from error
    for (name, digest), (_, here) in zip(functions, functions_of(store.sweep.base), strict=True):
        if digest != here:
            raise StoreError(
                f"{name} has other code, or reads other values, in a worker than when the part was made. "
                "Nearest: constants in its module that nothing changes"
            )
    return store


def store_of(job: Job) -> Store:
    return store_at(job.path, job.stamp, job.functions, job.any_version)


def run_cell(job: Job, index: Index) -> Finished:
    """Compute a cell and write it; a cell that fails is tried again, then recorded with its error.

    Raises:
        StoreError: the store cannot be written.
    """
    began = time.perf_counter()
    store = store_of(job)
    message = ""
    for _ in range(job.tries):
        try:
            results = compute(store.sweep, store.sweep.cell(index), threads=job.threads)
            seconds = time.perf_counter() - began
            file = store.done(index, results, seconds)
        except InputError as error:  # the next try would give the same
            message = str(error)
            break
        except Exception as error:  # noqa: BLE001  # other cells may still succeed
            message = f"{type(error).__name__}: {error}"
            continue
        save(store, index, file, seconds)
        return Finished(index, DONE)
    return record_failure(store, index, message)


def record_failure(store: Store, index: Index, message: str) -> Finished:
    save(store, index, store.failed(index, message), 0.0)
    return Finished(index, FAILED, message)


def save(store: Store, index: Index, file: bytes, seconds: float) -> None:
    """Write the file of a cell; raise `StoreError` with the reason if the store cannot be written."""
    try:
        store.write(index, file, seconds)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        name = error.filename2 or error.filename  # of a rename, the target
        place = f" ({name})" if name else ""  # a full disk does not name the file
        raise StoreError(f"{reason}{place}") from error
