r"""Cells on a Dask cluster: one on this machine, one at an address, or one of SLURM jobs.

Workers write their cells into the store themselves, so they must see its folder; that is tried before any work.
Dask hands out batches, replaces workers that die, and this module hands the cells of a lost batch out again.
"""

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from limitformer.errors import InputError, MissingExtraError, require
from limitformer.sweep.store import Index
from limitformer.sweep.work import Finished, StoreError, run_cell, stamp_of

BATCHES_PER_WORKER = 8
LARGEST_BATCH = 64
CONNECT_SECONDS = 10
LOST_BATCHES = 5  # of one batch, before the sweep gives up


def distributed() -> Any:
    """The package, or the extra that has it."""
    try:
        import dask.distributed as package
    except ImportError as error:
        raise MissingExtraError("dask.distributed", "cluster") from error
    return package


def connected(cluster: Any) -> Any:
    """A client of the cluster: a `Client` as it is, or one at an address.

    Raises:
        InputError: nobody answers there.
    """
    package = distributed()
    if isinstance(cluster, package.Client):
        return cluster
    try:
        return package.Client(cluster, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise InputError(f"No Dask scheduler answers at {cluster}: {first_line(error)}.") from error


def first_line(error: Exception) -> str:
    """What is wrong, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def local_cluster(workers: int) -> Any:
    """A cluster of processes on this machine."""
    return distributed().LocalCluster(
        n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
    )


def slurm_cluster(jobs: int, cores: int, memory: str, walltime: str, queue: str | None = None) -> Any:
    """A cluster of SLURM jobs, each with so many single-threaded workers."""
    try:
        from dask_jobqueue.slurm import SLURMCluster
    except ImportError as error:
        raise MissingExtraError("dask-jobqueue", "cluster") from error
    options: dict[str, Any] = {} if queue is None else {"queue": queue}
    made = SLURMCluster(cores=cores, processes=cores, memory=memory, walltime=walltime, **options)
    made.scale(jobs=jobs)
    return made


def run_batch(path: str, stamp: int, cells: list[Index], tries: int) -> list[Finished]:
    """On a worker: these cells, one after the other."""
    return [run_cell(path, stamp, index, 1, tries) for index in cells]


def sees(path: str, word: str) -> bool:
    """On a worker: whether the store that it sees is ours."""
    return (Path(path) / word).exists()


def check_shared(client: Any, path: Path) -> None:
    """Raise `InputError` unless the workers see the store's folder."""
    word = f".seen-{uuid.uuid4().hex}"
    (path / word).touch()
    try:
        seen = client.submit(sees, str(path.resolve()), word, pure=False).result(timeout=10 * CONNECT_SECONDS)
    except TimeoutError as error:
        raise InputError(f"The scheduler at {client.scheduler.address} has no worker that answers.") from error
    finally:
        (path / word).unlink(missing_ok=True)
    require(seen, f"The cluster's workers do not see {path.resolve()}; the store must lie on a disk that they share.")


def on_cluster(path: Path, cells: Sequence[Index], *, client: Any, ours: bool, tries: int) -> Iterator[Finished]:
    """What becomes of the cells on a Dask cluster; a client that is `ours` is closed at the end."""
    try:
        check_shared(client, path)
        yield from collected(distributed(), client, path, cells, tries)
    finally:
        if ours:
            client.close()


def collected(package: Any, client: Any, path: Path, cells: Sequence[Index], tries: int) -> Iterator[Finished]:
    """Hand out batches and collect them, those of lost workers again."""
    stamp = stamp_of(path)
    lost: dict[Index, int] = {}

    def submit(batch: list[Index]) -> Any:
        return client.submit(run_batch, str(path.resolve()), stamp, batch, tries, pure=False)

    batches = {submit(batch): batch for batch in batches_of(cells, len(client.scheduler_info()["workers"]))}
    arriving = package.as_completed(list(batches), loop=client.loop)
    try:
        for future in arriving:
            batch = batches.pop(future)
            try:
                yield from future.result()
            except StoreError:
                raise
            except (package.KilledWorker, package.CancelledError) as error:
                lost[batch[0]] = lost.get(batch[0], 0) + 1
                if lost[batch[0]] >= LOST_BATCHES:
                    raise InputError(
                        f"The cluster lost the same cells {LOST_BATCHES} times: {first_line(error)}."
                    ) from error
                again = submit(batch)
                batches[again] = batch
                arriving.add(again)
    finally:
        client.cancel(list(batches), force=True)


def batches_of(cells: Sequence[Index], workers: int) -> list[list[Index]]:
    """The cells in batches: several for each worker, none too large."""
    size = min(LARGEST_BATCH, max(1, len(cells) // (BATCHES_PER_WORKER * max(workers, 1))))
    return [list(cells[k : k + size]) for k in range(0, len(cells), size)]
