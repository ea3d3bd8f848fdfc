"""Many runs of an experiment, one after the other or on several processes; each goes on where it stopped.

A run that fails does not end the others: its error is its outcome. Each worker has a pipe of its own. It gets its runs
through it, and stops its run at the next step, with a checkpoint, when anything else comes: the word of its parent that
heard Ctrl-C, or the end of the pipe, if the parent was killed.
"""

import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

import datasets
import torch
from transformers.utils import logging

from limitformer.base import progress
from limitformer.base.errors import InputError, MissingExtraError, require, require_count
from limitformer.sweep.processes import interrupts_wait
from limitformer.train.interrupts import TrainingInterrupted, obey, tell
from limitformer.train.plan import processes

Run = TypeVar("Run")
Summary = Mapping[str, float]
DEVICES = "CUDA_VISIBLE_DEVICES"
# A new interpreter for each worker: a fork of a process with threads may never wake up.
spawning: Any = get_context("spawn")


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
        return
    crew = Crew(runs, function)
    with crew.at_work(min(workers, len(runs))):
        yield from crew.outcomes()


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


def serve(connection: Connection, function: Callable[[Any], Summary], device: str | None) -> None:
    """A worker: runs come in, what became of them goes out. It shows no bars, but what else it says is seen."""
    obey(connection.poll)  # between a run and its outcome, nothing comes but the word to stop, or the pipe's end
    if device is not None:
        os.environ[DEVICES] = device
    progress.hide()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    with suppress(EOFError, OSError):  # the parent is gone
        while (message := connection.recv()) is not None:
            connection.send(reply_to(function, *message))


def reply_to(function: Callable[[Any], Summary], run: Any) -> Summary | InputError | TrainingInterrupted:
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


@dataclass
class Worker:
    """A process, its place among the workers, its pipe, and the run that it has."""

    place: int
    process: Any
    connection: Connection
    run: Any

    def tell(self, message: Any) -> None:
        """Send; one that has just died will be noticed where it is listened to."""
        with suppress(OSError):
            self.connection.send(message)


class Crew(Generic[Run]):
    """The workers of a grid, the runs that wait for one, and how often Ctrl-C was heard.

    Attributes:
        everyone, workers: all workers, and those with a run.
        saved, lost: runs that Ctrl-C stopped at a step, and those that it ended at once.
    """

    def __init__(self, runs: Sequence[Run], function: Callable[[Run], Summary]) -> None:
        self.waiting, self.function, self.devices = deque(runs), function, gpus()
        self.everyone: list[Worker] = []
        self.workers: list[Worker] = []
        self.heard = self.saved = self.lost = 0

    @contextmanager
    def at_work(self, count: int) -> Iterator[None]:
        """So many workers; all have ended at the end of the block, and saved what they had in work."""
        ours = threading.current_thread() is threading.main_thread()  # no other has a handler
        before = signal.signal(signal.SIGINT, self.hear) if ours else None
        try:
            for place in range(count):
                self.employ(place)
            yield
        finally:
            self.stop()
            for worker in self.everyone:
                worker.process.join()
            if ours:
                signal.signal(signal.SIGINT, before)

    def hear(self, number: int, frame: Any) -> None:
        """Ctrl-C: stop at the next step; a second one: at once."""
        self.heard += 1
        if self.heard == 1:
            tell("Finishing the steps in work; Ctrl-C again to stop at once.")
            self.stop()
        else:
            for worker in self.everyone:
                worker.process.terminate()

    def stop(self) -> None:
        """Ask all workers to save their runs and to end."""
        for worker in self.everyone:
            worker.tell(None)

    def employ(self, place: int, worker: Worker | None = None) -> None:
        """Give the next run to a worker, or to a new one; if there is none, the worker ends."""
        with interrupts_wait():  # which a new process inherits: also before it can say so itself
            if self.heard or not self.waiting:
                if worker is not None:
                    worker.tell(None)
                return
            run = self.waiting.popleft()
            worker = self.start(place, run) if worker is None else worker
            worker.run = run
            self.workers.append(worker)
            worker.tell((run,))

    def start(self, place: int, run: Run) -> Worker:
        """A new process."""
        ours, theirs = spawning.Pipe()
        device = self.devices[place % len(self.devices)] if self.devices else None
        process = spawning.Process(target=serve, args=(theirs, self.function, device), daemon=True)
        process.start()
        theirs.close()
        self.everyone.append(Worker(place, process, ours, run))
        return self.everyone[-1]

    def outcomes(self) -> Iterator[tuple[Run, Summary | InputError]]:
        """What becomes of the runs, as they end."""
        while self.workers:
            ready = wait([worker.connection for worker in self.workers])
            for worker in [one for one in self.workers if one.connection in ready]:
                run, outcome = worker.run, self.outcome(worker)
                if outcome is not None:
                    yield run, outcome
        if self.heard:
            raise GridInterrupted(self.account())

    def outcome(self, worker: Worker) -> Summary | InputError | None:
        """What a worker has to say, None if its run was interrupted; then it gets the next one."""
        self.workers.remove(worker)
        try:
            found = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join()
            self.lost += self.heard > 1
            self.employ(worker.place)
            return None if self.heard > 1 else InputError(died(worker.process.exitcode))
        self.employ(worker.place, worker)
        stopped = isinstance(found, TrainingInterrupted)
        self.saved += stopped
        return None if stopped else found

    def account(self) -> str:
        """What Ctrl-C has left."""
        parts = [
            f"{self.saved} stopped and saved" if self.saved else "",
            f"{self.lost} ended at once, which go on from their last checkpoints" if self.lost else "",
            f"{len(self.waiting)} not begun" if self.waiting else "",
        ]
        told = ", ".join(part for part in parts if part)
        return f"Interrupted{f'; runs: {told}' if told else ''}. Start it again to go on."


def died(code: int) -> str:
    """Why a worker is no more."""
    if code < 0:
        reason = f"was killed by {signal.Signals(-code).name} (out of memory? fewer workers need less)"
    else:
        reason = f"ended with code {code} (in a script, run_all belongs below `if __name__ == '__main__':`)"
    return f"Its process {reason}. Started again, it goes on from its last checkpoint."
