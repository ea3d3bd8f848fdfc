"""One kernel in `conv1d` and `conv_transpose1d`, with draw="never": each once had a kernel of its own (also r8).

Right: the law does not depend on `draw`; |conv_transpose1d(conv1d(x))| is larger, as K Kᵀ has a mean.
"""

from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import limitformer as lf
from cases.networks import IDS, Stack


class Block(nn.Module):
    size = 1

    def __init__(self, width):
        super().__init__()
        self.w = nn.Parameter(torch.empty(width, width, self.size))
        nn.init.normal_(self.w, 0, 0.3)

    def forward(self, x):
        pad = self.size // 2
        y = torch.tanh(functional.conv1d(x.mT, self.w, padding=pad))
        return x + functional.conv_transpose1d(y, self.w, padding=pad).mT


class Wide(Block):
    size = 3


class Reversed(Block):
    def forward(self, x):
        return x + functional.conv1d(torch.tanh(functional.conv_transpose1d(x.mT, self.w)), self.w).mT


def verify():
    for block in (Block, Wide, Reversed):
        make = partial(Stack, block, 2)
        drawn = [make()(IDS).detach()[0, 6].square().mean().item() for _ in range(100)]
        for draw in ("auto", "never"):
            data = lf.weightless.simulate(make, IDS, samples=60, seed=0, draw=draw, progress=False)
            law = data.covariance.values[:, -1, 6, 6]
            error = np.sqrt(law.var() / 60 + np.var(drawn) / 100)
            assert abs(law.mean() - np.mean(drawn)) < 4 * error, (block, draw)
