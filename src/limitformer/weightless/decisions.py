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
        reads = name in READING or (func in (torch.where, Tensor.where) and len(args) == 1)  # indices
        if depends and not reads and name in INDEXING:
            reads = any(each.dtype == torch.bool and each in self.random for each in tensors_in([args[1]]))
        if depends and reads:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            self.found = self.found or not caller.startswith(OWN_CODE)
        out = func(*args, **kwargs)
        if depends:
            for each in tensors_in((out, args[:1] if name == "__setitem__" else ())):
                if not isinstance(each, Implicit):
                    self.random[each] = True
                    if each._is_view() and each._base is not None:  # a change in place of a view changes all of it
                        self.random[each._base] = True
        return out
