"""Two sound modules of unusual code by an author who has not read this library."""

import math

import torch
from torch import nn

F, V = nn.functional, 61


class PaLM(nn.Module):  # parallel attention and MLP, one key and value for all heads, ALiBi, einsum
    def __init__(self, d: int = 48, heads: int = 4, size: int = 16, depth: int = 3) -> None:
        super().__init__()
        gauss = lambda fan, *shape: nn.Parameter(torch.randn(depth, *shape) / math.sqrt(fan))  # noqa: E731
        self.embed = nn.Parameter(torch.randn(V, d))
        self.q, self.o = gauss(d, d, heads, size), gauss(heads * size, heads, size, d)
        self.k, self.v = gauss(d, d, size), gauss(d, d, size)
        self.up, self.down = gauss(d, d, 4 * d), gauss(4 * d, 4 * d, d)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, heads + 1))

    def forward(self, ids, keep=None):
        x, t = self.embed[ids], torch.arange(ids.shape[1])
        bias = torch.where(t[:, None] < t, -torch.inf, (t - t[:, None]) * self.slopes[:, None, None])
        bias = bias if keep is None else bias.masked_fill(~keep[:, None, None], -torch.inf)
        for q, k, v, o, up, down in zip(self.q, self.k, self.v, self.o, self.up, self.down, strict=True):
            h = F.layer_norm(x, x.shape[-1:])
            s = torch.einsum("btd,dhk,bsd,dk->bhts", h, q, h, k) / math.sqrt(k.shape[1]) + bias
            y = torch.einsum("bhts,bsd,dk,hke->bte", s.softmax(-1), h, v, o)
            x = x + y + F.gelu(h @ up) @ down
        return F.layer_norm(x, x.shape[-1:]) @ self.embed.T / math.sqrt(x.shape[-1])


class Looped(nn.Module):  # one core four times, on purpose: linear attention, then a gated recurrence
    def __init__(self, d: int = 48, loops: int = 4) -> None:
        super().__init__()
        self.loops, self.embed, self.head = loops, nn.Embedding(V, d), nn.Linear(d, V)
        self.norm1, self.norm2, self.norm = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o, self.zh, self.o2 = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(self.loops):
            q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
            q, k = F.elu(q) + 1, F.elu(k) + 1
            kv = (k[..., None] * v[..., None, :]).cumsum(1)
            x = x + self.o((q[..., None, :] @ kv)[..., 0, :] / (q * k.cumsum(1)).sum(-1, keepdim=True))
            z, new = self.zh(self.norm2(x)).chunk(2, -1)
            h = [torch.zeros_like(x[:, 0])]
            for zt, nt in zip(z.sigmoid().unbind(1), new.tanh().unbind(1), strict=True):
                h.append((1 - zt) * h[-1] + zt * nt)
            x = x + self.o2(torch.stack(h[1:], 1))
        return self.head(self.norm(x))


def lm_loss(out, ids):
    return F.cross_entropy(out[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


IDS = torch.randint(V, (2, 24), generator=torch.Generator().manual_seed(7))
