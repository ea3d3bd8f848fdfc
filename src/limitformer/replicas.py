"""Replicas over threads, a slice of them at a time.

A replica's random numbers depend on (seed, replica) alone, so slices may be of any size and run in any order. The
kernels release the interpreter's lock; between slices the main thread shows progress and hears Ctrl-C.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from math import ceil

from limitformer.lanes import LANES

CHUNKS_PER_THREAD = 8
CHUNK_SECONDS = 0.3


def slices(first: int, samples: int, chunk: int) -> list[slice]:
    """Replicas `first` … `samples` − 1, `chunk` at a time."""
    return [slice(begin, min(begin + chunk, samples)) for begin in range(first, samples, chunk)]


def slices_after_a_trial(run: Callable[[slice], None], samples: int, threads: int) -> list[slice]:
    """Run the first replicas, and divide the others into chunks of about `CHUNK_SECONDS`.

    Ctrl-C waits for the chunks that are running; one of them is never less than a group of `LANES` replicas.
    """
    first = min(LANES, samples)
    began = time.perf_counter()
    run(slice(0, first))
    seconds = max(time.perf_counter() - began, 1e-9)
    wanted = min(CHUNK_SECONDS / seconds, samples / (LANES * threads * CHUNKS_PER_THREAD))
    return slices(first, samples, LANES * max(1, ceil(wanted)))


def usable_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def succeeded(future: Future[None]) -> bool:
    """Whether it ran to its end, without an error."""
    return future.done() and not future.cancelled() and future.exception() is None


def run_parts(
    run: Callable[[slice], None],
    parts: Sequence[slice],
    samples: int,
    threads: int,
    show: Callable[[int], None],
) -> tuple[int, bool]:
    """Call `run` on every part, the last up to `samples`; how many replicas are finished, and whether Ctrl-C came."""
    done: set[int] = set()
    interrupted = False
    with ThreadPoolExecutor(threads) as pool:
        pending: dict[Future[None], int] = {pool.submit(run, part): k for k, part in enumerate(parts)}
        try:
            while pending:
                finished, _ = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                    done.add(pending.pop(future))
                show(samples - sum(part.stop - part.start for k, part in enumerate(parts) if k not in done))
        except KeyboardInterrupt:
            interrupted = True
            pool.shutdown(wait=True, cancel_futures=True)
            done |= {k for future, k in pending.items() if succeeded(future)}
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        finally:
            show(-1)
    missing = [part.start for k, part in enumerate(parts) if k not in done]
    return min(missing, default=samples), interrupted
