"""LoRA, adapters, frozen towers: parameters with requires_grad=False are not meant to have a gradient.

Right: they take no part in verdicts on gradients and steps, and are counted; with A random and B zero it is watch.
"""

import torch
from torch import nn

import limitformer as lf
from cases.networks import Residual, mean_square


class Lora(Residual):
    def __init__(self):
        super().__init__()
        self.w.requires_grad_(False)
        self.a, self.b = nn.Linear(24, 4, bias=False), nn.Linear(4, 24, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return super().forward(x) + self.b(self.a(x))


def build():
    model = nn.Sequential(nn.Embedding(200, 24), *[Lora() for _ in range(4)], nn.Linear(24, 20))
    for part in (model[0], model[-1]):
        part.requires_grad_(False)
    return model


def verify():
    torch.manual_seed(0)
    for model in (build, build()):
        report = lf.check(model, 32, samples=2, progress=False)
        (one,) = report.verdicts
        assert (report.grade, one.name) == ("watch", "waits for zeros")
        assert "1 of 2 kinds of weight have no gradient until *.b.weight" in one.said
        assert "7 weights are frozen" in str(report).replace("\n", " ")
    report = lf.steps(
        build, 16, optimizer="adamw", rates=[1e-3], steps=2, samples=2, seed=0, loss=mean_square, progress=False
    )
    still = {one.name: one.said for one in report.verdicts}["still"]
    assert "4 of 8 matrices" in still
    assert "none of" not in still
    assert "7 weights are frozen" in report.caveat
