"""A pool of processes that goes on when some of them die: for cells of sweeps and for runs of training.

Each worker has a pipe of its own and no lock with anybody, so that one that is killed harms nobody: it is replaced, and
its tasks are handed out again. Workers do not hear Ctrl-C; they end when their pipe closes, as it does with the parent.

Tasks are of two kinds. Short ones are handed out in batches, ahead of time, and Ctrl-C drops those in work. Tasks that
save (`saves`) are handed out one at a time: while a worker has one, all that its pipe can bring is the word to save and
stop. The first Ctrl-C sends that word to every worker; a second one ends them at once.
"""

import multiprocessing
import pickle
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from limitformer.base.errors import require
from limitformer.base.interrupts import interrupts_wait, route_interrupts, write_notice

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")
StopRequested = Callable[[], bool]  # in a worker whose task saves: whether it should, and stop

BATCH_SECONDS = 0.2  # of work that is handed out at a time
LARGEST_BATCH = 64
MOST_STILLBORN = 6
# A new interpreter for each worker: a fork of a process with threads may never wake up.
spawning: Any = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class LostTask:
    """A task that is given up, as its worker died: how often, and the last exit code."""

    times: int
    code: int

    def within(self, task: str) -> str:
        """What happened, in the words of who gave the task."""
        times = f" {self.times} times" if self.times > 1 else ""
        return f"the worker died{times} in this {task} ({ending(self.code)})"


def ending(code: int) -> str:
    """How a process has ended."""
    if code >= 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name}; out of memory? fewer workers need less"


def serve(connection: Connection, begin: bytes, place: int) -> None:
    """A worker: tasks come in, what became of them and the seconds that each took go out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        work = pickle.loads(begin)(place, connection.poll)
        connection.send(None)  # tell the parent that start-up has finished
        while (tasks := connection.recv()) is not None:
            for task in tasks:
                began = time.perf_counter()
                connection.send((work(task), time.perf_counter() - began))


@dataclass
class Worker:
    """A process, its place among the workers, its pipe, whether it has begun, and the numbers of its tasks."""

    place: int
    process: Any
    connection: Connection
    began: bool = False
    tasks: deque[int] = field(default_factory=deque)

    def tell(self, message: Sequence[Any] | None) -> None:
        """Tasks, or None: no more. One that has just died will be noticed where it is listened to."""
        with suppress(OSError):
            self.connection.send(message)


@dataclass
class Pool(Generic[Task, Outcome]):
    """Processes that do tasks. These, outcomes and `begin` go between processes by pickle.

    Attributes:
        begin: called in each worker with its place and with what asks whether to stop; gives what does a task.
        count: of workers, at most.
        caller: the function to name where a script runs itself again in each worker.
        patience: deaths in one task after which it is given up.
        saves: whether a task that is asked to stop saves what it has.
        heard: how often Ctrl-C was, if the tasks save.
        pending: numbers of the tasks that nobody has.
        stillborn: workers in a row that have died before they could begin.
        seconds: of a task, as far as is known.
    """

    begin: Callable[[int, StopRequested], Callable[[Task], Outcome]]
    count: int
    caller: str
    patience: int = 1
    saves: bool = False
    heard: int = 0
    stillborn: int = 0
    seconds: float = BATCH_SECONDS
    workers: list[Worker] = field(default_factory=list)
    pending: deque[int] = field(default_factory=deque)
    deaths: Counter[int] = field(default_factory=Counter)

    def outcomes(self, tasks: Sequence[Task]) -> Generator[tuple[Task, Outcome | LostTask], None, None]:
        """(task, what it gave) of each, as they end; close the iterator to end the processes before."""
        self.tasks, self.pending = tasks, deque(range(len(tasks)))
        with route_interrupts(self.hear) if self.saves else nullcontext():
            try:
                for place in range(min(self.count, len(tasks))):
                    self.refill(self.start(place))
                while busy := [worker for worker in self.workers if worker.tasks]:
                    spoke = wait([worker.connection for worker in busy])
                    for worker in busy:
                        if worker.connection in spoke:
                            yield from self.listen(worker)
            finally:
                self.close()

    def start(self, place: int) -> Worker:
        """A new process."""
        begin = pickle.dumps(self.begin)  # which the worker reads once it has begun: what it imports takes long
        ours, theirs = spawning.Pipe()
        worker = Worker(place, spawning.Process(target=serve, args=(theirs, begin, place), daemon=True), ours)
        with interrupts_wait():  # which the process inherits: also before it can say so itself
            worker.process.start()
            self.workers.append(worker)
        theirs.close()
        return worker

    def refill(self, worker: Worker) -> None:
        """Hand out the next batch once the worker has begun its last task; if there is none, let it end."""
        if len(worker.tasks) > (0 if self.saves else 1):
            return
        with interrupts_wait():  # the word to stop must not overtake a task
            if self.pending and not self.heard:
                batch = [self.pending.popleft() for _ in range(self.batch)]
                worker.tasks.extend(batch)
                worker.tell([self.tasks[number] for number in batch])
            elif not worker.tasks:
                worker.tell(None)

    @property
    def batch(self) -> int:
        """How many tasks to hand out."""
        if self.saves:
            return 1
        share = -(-len(self.pending) // (2 * self.count))
        return min(LARGEST_BATCH, max(1, int(BATCH_SECONDS / max(self.seconds, 1e-6))), share)

    def listen(self, worker: Worker) -> Iterator[tuple[Task, Outcome | LostTask]]:
        """What a worker has to say: that it has begun, an outcome, or that it has died."""
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            yield from self.bury(worker)
            return
        if message is None:
            worker.began, self.stillborn = True, 0
            return
        outcome, seconds = message
        self.seconds = 0.8 * self.seconds + 0.2 * seconds
        number = worker.tasks.popleft()
        self.refill(worker)
        yield self.tasks[number], outcome

    def bury(self, worker: Worker) -> Iterator[tuple[Task, Outcome | LostTask]]:
        """Replace a dead worker; its tasks are handed out again, but the one it died in only so often."""
        worker.process.join()
        self.workers.remove(worker)
        code, first = worker.process.exitcode, worker.tasks[0]
        if worker.began or self.heard:
            self.deaths[first] += 1
        else:
            self.check_birth(code)
        if given_up := bool(self.heard) or self.deaths[first] >= self.patience:
            worker.tasks.popleft()
        self.pending.extendleft(reversed(worker.tasks))
        if self.pending and not self.heard:
            self.refill(self.start(worker.place))
        if given_up:
            yield self.tasks[first], LostTask(self.deaths[first], code)

    def check_birth(self, code: int) -> None:
        """Raise `InputError` if one worker after the other has died before it could begin."""
        self.stillborn += 1
        require(
            self.stillborn < MOST_STILLBORN * (1 if code >= 0 else 10),  # whom somebody kills, could have begun
            f"The workers end as they start ({ending(code)}). In a script, call {self.caller} below "
            '`if __name__ == "__main__":`; or take workers=1.',
        )

    def hear(self, number: int, frame: Any) -> None:
        """Ctrl-C: all save and stop; a second one: they end at once."""
        self.heard += 1
        if self.heard == 1:
            write_notice("Finishing the steps in work; Ctrl-C again to stop at once.")
        for worker in self.workers:
            worker.tell(None) if self.heard == 1 else worker.process.terminate()

    def close(self) -> None:
        """End the processes: as soon as they have saved, or at once."""
        for worker in self.workers:
            worker.connection.close()  # whoever saves does so now
            if not self.saves:
                worker.process.terminate()
        for worker in self.workers:
            worker.process.join()
