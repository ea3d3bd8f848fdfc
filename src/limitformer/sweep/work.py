"""What a worker does, wherever it runs: compute cells of a store and write them down."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from limitformer.errors import InputError
from limitformer.sweep.describe import compute
from limitformer.sweep.store import DONE, FAILED, Index, Store, attributes, check_code, open_store


class StoreError(Exception):
    """The store cannot be written; the sweep ends, and what is written stays."""


@dataclass(frozen=True)
class Finished:
    """What became of a cell."""

    index: Index
    status: int
    seconds: float
    message: str = ""


@cache
def store_at(path: str, stamp: int) -> Store:
    """The store, opened once by each worker; `stamp` changes when the store is extended.

    Raises:
        StoreError: the worker's code is not that which began or went on with the store.
    """
    try:
        check_code(Path(path), attributes(Path(path)), any_version=False)
    except InputError as error:
        raise StoreError(str(error)) from error
    return open_store(Path(path))


def stamp_of(path: Path) -> int:
    """When the store's metadata was written."""
    return (path / "zarr.json").stat().st_mtime_ns


def run_cell(path: str, stamp: int, index: Index, threads: int, tries: int) -> Finished:
    """Compute a cell and write it; a failure is tried again, then written down as well.

    Raises:
        StoreError: the store cannot be written.
    """
    began = time.perf_counter()
    store = store_at(path, stamp)
    message = ""
    for _ in range(tries):
        try:
            results = compute(store.sweep, store.sweep.cell(index), threads=threads)
        except InputError as error:  # the same again
            message = str(error)
            break
        except Exception as error:  # noqa: BLE001  # whatever it is, the other cells go on
            message = f"{type(error).__name__}: {error}"
            continue
        seconds = time.perf_counter() - began
        save(lambda results=results, seconds=seconds: store.write(index, results, seconds))  # type: ignore[misc]
        return Finished(index, DONE, seconds)
    save(lambda: store.fail(index, message))
    return Finished(index, FAILED, time.perf_counter() - began, message)


def save(write: Callable[[], None]) -> None:
    """Write, or say why the store cannot be written."""
    try:
        write()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        place = f" ({error.filename})" if error.filename else ""  # a full disk does not say for which file
        raise StoreError(f"{reason}{place}") from error
