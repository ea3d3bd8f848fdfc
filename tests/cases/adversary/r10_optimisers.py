"""Optimisers that are not what their class says: another update under the name Lion, a replaced step, a state, writes.

Right: each trains drawn networks itself, with the reason; the same classes without the change are simulated.
"""

import pytest
import torch
from torch import nn

import limitformer as lf
from cases.networks import IDS, Stack, mean_square
from limitformer.nn.drawn.simulate import torch_seed
from limitformer.weightless.building import drawn_module


class Lion(torch.optim.Optimizer):
    """A variant that moves by the sign of the gradient, at a tenth of the rate."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                each.add_(each.grad.sign(), alpha=-group["lr"] / 10)


def patched(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    step = optimizer.step

    def clipped(*arguments):
        nn.utils.clip_grad_value_(module.parameters(), 0.001)
        return step(*arguments)

    optimizer.step = clipped
    return optimizer


def zeroing(module):
    for block in module.blocks:
        nn.init.zeros_(block.w)
    return torch.optim.SGD(module.parameters(), lr=1.0)


def data_zeroing(module):
    module.e.weight.data.mul_(0.5)
    return torch.optim.SGD(module.parameters(), lr=1.0)


def replacing(module):
    module.e.weight.data = torch.zeros_like(module.e.weight)
    return torch.optim.SGD(module.parameters(), lr=1.0)


def freezing(module):
    module.e.requires_grad_(False)
    return torch.optim.SGD(module.parameters(), lr=1.0)


def hooking(module):
    module.blocks[0].w.register_hook(lambda gradient: 10 * gradient)
    return torch.optim.SGD(module.parameters(), lr=1.0)


def hooking_module(module):
    """Hooks that change no gradient change nothing."""
    module.blocks[1].register_full_backward_hook(lambda *_: None)
    return torch.optim.SGD(module.parameters(), lr=1.0)


def with_state(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)
    optimizer.state[module.e.weight]["momentum_buffer"] = torch.ones(20, 24)
    return optimizer


def scheduled(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    return optimizer


NOT_UNDERSTOOD = {
    lambda module: Lion(module.parameters()): "the optimiser Lion is not understood",
    patched: "SGD has a step that is replaced, as by a scheduler",
    scheduled: "SGD has a step that is replaced, as by a scheduler",
    zeroing: "the output of blocks.0 differs",
    data_zeroing: "the output of e differs",
    replacing: "the output of e differs",
    freezing: "the gradient of e.weight is only in the simulation",
    hooking: "the gradient of blocks.0.w differs",
    with_state: "SGD has a state already",
}


def trained(optimizer):
    """Return the losses before and after a step in plain torch, of the first network that is drawn."""
    module = drawn_module(Stack, torch.float32, torch_seed(0, "weightless build 0")).eval()
    made = optimizer(module)
    before = mean_square(module(IDS), {}).mean()
    before.backward()
    made.step()
    return [before.item(), mean_square(module(IDS), {}).mean().item()]


def verify():
    options = {"loss": mean_square, "steps": 1, "samples": 1, "seed": 0, "progress": False}
    for optimizer, reason in NOT_UNDERSTOOD.items():
        report = lf.steps(Stack, IDS, optimizer=optimizer, **options)
        assert report.witness.status == "drawn"
        assert reason in report.witness.reason
        assert report.data.loss.values[0, 0].tolist() == pytest.approx(trained(optimizer), rel=1e-5)
    for optimizer in (lambda module: torch.optim.SGD(module.parameters(), lr=1.0), hooking_module):
        assert lf.steps(Stack, IDS, optimizer=optimizer, **options).witness.status == "witnessed"
