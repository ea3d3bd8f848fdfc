"""Many runs of an experiment, one after the other or on several processes; each goes on where it stopped."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

from limitformer.errors import require, require_count
from limitformer.train.plan import processes

Run = TypeVar("Run")
Summary = Mapping[str, float]


class GridInterrupted(KeyboardInterrupt):
    """Ctrl-C during a grid; what was done is in checkpoints."""

    resumes = True


def run_all(
    runs: Sequence[Run], function: Callable[[Run], Summary], *, workers: int = 1
) -> Iterator[tuple[Run, Summary]]:
    """(run, function(run)) of each, as they end; a run that fails ends the rest with its error.

    Args:
        runs: what `function` takes; both go to other processes by pickle.
        function: makes one run.
        workers: processes; with 1, this one does it.

    Raises:
        InputError: several workers within several processes of one run.
        KeyboardInterrupt: Ctrl-C; each worker has saved a checkpoint.
    """
    workers = require_count("workers", workers)
    require(workers == 1 or processes() == 1, "With torchrun each run has all processes; workers must be 1.")
    if workers == 1:
        yield from ((run, function(run)) for run in runs)
        return
    # A new interpreter for each worker: a fork of a process with threads may never wake up.
    with ProcessPoolExecutor(min(workers, len(runs)), mp_context=get_context("spawn"), initializer=quiet) as pool:
        waiting = {pool.submit(partial(function, run)): run for run in runs}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except KeyboardInterrupt as error:
            pool.shutdown(wait=True, cancel_futures=True)
            raise GridInterrupted("Interrupted; each run has saved where it was. Start it again to go on.") from error
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def quiet() -> None:
    """A worker shows no bars of its own, and hears Ctrl-C like its parent."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def rows_of(finished: Sequence[tuple[Any, Summary]]) -> list[dict[str, Any]]:
    """One row for each variant, γ and learning rate: how many seeds, the losses' mean and spread, how many diverged."""
    groups: dict[tuple[str, float, float], list[Summary]] = {}
    for run, summary in finished:
        groups.setdefault((run.variant, run.gamma, run.learning_rate), []).append(summary)
    return [row_of(*key, summaries) for key, summaries in sorted(groups.items())]


def row_of(variant: str, gamma: float, rate: float, summaries: list[Summary]) -> dict[str, Any]:
    """The row of one group; losses over the runs that did not diverge."""
    ended = [one for one in summaries if not one["diverged"]]
    row: dict[str, Any] = {"variant": variant, "gamma": gamma, "learning_rate": rate, "seeds": len(summaries)}
    row["diverged"] = len(summaries) - len(ended)
    for name in ("train_loss", "eval_loss"):
        values = [one[name] for one in ended]
        mean = sum(values) / len(values) if values else float("nan")
        spread = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5 if len(values) > 1 else 0.0
        row |= {name: mean, f"{name}_sd": spread}
    return row
