r"""Cells on a Dask cluster: on this machine, at an address, or made of SLURM jobs.

Workers write their cells into the store themselves, so they must see its folder; this is tried before any work. Dask
distributes batches and replaces workers that die. This module submits the cells of a lost batch again.
"""

import asyncio
import shutil
import signal
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from limitformer.base.errors import InputError, MissingExtraError, first_line, require
from limitformer.base.progress import notice_if_slow
from limitformer.sweep.files import CELLS, UNFINISHED
from limitformer.sweep.grid import Index
from limitformer.sweep.work import Finished, Job, Results, record_failure, run_cell, store_of

BATCHES_PER_WORKER = 8
LARGEST_BATCH = 64
CONNECT_SECONDS = 10
LOST_SECONDS = 3600
LOST_ALONE = 1  # times that Dask gives up a batch of one cell, each time after four workers, before it has failed


def distributed() -> Any:
    """Import the package, or raise `MissingExtraError`."""
    try:
        import distributed as package
    except ImportError as error:
        raise MissingExtraError("distributed", "cluster") from error
    return package


@contextmanager
def connected(cluster: Any) -> Iterator[Any]:
    """Yield a client of the cluster: a `Client` is used directly, one for an address is closed at the end.

    Raises:
        InputError: no scheduler answers at the address.
    """
    package = distributed()
    if isinstance(cluster, package.Client):
        yield cluster
        return
    try:
        package.comm.get_address_host_port(cluster)  # a client of an invalid address never ends
        ask_scheduler(package, cluster)
        client = package.Client(cluster, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError, TypeError) as error:
        raise InputError(f"No Dask scheduler answers at {cluster}: {first_line(error).rstrip('.')}.") from error
    with client:
        yield client


def ask_scheduler(package: Any, address: str) -> None:
    """Request the identity of the scheduler; a client would wait forever for one that accepts and does not answer.

    Raises:
        OSError: there is none, or it does not answer in time.
    """

    async def ask() -> None:
        async with package.rpc(address, connection_args=package.Security().get_connection_args("client")) as scheduler:
            await scheduler.identity(n_workers=0)

    async def in_time() -> None:
        try:
            await asyncio.wait_for(ask(), CONNECT_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(f"no answer in {CONNECT_SECONDS:g} s") from error

    with ThreadPoolExecutor(1) as pool:  # a notebook already runs a loop in this thread
        pool.submit(asyncio.run, in_time()).result()


def local_cluster(workers: int) -> Any:
    """Start a cluster of processes on this machine; a process that dies is replaced, on a slow machine too."""
    import dask

    dask.config.set({"distributed.deploy.lost-worker-timeout": LOST_SECONDS})  # by default none is replaced after 15 s
    loopback = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}  # the default is port 8787, open to all
    return distributed().LocalCluster(n_workers=workers, threads_per_worker=1, processes=True, **loopback)


def slurm_cluster(jobs: int, cores: int, memory: str, walltime: str, queue: str | None = None) -> Any:
    """Start a cluster of SLURM jobs, each with `cores` single-threaded workers."""
    before = signal.getsignal(signal.SIGINT)
    try:
        from dask_jobqueue.slurm import SLURMCluster
    except ImportError as error:
        raise MissingExtraError("dask-jobqueue", "cluster") from error
    finally:
        signal.signal(signal.SIGINT, before)  # the import of the package changes the handler of Ctrl-C
    require(
        shutil.which("sbatch") is not None, "There is no sbatch here. Nearest: run on a machine of the SLURM cluster."
    )
    options: dict[str, Any] = {} if queue is None else {"queue": queue}
    cluster = SLURMCluster(cores=cores, processes=cores, memory=memory, walltime=walltime, **options)
    cluster.scale(jobs=jobs)
    with notice_if_slow("Waiting for the first SLURM job"):
        cluster.wait_for_workers(1)  # a job may be in the queue for hours
    return cluster


def run_batch(job: Job, cells: list[Index]) -> list[Finished]:
    """Run these cells one after the other, on a worker."""
    return [run_cell(job, index) for index in cells]


def sees(path: str, word: str) -> bool:
    """Whether a worker sees the file `word` of the store."""
    return (Path(path) / word).exists()


def check_shared(client: Any, path: Path) -> None:
    """Raise `InputError` unless the workers see the store's folder."""
    word = f"{CELLS}/seen-{uuid.uuid4().hex}{UNFINISHED}"  # after a kill here, the next run removes it
    (path / word).touch()
    try:
        seen = client.submit(sees, str(path.resolve()), word, pure=False).result(timeout=10 * CONNECT_SECONDS)
    except TimeoutError as error:
        raise InputError(f"The scheduler at {client.scheduler.address} has no worker that answers.") from error
    finally:
        (path / word).unlink(missing_ok=True)
    require(seen, f"The cluster's workers do not see {path.resolve()}; the store must lie on a disk that they share.")


def on_cluster(job: Job, cells: Sequence[Index], *, client: Any) -> Results:
    """Yield the cells as they end on a Dask cluster."""
    check_shared(client, Path(job.path))
    yield from results_of(distributed(), client, replace(job, threads=1), cells)


def results_of(package: Any, client: Any, job: Job, cells: Sequence[Index]) -> Results:
    """Submit batches and collect them; if workers died, submit the cells of the batch again, one at a time.

    Dask counts a death against all cells of a batch; a cell that is submitted alone shows whether it is the cause.
    """
    suspects: deque[Index] = deque()
    deaths: dict[Index, int] = {}

    def submit(batch: list[Index]) -> Any:
        future = client.submit(run_batch, job, batch, pure=False)
        batches[future] = batch
        return future

    batches: dict[Any, list[Index]] = {}
    arriving = package.as_completed(map(submit, batches_of(cells, len(client.ncores()))), loop=client.loop)
    try:
        for future in arriving:
            batch = batches.pop(future)
            try:
                yield from future.result()
            except package.KilledWorker as error:
                for cell in batch:
                    deaths[cell] = deaths.get(cell, -1) + 1  # the first death does not count: the cell was in a batch
                if deaths[batch[0]] < LOST_ALONE:
                    suspects.extend(batch)
                else:
                    yield record_failure(store_of(job), batch[0], f"workers died in this cell: {first_line(error)}")
            except package.CancelledError as error:
                reason = first_line(error).rstrip(".")
                raise InputError(
                    f"The cluster has cancelled the work ({reason}). What is finished stays; start it again."
                ) from error
            if not batches and suspects:
                arriving.add(submit([suspects.popleft()]))
    finally:
        client.cancel(list(batches), force=True)


def batches_of(cells: Sequence[Index], workers: int) -> list[list[Index]]:
    """Return the cells in batches: several for each worker, each of at most `LARGEST_BATCH`."""
    size = min(LARGEST_BATCH, max(1, len(cells) // (BATCHES_PER_WORKER * max(workers, 1))))
    return [list(cells[k : k + size]) for k in range(0, len(cells), size)]
