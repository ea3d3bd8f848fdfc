"""A pool of processes for tasks that save their state, such as runs of training.

`concurrent.futures` fails every task of its pool when one process is killed, and does not tell in which task. Here each
worker has its own pipe and shares no lock, so the death of one affects only its own task.
Workers ignore Ctrl-C; they end when their pipe closes, which also happens when the parent dies.

Tasks are handed out one at a time: while a worker has one, only the message to save and stop can be in its pipe. The
first Ctrl-C sends that message to every worker, and a second one terminates them.
"""

import multiprocessing
import pickle
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from limitformer.base.errors import require
from limitformer.base.interrupts import interrupts_wait, route_interrupts, write_notice

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")
StopRequested = Callable[[], bool]  # in a worker whose task saves: whether it should save and stop

MOST_FAILED_STARTS = 6
# A new interpreter for each worker: a fork of a process with threads may never wake up.
spawning: Any = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class LostTask:
    """A task that is given up because its worker died, with this exit code."""

    code: int

    def within(self, task: str) -> str:
        """Describe the death, naming the kind of task."""
        return f"the worker died in this {task} ({ending(self.code)})"


def ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name}; out of memory? fewer workers need less"


def serve(connection: Connection, begin: bytes, place: int) -> None:
    """Run a worker: receive tasks, send outcomes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        work = pickle.loads(begin)(place, connection.poll)
        connection.send(None)  # tell the parent that start-up has finished
        while (task := connection.recv()) is not None:
            connection.send((work(task[0]),))


@dataclass
class Worker:
    """A process, its place among the workers, its pipe, and the number of its task."""

    place: int
    process: Any
    connection: Connection
    started: bool = False
    task: int | None = None

    def send(self, message: tuple[Any] | None) -> None:
        """Send a task, or None to end the worker. A worker that has just died is noticed by `receive`."""
        with suppress(OSError):
            self.connection.send(message)


@dataclass
class Pool(Generic[Task, Outcome]):
    """Processes that do tasks. Tasks, outcomes and `begin` go between processes by pickle.

    Attributes:
        begin: called in each worker with its place and `StopRequested`; returns the function that does a task.
        count: the largest number of workers.
        caller: the public function to name where a script runs itself again in each worker.
        interrupts: how often Ctrl-C was pressed.
        pending: numbers of the tasks that no worker has.
        failed_starts: workers in a row that died during start-up.
    """

    begin: Callable[[int, StopRequested], Callable[[Task], Outcome]]
    count: int
    caller: str
    interrupts: int = 0
    failed_starts: int = 0
    workers: list[Worker] = field(default_factory=list)
    pending: deque[int] = field(default_factory=deque)

    def outcomes(self, tasks: Sequence[Task]) -> Generator[tuple[Task, Outcome | LostTask], None, None]:
        """Yield (task, outcome) as tasks end. Close the iterator to end the processes early."""
        self.tasks, self.pending = tasks, deque(range(len(tasks)))
        with route_interrupts(self.interrupt):
            try:
                for place in range(min(self.count, len(tasks))):
                    self.hand_out(self.start(place))
                while busy := [worker for worker in self.workers if worker.task is not None]:
                    ready = wait([worker.connection for worker in busy])
                    for worker in busy:
                        if worker.connection in ready:
                            yield from self.receive(worker)
            finally:
                self.close()

    def start(self, place: int) -> Worker:
        """Start a worker process."""
        begin = pickle.dumps(self.begin)  # loaded by the worker itself, because its imports may take long
        ours, theirs = spawning.Pipe()
        worker = Worker(place, spawning.Process(target=serve, args=(theirs, begin, place), daemon=True), ours)
        with interrupts_wait():  # the process inherits this, so it ignores Ctrl-C before `serve` runs
            worker.process.start()
            self.workers.append(worker)
        theirs.close()
        return worker

    def hand_out(self, worker: Worker) -> None:
        """Send the next task to a worker; end it if there is none."""
        with interrupts_wait():  # the message to stop must not overtake a task
            worker.task = self.pending.popleft() if self.pending and not self.interrupts else None
            worker.send(None if worker.task is None else (self.tasks[worker.task],))

    def receive(self, worker: Worker) -> Iterator[tuple[Task, Outcome | LostTask]]:
        """Process one message of a worker: start-up has finished, an outcome, or its death."""
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            yield from self.replace(worker)
            return
        if message is None:
            worker.started, self.failed_starts = True, 0
            return
        task = self.task_of(worker)
        self.hand_out(worker)
        yield task, message[0]

    def task_of(self, worker: Worker) -> Task:
        assert worker.task is not None
        return self.tasks[worker.task]

    def replace(self, worker: Worker) -> Iterator[tuple[Task, Outcome | LostTask]]:
        """Replace a dead worker; give up its task, unless the worker died during start-up."""
        worker.process.join()
        self.workers.remove(worker)
        code, given_up = worker.process.exitcode, worker.started or bool(self.interrupts)
        if not given_up and worker.task is not None:
            self.count_failed_start(code)
            self.pending.appendleft(worker.task)
        if self.pending and not self.interrupts:
            self.hand_out(self.start(worker.place))
        if given_up:
            yield self.task_of(worker), LostTask(code)

    def count_failed_start(self, code: int) -> None:
        """Raise `InputError` if one worker after the other dies during start-up."""
        self.failed_starts += 1
        require(
            self.failed_starts < MOST_FAILED_STARTS * (1 if code >= 0 else 10),  # a killed one might have started
            f"Every worker process exits during start-up ({ending(code)}). In a script, call {self.caller} below "
            '`if __name__ == "__main__":`; or take workers=1.',
        )

    def interrupt(self, number: int, frame: Any) -> None:
        """Let all tasks save and stop at the first Ctrl-C; terminate their workers at the second one."""
        self.interrupts += 1
        if self.interrupts == 1:
            write_notice("Finishing the steps in work; Ctrl-C again to stop at once.")
        for worker in self.workers:
            worker.send(None) if self.interrupts == 1 else worker.process.terminate()

    def close(self) -> None:
        """End the processes: as soon as they have saved, or at once."""
        for worker in self.workers:
            worker.connection.close()  # its task saves now
        for worker in self.workers:
            worker.process.join()
