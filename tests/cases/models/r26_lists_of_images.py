"""dinov3 calls its blocks with a list of images of several sizes, and they return a list; others pass tuples or dicts.

Right: the stream is that of the first image; `check` and `steps` run, with blocks= and without.
"""

from functools import partial

import numpy as np
import torch
from torch import nn

import limitformer as lf


class Block(nn.Module):
    def __init__(self, pack, width=64):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True, dropout=0.0)
        self.pack = pack

    def forward(self, images):
        each = images.values() if isinstance(images, dict) else images
        return self.pack([self.inner(x) for x in each])


class Net(nn.Module):
    def __init__(self, pack=list, width=64):
        super().__init__()
        self.patch, self.head, self.pack = nn.Linear(12, width), nn.Linear(width, 10), pack
        self.blocks = nn.ModuleList(Block(pack, width) for _ in range(4))

    def forward(self, x):
        images = self.pack([self.patch(x), self.patch(x[:, :9])])
        for block in self.blocks:
            images = block(images)
        return self.head(images["large"] if isinstance(images, dict) else images[0])


def named(images):
    return dict(zip(("large", "small"), images, strict=True))


def loss(output, inputs):
    return output.flatten(1).square().mean(1)


def verify():
    x = torch.randn(2, 16, 12, generator=torch.Generator().manual_seed(0))
    for blocks in (None, "blocks.*"):
        one, *others = (
            lf.check(partial(Net, pack), x, samples=2, blocks=blocks, progress=False).data
            for pack in (list, tuple, named)
        )
        assert one.sizes["layer"] == 5
        assert all(np.array_equal(one.covariance, each.covariance) for each in others)
    report = lf.steps(Net, x, optimizer="adamw", rates=[1e-3], steps=1, samples=2, seed=0, loss=loss, progress=False)
    assert report.data.sizes["layer"] == 5
