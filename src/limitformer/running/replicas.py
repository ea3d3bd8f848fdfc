"""Replicas over threads, a slice of them at a time.

A replica's random numbers depend on (seed, replica) alone, so slices may be of any size and run in any order. The
kernels release the interpreter's lock; meanwhile the main thread shows progress and hears Ctrl-C, of which it tells the
kernels by their watches.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from math import ceil

import numpy as np

from limitformer.numerics.lanes import LANES
from limitformer.numerics.watch import DONE, HALT, WHOLE, Watch

CHUNKS_PER_THREAD = 8
CHUNK_SECONDS = 0.3

Run = Callable[[slice, Watch], None]
Show = Callable[[float], None]


def slices(first: int, samples: int, chunk: int) -> list[slice]:
    """Replicas `first` … `samples` − 1, `chunk` at a time."""
    return [slice(begin, min(begin + chunk, samples)) for begin in range(first, samples, chunk)]


def chunk_of(seconds: float, samples: int, threads: int) -> int:
    """Replicas that take about `CHUNK_SECONDS`, whole groups of `LANES`, of which one took so many seconds."""
    wanted = min(CHUNK_SECONDS / max(seconds, 1e-9), samples / (LANES * threads * CHUNKS_PER_THREAD))
    return LANES * max(1, ceil(wanted))


def usable_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def run_all(run: Run, samples: int, threads: int, chunk: int | None, show: Show) -> tuple[int, bool]:
    """Call `run` on every replica, `chunk` at a time, or so many as the first group's time suggests.

    Returns:
        How many replicas are whole, from the first on, and whether Ctrl-C came.
    """
    if chunk:
        return run_parts(run, slices(0, samples, chunk), threads, show)
    began = time.perf_counter()
    first, interrupted = run_parts(run, slices(0, min(LANES, samples), LANES), threads, show)
    if interrupted:
        return first, True
    parts = slices(first, samples, chunk_of(time.perf_counter() - began, samples, threads))
    others, interrupted = run_parts(run, parts, threads, lambda done: show(first + done))
    return first + others, interrupted


def run_parts(run: Run, parts: Sequence[slice], threads: int, show: Show) -> tuple[int, bool]:
    """Call `run` on every part with a watch of its own; as `run_all`."""
    watches = np.zeros((len(parts), 3))
    with ThreadPoolExecutor(threads) as pool:
        pending = dict.fromkeys(pool.submit(run, part, watch) for part, watch in zip(parts, watches, strict=True))
        try:
            while pending:
                finished, _ = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                    del pending[future]
                show(float(watches[:, DONE].sum()))
        except BaseException as error:
            watches[:, HALT] = 1.0
            pool.shutdown(wait=True, cancel_futures=True)
            if not isinstance(error, KeyboardInterrupt):
                raise
            return whole_replicas(parts, watches), True
    return whole_replicas(parts, watches), False


def whole_replicas(parts: Sequence[slice], watches: Watch) -> int:
    """How many are whole, from the first on."""
    total = 0
    for part, watch in zip(parts, watches, strict=True):
        total += int(watch[WHOLE])
        if watch[WHOLE] < part.stop - part.start:
            break
    return total
