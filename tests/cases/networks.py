"""Small Transformers that the cases share."""

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, DEPTH, HEADS = 200, 64, 6, 4


class Attention(nn.Module):
    def __init__(self, width=WIDTH, heads=HEADS):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.heads = heads

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = (
            f(x).view(batch, tokens, self.heads, width // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    def __init__(self, width=WIDTH, heads=HEADS):
        super().__init__()
        self.n1, self.n2, self.attn = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.down(functional.gelu(self.up(self.n2(x))))


class LanguageModel(nn.Module):
    """A decoder that returns logits, and the cross-entropy with `targets` if given; std=0 keeps torch's laws."""

    def __init__(self, width=WIDTH, depth=DEPTH, heads=HEADS, vocabulary=VOCABULARY, tie=False, block=Block, std=0.02):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(block(width, heads) for _ in range(depth))
        self.nf, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if std:
            for part in self.modules():
                if isinstance(part, nn.Linear | nn.Embedding):
                    nn.init.normal_(part.weight, std=std)
        if tie:
            self.head.weight = self.wte.weight

    def stream(self, ids):
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids, targets=None):
        y = self.head(self.nf(self.stream(ids)))
        return y if targets is None else (y, functional.cross_entropy(y.flatten(0, 1), targets.flatten()))


class Residual(nn.Module):
    """x + tanh(x Wᵀ)."""

    def __init__(self, width=24, std=0.3):
        super().__init__()
        self.w = nn.Parameter(torch.empty(width, width))
        nn.init.normal_(self.w, 0, std)

    def forward(self, x):
        return x + torch.tanh(x @ self.w.T)


class Stack(nn.Module):
    """An embedding of 20 ids and `depth` blocks; returns the stream."""

    def __init__(self, block=Residual, depth=3, width=24):
        super().__init__()
        self.e = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))

    def forward(self, ids):
        x = self.e(ids)
        for block in self.blocks:
            x = block(x)
        return x


IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])


def mean_square(output, inputs):
    """Return the mean square of the output, a loss by sequence."""
    return output.flatten(1).square().mean(1)
