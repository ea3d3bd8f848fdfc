r"""`Tape`, which records how tensors without entries were computed, and computes their entries when they are needed.

While a module is built, its matrices have no entries. Each operation that writes to one of them is a step of the tape.
`replay` runs the steps that some tensors need, with entries. Step k draws from a generator seeded by (seed, k), so that
a step that several tensors need draws the same numbers for all of them, and in every replay.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from limitformer.base.errors import InputError
from limitformer.nn.drawn.simulate import torch_seed
from limitformer.weightless.tensors import covers_storage, is_whole_storage, storage, tensors_in


class TensorView(NamedTuple):
    """A tensor without entries: a view of a storage."""

    storage: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    whole: bool


class Step(NamedTuple):
    """A call that writes to storages without entries."""

    call: Callable[..., Any]
    args: Any  # places instead of tensors without entries
    kwargs: dict[str, Any]
    out: list[TensorView]  # new tensors
    reads: set[int]  # storages whose earlier entries matter
    seeded: bool  # whether it draws random numbers
    shares: bool  # whether it reads random entries that exist


class Tape:
    """The operations that wrote to tensors without entries, in their order."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.steps: list[Step] = []
        self.writers: dict[int, list[int]] = {}  # by storage
        self.storages: dict[int, Any] = {}  # kept alive, so that no address is reused
        self.read: set[int] = set()  # steps whose random numbers the code has read

    def record(
        self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any], out: Any, written: list[Tensor],
        seeded: bool = False, shares: bool = False, fresh: bool = False,
    ) -> None:  # fmt: skip
        """Record a call that has changed the tensors `written`, or has made the tensors `out`.

        If it is `fresh`, earlier entries of a tensor that is written do not matter.
        """
        inputs = tensors_in((args, kwargs))
        old = {storage(each) for each in inputs if each.is_meta}
        new = [each for each in tensors_in(out) if each.is_meta and storage(each) not in old]
        changed = [each for each in written if each.is_meta]
        if not new and not changed:
            return
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        if new and not inputs:
            kwargs["dtype"] = new[0].dtype
        places = [self.place(each) for each in new]
        if fresh and len(changed) == 1 and covers_storage(changed[0]):
            own = storage(changed[0])
            if sum(storage(each) == own for each in inputs) == 1:
                old.discard(own)
        step = Step(call, self.without_entries(args), self.without_entries(kwargs), places, old, seeded, shares)
        for each in (*new, *changed):
            self.writers.setdefault(self.place(each).storage, []).append(len(self.steps))
        self.steps.append(step)

    def place(self, tensor: Tensor) -> TensorView:
        if tensor.is_conj() or tensor.is_neg():
            raise NotImplementedError("a tape has no conjugate views")
        self.storages.setdefault(storage(tensor), tensor.untyped_storage())
        offset = int(tensor.storage_offset())
        return TensorView(
            storage(tensor), tensor.dtype, tensor.shape, tensor.stride(), offset, is_whole_storage(tensor)
        )

    def without_entries(self, values: Any) -> Any:
        """Replace tensors by their places, and copy those that have entries."""
        if isinstance(values, Tensor):
            return self.place(values) if values.is_meta else values.detach().clone()
        if isinstance(values, dict):
            return {key: self.without_entries(each) for key, each in values.items()}
        return [self.without_entries(each) for each in values] if isinstance(values, list | tuple) else values

    def knows(self, tensor: Tensor) -> bool:
        """Whether steps wrote to the tensor, and to all that they read."""
        if tensor.layout != torch.strided or storage(tensor) not in self.writers:
            return False
        reads = [(one, k) for k in self.needed([storage(tensor)]) for one in self.steps[k].reads]
        return all(one in self.writers and self.writers[one][0] <= k for one, k in reads)

    def needed(self, storages: Iterable[int]) -> list[int]:
        """Return the steps that the entries of these storages depend on."""
        numbers = set[int]()
        waiting = [(each, len(self.steps)) for each in storages]
        while waiting:
            each, before = waiting.pop()
            writers = self.writers.get(each, [])
            place = bisect_left(writers, before)
            if place and writers[place - 1] not in numbers:
                numbers.add(writers[place - 1])
                waiting.extend((one, writers[place - 1]) for one in self.steps[writers[place - 1]].reads)
        return sorted(numbers)

    def draws(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the steps that give these tensors random numbers."""
        steps = self.needed(storage(each) for each in tensors)
        return {k for k in steps if self.steps[k].seeded or self.steps[k].shares}

    def dependent(self, tensor: Tensor, draws: set[int]) -> bool:
        """Whether a tensor depends on these draws, on numbers that the code has read, or on entries that exist."""
        own = self.draws([tensor])
        return bool(own & (draws | self.read)) or any(self.steps[k].shares for k in own)

    def replay(self, tensors: list[Tensor], names: Sequence[str] = ()) -> list[Tensor]:
        """Return these tensors with their entries.

        Raises:
            InputError: nothing wrote to a part of them.
        """
        places = [self.place(each) for each in tensors]
        steps = self.needed(place.storage for place in places)
        last = {one: k for k in steps for one in self.steps[k].reads}
        memory = Memory(self.storages)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for k in steps:
                self.run(k, memory)
                for one in [one for one in self.steps[k].reads if last[one] == k]:
                    if all(one != place.storage for place in places):
                        memory.entries.pop(one, None)
        values = [memory.tensor(place) for place in places]
        for k, value in enumerate(values):
            if memory.unwritten and bool(value.isnan().any()):
                name = names[k] if names else "a matrix"
                raise InputError(
                    f"nothing writes to a part of {name} while the module is built. Nearest: a function that makes all "
                    "tensors anew at each call."
                )
        return values

    def run(self, index: int, memory: "Memory") -> None:
        """Run a step with entries."""
        step = self.steps[index]
        if step.seeded:
            torch.manual_seed(torch_seed(self.seed, f"weightless step {index}"))
        result = step.call(*memory.with_entries(step.args), **memory.with_entries(step.kwargs))
        tensors = [each for each in tensors_in(result) if each.layout == torch.strided]
        if step.out:
            for place, each in zip(step.out, tensors, strict=True):
                memory.put(place, each)


class Memory:
    """Storages with entries."""

    def __init__(self, storages: dict[int, Any]) -> None:
        self.storages = storages
        self.entries: dict[int, Tensor] = {}  # flat
        self.unwritten: set[int] = set()  # storages that began without any entry

    def tensor(self, place: TensorView) -> Tensor:
        """Return the tensor at this place; entries that nothing has written are NaN."""
        if place.storage not in self.entries:
            size = self.storages[place.storage].nbytes() // place.dtype.itemsize
            empty = torch.nan if place.dtype.is_floating_point or place.dtype.is_complex else 0
            self.entries[place.storage] = torch.full((size,), empty, dtype=place.dtype, device="cpu")
            self.unwritten.add(place.storage)
        flat = self.entries[place.storage].view(place.dtype)
        return flat.as_strided(place.shape, place.stride, place.offset)

    def put(self, place: TensorView, value: Tensor) -> None:
        if place.whole and is_whole_storage(value):
            self.entries[place.storage] = value.detach().reshape(-1)
        else:
            self.tensor(place).copy_(value)

    def with_entries(self, values: Any) -> Any:
        """Replace views by tensors, also in containers."""
        if isinstance(values, TensorView):
            return self.tensor(values)
        if isinstance(values, dict):
            return {key: self.with_entries(each) for key, each in values.items()}
        return [self.with_entries(each) for each in values] if isinstance(values, list) else values
