"""A module that casts x and W to float32 around a linear map runs in float64, as in torch: routers and norms do so.

Right: the loss of a pass in float32, to the rounding of float32, whether W is drawn, kept for `einsum`, or not drawn.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

import limitformer as lf


def linear(x, w):
    return functional.linear(x.float(), w.float())


def contraction(x, w):
    return torch.einsum("bmn,pn->bmp", x.to(torch.float32), w.to(torch.float32))


class Block(nn.Module):
    def __init__(self, product):
        super().__init__()
        self.w, self.product = nn.Linear(64, 64, bias=False), product
        nn.init.normal_(self.w.weight, std=0.1)

    def forward(self, x):
        return x + self.product(x, self.w.weight).to(x.dtype)


def verify():
    x = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))
    for product in (linear, contraction):
        for draw in ("auto", "never", "always"):
            losses = [
                lf.weightless.simulate(
                    lambda: nn.Sequential(*(Block(product) for _ in range(2))), x, samples=1, seed=0, gradients=True,  # noqa: B023
                    draw=draw, dtype=dtype, progress=False,
                ).loss.item()
                for dtype in (torch.float32, torch.float64)
            ]  # fmt: skip
            assert losses[0] == pytest.approx(losses[1], rel=1e-5), (product, draw)
