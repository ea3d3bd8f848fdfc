"""A matrix that reads a vector of zeros moves once the vector has moved.

Right (torch): W changes by 7 % before step 3 and by 15 % before step 4. Once the factors of its
gradient shared the vector's memory, which the next pass resets, so that W never moved.
"""

import pytest
import torch
from torch import nn

import limitformer as lf
from limitformer.subjects.losses import square


class Net(nn.Module):
    """x + W p with a zero vector p, then two blocks; W has no gradient at step 1, p has."""

    def __init__(self):
        super().__init__()
        self.start, self.w = nn.Parameter(torch.zeros(32)), nn.Linear(32, 64, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
        for each in (self.w, *self.blocks):
            nn.init.normal_(each.weight, std=0.1)

    def forward(self, x):
        x = x + self.w(self.start)
        for block in self.blocks:
            x = x + block(torch.tanh(x))
        return x


def verify():
    x = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))
    adamw = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.0}
    for draw in ("auto", "never", "always"):
        data = lf.weightless.simulate_steps(
            Net, x, optimizer=adamw, steps=4, samples=2, seed=0, draw=draw, loss=square, progress=False
        )
        moved = data.isel(rate=0, sample=0).sel(weight="w.weight").weight_change.values
        assert moved[:2].max() < 1e-6, (draw, moved)
        assert moved[2:4] == pytest.approx([0.07, 0.15], abs=0.02), (draw, moved)
