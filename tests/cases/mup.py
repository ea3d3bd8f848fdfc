"""A language model in muP by its own code, for the cases."""

import torch
from torch import nn

from cases.networks import LanguageModel
from training_networks import next_token

OPTIONS = {"loss": next_token, "steps": 1, "seed": 0, "progress": False}


class Mup(LanguageModel):
    """The head's input is divided by m, the width over 64."""

    def __init__(self, width=64):
        super().__init__(width, depth=2, std=0)
        self.m = width / 64
        for name, each in self.named_parameters():
            if each.dim() == 2:
                nn.init.normal_(each, std=each.shape[1] ** -0.5 if "blocks" in name else 0.02)

    def forward(self, ids):
        return self.head(self.nf(self.stream(ids)) / self.m)


def groups(module, rate, **keys):
    """Return AdamW with a group of the matrices of blocks, which has other options, and a group of the rest."""
    hidden = [each for name, each in module.named_parameters() if each.dim() == 2 and "blocks" in name]
    rest = [each for each in module.parameters() if all(each is not one for one in hidden)]
    return torch.optim.AdamW([{"params": hidden, **keys}, {"params": rest}], lr=rate)
