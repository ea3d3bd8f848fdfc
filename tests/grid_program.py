"""Runs of a grid that train nothing: processes that make them need not import the Trainer, which takes seconds."""

import os
import signal
import sys

from limitformer.base import progress
from limitformer.base.errors import InputError
from limitformer.train import grid


def of_all_kinds(kind: str) -> dict[str, float]:
    """What a run may do; what it says of its process."""
    if kind == "bad":
        raise InputError("got 0, at least 1")
    if kind == "bug":
        raise ZeroDivisionError("by nothing")
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    print(f"this is {kind}", file=sys.stderr)
    return {"value": float(len(kind)), "patience": progress.PATIENCE, "device": float(os.environ[grid.DEVICES])}
