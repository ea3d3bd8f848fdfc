r"""The order of the data: the batch of step k is a function of the seed and k only.

Each epoch is a new permutation of the examples, drawn from (seed, epoch); the examples after the last whole batch of an
epoch are left out.
"""

import signal
from collections.abc import Iterator, Sized
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import Dataset, Sampler

from limitformer.base.errors import require


@runtime_checkable
class ByEpoch(Protocol):
    """Data that change with the epoch (augmentation); they receive its number before its first batch."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch."""


class InEpochs(Dataset[Any]):
    """Data whose items are asked for as (epoch, index), so that several processes can prepare batches ahead."""

    def __init__(self, data: Any) -> None:
        self.data, self.changes = data, isinstance(data, ByEpoch)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, index = place
        if self.changes:
            self.data.set_epoch(epoch)
        return self.data[index]


def steps_per_epoch(examples: int, batch: int) -> int:
    """Return the number of whole batches in an epoch, or raise `InputError` if there are none."""
    require(
        examples >= batch,
        f"A batch must not be larger than the data, {examples} examples; got {batch}. Nearest: {max(examples, 1)}.",
    )
    return examples // batch


ORDER = 1  # the purpose in the seed of these random numbers; augmentation has another


class Batches(Sampler[list[int]]):
    """The indices of `steps` batches, in order.

    Args:
        data: has a length; its epoch is set if it is `ByEpoch`.
        batch: examples of a step.
        steps: number of batches.
        seed: seed of the order.
    """

    def __init__(self, data: Sized, batch: int, steps: int, seed: int) -> None:
        self.data, self.batch, self.steps, self.seed = data, batch, steps, seed
        self.per_epoch = steps_per_epoch(len(data), batch)

    def __len__(self) -> int:
        return self.steps

    def order(self, epoch: int) -> list[int]:
        return np.random.default_rng([self.seed, ORDER, epoch]).permutation(len(self.data)).tolist()

    def __iter__(self) -> Iterator[list[int]]:
        order: list[int] = []
        for step in range(self.steps):
            epoch, place = divmod(step, self.per_epoch)
            if place == 0:
                order = self.order(epoch)
                if isinstance(self.data, ByEpoch):
                    self.data.set_epoch(epoch)
            yield order[place * self.batch : (place + 1) * self.batch]


class BatchesInEpochs(Sampler[list[tuple[int, int]]]):
    """The same batches for `InEpochs`: each index has its epoch."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step, batch in enumerate(self.batches):
            yield [(step // self.batches.per_epoch, index) for index in batch]


def ignore_interrupts(worker: int) -> None:
    """Let a process that prepares batches ignore Ctrl-C: the run finishes its step first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
