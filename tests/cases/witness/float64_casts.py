"""A module that casts x and W to float32 around a linear map runs in float64, as in torch: routers and norms do so.

Right: the loss of a pass in float32, to the rounding of float32, whether W is drawn, kept for `einsum`, or not drawn.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import limitformer as lf


def linear(x, w):
    return functional.linear(x.float(), w.float())


def contraction(x, w):
    return torch.einsum("bmn,pn->bmp", x.to(torch.float32), w.to(torch.float32))


TYPES = torch.float32, torch.float64


class Block(nn.Module):
    def __init__(self, product):
        super().__init__()
        self.w, self.product = nn.Linear(64, 64, bias=False), product
        nn.init.normal_(self.w.weight, std=0.1)

    def forward(self, x):
        return x + self.product(x, self.w.weight).to(x.dtype)


class Kernel(nn.Module):
    """One kernel that is used in the type of the pass and in float32."""

    def __init__(self):
        super().__init__()
        self.w = nn.Conv1d(64, 64, 1, bias=False)

    def forward(self, x):
        y = functional.conv1d(x.mT, self.w.weight)
        return x + functional.conv1d(y.float(), self.w.weight.float()).mT.to(x.dtype)


def two(block, *arguments):
    return nn.Sequential(block(*arguments), block(*arguments))


def verify():
    x = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))
    for make in (partial(two, Block, linear), partial(two, Block, contraction), partial(two, Kernel)):
        for draw in ("auto", "never", "always"):
            options = {"samples": 1, "seed": 0, "gradients": True, "draw": draw, "progress": False}
            one, other = (lf.weightless.simulate(make, x, dtype=each, **options).loss.item() for each in TYPES)
            assert one == pytest.approx(other, rel=1e-5), (make, draw)
