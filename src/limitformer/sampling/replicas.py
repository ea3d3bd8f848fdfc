"""Replicas over threads, a slice of them at a time.

A replica's random numbers depend on (seed, replica) alone, so slices may be of any size and run in any order. The
kernels release the interpreter's lock; meanwhile the main thread shows progress and receives Ctrl-C, upon which it sets
the kernels' watches to halt.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import islice
from math import ceil

import numpy as np

from limitformer.numerics.lanes import LANES
from limitformer.numerics.watch import DONE, HALT, WHOLE, Watch

CHUNKS_PER_THREAD = 8
CHUNK_SECONDS = 0.3
TRIAL_SECONDS = 0.01  # shorter trials give no useful time per replica

Run = Callable[[slice, Watch], None]
Show = Callable[[float], None]


def slices(first: int, samples: int, chunk: int) -> list[slice]:
    """Divide the replicas `first` … `samples` − 1 into slices of `chunk`."""
    return [slice(begin, min(begin + chunk, samples)) for begin in range(first, samples, chunk)]


def usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def run_all(run: Run, samples: int, threads: int, chunk: int | None, show: Show) -> tuple[int, bool]:
    """Call `run` on every replica, `chunk` at a time; None chooses by the time that the first replicas take.

    Returns:
        The number of whole replicas, from the first on, and whether Ctrl-C came.
    """
    if chunk:
        return run_on(run, 0, samples, chunk, threads, show)
    done, seconds, interrupted = try_out(run, samples, show)
    if interrupted:
        return done, True
    groups = min(CHUNK_SECONDS / max(seconds, 1e-9), samples / (LANES * threads * CHUNKS_PER_THREAD))
    return run_on(run, done, samples, LANES * max(1, ceil(groups)), threads, show)


def try_out(run: Run, samples: int, show: Show) -> tuple[int, float, bool]:
    """Run the first replicas, eight times as many in each trial until one takes long enough to be timed.

    Returns:
        The number of whole replicas, seconds for a group of `LANES`, and whether Ctrl-C came.
    """
    done, groups, seconds, interrupted = 0, 1, 0.0, False
    while seconds < TRIAL_SECONDS and done < samples and not interrupted:
        began, size = time.perf_counter(), LANES * groups
        done, interrupted = run_on(run, done, min(done + size, samples), size, 1, show)
        seconds, groups = time.perf_counter() - began, 8 * groups
    return done, 8 * seconds / groups, interrupted


def run_on(run: Run, done: int, samples: int, chunk: int, threads: int, show: Show) -> tuple[int, bool]:
    """Run the replicas from `done` on; the results are those of `run_all`."""
    parts = slices(done, samples, chunk)
    whole, interrupted = run_parts(run, parts, threads, lambda running: show(done + running))
    return done + whole, interrupted


def run_parts(run: Run, parts: Sequence[slice], threads: int, show: Show) -> tuple[int, bool]:
    """Call `run` on every part, each with its own watch; the results are those of `run_all`."""
    watches = np.zeros((len(parts), 3))
    waiting = zip(parts, watches, strict=True)
    with ThreadPoolExecutor(threads) as pool:
        try:
            pending = {pool.submit(run, *each) for each in islice(waiting, 4 * threads)}
            while pending:
                finished, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                pending |= {pool.submit(run, *each) for each in islice(waiting, len(finished))}
                show(float(watches[:, DONE].sum()))
        except BaseException as error:
            watches[:, HALT] = 1.0
            pool.shutdown(wait=True, cancel_futures=True)
            if not isinstance(error, KeyboardInterrupt):
                raise
            return whole_replicas(parts, watches), True
    return whole_replicas(parts, watches), False


def whole_replicas(parts: Sequence[slice], watches: Watch) -> int:
    total = 0
    for part, watch in zip(parts, watches, strict=True):
        total += int(watch[WHOLE])
        if watch[WHOLE] < part.stop - part.start:
            break
    return total
