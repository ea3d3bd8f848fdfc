"""Run an experiment many times, one run after another or several at a time; each run resumes where it stopped.

A run that fails does not end the others: its error is its outcome. With several workers each run has a process and a
pipe of its own, so that the death of one affects only its own run. Processes ignore Ctrl-C; a run stops at its next
step with a checkpoint when its pipe has a message or is closed, which also happens when the parent process ends. When a
time budget (`interrupts.within`) is spent, runs do the same, and no other run begins.
"""

import multiprocessing
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

import datasets
import torch
from transformers.utils import logging

from limitformer.base import progress
from limitformer.base.errors import InputError, MissingExtraError, require_count, unusable
from limitformer.base.interrupts import interrupts_wait, route_interrupts, write_notice
from limitformer_papers.training.interrupts import BUDGETS, ORDERS, UNFINISHED, TrainingInterrupted, time_is_up

Run = TypeVar("Run")
Summary = Mapping[str, float]
Outcomes = Generator[tuple[Run, Summary | InputError], None, None]
DEVICES = "CUDA_VISIBLE_DEVICES"
# A new interpreter for each run: a fork of a process with threads may never wake up.
spawning: Any = multiprocessing.get_context("spawn")


class GridInterrupted(KeyboardInterrupt):
    """Ctrl-C during a grid, or the end of its time budget; finished steps are in checkpoints."""

    resumes = True
    exit_code: int | None = None  # that of Ctrl-C


def run_all(
    runs: Sequence[Run], function: Callable[[Run], Summary], *, workers: int = 1
) -> Iterator[tuple[Run, Summary | InputError]]:
    """Yield (run, function(run)) of each run as it ends, or (run, error) if it fails or its process is killed.

    The traceback of an unexpected error is printed once, however many runs it ends.

    Args:
        runs: arguments of `function`; both are pickled for other processes.
        function: computes one run.
        workers: number of runs at a time; 1 takes this process. Workers take the GPUs in turn.

    Raises:
        TrainingInterrupted, GridInterrupted: Ctrl-C, or a time budget is spent; finished steps are saved.
    """
    alone = min(require_count("workers", workers), len(runs)) <= 1
    printed: set[str] = set()
    with closing(one_by_one(runs, function) if alone else on_processes(runs, function, workers)) as outcomes:
        for run, outcome in outcomes:
            for text in set(getattr(outcome, "__notes__", ())) - printed:
                printed.add(text)
                sys.stderr.write(text)
            yield run, outcome


def one_by_one(runs: Sequence[Run], function: Callable[[Run], Summary]) -> Outcomes[Run]:
    for number, run in enumerate(runs):
        if time_is_up():
            raise out_of_time(0, len(runs) - number)
        try:
            outcome = outcome_of(function, run)
        except TrainingInterrupted:
            raise
        except KeyboardInterrupt as error:
            line = "Interrupted at once; earlier checkpoints stay. Start it again to resume."
            raise GridInterrupted(line) from error
        yield run, outcome


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


class Working(NamedTuple):
    """A run, its process, and the process's place among the workers."""

    run: Any
    process: Any
    place: int


def on_processes(runs: Sequence[Run], function: Callable[[Run], Summary], workers: int) -> Outcomes[Run]:
    """Yield the outcomes of all runs, each of a process of its own, `workers` at a time."""
    waiting, free, devices = deque(runs), list(range(workers)), gpus()
    working: dict[Any, Working] = {}  # by the end of the pipe
    presses: list[int] = []
    saved = lost = 0

    def stop(number: int, frame: Any) -> None:
        """Let all runs save and stop at the first Ctrl-C; terminate their processes at the second one."""
        presses.append(number)
        if len(presses) == 1:
            write_notice("Finishing the steps in work; Ctrl-C again to stop at once.")
        for connection, (_, process, _) in working.items():
            with suppress(OSError):  # it has just ended
                connection.send(None) if len(presses) == 1 else process.terminate()

    with route_interrupts(stop):
        try:
            while True:
                while waiting and free and not (presses or saved or time_is_up()):
                    with interrupts_wait():  # the process inherits this, so it ignores Ctrl-C from its start
                        run, place = waiting.popleft(), free.pop(0)
                        ours, theirs = spawning.Pipe()
                        device = devices[place % len(devices)] if devices else None
                        process = spawning.Process(target=work, args=(theirs, function, run, device, tuple(BUDGETS)))
                        process.start()
                        working[ours] = Working(run, process, place)
                    theirs.close()
                if not working:
                    break
                for connection in wait(list(working)):
                    outcome = received(connection, working[connection].process)
                    run, _, place = working.pop(connection)
                    free.append(place)
                    if isinstance(outcome, TrainingInterrupted):
                        saved += 1
                    elif isinstance(outcome, int) and len(presses) > 1:
                        lost += 1
                    else:
                        yield run, died(outcome) if isinstance(outcome, int) else outcome
        finally:
            for connection in working:
                connection.close()  # its run saves now
            for _, process, _ in working.values():
                process.join()
    if presses:
        raise GridInterrupted(account(saved, lost, len(waiting)))
    if saved or waiting:
        raise out_of_time(saved, len(waiting))


def received(connection: Any, process: Any) -> Summary | InputError | TrainingInterrupted | int:
    """Return the message of a process that ends, or its exit code if it has died."""
    try:
        outcome = connection.recv()
    except (EOFError, OSError):
        outcome = None
    process.join()
    return process.exitcode if outcome is None else outcome


def died(code: int) -> InputError:
    """Return the error of a run whose process has died."""
    how = f'exit code {code}; a script calls run_all below `if __name__ == "__main__":`'
    if code < 0:
        how = f"killed by {signal.Signals(-code).name}; out of memory? fewer workers need less"
    return InputError(f"The worker died in this run ({how}). Started again, it resumes from its last checkpoint.")


def work(
    connection: Connection, function: Callable[[Run], Summary], run: Run, device: str | None, budgets: Any
) -> None:
    """Make a run in a process of its own: it has its own GPU, no progress bars, and prints its other messages."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ORDERS[:] = [connection.poll]
    BUDGETS[:] = budgets
    if device is not None:
        os.environ[DEVICES] = device
    progress.hide()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    with suppress(OSError):  # the parent is gone
        try:
            connection.send(outcome_of(function, run))
        except TrainingInterrupted as stopped:
            connection.send(stopped)


def gpus() -> list[str]:
    """Return the names of the GPUs that CUDA may use; [] without any."""
    names = os.environ.get(DEVICES)
    if names is not None:
        return [name for name in names.split(",") if name]
    return [str(k) for k in range(torch.cuda.device_count())]


def out_of_time(saved: int, waiting: int) -> GridInterrupted:
    """Return the exception of a grid whose time budget is spent."""
    ended = GridInterrupted(account(saved, 0, waiting, f"The {BUDGETS[0].minutes:g} min are over"))
    ended.exit_code = UNFINISHED
    return ended


def account(saved: int, lost: int, waiting: int, why: str = "Interrupted") -> str:
    """Return the message at an early end: numbers of runs that were saved, ended at once, or not begun."""
    parts = [
        f"{saved} stopped and saved" if saved else "",
        f"{lost} ended at once, which resume from their last checkpoints" if lost else "",
        f"{waiting} not begun" if waiting else "",
    ]
    numbers = ", ".join(part for part in parts if part)
    return f"{why}{f'; runs: {numbers}' if numbers else ''}. Start it again to resume."
