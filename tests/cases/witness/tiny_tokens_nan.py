"""Tokens near 1e-41 in float32 once made all gradients before them NaN, and collapsed tokens lost digits.

Right: gradients that are finite, those of `first` for any size of the small tokens, those of `inside` in proportion to
it; and U Dᵀ = Z Bᵀ, both of which are Z W Dᵀ, to the rounding of float32 where tokens differ by 1e-5.
"""

from functools import partial

import numpy as np
import torch
from torch import nn

import limitformer as lf
from limitformer.weightless.maps import NeverDrawnMap
from limitformer.weightless.roots import root_of


class Block(nn.Module):
    def __init__(self, small):
        super().__init__()
        self.small, self.inside = small, nn.Linear(64, 64, bias=False)
        nn.init.normal_(self.inside.weight, std=0.125)

    def forward(self, x):
        return x + self.inside(x * self.small)


class Net(nn.Module):
    def __init__(self, small):
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        nn.init.normal_(self.first.weight, std=0.125)
        self.blocks = nn.ModuleList([Block(small), Block(small)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Fresh:
    """The random numbers of a map."""

    scale = 1.0

    def gaussian(self, purpose, rows, columns):
        return torch.randn(1, rows, columns, generator=torch.Generator().manual_seed(len(purpose)))

    def note_product(self, backward, factor, answer):
        pass

    def add_squared_gradient(self, squared):
        self.squared = squared


def verify():
    x = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))
    norms = {}
    for small in (1e-10, 1e-39, 1e-41):
        make = partial(Net, small)
        data = lf.weightless.simulate(make, x, samples=1, seed=0, gradients=True, draw="never", progress=False)
        norms[small] = data.weight_gradient[0].values / [1.0, small, small]
        assert np.isfinite(data.weight_gradient).all()
    assert np.allclose(norms[1e-39], norms[1e-10], rtol=1e-3)
    assert np.allclose(norms[1e-41], norms[1e-10], rtol=2e-2)  # 1e-41 has three digits in float32

    token = torch.randn(1, 1, 512, generator=torch.Generator().manual_seed(1))
    z = (token + 1e-5 * torch.randn(1, 16, 512, generator=torch.Generator().manual_seed(2))).requires_grad_()
    d = torch.randn(1, 16, 256, generator=torch.Generator().manual_seed(3))
    u = NeverDrawnMap.apply(z, torch.zeros((), requires_grad=True), Fresh(), root_of(z), 256)
    (back,) = torch.autograd.grad(u, z, d)
    one, other = (u.double() @ d.double().mT).detach(), z.detach().double() @ back.double().mT
    assert torch.linalg.norm(one - other) < 1e-5 * torch.linalg.norm(one)
