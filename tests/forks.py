"""Processes that tests kill or run together: forks of a process that has imported their packages, which takes five
seconds.

That one is of `multiprocessing` ("forkserver"): it has run nothing, and its one thread beside is of Arrow's allocator,
which knows of forks, so a fork of it is as good as a new interpreter.
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
