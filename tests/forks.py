"""Processes that tests kill or run together: forks of a process that has imported their packages, which takes five
seconds.

The process is the fork server of `multiprocessing`. It has run nothing, and its only other thread is Arrow's allocator,
which supports forks, so a fork of it behaves like a new interpreter.
"""

import multiprocessing
from collections.abc import Callable
from typing import Any

forking: Any = multiprocessing.get_context("forkserver")
forking.set_forkserver_preload(["limitformer_papers.training.tasks.mlm", "torch.distributed.fsdp"])


def forked(function: Callable[..., object], *arguments: object, **named: object) -> Any:
    """Start `function` in its own process; function and arguments are pickled."""
    process = forking.Process(target=function, args=arguments, kwargs=named, daemon=True)
    process.start()
    return process
