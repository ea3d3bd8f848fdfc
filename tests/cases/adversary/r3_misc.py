"""An exception of a model's code, whatever it is, leaves torch as it was.

Right: the exception itself, or one line that names it; afterwards a new layer is finite, on the CPU, and has gradients.
"""

import pytest
import torch
from torch import nn

import limitformer as lf
from cases.networks import IDS, Residual, Stack


class Weird(BaseException):
    pass


def patched():
    """Return what the library may replace while it watches."""
    spaces = (torch, torch.nn.init, torch.Tensor, nn.Module)
    return [{key: each for key, each in vars(space).items() if callable(each)} for space in spaces]


def verify():
    lf.weightless.simulate(Stack, IDS, samples=2, seed=0, progress=False)  # torch's compiler wraps a function once
    before = patched()
    for error in (RuntimeError("x"), SystemExit(3), KeyboardInterrupt(), Weird("w"), MemoryError()):

        class Raises(Residual):
            def forward(self, x, error=error):
                raise error

        def built(error=error):
            nn.init.normal_(Stack().e.weight)
            raise error

        for model in (lambda block=Raises: Stack(block), built):
            with pytest.raises((type(error), lf.InputError)):
                lf.weightless.simulate(model, IDS, samples=2, seed=0, progress=False)
            assert patched() == before
            weight = nn.Linear(3, 3).weight
            assert (weight.device.type, weight.requires_grad, bool(weight.isfinite().all())) == ("cpu", True, True)
