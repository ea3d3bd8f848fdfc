"""The laws of parametrized weights, and of constructors that read a random number.

Right: what torch's orthogonal parametrization stores is −I, not uniform; a weight that depends on a random entry is
drawn by its constructor; both streams have the size of really drawn networks.
"""

from functools import partial

import numpy as np
import torch
import torch.nn.utils.parametrizations as parametrizations
from torch import nn

import limitformer as lf
from cases.networks import IDS, Stack


class Orthogonal(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.map = parametrizations.orthogonal(nn.Linear(width, width))

    def forward(self, x):
        return x + torch.tanh(self.map(x) * 2)


class Reads(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.map = nn.Linear(width, width)
        with torch.no_grad():
            self.map.weight.normal_(0, 0.2)
            self.map.weight.mul_(3.0 if float(self.map.weight[0, 0]) > 0 else 0.3)

    def forward(self, x):
        return x + torch.tanh(self.map(x))


def verify():
    for block, weight, kind in (
        (Orthogonal, "blocks.0.map.parametrizations.weight.original", "given"),
        (Reads, "blocks.0.map.weight", "unknown"),
    ):
        make = partial(Stack, block, 2)
        assert lf.weightless.law(make)[weight].kind == kind
        drawn = [make()(IDS).detach()[0, 6].square().mean().item() for _ in range(100)]
        law = lf.weightless.simulate(make, IDS, samples=60, seed=0, progress=False).covariance.values[:, -1, 6, 6]
        assert abs(law.mean() - np.mean(drawn)) < 4 * np.sqrt(law.var() / 60 + np.var(drawn) / 100), block
