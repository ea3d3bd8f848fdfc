"""Fill new memory with known numbers while a module is built, and note what its vectors held before each write.

Two builds from one seed, whose uninitialised memory holds different numbers, differ exactly in the entries that depend
on such memory: nothing wrote them, or what did write them read it. No garbage has to be there by chance.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from limitformer.weightless.tensors import storage, tensors_in

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
FINITE, NAN = 0, 1  # the two fills
NUMBERS = {FINITE: 1.6180339887, NAN: float("nan")}  # of floating types; other types hold 0 or 1
MOST_NOTED = 2**16  # entries of a tensor whose values are noted


class EmptyMemory(TorchDispatchMode):
    """A mode in which uninitialised memory holds a known number, and that notes what small tensors held."""

    def __init__(self, fill: int) -> None:
        super().__init__()
        self.fill = fill
        self.history: dict[int, list[bytes]] = {}  # by storage: digests of its values, in order
        self.alive: list[Any] = []  # storages, so that no address is reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and fill what it allocates."""
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name == "resize_" and args[0].layout == torch.strided:
            return self.resize(func, args, kwargs)
        written = tensors_in(args[0]) if args and name.rstrip("_") != name else tensors_in(kwargs.get("out", ()))
        self.note(written, first=True)
        out = func(*args, **kwargs)
        if name in ALLOCATIONS:
            self.write(out)
        self.note(written)
        return out

    def resize(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Fill the memory that is new, behind the entries that were there."""
        before = args[0].untyped_storage().nbytes() // args[0].element_size()
        out = func(*args, **kwargs)
        after = out.untyped_storage().nbytes() // out.element_size()
        if not out.is_meta and after > before:
            self.write(out.detach().as_strided((after - before,), (1,), before))
        return out

    def write(self, tensor: Tensor) -> None:
        """Write the fill to a tensor; types that cannot be filled stay as they are."""
        if tensor.is_meta or not tensor.numel():
            return
        floating = tensor.is_floating_point() or tensor.is_complex()
        with torch.no_grad():
            try:
                tensor.fill_(NUMBERS[self.fill] if floating else self.fill)
            except RuntimeError:  # such as quantised types
                return

    def note(self, tensors: list[Tensor], first: bool = False) -> None:
        """Note the values of small tensors on the CPU; `first`: only of those without a note."""
        for tensor in tensors:
            plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
            if not plain or tensor.device.type != "cpu" or tensor.untyped_storage().nbytes() > 8 * MOST_NOTED:
                continue
            if not (first and storage(tensor) in self.history):
                self.alive.append(tensor.untyped_storage())
                self.history.setdefault(storage(tensor), []).append(digest(tensor))


def digest(tensor: Tensor) -> bytes:
    """Return a short text of a tensor's storage, equal for equal bytes."""
    entries = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())
    return hashlib.sha256(entries.numpy().tobytes()).digest()
