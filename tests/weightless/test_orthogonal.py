"""Orthogonal weights: their law, and passes that never draw them against networks that `nn.init.orthogonal_` draws."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from scipy.stats import chi, ks_2samp, kstest
from torch import nn

import limitformer as lf
from limitformer.weightless import laws, orthogonal
from limitformer.weightless.maps import NeverDrawnMap
from limitformer.weightless.numbers import wishart_root
from limitformer.weightless.orthogonal import OrthogonalMap, haar_matrix, has_room
from limitformer.weightless.roots import root_of

SAMPLES, TOKENS, GAIN = 4000, 4, 0.7
LEVEL, REJECTED = 1e-4, 1e-8
SHAPES = [(12, 12), (7, 16), (16, 7), (3, 12), (12, 3)]  # with four tokens on three or more inputs, or outputs


class FromTorch:
    """Numbers for a map, from torch's own generator."""

    def __init__(self, seed, dtype):
        self.generator, self.dtype, self.squared = torch.Generator().manual_seed(seed), dtype, None
        self.scale, self.chance = GAIN, np.random.default_rng(seed)

    def gaussian(self, purpose, rows, columns):
        return torch.randn(SAMPLES, rows, columns, generator=self.generator, dtype=self.dtype)

    def wishart_root(self, purpose, rows, freedom):
        """The triangular factor of a Gaussian matrix, by its QR factorisation."""
        wide = torch.randn(SAMPLES, rows, freedom, generator=self.generator, dtype=torch.float64)
        return torch.linalg.qr(wide.mT).R.mT.to(self.dtype)

    def add_squared_gradient(self, squared):
        self.squared = squared


def tokens(inputs, dtype):
    """Unequal tokens; the third repeats the first."""
    z = torch.randn(TOKENS, inputs, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    z = z * torch.tensor([[1.0], [2.0], [0.3], [0.8]]) / math.sqrt(inputs)
    z[2] = z[0]
    return z.to(dtype).repeat(SAMPLES, 1, 1).requires_grad_()


def statistics(z, u, squared):
    """Statistics of outputs and gradients of a nonlinear loss."""
    back, out, z = z.grad.double(), u.detach().double(), z.detach().double()
    return {
        "an output": out[:, 1, 2],
        "fourth powers": out[:, 3].pow(4).sum(-1),
        "an inner product": (torch.tanh(2 * out[:, 0]) * out[:, 1]).sum(-1),
        "size of a gradient": back[:, 1].square().sum(-1),
        "an entry of a gradient": back[:, 3, 1],
        "gradient along its token": (back[:, 1] * z[:, 1]).sum(-1),
        "gradient along another token": (back[:, 3] * z[:, 1]).sum(-1),
        "inner product of gradients": (back[:, 0] * back[:, 1]).sum(-1),
        "gradient of the weight": squared.double(),
    }


def loss(u):
    """A loss whose gradient depends on u."""
    return (torch.tanh(2 * u) * u.roll(1, -2)).sum() + u[:, 1].pow(4).sum()


def drawn(inputs, outputs):
    """Statistics with matrices that torch's own initialisation draws."""
    z = tokens(inputs, torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        w = torch.empty(SAMPLES, inputs, outputs, dtype=torch.float64)
        for each in w:
            nn.init.orthogonal_(each, gain=GAIN)
    w.requires_grad_()
    u = z @ w
    loss(u).backward()
    return statistics(z, u, w.grad.square().sum((-1, -2)))


def never_drawn(inputs, outputs, dtype, which=OrthogonalMap, columns=None):
    z, numbers = tokens(inputs, dtype), FromTorch(5, dtype)
    if columns is not None:
        z.data = nn.functional.pad(z.data, (0, columns - inputs))
    if which is NeverDrawnMap:
        numbers.scale = GAIN / math.sqrt(max(inputs, outputs))
    u = which.apply(z, torch.zeros((), requires_grad=True), numbers, root_of(z.detach()), outputs)
    loss(u).backward()
    return statistics(z, u, numbers.squared)


def least_p(mine, theirs):
    return min(ks_2samp(mine[key], theirs[key]).pvalue for key in mine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_map_has_the_joint_law_of_a_matrix_that_torch_draws(inputs, outputs, dtype):
    theirs = drawn(inputs, outputs)
    assert least_p(never_drawn(inputs, outputs, dtype), theirs) > LEVEL
    assert least_p(never_drawn(inputs, outputs, dtype, NeverDrawnMap), theirs) < REJECTED  # the twin: a Gaussian matrix
