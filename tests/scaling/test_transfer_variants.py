"""Parametrisations by a model's own code: right ones are not blamed, and each mistake is found by its measure."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import limitformer as lf
from cases import networks
from training_networks import next_token

SIZES, BASE, HEAD_SIZE = [64, 256], 64, 16
LOGITS, START = "change of attention logits", "stream at the start"


class Attention(networks.Attention):
    """Attention whose logits have the factor of `scale`, a function of the size of a head."""

    def __init__(self, width, heads, scale=None):
        super().__init__(width, heads)
        self.scale = scale and scale(width // heads)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.o(y.transpose(1, 2).flatten(2))


class Model(networks.LanguageModel):
    """muP by its own code, with `power` 1; heads keep their size unless `heads` are given."""

    def __init__(self, width, power=1.0, heads=None, scale=None, tie=False, rescale=False, zero=False):
        super().__init__(width, depth=2, heads=heads or width // HEAD_SIZE, tie=tie, std=0)
        self.m = width / BASE
        self.power = power
        for block in self.blocks:
            block.attn = Attention(width, block.attn.heads, scale)
        for name, each in self.named_parameters():
            if each.dim() == 2:
                std = 1.0 if "wte" in name and not tie else 0.125
                nn.init.normal_(each, std=each.shape[1] ** -0.5 if "blocks" in name else std)
        if rescale:
            nn.init.normal_(self.wte.weight, std=0.125 * self.m**0.5)
        if zero:
            nn.init.zeros_(self.head.weight)

    def forward(self, ids):
        return self.head(self.nf(self.stream(ids)) / self.m**self.power)


def split(module):
    hidden = [each for name, each in module.named_parameters() if each.dim() == 2 and "blocks" in name]
    return hidden, [each for each in module.parameters() if all(each is not one for one in hidden)]


def adamw(module):
    hidden, rest = split(module)
    return torch.optim.AdamW([{"params": hidden, "lr": 1e-3 / module.m}, {"params": rest}], lr=1e-3, weight_decay=0.0)


def keyed(module):
    hidden, rest = split(module)
    return torch.optim.AdamW([{"params": hidden, "lr_scale": 1 / module.m}, {"params": rest}], lr=1e-3)


def applied(optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= group.get("lr_scale", 1.0)


def one_rate(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def divided(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-3 / module.m)


def muon_everywhere(module):
    matrices = [each for each in module.parameters() if each.dim() == 2]
    rest = [each for each in module.parameters() if each.dim() < 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=1e-3)]


def run(optimizer=adamw, after_groups=None, **options):
    return lf.transfer(
        lambda width: Model(width, **options), {"width": SIZES}, 12, optimizer=optimizer, after_groups=after_groups,
        steps=1, samples=8, seed=0, loss=next_token, progress=False,
    )  # fmt: skip


def over_d(d):
    return HEAD_SIZE**0.5 / d


RIGHT = {
    "heads of one size": {},
    "heads that grow, with logits over d": {"heads": 4, "scale": over_d},
    "tied tables": {"tie": True},
    "a head of zeros": {"zero": True},
    "keys of groups, applied": {"optimizer": keyed, "after_groups": applied},
}
WRONG = {
    "heads that grow, with logits over the root of d": ({"heads": 4}, LOGITS),
    "a tied table, rescaled": ({"tie": True, "rescale": True}, START),
    "a head over the root of m": ({"power": 0.5}, "effect of head"),
    "rates of hidden matrices that stay": ({"optimizer": one_rate}, "effect of blocks.*"),
    "keys of groups, ignored": ({"optimizer": keyed, "after_groups": lambda _: None}, "effect of blocks.*"),
    "all rates over m": ({"optimizer": divided}, "effect of wte"),
    "Muon on tables": ({"optimizer": muon_everywhere}, "effect of wte"),
}


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", RIGHT)
def test_right_parametrisation_transfers(name):
    result = run(**RIGHT[name])
    assert result.transfers is True, result.conclusion


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", WRONG)
def test_mistake_is_found_by_its_measure(name):
    options, measure = WRONG[name]
    result = run(**options)
    assert result.transfers is False
    assert any(each.startswith(measure) for each in result.depending())
