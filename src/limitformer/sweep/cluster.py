r"""Cells on a Dask cluster: one on this machine, one at an address, or one of SLURM jobs.

Workers write their cells into the store themselves, so they must see its folder; that is tried before any work.
Dask hands out batches, replaces workers that die, and this module hands the cells of a lost batch out again.
"""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from limitformer.errors import InputError, MissingExtraError, require
from limitformer.sweep.chunks import UNFINISHED
from limitformer.sweep.store import FAILED, Index, open_store
from limitformer.sweep.work import Finished, StoreError, run_cell, save, stamp_of

BATCHES_PER_WORKER = 8
LARGEST_BATCH = 64
CONNECT_SECONDS = 10
LOST_BATCHES = 3  # with the same first cell, before it is given up; Dask itself tries a batch on four workers


def distributed() -> Any:
    """The package, or the extra that has it."""
    try:
        import dask.distributed as package
    except ImportError as error:
        raise MissingExtraError("dask.distributed", "cluster") from error
    return package


@contextmanager
def connected(cluster: Any) -> Iterator[Any]:
    """A client of the cluster: a `Client` as it is, or one at an address, closed at the end.

    Raises:
        InputError: nobody answers there.
    """
    package = distributed()
    if isinstance(cluster, package.Client):
        yield cluster
        return
    try:
        client = package.Client(cluster, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise InputError(f"No Dask scheduler answers at {cluster}: {first_line(error)}.") from error
    with client:
        yield client


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
    word = f".seen-{uuid.uuid4().hex}{UNFINISHED}"  # if we are killed here, the next run removes it
    (path / word).touch()
    try:
        seen = client.submit(sees, str(path.resolve()), word, pure=False).result(timeout=10 * CONNECT_SECONDS)
    except TimeoutError as error:
        raise InputError(f"The scheduler at {client.scheduler.address} has no worker that answers.") from error
    finally:
        (path / word).unlink(missing_ok=True)
    require(seen, f"The cluster's workers do not see {path.resolve()}; the store must lie on a disk that they share.")


def on_cluster(path: Path, cells: Sequence[Index], *, client: Any, tries: int) -> Iterator[Finished]:
    """What becomes of the cells on a Dask cluster."""
    check_shared(client, path)
    yield from collected(distributed(), client, path, cells, tries)


def collected(package: Any, client: Any, path: Path, cells: Sequence[Index], tries: int) -> Iterator[Finished]:
    """Hand out batches and collect them, those of lost workers again."""
    stamp = stamp_of(path)
    lost: dict[Index, int] = {}

    def submit(batch: list[Index]) -> Any:
        return client.submit(run_batch, str(path.resolve()), stamp, batch, tries, pure=False)

    batches = {submit(batch): batch for batch in batches_of(cells, len(client.ncores()))}
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
                if len(batch) == 1 and lost[batch[0]] >= LOST_BATCHES:
                    yield given_up(path, batch[0], first_line(error))
                    continue
                for cell in batch:  # one by one, so that a cell that kills its worker takes no other along
                    again = submit([cell])
                    batches[again] = [cell]
                    arriving.add(again)
    finally:
        client.cancel(list(batches), force=True)


def given_up(path: Path, cell: Index, reason: str) -> Finished:
    """A cell on which worker after worker dies, written down as failed."""
    message = f"the cluster lost this cell {LOST_BATCHES} times: {reason}"
    save(lambda: open_store(path).fail(cell, message))
    return Finished(cell, FAILED, 0.0, message)


def batches_of(cells: Sequence[Index], workers: int) -> list[list[Index]]:
    """The cells in batches: several for each worker, none too large."""
    size = min(LARGEST_BATCH, max(1, len(cells) // (BATCHES_PER_WORKER * max(workers, 1))))
    return [list(cells[k : k + size]) for k in range(0, len(cells), size)]
