"""iTransformer and its relatives normalise their copy of a series in place, which torch allows.

Right: `check` and `steps` run, with the loss of really drawn networks, 1.41 at the start.
"""

import pytest
import torch
from torch import nn

import limitformer as lf


class Net(nn.Module):
    def __init__(self, steps=96, width=64, out=24):
        super().__init__()
        self.embed, self.head = nn.Linear(steps, width), nn.Linear(width, out)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, dropout=0.0) for _ in range(3)
        )

    def forward(self, x):  # (batch, time, variables)
        mean = x.mean(1, keepdim=True).detach()
        x = x - mean
        std = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5)
        x /= std
        y = self.embed(x.mT)
        for block in self.blocks:
            y = block(y)
        return self.head(y).mT * std + mean


class Doubling(Net):
    def forward(self, x):
        return super().forward(torch.add(x, x, out=x))


TARGET = torch.randn(4, 24, 7, generator=torch.Generator().manual_seed(1))


def loss(output, inputs):
    return (output - TARGET[: len(output)]).square().mean((1, 2))


def verify():
    x = torch.randn(4, 96, 7, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    report = lf.check(Net, x, samples=4, loss=loss, progress=False)
    assert report.data.loss.mean() == pytest.approx(1.41, abs=0.1)
    report = lf.steps(Net, x, optimizer="adamw", rates=[1e-3], steps=1, samples=2, seed=0, loss=loss, progress=False)
    assert report.data.loss.values[..., 0].mean() == pytest.approx(1.41, abs=0.1)
    assert torch.equal(x, before)
    lf.check(Doubling, x, samples=1, loss=loss, progress=False)
