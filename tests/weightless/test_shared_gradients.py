"""Gradients by sample of parameters with entries, against autograd, for each use of a parameter."""

from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import limitformer as lf
from limitformer.subjects.inputs import inputs_of
from limitformer.subjects.losses import chosen_loss
from limitformer.subjects.subject import resolve
from limitformer.weightless import network

WIDTH, SAMPLES = 6, 5
OPTIONS = {"gradients": True, "dtype": torch.float64, "progress": False}


def constants(*shape, start=0.0):
    """A parameter with fixed entries."""
    count = int(np.prod(shape))
    return nn.Parameter(start + torch.linspace(-1.0, 1.0, count).reshape(shape).contiguous())


def one_and_gain(p, x):
    return x * (1.0 + p["gain"].float().to(x.dtype))


def part(p, x):
    return x + p["long"][2 : 2 + WIDTH]


def row(p, x):
    return x + p["matrix"][1]


def positions(p, x):
    return x + p["positions"][:, : x.shape[1]]


def bias_in_place(p, x):
    return (x * 1.0).add_(p["gain"])


def two_at_once(p, x):
    return x * (p["gain"] + p["long"][:WIDTH])


def twice(p, x):
    return x * p["gain"] + p["gain"]


def layer_norm(p, x):
    return functional.layer_norm(x, (WIDTH,), p["gain"], p["long"][:WIDTH], 1e-3)


def rms_norm(p, x):
    return functional.rms_norm(x, (WIDTH,), weight=p["gain"])


def linear(p, x):
    return functional.linear(x, p["matrix"], p["gain"])


def matmul(p, x):
    return x @ p["matrix"].T


def addmm(p, x):
    return torch.addmm(p["gain"], x.flatten(0, 1), p["matrix"]).view_as(x)


def convolution(p, x):
    kernel = torch.ones(WIDTH, WIDTH, 1, dtype=x.dtype)
    return functional.conv1d(x.mT, kernel, p["gain"]).mT


def difference(p, x):
    return x - p["gain"]


ONE_PASS = [one_and_gain, part, row, positions, bias_in_place, two_at_once, twice, layer_norm, rms_norm, linear]
ONE_PASS += [matmul, addmm, convolution]
ONE_AT_A_TIME = [difference]


class Used(nn.Module):
    """Blocks that apply `use` to constants, before a random map."""

    def __init__(self, use):
        super().__init__()
        self.use = use
        self.blocks = nn.ModuleList([nn.Module(), nn.Module()])
        for k, block in enumerate(self.blocks):
            block.p = nn.ParameterDict(
                {
                    "gain": constants(WIDTH, start=0.3 * k),
                    "long": constants(WIDTH + 3),
                    "matrix": constants(WIDTH, WIDTH),
                    "positions": constants(1, 7, WIDTH),
                    "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
                }
            )
            block.map = nn.Linear(WIDTH, WIDTH)
            block.forward = lambda x, block=block: x + torch.tanh(block.map(self.use(block.p, torch.tanh(x))))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def inputs():
    return torch.randn(2, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def steps(monkeypatch):
    """Record the numbers of samples side by side."""
    module, sizes = import_module("limitformer.weightless.simulate"), []
    side_by_side = module.side_by_side

    def note(*arguments):
        sizes.append(side_by_side(*arguments))
        return sizes[-1]

    monkeypatch.setattr(module, "side_by_side", note)
    return sizes


@pytest.mark.parametrize("use", ONE_PASS + ONE_AT_A_TIME)
def test_gradients_side_by_side_equal_those_of_autograd(use, monkeypatch):
    sizes = steps(monkeypatch)
    several = lf.weightless.simulate(lambda: Used(use), inputs(), samples=SAMPLES, seed=0, **OPTIONS)
    assert sizes == [SAMPLES if use in ONE_PASS else 1]
    monkeypatch.setattr(network, "SharedGradients", None)  # samples alone have torch's own gradients
    for k in range(SAMPLES):
        alone = autograd(use, k)
        for name in several.weight.values:
            mine = float(several.weight_gradient.sel(weight=name)[k])
            assert mine == pytest.approx(alone[name], rel=1e-9, nan_ok=True), (k, name)
    names = [str(name) for name in several.weight.values]
    assert "blocks.0.p.frozen" not in names
    assert {"blocks.0.p.gain", "blocks.1.p.matrix", "blocks.0.map.bias"} < set(names)
    used = several.weight_gradient.sel(
        weight="blocks.0.p.gain" if use not in (part, row, matmul, positions) else names[0]
    )
    assert len(np.unique(used)) == SAMPLES or np.isnan(used).all()


def autograd(use, sample):
    """Return the norms of torch's gradients of a single sample."""
    subject = resolve(lambda: Used(use))
    weightless = network.Weightless(subject, torch.float64, torch.device("cpu"))
    prepared = inputs_of(inputs(), subject)
    arrays = weightless.run(0, range(sample, sample + 1), prepared, "auto", chosen_loss(None, "hidden"))
    return dict(zip(weightless.trained, arrays["weight_gradient"][0], strict=True))
