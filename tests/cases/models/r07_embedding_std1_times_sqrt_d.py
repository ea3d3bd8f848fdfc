"""espnet#3454: an embedding N(0, 1) times √d, where a std of 1/√d is meant, "does not train properly".

The stream starts at √d = 16, so that every branch is about 1 % of it. Right: a verdict says so.
"""

import torch
from torch import nn

import limitformer as lf
from cases.networks import LanguageModel


class Decoder(LanguageModel):
    def __init__(self, right=False):
        super().__init__(width=256, std=0)
        if right:
            nn.init.normal_(self.wte.weight, std=1 / 16)

    def forward(self, ids):
        x = self.wte(ids) * 16
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Constant(LanguageModel):
    """Positions of std 1 and words of std 0.001."""

    def __init__(self):
        super().__init__(depth=2)
        self.positions = nn.Parameter(torch.empty(32, 64))
        nn.init.normal_(self.positions), nn.init.normal_(self.wte.weight, std=1e-3)

    def stream(self, ids):
        x = self.wte(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x


def verify():
    (faint,) = lf.check(Decoder, 32, samples=2, progress=False).verdicts
    assert (faint.name, faint.grade) == ("faint", "watch")
    assert 0.01 < faint.value < 0.015
    assert lf.check(lambda: Decoder(True), 32, samples=2, progress=False).grade == "fine"
    assert "constant" in {one.name for one in lf.check(Constant, 32, samples=2, progress=False).verdicts}
    torch.manual_seed(0)
    assert "constant" in {one.name for one in lf.check(Constant(), 32, law=False, progress=False).verdicts}
