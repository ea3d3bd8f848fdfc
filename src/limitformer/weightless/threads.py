"""One thread for matrices in a pass.

The threads of OpenMP (torch) and OpenBLAS (NumPy, SciPy) wait for each other at the end of every operation. Where
another thread or process has one of their cores, they spin until it is their turn again: two threads then take ten
times as long as one. And the last bits of a product of matrices depend on how many threads share it; with one, they are
the same on every machine. Random numbers are still drawn by all cores (`numbers`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from threadpoolctl import ThreadpoolController


@cache
def libraries() -> ThreadpoolController:
    """The libraries of linear algebra that are loaded; found once, as that takes longer than a small pass."""
    return ThreadpoolController().select(user_api="blas")


@contextmanager
def one_thread() -> Iterator[None]:
    """Let matrices be multiplied and factored on this thread alone within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with libraries().limit(limits=1):
            yield
    finally:
        torch.set_num_threads(before)
