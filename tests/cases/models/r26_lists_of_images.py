"""dinov3 calls its blocks with a list of images of several sizes, and they return a list.

Right: the stream is that of the first image; `check` and `steps` run, with blocks= and without.
"""

import torch
from torch import nn

import limitformer as lf


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True, dropout=0.0)

    def forward(self, images):
        return [self.inner(x) for x in images]


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.patch, self.head = nn.Linear(12, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))

    def forward(self, x):
        images = [self.patch(x), self.patch(x[:, :9])]
        for block in self.blocks:
            images = block(images)
        return self.head(images[0])


def loss(output, inputs):
    return output.flatten(1).square().mean(1)


def verify():
    x = torch.randn(2, 16, 12, generator=torch.Generator().manual_seed(0))
    for blocks in (None, "blocks.*"):
        assert lf.check(Net, x, samples=2, blocks=blocks, progress=False).data.sizes["layer"] == 5
    report = lf.steps(Net, x, optimizer="adamw", rates=[1e-3], steps=1, samples=2, seed=0, loss=loss, progress=False)
    assert report.data.sizes["layer"] == 5
