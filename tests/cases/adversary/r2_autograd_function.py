"""A weight in an `autograd.Function` of the module's own once had no gradient, and those upstream were wrong.

Right: the code draws such networks, and every gradient has the law of really drawn ones; so have those of a function
that reaches its weight by a module, and of a straight-through estimator.
"""

from functools import partial

import torch
from scipy.stats import ks_2samp
from torch import nn

import limitformer as lf
from cases.networks import IDS, Residual, Stack, mean_square


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.flatten(0, 1).T @ x.flatten(0, 1)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return torch.sign(w) * 0.2

    @staticmethod
    def backward(ctx, g):
        return g


apply = Product.apply  # bound before any pass, as is common


class Own(Residual):
    def forward(self, x):
        return x + torch.tanh(apply(x, self.w))


class Binary(Residual):
    def forward(self, x):
        return x + torch.tanh(x @ Sign.apply(self.w).T)


def gradients(make, seed):
    torch.manual_seed(seed)
    module: nn.Module = make()
    mean_square(module(IDS), None).mean().backward()
    return [each.grad.norm().item() for each in module.parameters()]


def verify():
    for block in (Own, Binary):
        make = partial(Stack, block, depth=2)
        for draw in ("auto", "never"):
            data = lf.weightless.simulate(
                make, IDS, samples=60, seed=0, gradients=True, loss=mean_square, draw=draw, progress=False
            )
            assert data.attrs["weights"] == "3 drawn by the model's own code"
        drawn = [gradients(make, seed) for seed in range(150)]
        for law, real in zip(data.weight_gradient.values.T, zip(*drawn, strict=True), strict=True):
            assert ks_2samp(law, real).pvalue > 1e-4
