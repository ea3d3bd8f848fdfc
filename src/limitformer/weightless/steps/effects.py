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
WITH_BIAS = {torch.addmm, Tensor.addmm}  # the bias is the first argument


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
        if func is functional.linear:
            x, matrix = (kwargs.get(key, *args[k : k + 1]) for k, key in enumerate(("input", "weight")))
        elif func in PRODUCTS | WITH_BIAS and not kwargs:
            x, matrix = args[-2:]
        else:
            return out
        if any(not isinstance(each, Tensor) or isinstance(each, Implicit) for each in (x, matrix)):
            return out
        name = self.names.get(storage(matrix))
        if name is not None and bool(x.isfinite().all()):
            with torch.no_grad():
                moved = self.trained.entries[name].moved.contiguous()
                moved = moved.as_strided(matrix.shape, matrix.stride(), matrix.storage_offset())
                if func is functional.linear:
                    matrix, moved = matrix.mT, moved.mT
                self.trained.note_effect(name, x @ moved)
                self.trained.last = name, x @ matrix
        return out
