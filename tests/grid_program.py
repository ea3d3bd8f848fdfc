"""Runs of a grid. Training runs import the Trainer late, which takes seconds: the parent process does not need it."""

import os
import signal
import time
from functools import partial
from pathlib import Path

from limitformer.base import progress
from limitformer.base.errors import InputError
from limitformer_papers.training import grid

ONE_THREAD = {"threads": 1, "save_every": 1000}


def slow(seed: int, out: Path, pause: float = 0.1) -> dict[str, float]:
    """Make a run with pauses, which change nothing."""
    from train_program import STEPS, At, small_run

    pauses = [At(step, partial(time.sleep, pause)) for step in range(1, STEPS + 1)]
    return dict(small_run(Path(out) / str(seed), pauses, seed=seed, **ONE_THREAD))


def mixed(seed: int, out: Path) -> dict[str, float]:
    """Make a run; number 1 is stuck in its first step."""
    return slow(seed, out, 1000.0 if seed == 1 else 0.1)


def of_all_kinds(kind: str) -> dict[str, float]:
    """Make a run that fails in the way of its kind, or returns facts about its process."""
    if kind == "bad":
        raise InputError("got 0, at least 1")
    if kind == "bug":
        raise ZeroDivisionError("by nothing")
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"value": float(len(kind)), "patience": progress.PATIENCE, "device": float(os.environ[grid.DEVICES])}
