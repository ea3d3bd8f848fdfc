"""Cells in this process, or on several of this machine (`base/pool.py`)."""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

from limitformer.base.pool import LostTask, Pool, StopRequested
from limitformer.sweep.layout import Index
from limitformer.sweep.work import Finished, Job, Results, StoreError, given_up, run_cell, store_of

PATIENCE = 3  # deaths, beyond the tries of a cell: it is not the cell's fault if somebody kills workers at random


def begin(job: Job, place: int, asked: StopRequested) -> Callable[[Index], Finished | StoreError]:
    """What a worker does with a cell."""
    return partial(attempt, job)


def attempt(job: Job, index: Index) -> Finished | StoreError:
    """The cell, or why nothing can be written."""
    try:
        return run_cell(job, index)
    except StoreError as error:
        return error


def pool_of(job: Job, workers: int) -> Pool[Index, Finished | StoreError]:
    """Processes for the cells of a job."""
    return Pool(partial(begin, job), workers, patience=PATIENCE + job.tries, caller="run_sweep")


def on_processes(job: Job, cells: Sequence[Index], *, workers: int) -> Results:
    """What becomes of the cells on so many processes."""
    with closing(pool_of(job, workers).outcomes(cells)) as outcomes:
        for index, found in outcomes:
            if isinstance(found, StoreError):
                raise found
            yield given_up(store_of(job), index, found.within("cell")) if isinstance(found, LostTask) else found


def in_this_process(job: Job, cells: Sequence[Index]) -> Results:
    """The same, without other processes."""
    for index in cells:
        yield run_cell(job, index)
