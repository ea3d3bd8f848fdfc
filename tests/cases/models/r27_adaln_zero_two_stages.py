"""SiT, DiT and all their forks: a zero output layer and zero modulations (adaLN-Zero) are sound.

Right: the output layer moves in step 1, the modulations in step 2, all others in step 3; nothing is dead or broken, and
no `--fail-on` fails. Changes in the second step of what has no gradient were rounding (6e-8).
"""

import torch
from torch import nn
from torch.nn import functional

import limitformer as lf
from cases.networks import Attention

INPUTS = {"x": torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0)), "y": torch.tensor([0, 1])}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.attn, self.mod = nn.LayerNorm(64, elementwise_affine=False), Attention(), nn.Linear(64, 128)
        nn.init.zeros_(self.mod.weight), nn.init.zeros_(self.mod.bias)

    def forward(self, x, c):
        shift, gate = self.mod(functional.silu(c))[:, None].chunk(2, -1)
        return x + gate * self.attn(self.n(x) + shift)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.cond, self.out = nn.Linear(12, 64), nn.Embedding(10, 64), nn.Linear(64, 12)
        self.blocks, self.n = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(64, elementwise_affine=False)
        nn.init.zeros_(self.out.weight), nn.init.zeros_(self.out.bias)

    def forward(self, x, y):
        x, c = self.patch(x), self.cond(y)
        for block in self.blocks:
            x = block(x, c)
        return self.out(self.n(x))


def loss(out, inputs):
    return (out - INPUTS["x"][: len(out)].roll(1, 1)).square().mean((1, 2))


def verify():
    torch.manual_seed(0)
    for model in (Net, Net()):
        report = lf.check(model, INPUTS, samples=2, loss=loss, progress=False)
        (one,) = [one for one in report.verdicts if one.name in ("dead", "waits for zeros")]
        assert (one.name, one.grade, report.grade) == ("waits for zeros", "watch", "watch")
        assert "until out.weight, then blocks.*.mod.weight, zero at first" in one.said
        assert one not in report.failed("any")
        assert not report.failed("dead,broken")
    report = lf.steps(
        Net, INPUTS, optimizer="adamw", rates=[1e-3], steps=3, samples=2, seed=0, loss=loss, progress=False
    )
    still = {one.name: one.said for one in report.verdicts}["still"]
    assert "zero before: out.weight (first step), blocks.*.mod.weight (2) (second step)" in still
    assert "attn.q.weight (2)" in still.partition("third step")[2]
