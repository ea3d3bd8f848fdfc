"""`Interpreter`, which tells observers of each operation of a pass, and of the modules that they watch.

It sees operations below autograd (`ops`). A tensor is then known by its memory. While an observer computes, and while
a product with a weight that has no entries is answered (`implicit`), the interpreter is off; `tell` reports such an
answer as one operation.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from limitformer.weightless.ops import FUSED, FUSED_MASKS, kind_of
from limitformer.weightless.tensors import storage, tensors_in

paused: Any = _disable_current_modes  # within it the interpreter sees nothing
T = TypeVar("T")


@dataclass(slots=True)
class Op:
    """One operation; `kind` is empty for those that are not in the table, and for answers of weights.

    An answer has the weights without entries that it used, as Python functions see them, and its results may have a
    gradient.
    """

    kind: str
    func: Any
    args: Any
    kwargs: Any
    out: Any
    weights: Sequence[Any] = ()


class Observer:
    """A part of the program that looks at a pass; `watched` are the names of modules whose calls it is told of."""

    watched: Iterable[str] = ()

    def enter(self, name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        """Look at the arguments of a watched module."""

    def leave(self, name: str, part: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """Look at the output of a watched module."""

    def see(self, op: Op) -> None:
        """Look at an operation that has run."""


class NoEntriesError(Exception):
    """The module reads a tensor without entries."""


class Interpreter(TorchDispatchMode):
    """A mode that tells observers of a pass of `module`; parameters that it reads are added to `read`.

    Args:
        read: ids of parameters, and names of those without entries.
    """

    def __init__(self, module: nn.Module, *observers: Observer, read: set[Any] | None = None) -> None:
        super().__init__()
        self.module, self.observers, self.read = module, observers, set[Any]() if read is None else read
        self.exits, self.below_autograd = ExitStack(), False

    def __enter__(self) -> "Interpreter":
        fast = torch.backends.mha
        self.exits.callback(fast.set_fastpath_enabled, fast.get_fastpath_enabled())
        fast.set_fastpath_enabled(False)  # one operation for a whole layer, whose parts nobody sees
        for observer in self.observers:
            for name in observer.watched:
                part = self.module.get_submodule(name)
                before, after = (partial(self.call_off, each, name) for each in (observer.enter, observer.leave))
                self.exits.callback(part.register_forward_pre_hook(before, with_kwargs=True).remove)
                self.exits.callback(part.register_forward_hook(after, with_kwargs=True).remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.exits.close()

    def call_off(self, method: Callable[..., None], name: str, *arguments: Any) -> None:
        with paused():
            method(name, *arguments)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and tell the observers."""
        kwargs = kwargs or {}
        if self.below_autograd or torch.is_inference_mode_enabled():  # where operations are not yet in parts
            out = self.in_parts(lambda: func.decompose(*args, **kwargs))
            if out is not NotImplemented:
                return out
        self.note_reads(func, args)
        if kwargs:
            self.note_reads(func, kwargs.values())
        out = func(*args, **kwargs)
        kind = kind_of(func)
        if kind == FUSED:
            self.attend_in_parts(func, args, kwargs)
        op = Op(kind, func, args, kwargs, out)
        for observer in self.observers:
            observer.see(op)
        return out

    def in_parts(self, call: Callable[[], T]) -> T:
        """Call a function that is made of operations, and see them."""
        before, self.below_autograd = self.below_autograd, True
        super().__enter__()
        try:
            return call()
        finally:
            super().__exit__(None, None, None)
            self.below_autograd = before

    def attend_in_parts(self, func: Any, args: Any, kwargs: Any) -> None:
        """Repeat fused attention, without gradients, in parts that the observers see."""
        mask, causal = FUSED_MASKS[func.overloadpacket.__name__]
        chosen = dict(enumerate(args)) | kwargs
        q, k, v = args[:3]
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            self.in_parts(
                lambda: functional.scaled_dot_product_attention(
                    q, k, v, chosen.get(mask), 0.0, bool(chosen.get(causal)), scale=kwargs.get("scale"),
                    enable_gqa=k.shape[-3] != q.shape[-3],
                )
            )  # fmt: skip

    def tell(self, func: Any, values: Any, out: Any, kind: str) -> None:
        """Tell the observers of an operation that ran while the interpreter was off."""
        tensors = tensors_in(values)
        self.note_reads(func, tensors)
        inputs, outputs = (
            [each for each in some if not hasattr(each, "weight")] for some in (tensors, tensors_in(out))
        )
        weights = [each for each in tensors if hasattr(each, "weight")]
        with paused():
            for observer in self.observers:
                observer.see(Op(kind, func, inputs, {}, outputs, weights))

    def note_reads(self, func: Any, values: Iterable[Any]) -> None:
        """Add the parameters among the values to `read`.

        Raises:
            NoEntriesError: a tensor is on the meta device; torch would return uninitialised memory.
        """
        for each in values:
            if isinstance(each, list | tuple):
                self.note_reads(func, each)
            elif isinstance(each, Tensor):
                if each.is_meta:
                    name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else func.__name__
                    raise NoEntriesError(f"reads a matrix without entries in {name}")
                if type(each) is not Tensor and isinstance(each, nn.Parameter):
                    self.read.add(each.weight.name if hasattr(each, "weight") else id(each))


class ByMemory:
    """Values by the memory of tensors, which their views share, until it is freed."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[StorageWeakRef, Any]] = {}

    def get(self, x: Tensor) -> Any:
        """Return the value, None if there is none."""
        return self.known.get(storage(x), (None, None))[1] if self.known else None

    def put(self, x: Tensor, value: Any) -> None:
        """Set the value; a weak reference keeps the address from other tensors."""
        with suppress(NotImplementedError, RuntimeError):  # as in `storage`
            self.known[storage(x)] = StorageWeakRef(x.untyped_storage()), value

    def forget_freed(self) -> None:
        self.known = {key: each for key, each in self.known.items() if not each[0].expired()}
