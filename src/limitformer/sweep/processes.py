"""Cells in this process, or on several processes of this machine (`base/pool.py`)."""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

from limitformer.base.pool import LostTask, Pool, StopRequested
from limitformer.sweep.grid import Index
from limitformer.sweep.work import Finished, Job, Results, StoreError, record_failure, run_cell, store_of

PATIENCE = 3  # deaths in a cell beyond its tries: a worker may be killed at random, through no fault of the cell


def begin(job: Job, place: int, asked: StopRequested) -> Callable[[Index], Finished | StoreError]:
    """Return the function with which a worker runs a cell."""
    return partial(attempt, job)


def attempt(job: Job, index: Index) -> Finished | StoreError:
    """Run a cell, and return a `StoreError` instead of raising it: it must reach the parent."""
    try:
        return run_cell(job, index)
    except StoreError as error:
        return error


def pool_of(job: Job, workers: int) -> Pool[Index, Finished | StoreError]:
    return Pool(partial(begin, job), workers, patience=PATIENCE + job.tries, caller="run_sweep")


def on_processes(job: Job, cells: Sequence[Index], *, workers: int) -> Results:
    """Yield the cells as they end on `workers` processes."""
    with closing(pool_of(job, workers).outcomes(cells)) as outcomes:
        for index, outcome in outcomes:
            if isinstance(outcome, StoreError):
                raise outcome
            if isinstance(outcome, LostTask):
                outcome = record_failure(store_of(job), index, outcome.within("cell"))
            yield outcome


def in_this_process(job: Job, cells: Sequence[Index]) -> Results:
    """Yield the cells as they end in this process."""
    for index in cells:
        yield run_cell(job, index)
