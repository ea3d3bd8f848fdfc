"""A small GPT whose matrices have the variance 1/fan_in, in the standard parametrisation and in muP."""

import math

import torch
from torch import nn
from torch.nn import functional

BASE, VOCABULARY = 64, 256


class Block(nn.Module):
    def __init__(self, width, heads, logits):
        super().__init__()
        self.heads, self.scale = heads, logits
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        b, t, n = x.shape
        q, k, v = (each.view(b, t, self.heads, -1).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, n))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """`head_power` is the power of width/base by which the head's input, or its output, is divided: 1 in muP."""

    def __init__(self, width=BASE, depth=2, head_power=0.0, after=False):
        super().__init__()
        self.table, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList([Block(width, width // 32, 1 / math.sqrt(32)) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, VOCABULARY, bias=False)
        self.divisor, self.after = (width / BASE) ** head_power, after
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=part.in_features**-0.5)
            if isinstance(part, nn.Embedding):
                nn.init.normal_(part.weight, std=1.0)
        if head_power:
            nn.init.normal_(self.head.weight, std=BASE**-0.5)

    def forward(self, ids):
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        if self.after:
            return self.head(self.norm(x)) / self.divisor
        return self.head(self.norm(x) / self.divisor)


def next_token(out, inputs):
    ids = inputs[""]
    return functional.cross_entropy(out[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(-1)


def standard(width):
    return GPT(width)


def mup(width):
    return GPT(width, head_power=1.0)


def wrong_after(width):
    return GPT(width, head_power=0.5, after=True)


def adam(module):
    """Adam with the rates of hidden matrices divided by width/base."""
    ratio = module.table.embedding_dim / BASE
    hidden = [p for name, p in module.named_parameters() if "blocks" in name and p.dim() == 2]
    rest = [p for p in module.parameters() if all(p is not each for each in hidden)]
    return torch.optim.Adam([{"params": hidden, "lr": 1e-4 / ratio}, {"params": rest}], lr=1e-4)
