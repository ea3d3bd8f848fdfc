"""Measure effects of updates on the outputs of linear maps by matrices that begin with given entries, such as zeros.

`weights.TrainedRun` measures those of random matrices.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from limitformer.weightless.implicit import Implicit
from limitformer.weightless.steps.weights import TrainedWeights
from limitformer.weightless.tensors import storage

PRODUCTS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
PRODUCTS |= {torch.addmm, Tensor.addmm}  # with a bias before the factors


class EffectsOfUpdates(TorchFunctionMode):
    """A mode that notes what the updates of a module's own matrices add to the outputs of linear maps."""

    def __init__(self, trained: TrainedWeights) -> None:
        super().__init__()
        self.trained = trained
        self.names = {storage(each): name for name, each in trained.own.items() if each.dim() == 2}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and note the effect if it is a linear map by one of the matrices, its transpose or a slice."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.names:
            return out
        if func is functional.linear:
            x, matrix = (kwargs.get(key, *args[k : k + 1]) for k, key in enumerate(("input", "weight")))
        elif func in PRODUCTS and not kwargs:
            x, matrix = args[-2:]
        else:
            return out
        name = self.names.get(plain_storage(matrix))
        if name is not None and plain_storage(x) and matrix.dim() == 2:
            with torch.no_grad():  # a checkpoint counts the tensors that autograd saves
                self.note(name, x, matrix, func is functional.linear)
            self.trained.last = name, out.detach().clone()  # the code may change it in place
        return out

    def note(self, name: str, x: Tensor, matrix: Tensor, transpose: bool) -> None:
        """Note the effect of x W, or x Wᵀ, where W is a view of the matrix `name`."""
        moved = self.trained.entries[name].moved.contiguous()
        if matrix.dtype != moved.dtype or not bool(x.isfinite().all()):
            return
        moved = moved.as_strided(matrix.shape, matrix.stride(), matrix.storage_offset())
        self.trained.note_effect(name, x @ (moved.mT if transpose else moved))


def plain_storage(tensor: Any) -> int:
    """Return `storage`, or 0 for what has none: sparse and nested tensors, and those inside `torch.func`."""
    if not isinstance(tensor, Tensor) or isinstance(tensor, Implicit) or tensor.layout != torch.strided:
        return 0
    try:
        return storage(tensor)
    except (NotImplementedError, RuntimeError):
        return 0
