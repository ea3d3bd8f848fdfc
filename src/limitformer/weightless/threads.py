"""One thread for matrices in a pass.

The threads of OpenMP (torch) and OpenBLAS (NumPy, SciPy) wait for each other at the end of every operation. Where
another thread or process uses one of their cores, they spin until it is free: two threads then take ten times as long
as one. Also, the last bits of a product of matrices depend on the number of threads; with one thread they are the same
for every number of cores. Random numbers are still drawn by all cores (`numbers`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from threadpoolctl import ThreadpoolController


@cache
def libraries() -> ThreadpoolController:
    """The loaded libraries of linear algebra; cached, as the search takes longer than a small pass."""
    return ThreadpoolController().select(user_api="blas")


@contextmanager
def one_thread() -> Iterator[None]:
    """Multiply and factor matrices on one thread within the with statement."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with libraries().limit(limits=1):
            yield
    finally:
        torch.set_num_threads(before)
