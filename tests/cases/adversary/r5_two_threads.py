"""Two threads that simulate at once got other numbers than alone, in 3 of 12 runs, or a wrong reason (also r4).

Right: the same bits as alone.
"""

import threading

import numpy as np
import torch
from torch import nn

import limitformer as lf
from cases.networks import IDS, Stack


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.w = nn.Linear(width, width)
        nn.init.normal_(self.w.weight, 0, 0.2)

    def forward(self, x):
        return x + self.w(x)


def simulated():
    return lf.weightless.simulate(lambda: Stack(Block, 2), IDS, samples=10, seed=0, gradients=True, progress=False)


def verify():
    alone, together = simulated(), []
    threads = [threading.Thread(target=lambda: together.append(simulated())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(together) == 6
    for data in together:
        assert np.array_equal(data.covariance, alone.covariance)
        assert np.array_equal(data.weight_gradient, alone.weight_gradient)
    assert nn.Linear(3, 3).weight.device.type == "cpu"
    assert torch.is_grad_enabled()
