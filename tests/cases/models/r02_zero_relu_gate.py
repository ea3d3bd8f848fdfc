"""lucidrains/deep-cross-attention#2: a gate whose linear is zero and whose activation is ReLU never has a gradient.

ReLU(0) has derivative 0 in torch, so that gate.1.weight stays zero for ever. Right: `dead`, broken, with its name.
"""

from torch import nn

import limitformer as lf
from cases.networks import Block, LanguageModel


class Gated(Block):
    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.gate = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2, bias=False), nn.ReLU())

    def forward(self, x):
        g, y = self.gate(x), super().forward(x)
        return y + g[..., :1] * x + g[..., 1:] * y


def build():
    model = LanguageModel(block=Gated, depth=3)
    for block in model.blocks:
        nn.init.zeros_(block.gate[1].weight)
    return model


def verify():
    report = lf.check(build, 16, samples=2, progress=False)
    dead = {one.name: one for one in report.verdicts}["dead"]
    assert (report.grade, dead.grade) == ("broken", "broken")
    assert "held back by blocks.*.gate.1.weight, which is zero" in dead.said
