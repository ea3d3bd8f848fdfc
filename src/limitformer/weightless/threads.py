"""One thread of torch in a pass.

The threads of OpenMP wait for each other at the end of every operation. Where another process has one of their cores,
they spin until it is their turn again: two threads then take ten times as long as one. And the last bits of a product
of matrices depend on how many threads share it; with one, they are the same on every machine.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on this thread alone within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
