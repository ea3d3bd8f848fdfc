"""Processes that tests kill or that meet: forks of one that has imported what they need, which takes five seconds.

That one is of `multiprocessing` ("forkserver"): it has run nothing, and its one thread beside is of Arrow's allocator,
which knows of forks, so a fork of it is as good as a new interpreter.
"""

import multiprocessing
from collections.abc import Callable
from typing import Any

forking: Any = multiprocessing.get_context("forkserver")
forking.set_forkserver_preload(["limitformer_papers.training.tasks.mlm", "torch.distributed.fsdp"])


def forked(function: Callable[..., object], *arguments: object, **named: object) -> Any:
    """`function` of these arguments in a process of its own, which has started; all goes there by pickle."""
    process = forking.Process(target=function, args=arguments, kwargs=named, daemon=True)
    process.start()
    return process
