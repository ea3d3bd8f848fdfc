r"""Cells on processes of one machine.

Each worker has a pipe of its own and no lock with anybody, so that a worker that is killed harms nobody: it is
replaced, and its cells are handed out again. Workers ignore Ctrl-C and end when the pipe to their parent closes, also
if the parent was killed.
"""

import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from limitformer.base.errors import require
from limitformer.sweep.layout import Index
from limitformer.sweep.work import Finished, Job, Results, StoreError, given_up, run_cell, store_of

BATCH_SECONDS = 0.2  # of work that is handed out at a time
LARGEST_BATCH = 64
MOST_STILLBORN = 6
# A new interpreter for each worker: a fork of a process with threads may never wake up.
spawning: Any = multiprocessing.get_context("spawn")


def serve(connection: Connection, job: Job) -> None:
    """A worker: cells come in, what became of them goes out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        connection.send(None)  # I am here
        while True:
            for index in connection.recv():
                connection.send(attempt(job, index))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        return


def attempt(job: Job, index: Index) -> Finished | StoreError:
    """The cell, or why nothing can be written."""
    try:
        return run_cell(job, index)
    except StoreError as error:
        return error


@dataclass
class Worker:
    """A process, its pipe, whether it has begun, and the cells that it has."""

    process: Any
    connection: Connection
    began: bool = False
    cells: deque[Index] = field(default_factory=deque)

    def give(self, cells: Sequence[Index]) -> None:
        """Hand out cells; a worker that has just died will be noticed."""
        self.cells.extend(cells)
        try:
            self.connection.send(list(cells))
        except OSError:
            return


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C waits until the end of the block, and processes that start in it never hear it."""
    resource_tracker.ensure_running()  # multiprocessing's own helper, which would let Ctrl-C in when it starts
    waiting: list[int] = []
    ours = threading.current_thread() is threading.main_thread()  # no other has a handler
    handler = signal.signal(signal.SIGINT, lambda number, _: waiting.append(number)) if ours else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if ours:
            signal.signal(signal.SIGINT, handler)
        if waiting:
            signal.raise_signal(signal.SIGINT)


class Workers:
    """A group of processes that go on when some of them die."""

    def __init__(self, job: Job, count: int) -> None:
        self.job = job
        self.deaths: dict[Index, int] = {}
        self.stillborn = 0  # workers in a row that have died before they could begin
        self.seconds = BATCH_SECONDS  # of a cell, as far as is known
        self.workers = [self.start() for _ in range(count)]

    def start(self) -> Worker:
        """A new process."""
        ours, theirs = spawning.Pipe()
        process = spawning.Process(target=serve, args=(theirs, self.job), daemon=True)
        with interrupts_wait():  # which the process inherits: also before it can say so itself
            process.start()
        theirs.close()
        return Worker(process, ours)

    def run(self, cells: Sequence[Index]) -> Iterator[Finished]:
        """What becomes of the cells, as they finish."""
        pending = deque(cells)
        for worker in self.workers:
            self.refill(worker, pending)
        while any(worker.cells for worker in self.workers):
            ready = wait([worker.connection for worker in self.workers])
            for worker in [one for one in self.workers if one.connection in ready]:
                yield from self.listen(worker, pending)

    def listen(self, worker: Worker, pending: deque[Index]) -> Iterator[Finished]:
        """What a worker has to say: a finished cell, or that it has died."""
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            yield from self.bury(worker, pending)
            return
        if isinstance(message, StoreError):
            raise message
        if message is None:
            worker.began, self.stillborn = True, 0
            return
        worker.cells.remove(message.index)
        self.seconds = 0.8 * self.seconds + 0.2 * message.seconds
        self.refill(worker, pending)
        yield message

    def refill(self, worker: Worker, pending: deque[Index]) -> None:
        """Hand out the next batch once the worker has begun its last cell."""
        if len(worker.cells) > 1 or not pending:
            return
        share = -(-len(pending) // (2 * len(self.workers)))
        size = min(LARGEST_BATCH, max(1, int(BATCH_SECONDS / max(self.seconds, 1e-6))), share)
        worker.give([pending.popleft() for _ in range(size)])

    def bury(self, worker: Worker, pending: deque[Index]) -> Iterator[Finished]:
        """Replace a dead worker; its cells are handed out again, but the one it died on only so often."""
        worker.process.join()
        code = worker.process.exitcode
        if not worker.began:
            self.stillborn += 1
            require(
                self.stillborn < MOST_STILLBORN * (1 if code >= 0 else 10),  # whom somebody kills, could have begun
                f"The workers end as they start (exit code {code}). In a script, call run_sweep below "
                '`if __name__ == "__main__":`; or take workers=1.',
            )
            pending.extendleft(reversed(worker.cells))
        elif worker.cells:
            first = worker.cells[0]
            self.deaths[first] = self.deaths.get(first, 0) + 1
            if self.deaths[first] >= self.patience:
                worker.cells.popleft()
                message = f"the worker died {self.deaths[first]} times in this cell (exit code {code})"
                yield given_up(store_of(self.job), first, message)
            pending.extendleft(reversed(worker.cells))
        place = self.workers.index(worker)
        self.workers[place] = self.start()
        self.refill(self.workers[place], pending)

    @property
    def patience(self) -> int:
        """Deaths in one cell after which it is given up: not the cell's fault if somebody kills workers at random."""
        return 3 + self.job.tries

    def close(self) -> None:
        """End the processes; the cells that they have are dropped."""
        for worker in self.workers:
            worker.connection.close()
            worker.process.terminate()
        for worker in self.workers:
            worker.process.join()


def on_processes(job: Job, cells: Sequence[Index], *, workers: int) -> Results:
    """What becomes of the cells on so many processes."""
    group = Workers(job, min(workers, len(cells)))
    try:
        yield from group.run(cells)
    finally:
        group.close()


def in_this_process(job: Job, cells: Sequence[Index]) -> Results:
    """The same, without other processes."""
    for index in cells:
        yield run_cell(job, index)
