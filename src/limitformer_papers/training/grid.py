"""Run an experiment many times, sequentially or on several processes; each run resumes where it stopped.

A run that fails does not end the others: its error is its outcome. On processes (`pool.py`) runs are tasks that
save: on Ctrl-C, or when the parent process ends, a run stops at its next step with a checkpoint. When a time budget
(`interrupts.within`) is spent, runs do the same, and no other run begins.
"""

import os
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

import datasets
import torch
from transformers.utils import logging

from limitformer.base import progress
from limitformer.base.errors import InputError, MissingExtraError, require, require_count, unusable
from limitformer_papers.training.evaluation import collected
from limitformer_papers.training.interrupts import BUDGETS, UNFINISHED, Budget, TrainingInterrupted, obey, time_is_up
from limitformer_papers.training.plan import processes
from limitformer_papers.training.pool import LostTask, Pool, StopRequested

Run = TypeVar("Run")
Summary = Mapping[str, float]
Outcomes = Generator[tuple[Run, Summary | InputError], None, None]
Reply = Summary | InputError | TrainingInterrupted | None  # sent by a worker; None: its time was up before the run
DEVICES = "CUDA_VISIBLE_DEVICES"


class GridInterrupted(KeyboardInterrupt):
    """Ctrl-C during a grid, or the end of its time budget; finished steps are in checkpoints."""

    resumes = True
    exit_code: int | None = None  # that of Ctrl-C


def run_all(
    runs: Sequence[Run], function: Callable[[Run], Summary], *, workers: int = 1
) -> Iterator[tuple[Run, Summary | InputError]]:
    """Yield (run, function(run)) of each run as it ends, or (run, error) if it fails or its worker is killed.

    The traceback of an unexpected error is printed once, however many runs it ends.
    The processes of one run (torchrun) must stay in step, so the first failure ends all.

    Args:
        runs: arguments of `function`; both are pickled for other processes.
        function: computes one run.
        workers: number of processes; 1 is this one. Workers take the GPUs in turn.

    Raises:
        InputError: several workers within several processes of one run.
        TrainingInterrupted, GridInterrupted: Ctrl-C, or a time budget is spent; finished steps are saved.
    """
    workers = require_count("workers", workers)
    require(workers == 1 or processes() == 1, "With torchrun each run has all processes; workers must be 1.")
    alone = min(workers, len(runs)) <= 1
    printed: set[str] = set()
    with closing(one_by_one(runs, function) if alone else on_processes(runs, function, workers)) as outcomes:
        for run, outcome in outcomes:
            for text in set(getattr(outcome, "__notes__", ())) - printed:
                printed.add(text)
                sys.stderr.write(text)
            yield run, outcome


def one_by_one(runs: Sequence[Run], function: Callable[[Run], Summary]) -> Outcomes[Run]:
    for number, run in enumerate(runs):
        if begins_no_run():
            raise out_of_time(0, len(runs) - number)
        try:
            outcome = function(run) if processes() > 1 else outcome_of(function, run)
        except TrainingInterrupted:
            raise
        except KeyboardInterrupt as error:
            line = "Interrupted at once; earlier checkpoints stay. Start it again to resume."
            raise GridInterrupted(line) from error
        yield run, outcome


def begins_no_run() -> bool:
    """Return whether the time budget of this process, or of another one of the same run, is spent.

    The processes of torchrun can ask one another only after their first run has begun; it stops after a step.
    """
    alone = processes() == 1
    return any(collected([time_is_up()])) and (alone or torch.distributed.is_initialized())


def out_of_time(saved: int, waiting: int) -> GridInterrupted:
    """Return the exception of a grid whose time budget is spent."""
    ended = GridInterrupted(account(saved, 0, waiting, f"The {BUDGETS[0].minutes:g} min are over"))
    ended.exit_code = UNFINISHED
    return ended


def outcome_of(function: Callable[[Run], Summary], run: Run) -> Summary | InputError:
    """Return the summary of a run, or its error; an unexpected one has its traceback as a note."""
    try:
        return function(run)
    except (InputError, MissingExtraError) as error:
        return InputError(str(error))
    except Exception as error:  # noqa: BLE001 (one run must not end a whole grid)
        if isinstance(error, OSError) and error.filename is not None:
            return InputError(unusable(error))
        failure = InputError(f"{type(error).__name__}: {' '.join(str(error).split())}")
        failure.add_note(traceback.format_exc())
        return failure


def on_processes(runs: Sequence[Run], function: Callable[[Run], Summary], workers: int) -> Outcomes[Run]:
    """Yield the outcomes of all runs, `workers` at a time."""
    pool = Pool[Run, Reply](partial(begin, function, gpus(), budgets=tuple(BUDGETS)), workers, caller="run_all")
    saved = lost = unbegun = 0
    with closing(pool.outcomes(runs)) as outcomes:
        for run, outcome in outcomes:
            if isinstance(outcome, TrainingInterrupted):
                saved += 1
            elif outcome is None:
                unbegun += 1
            elif isinstance(outcome, LostTask) and pool.interrupts > 1:
                lost += 1
            elif isinstance(outcome, LostTask):
                line = f"{outcome.within('run')}. Started again, it resumes from its last checkpoint."
                yield run, InputError(line[0].upper() + line[1:])
            else:
                yield run, outcome
    if pool.interrupts:
        raise GridInterrupted(account(saved, lost, len(pool.pending) + unbegun))
    if saved or unbegun:
        raise out_of_time(saved, unbegun)


def begin(
    function: Callable[[Run], Summary],
    devices: Sequence[str],
    place: int,
    asked: StopRequested,
    *,
    budgets: Sequence[Budget] = (),
) -> Callable[[Run], Reply]:
    """Set a worker up and return its task: it has its own GPU, no progress bars, and prints its other messages."""
    obey(asked)
    BUDGETS[:] = budgets
    if devices:
        os.environ[DEVICES] = devices[place % len(devices)]
    progress.hide()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    return partial(reply_to, function)


def reply_to(function: Callable[[Any], Summary], run: Any) -> Reply:
    """Return the outcome of a run, the exception with which it stopped and saved, or None if the time was up."""
    try:
        return None if time_is_up() else outcome_of(function, run)
    except TrainingInterrupted as stopped:
        return stopped


def gpus() -> list[str]:
    """Return the names of the GPUs that CUDA may use; [] without any."""
    names = os.environ.get(DEVICES)
    if names is not None:
        return [name for name in names.split(",") if name]
    return [str(k) for k in range(torch.cuda.device_count())]


def account(saved: int, lost: int, waiting: int, why: str = "Interrupted") -> str:
    """Return the message at an early end: numbers of runs that were saved, ended at once, or not begun."""
    parts = [
        f"{saved} stopped and saved" if saved else "",
        f"{lost} ended at once, which resume from their last checkpoints" if lost else "",
        f"{waiting} not begun" if waiting else "",
    ]
    numbers = ", ".join(part for part in parts if part)
    return f"{why}{f'; runs: {numbers}' if numbers else ''}. Start it again to resume."
