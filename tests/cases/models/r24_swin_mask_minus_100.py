"""Swin adds its mask of −100 in five dimensions: attention in shifted windows is uniform where it looks, not frozen.

Right: logits spread by 0.01 in every block, and no `frozen`.
"""

import torch
from torch import nn

import limitformer as lf

WIDTH, HEADS, WINDOWS, TOKENS = 64, 4, 4, 16


class Block(nn.Module):
    def __init__(self, shifted):
        super().__init__()
        self.n1, self.n2, self.qkv = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.o, self.up, self.down = (nn.Linear(a * WIDTH, b * WIDTH) for a, b in ((1, 1), (1, 4), (4, 1)))
        for part in (self.qkv, self.o, self.up, self.down):
            nn.init.trunc_normal_(part.weight, std=0.02)
        half = torch.arange(TOKENS) // (TOKENS // 2)
        mask = torch.where(half[:, None] == half, 0.0, -100.0).expand(WINDOWS, -1, -1)
        self.register_buffer("mask", mask if shifted else None)

    def forward(self, x):
        batch, tokens, width = x.shape
        w = self.n1(x).view(batch * WINDOWS, TOKENS, width)
        q, k, v = self.qkv(w).view(batch * WINDOWS, TOKENS, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        a = q * (width // HEADS) ** -0.5 @ k.transpose(-2, -1)
        if self.mask is not None:
            a = (a.view(batch, WINDOWS, HEADS, TOKENS, TOKENS) + self.mask[None, :, None]).view(
                -1, HEADS, TOKENS, TOKENS
            )
        w = self.o((a.softmax(-1) @ v).transpose(1, 2).reshape(batch * WINDOWS, TOKENS, width))
        x = x + w.view(batch, tokens, width)
        return x + self.down(nn.functional.gelu(self.up(self.n2(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.head = nn.Linear(12, WIDTH), nn.Linear(WIDTH, 10)
        self.blocks = nn.ModuleList(Block(shifted) for shifted in (False, True, False, True))

    def forward(self, x):
        x = self.patch(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def verify():
    x = torch.randn(2, WINDOWS * TOKENS, 12, generator=torch.Generator().manual_seed(0))
    report = lf.check(Net, x, samples=2, progress=False)
    assert "frozen" not in str(report)
    assert float(report.data.logit_std.max()) < 0.05
