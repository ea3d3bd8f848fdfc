"""One thread for matrices in a pass.

The threads of OpenMP (torch) and OpenBLAS (NumPy, SciPy) wait for each other at the end of every operation. Where
another thread or process uses one of their cores, they spin until it is free: two threads then take ten times as long
as one. Also, the last bits of a product of matrices depend on the number of threads; with one thread they are the same
for every number of cores. Random numbers are still drawn by all cores (`numbers`).

The number of threads, torch's generators and its default dtype belong to the process. Passes and builds hold `LOCK`,
so that threads of Python that simulate at once get the bits that each gets alone.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from threadpoolctl import ThreadpoolController

LOCK = threading.RLock()


@cache
def libraries() -> ThreadpoolController:
    """The loaded libraries of linear algebra; cached, as the search takes longer than a small pass."""
    return ThreadpoolController().select(user_api="blas")


@contextmanager
def one_thread() -> Iterator[None]:
    """Multiply and factor matrices on one thread within the with statement."""
    with LOCK:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with libraries().limit(limits=1):
                yield
        finally:
            torch.set_num_threads(before)
