"""`Decisions`: a mode that notes whether a module's code reads a number that depends on random weights.

Code that takes a number out of a tensor (`int(scores.argmax())`, `if x.max() > 1:`) decides once for a whole batch. If
samples side by side are that batch, one sample decides for the others, and their law is not that of samples alone. Two
samples that decide alike do not show this, so samples of such code run one at a time.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from limitformer.weightless.implicit import Implicit
from limitformer.weightless.tensors import tensors_in

# Names of the functions of torch that return numbers of Python or NumPy, or tensors whose size depends on numbers.
READING = {
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__bool__", "__contains__",
    "__float__", "__format__", "__index__", "__int__", "argwhere", "masked_select", "nonzero", "unique",
    "unique_consecutive", "bincount",
}  # fmt: skip
INDEXING = {"__getitem__", "__setitem__", "index_put", "index_put_"}
OWN_CODE = __name__.rpartition(".")[0]  # this package, whose hooks read numbers too


class Decisions(TorchFunctionMode):
    """A mode that sets `found` when code outside this package reads a number that depends on random weights."""

    def __init__(self) -> None:
        super().__init__()
        self.random: Any = WeakTensorKeyDictionary()  # tensors computed from random weights
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and note whether its result depends on random weights."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        depends = any(isinstance(each, Implicit) or each in self.random for each in tensors_in((args, kwargs)))
        if depends and (name in READING or (name in INDEXING and self.chooses(args[1])) or is_condition(func, args)):
            caller = sys._getframe(1).f_globals.get("__name__", "")
            self.found = self.found or not caller.startswith(OWN_CODE)
        out = func(*args, **kwargs)
        if depends:
            for each in tensors_in((out, args[:1] if name == "__setitem__" else ())):
                self.note(each)
        return out

    def chooses(self, index: Any) -> bool:
        """Whether an index is boolean and depends on random weights."""
        return any(each.dtype == torch.bool and each in self.random for each in tensors_in([index]))

    def note(self, tensor: Tensor) -> None:
        if isinstance(tensor, Implicit):
            return
        self.random[tensor] = True
        if tensor._is_view() and tensor._base is not None:  # a change in place of a view changes all of it
            self.random[tensor._base] = True


def is_condition(func: Any, args: Any) -> bool:
    """Whether a call is `where(condition)`, which returns indices."""
    return func in (torch.where, Tensor.where) and len(args) == 1
