"""A_log and D, written in the constructor and lost in to_empty.

Right: `compare` says "uninitialised" for A_log, D and weight.
"""

import torch
from torch import nn

from limitformer.initialisation import compare


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 64, bias=False)
        self.A_log, self.D = nn.Parameter(torch.log(torch.arange(1, 9).float())), nn.Parameter(torch.ones(8))
        self.weight = nn.Parameter(torch.ones(64))
        self.apply(self.draw)

    @staticmethod
    def draw(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


def build():
    with torch.device("meta"):
        model = Mixer()
    model.to_empty(device="cpu")
    return model.apply(Mixer.draw)


def verify():
    (one,) = compare(Mixer, build).findings
    assert (one.kind, set(one.names)) == ("uninitialised", {"A_log", "D", "weight"})
