"""Run a function once for each name, each in a forked process with limits, and append its row to a file.

A row is written whole as soon as it is there, so a run can be stopped at any time and resumed.
"""

import json
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from limitformer.weightless.numbers import pool

Row = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """The most that one process may use: seconds of CPU time, seconds by the clock, and bytes of address space."""

    cpu: int = 150
    wall: int = 900
    memory: int = 8 << 30


LIMITS = Limits()


@dataclass
class Child:
    """A process that computes one row."""

    name: str
    process: Any
    pipe: Connection
    began: float = field(default_factory=time.monotonic)


def run_all(
    call: Callable[[str], Row], names: Iterable[str], path: Path, workers: int, about: Row, limits: Limits = LIMITS
) -> Generator[Row]:
    """Yield the row of each name with `about`, after it has been appended to the file."""
    waiting, children = list(names)[::-1], list[Child]()
    try:
        while waiting or children:
            while waiting and len(children) < workers:
                children.append(started(call, waiting.pop(), limits))
            ready = wait([child.pipe for child in children], timeout=1.0)
            for child in list(children):
                late = time.monotonic() - child.began > limits.wall
                if child.pipe in ready or late:
                    children.remove(child)
                    row = finished(child, late, limits) | about
                    append(path, row)
                    yield row
    finally:  # also after Ctrl-C: finished rows are in the file
        for child in children:
            child.process.kill()


def started(call: Callable[[str], Row], name: str, limits: Limits) -> Child:
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(call, name, theirs, limits), daemon=True)
    process.start()
    theirs.close()
    return Child(name, process, mine)


def work(call: Callable[[str], Row], name: str, pipe: Connection, limits: Limits) -> None:
    """Compute a row in the child and send it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu, limits.cpu + 5))
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory, limits.memory))
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    pool.cache_clear()  # its threads are not in this process
    try:
        row = call(name)
    except Exception as error:  # a row of any type  # noqa: BLE001
        place = traceback.extract_tb(error.__traceback__)[-1]
        row = {"error": f"{type(error).__name__}: {error}"[:600], "at": f"{place.filename}:{place.lineno}"}
    pipe.send(row)


def finished(child: Child, late: bool, limits: Limits) -> Row:
    """Return the row of a child, or how it ended."""
    try:
        row: Row = {} if late else child.pipe.recv()
    except EOFError:
        row = {}
    if not row:
        child.process.kill()
    child.process.join()
    child.pipe.close()
    if late or (not row and child.process.exitcode == -signal.SIGXCPU):
        row = {"error": f"took more than {limits.wall if late else limits.cpu} s" + (" of CPU time" * (not late))}
    elif not row:
        row = {"error": f"the process ended with status {child.process.exitcode}"}
    return {"type": child.name, **row, "wall": round(time.monotonic() - child.began, 1)}


def append(path: Path, row: Row) -> None:
    """Append a row in a single write."""
    with path.open("ab", buffering=0) as file:
        file.write((json.dumps(row) + "\n").encode())


def rows_in(path: Path) -> dict[str, Row]:
    """Return the newest row of each type; a line that was cut off is left out, and its rest removed."""
    if not path.exists():
        return {}
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        path.write_bytes(whole)
    rows = (json.loads(line) for line in whole.splitlines())
    return {row["type"]: row for row in rows}
