"""A hook of a parameter changes its gradient, as in clipping by value. It was once ignored without a word.

Right: the code draws such networks, with their hooks; the loss is that of networks that SGD really trains.
"""

import numpy as np
import torch

import limitformer as lf
from cases.networks import IDS, Stack, mean_square


class Clipped(Stack):
    def __init__(self):
        super().__init__()
        for p in self.parameters():
            p.register_hook(lambda g: g.clamp(-0.001, 0.001))


def clip_after(parameter):
    parameter.grad.clamp_(-0.001, 0.001)


class ClippedAfter(Stack):
    def __init__(self):
        super().__init__()
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(clip_after)


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=1.0)


def trained(make, seed):
    torch.manual_seed(seed)
    module = make()
    optimizer, losses = sgd(module), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = mean_square(module(IDS), None).mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return [losses[0] - losses[1], losses[1] - losses[2]]


def verify():
    for make in (Clipped, ClippedAfter):
        report = lf.steps(make, IDS, optimizer=sgd, steps=2, loss=mean_square, samples=12, seed=0, progress=False)
        loss = report.data.loss[0].values
        law = np.stack([loss[:, 0] - loss[:, 1], loss[:, 1] - loss[:, 2]], 1)
        drawn = np.array([trained(make, seed) for seed in range(30)])
        error = np.sqrt(drawn.var(0) / 30 + law.var(0) / 12)
        assert (np.abs(law.mean(0) - drawn.mean(0)) < 4 * error).all(), (law.mean(0), drawn.mean(0))
        data = lf.weightless.simulate(make, IDS, samples=1, seed=0, gradients=True, loss=mean_square, progress=False)
        assert "is its hook" in data.attrs["kept"]
        assert data.weight_gradient.max() <= 0.001 * 24 * 1.001
