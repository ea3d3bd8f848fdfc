"""Many runs of an experiment, one after the other or on several processes; each goes on where it stopped.

A run that fails does not end the others: its error is its outcome. On processes (`base/pool.py`) runs are tasks that
save: a run stops at its next step, with a checkpoint, when its parent hears Ctrl-C, or is gone.
"""

import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

import datasets
import torch
from transformers.utils import logging

from limitformer.base import progress
from limitformer.base.errors import InputError, MissingExtraError, require, require_count
from limitformer.base.pool import LostTask, Pool, StopRequested
from limitformer_papers.training.interrupts import TrainingInterrupted, obey
from limitformer_papers.training.plan import processes

Run = TypeVar("Run")
Summary = Mapping[str, float]
Told = Summary | InputError | TrainingInterrupted  # by a worker
DEVICES = "CUDA_VISIBLE_DEVICES"


class GridInterrupted(KeyboardInterrupt):
    """Ctrl-C during a grid; what was done is in checkpoints."""

    resumes = True


def run_all(
    runs: Sequence[Run], function: Callable[[Run], Summary], *, workers: int = 1
) -> Iterator[tuple[Run, Summary | InputError]]:
    """(run, function(run)) of each, as they end; of a run that fails or whose worker is killed, (run, error).

    Several processes of one run (torchrun) must stay in step: there, the first failure ends all.

    Args:
        runs: what `function` takes; both go to other processes by pickle.
        function: makes one run.
        workers: processes; with 1, this one does it. Of several GPUs, each worker has its own, in turn.

    Raises:
        InputError: several workers within several processes of one run.
        TrainingInterrupted, GridInterrupted: Ctrl-C; what was done is saved.
    """
    workers = require_count("workers", workers)
    require(workers == 1 or processes() == 1, "With torchrun each run has all processes; workers must be 1.")
    if min(workers, len(runs)) <= 1:
        yield from one_by_one(runs, function)
    else:
        yield from on_processes(runs, function, workers)


def one_by_one(runs: Sequence[Run], function: Callable[[Run], Summary]) -> Iterator[tuple[Run, Summary | InputError]]:
    """All runs, in this process."""
    for run in runs:
        try:
            outcome = function(run) if processes() > 1 else outcome_of(function, run)
        except TrainingInterrupted:
            raise
        except KeyboardInterrupt as error:
            line = "Interrupted at once; what was saved before stays. Start it again to go on."
            raise GridInterrupted(line) from error
        yield run, outcome


def outcome_of(function: Callable[[Run], Summary], run: Run) -> Summary | InputError:
    """The summary of a run, or why there is none; an error that nobody foresaw shows where it came from."""
    try:
        return function(run)
    except (InputError, MissingExtraError) as error:
        return InputError(str(error))
    except Exception as error:  # noqa: BLE001 (a night's grid must not end with one run)
        traceback.print_exc()
        return InputError(f"{type(error).__name__}: {' '.join(str(error).split())}")


def on_processes(
    runs: Sequence[Run], function: Callable[[Run], Summary], workers: int
) -> Iterator[tuple[Run, Summary | InputError]]:
    """All runs, so many at a time."""
    pool = Pool[Run, Told](partial(begin, function, gpus()), workers, caller="run_all", saves=True)
    saved = lost = 0
    with closing(pool.outcomes(runs)) as outcomes:
        for run, found in outcomes:
            if isinstance(found, TrainingInterrupted):
                saved += 1
            elif isinstance(found, LostTask) and pool.interrupts > 1:
                lost += 1
            elif isinstance(found, LostTask):
                line = f"{found.within('run')}. Started again, it goes on from its last checkpoint."
                yield run, InputError(line[0].upper() + line[1:])
            else:
                yield run, found
    if pool.interrupts:
        raise GridInterrupted(account(saved, lost, len(pool.pending)))


def begin(
    function: Callable[[Run], Summary], devices: Sequence[str], place: int, asked: StopRequested
) -> Callable[[Run], Told]:
    """What a worker does with a run. It has its GPU and shows no bars, but what else it says is seen."""
    obey(asked)
    if devices:
        os.environ[DEVICES] = devices[place % len(devices)]
    progress.hide()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    return partial(reply_to, function)


def reply_to(function: Callable[[Any], Summary], run: Any) -> Told:
    """The outcome of a run, or that it was stopped and saved."""
    try:
        return outcome_of(function, run)
    except TrainingInterrupted as stopped:
        return stopped


def gpus() -> list[str]:
    """The GPUs that are to be used, by the names that CUDA has for them; [] if there are none."""
    given = os.environ.get(DEVICES)
    if given is not None:
        return [name for name in given.split(",") if name]
    return [str(k) for k in range(torch.cuda.device_count())]


def account(saved: int, lost: int, waiting: int) -> str:
    """What Ctrl-C has left: runs that stopped at a step, that it ended at once, and that nobody had."""
    parts = [
        f"{saved} stopped and saved" if saved else "",
        f"{lost} ended at once, which go on from their last checkpoints" if lost else "",
        f"{waiting} not begun" if waiting else "",
    ]
    told = ", ".join(part for part in parts if part)
    return f"Interrupted{f'; runs: {told}' if told else ''}. Start it again to go on."
