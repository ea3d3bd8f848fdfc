"""Networks in muP by their own code, whose optimiser scales the rates of hidden matrices."""

import math

import torch
from torch import nn

import limitformer as lf
from cases.networks import LanguageModel
from training_networks import next_token

WIDTHS = {"width": [64, 128, 256]}
OPTIONS = {"loss": next_token, "steps": 1, "seed": 0, "progress": False}


class Mup(LanguageModel):
    """The head divides by m, the width over 64; a tied table may be multiplied by √m, as MuSharedReadout does."""

    def __init__(self, width=64, tie=False, rescale=False):
        super().__init__(width, depth=2, std=0, tie=tie)
        self.m = width / 64
        for name, each in self.named_parameters():
            if each.dim() == 2:
                table = 0.1 * (math.sqrt(self.m) if rescale else 1.0)
                nn.init.normal_(each, std=each.shape[1] ** -0.5 if "blocks" in name else table)

    def forward(self, ids):
        return self.head(self.nf(self.stream(ids)) / self.m)


def optimizer(module, key="lr"):
    hidden = [each for name, each in module.named_parameters() if each.dim() == 2 and "blocks" in name]
    rest = [each for each in module.parameters() if all(each is not one for one in hidden)]
    scaled = 2e-3 / module.m if key == "lr" else 1 / module.m
    return torch.optim.AdamW([{"params": hidden, key: scaled}, {"params": rest}], lr=2e-3)


def verify():
    """r14, microsoft/mup#55: the tied table that is multiplied by √m makes the stream grow like √m."""
    grows, right = (
        lf.transfer(lambda width, rescale=rescale: Mup(width, True, rescale), WIDTHS, 16, optimizer=optimizer,
                    samples=4, **OPTIONS)
        for rescale in (True, False)
    )  # fmt: skip
    assert grows.transfers is False
    assert abs(right.exponents["stream at the end"].value) < 0.15
    assert grows.exponents["stream at the end"].value > right.exponents["stream at the end"].value + 0.2
