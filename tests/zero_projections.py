"""A language model whose head and output projections start at zero, in the manner of nanoGPT's fast variants."""

import torch
from torch import nn
from torch.nn import functional

WIDTH, VOCABULARY, BLOCKS = 24, 40, 2


class ZeroBlock(nn.Module):
    """A block of attention and feed-forward layer whose projections `proj` and `down` are zero."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        for part in (self.proj, self.down):
            nn.init.zeros_(part.weight)

    def forward(self, x):
        b, m, n = x.shape
        q, k, v = (each.view(b, m, 2, -1).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, m, n)
        x = x + self.proj(a)
        return x + self.down(functional.relu(self.up(self.norm2(x))))


class ZeroNetwork(nn.Module):
    """The model, with a loss of its own if it is given targets."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(ZeroBlock() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, ids, targets=None):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)


def sgd_without_up(module):
    """Leave one matrix out of the optimiser."""
    named = dict(module.named_parameters())
    named.pop("blocks.1.up.weight")
    return torch.optim.SGD(named.values(), lr=1.0)
