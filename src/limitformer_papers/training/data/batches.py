r"""The order of the data: step k's batch is a function of the seed and of k alone.

Each epoch is a fresh permutation of the examples, drawn from (seed, epoch); what is left after the last whole batch of
an epoch is left out. Of a batch, process r of R takes the r-th of R equal parts: with any number of processes, a step
sees the same examples.
"""

from collections.abc import Iterator, Sized
from typing import Protocol, runtime_checkable

import numpy as np
from torch.utils.data import Sampler

from limitformer.base.errors import require


@runtime_checkable
class ByEpoch(Protocol):
    """Data that are other ones in each epoch (augmentation): they hear its number before its first batch."""

    def set_epoch(self, epoch: int) -> None:
        """Take notice of the epoch."""


def steps_per_epoch(examples: int, batch: int) -> int:
    """Whole batches in an epoch, or `InputError` if there is none."""
    require(
        examples >= batch,
        f"A batch must not be larger than the data, {examples} examples; got {batch}. Nearest: {max(examples, 1)}.",
    )
    return examples // batch


ORDER = 1  # the purpose of these numbers; augmentation has another


class Batches(Sampler[list[int]]):
    """The indices of `steps` batches, one after the other; of each, the part of one process.

    Args:
        data: has a length; hears of epochs if it is `ByEpoch`.
        batch: examples of a step, over all processes.
        steps: how many batches.
        seed: of the order.
        process, processes: r and R.
    """

    def __init__(self, data: Sized, batch: int, steps: int, seed: int, *, process: int = 0, processes: int = 1) -> None:
        self.data, self.batch, self.steps, self.seed = data, batch, steps, seed
        self.share = batch // processes
        self.first = process * self.share
        self.per_epoch = steps_per_epoch(len(data), batch)

    def __len__(self) -> int:
        return self.steps

    def order(self, epoch: int) -> list[int]:
        """The permutation of an epoch."""
        return np.random.default_rng([self.seed, ORDER, epoch]).permutation(len(self.data)).tolist()

    def __iter__(self) -> Iterator[list[int]]:
        order: list[int] = []
        for step in range(self.steps):
            epoch, place = divmod(step, self.per_epoch)
            if place == 0:
                order = self.order(epoch)
                if isinstance(self.data, ByEpoch):
                    self.data.set_epoch(epoch)
            first = place * self.batch + self.first
            yield order[first : first + self.share]
