"""Twenty small modules by an author who has not read this library: ten sound ones, and ten with one fault each."""

import copy
import math
from collections import namedtuple
from collections.abc import Callable

import torch
from torch import Tensor, nn

F, V = nn.functional, 61
Case = namedtuple("Case", "name build inputs loss sound expected")  # inputs: tensor, dict, or number of tokens


class GPTBlock(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.c_fc, self.mlp_proj = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, d: int = 64, depth: int = 4, heads: int = 4, wte: float = 0.02) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, d), nn.Embedding(64, d)
        self.blocks = nn.ModuleList(GPTBlock(d, heads) for _ in range(depth))
        self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, V, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * depth) if name.endswith("proj.weight") else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        nn.init.normal_(self.wte.weight, std=wte)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class EncoderDecoder(nn.Module):  # post-LN; torch's own class deep-copies its layers, then draws each matrix anew
    def __init__(self, d: int = 48, depth: int = 2) -> None:
        super().__init__()
        self.d, self.embed, self.generator = d, nn.Embedding(V, d), nn.Linear(d, V)
        self.body = nn.Transformer(d, 4, depth, depth, 4 * d, 0.0, batch_first=True)
        nn.init.normal_(self.embed.weight, std=d**-0.5)

    def put(self, ids):
        angle = torch.arange(ids.shape[1])[:, None] * 1e4 ** (-torch.arange(0, self.d, 2) / self.d)
        return self.embed(ids) * math.sqrt(self.d) + torch.cat([angle.sin(), angle.cos()], -1)

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        return self.generator(self.body(self.put(src), self.put(tgt), tgt_mask=mask))


class LlamaBlock(nn.Module):
    def __init__(self, d: int, heads: int, power: float = -0.5) -> None:
        super().__init__()
        self.heads, self.power, self.g1, self.g2 = heads, power, *(nn.Parameter(torch.ones(d)) for _ in range(2))
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.w1, self.w3, self.w2 = nn.Linear(d, 88, False), nn.Linear(d, 88, False), nn.Linear(88, d, False)

    @staticmethod
    def rms(x, g):
        return g * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def rope(self, x):  # (batch, tokens, heads, size)
        z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        angle = torch.outer(torch.arange(x.shape[1]), 1e4 ** (-torch.arange(z.shape[-1]) / z.shape[-1]))
        return torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(3)

    def forward(self, x):
        h = self.rms(x, self.g1)
        q, k, v = (w(h).unflatten(-1, (self.heads, -1)) for w in (self.wq, self.wk, self.wv))
        s = (self.rope(q).transpose(1, 2) @ self.rope(k).permute(0, 2, 3, 1)) * q.shape[-1] ** self.power
        s = s + torch.full(s.shape[-2:], -torch.inf).triu(1)
        x = x + self.wo((s.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2).flatten(2))
        h = self.rms(x, self.g2)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def llama(depth: int, *how: float) -> list[nn.Module]:
    return [LlamaBlock(*how) for _ in range(depth)]


class Switch(nn.Module):  # top-1 routing; returns the logits and the balancing loss
    def __init__(self, d: int = 32, depth: int = 3, experts: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, d), nn.Linear(d, V)
        self.mixers = nn.ModuleList(nn.MultiheadAttention(d, 4, batch_first=True) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2 * depth + 1))
        self.routers = nn.ModuleList(nn.Linear(d, experts, bias=False) for _ in range(depth))
        make = lambda: nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))  # noqa: E731
        self.experts = nn.ModuleList(nn.ModuleList(make() for _ in range(experts)) for _ in range(depth))

    def forward(self, ids):
        x, balance = self.embed(ids), 0.0
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for i, (mix, router, experts) in enumerate(zip(self.mixers, self.routers, self.experts, strict=True)):
            h = self.norms[2 * i](x)
            x = x + mix(h, h, h, attn_mask=mask, need_weights=False)[0]
            h = self.norms[2 * i + 1](x)
            weight, chosen = router(h).softmax(-1).max(-1)
            y = torch.zeros_like(h)
            for e, expert in enumerate(experts):
                mine = chosen == e
                y[mine] = expert(h[mine]) * weight[mine][:, None]
                balance = balance + mine.float().mean() * router(h).softmax(-1)[..., e].mean()
            x = x + y
        return self.head(self.norms[-1](x)), balance


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


class LoRA(nn.ModuleList):
    def forward(self, x):  # base, a, b
        return self[0](x) + 2.0 * self[2](self[1](x))


def build_lora() -> nn.Module:
    model = GPT(48, 2).requires_grad_(False)
    for block in model.blocks:
        for name, wide in {"c_attn": 144, "c_fc": 192}.items():
            setattr(block, name, LoRA([getattr(block, name), nn.Linear(48, 4, False), nn.Linear(4, wide, False)]))
            getattr(block, name)[2].weight.data.zero_()
    return model


class DiTBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(d, 1e-6, False), nn.MultiheadAttention(d, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(approximate="tanh"), nn.Linear(4 * d, d))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(d, 6 * d))
        nn.init.zeros_(self.ada[1].weight), nn.init.zeros_(self.ada[1].bias)

    def forward(self, x, c):
        s1, b1, g1, s2, b2, g2 = self.ada(c)[:, None].chunk(6, -1)
        h = self.norm(x) * (1 + s1) + b1
        x = x + g1 * self.attn(h, h, h, need_weights=False)[0]
        return x + g2 * self.mlp(self.norm(x) * (1 + s2) + b2)


class DiT(nn.Module):
    def __init__(self, d: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.inp, self.time, self.out = nn.Linear(8, d), nn.Linear(d, d), nn.Linear(d, 8)
        self.pos = nn.Parameter(0.02 * torch.randn(1, 16, d))
        self.blocks = nn.ModuleList(DiTBlock(d) for _ in range(depth))
        nn.init.zeros_(self.out.weight), nn.init.zeros_(self.out.bias)

    def forward(self, x, t):
        angle = t[:, None] * torch.logspace(0, 3, self.pos.shape[-1] // 2)
        c, h = self.time(torch.cat([angle.sin(), angle.cos()], -1)), self.inp(x) + self.pos
        for block in self.blocks:
            h = block(h, c)
        return self.out(F.layer_norm(h, h.shape[-1:]))


class ViT(nn.Module):
    def __init__(self, d: int = 48, depth: int = 4) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, d, 4, stride=4), nn.Linear(d, 10)
        self.cls, self.pos = (nn.Parameter(0.02 * torch.randn(1, n, d)) for n in (1, 17))
        layers = (nn.TransformerEncoderLayer(d, 4, 4 * d, 0.1, "gelu", 1e-5, True, True) for _ in range(depth))
        self.body = nn.Sequential(*layers, nn.LayerNorm(d))

    def forward(self, pixels):
        x = self.patch(pixels).flatten(2).mT
        return self.head(self.body(torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos)[:, 0])


class Series(nn.Module):  # predicts each next patch of a series that it normalises in place; ReZero branches
    def __init__(self, d: int = 32, depth: int = 3, gate: type = nn.Identity) -> None:
        super().__init__()
        self.inp, self.out, self.gate = nn.Linear(8, d), nn.Linear(d, 8), gate()
        self.attn = nn.ModuleList(nn.MultiheadAttention(d, 2, batch_first=True) for _ in range(depth))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(d, 64), nn.SiLU(), nn.Linear(64, d)) for _ in range(depth))
        self.alpha = nn.Parameter(torch.zeros(depth, 2))

    def forward(self, series):
        series -= series.mean(1, keepdim=True)
        series /= series.std(1, keepdim=True) + 1e-5
        x = self.inp(series.unfold(1, 8, 8))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        for attn, mlp, (a, b) in zip(self.attn, self.mlp, self.gate(self.alpha), strict=True):
            x = x + a * attn(x, x, x, attn_mask=mask, need_weights=False)[0]
            x = x + b * mlp(x)
        return self.out(x[:, :-1])


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


class Forgot(nn.TransformerEncoderLayer):
    def forward(self, x):
        return self._ff_block(self.norm2(self._sa_block(self.norm1(x), None, None)))


def sequential(d: int, layers: list, *head: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Embedding(V, d), *layers, *(head or (nn.LayerNorm(d), nn.Linear(d, V))))


def build_wrong_fan() -> nn.Module:
    model = GPT()
    for name, p in model.named_parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=p.shape[1] ** -0.5 * (10 if name == "blocks.2.mlp_proj.weight" else 1))
    return model


def build_head_detached() -> nn.Module:
    model = ViT()
    model.body.register_forward_hook(lambda module, args, out: out.detach())
    return model


def build_uninitialised() -> nn.Module:
    model = PaLM()
    model.v = nn.Parameter(torch.empty(3, 48, 16))
    return model


def lm_loss(out, inputs):  # next token, and a balancing loss where there is one
    out, extra = out if isinstance(out, tuple) else (out, 0.0)
    ids = inputs if isinstance(inputs, Tensor) else inputs["tgt" if "tgt" in inputs else "ids"]
    return F.cross_entropy(out[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1) + 0.01 * extra


def class_loss(out, pixels):
    return F.cross_entropy(out, (pixels.mean((1, 2, 3)) > 0).long(), reduction="none")


def squared(target: Callable) -> Callable:
    return lambda out, inputs: (out - target(inputs)).pow(2).mean((1, 2))


g = torch.Generator().manual_seed(7)
IDS = torch.randint(V, (2, 24), generator=g)
PAIR = {"src": torch.randint(V, (2, 20), generator=g), "tgt": torch.randint(V, (2, 16), generator=g)}
PADDED = {"ids": IDS, "keep": torch.arange(24) >= torch.tensor([[0], [6]])}
NOISY = {"x": torch.randn(2, 16, 8, generator=g), "t": torch.rand(2, generator=g)}
PIXELS, SERIES = torch.randn(4, 3, 16, 16, generator=g), torch.randn(2, 96, generator=g).cumsum(1)
noise_loss, value_loss = squared(lambda inputs: inputs["x"]), squared(lambda ids: ids[..., None] / V)
next_loss = squared(lambda series: series.unfold(1, 8, 8)[:, 1:])

# fmt: off
MODULES = [
    Case("gpt_tied", GPT, IDS, lm_loss, True, "sound"),
    Case("encoder_decoder", EncoderDecoder, PAIR, lm_loss, True, "sound; layers' biases alone are copies, by torch"),
    Case("llama_by_hand", lambda: sequential(32, llama(4, 32, 4)), 24, lm_loss, True, "sound"),
    Case("moe_top1", Switch, IDS, lm_loss, True, "sound; an expert that gets no token has no gradient: no fault"),
    Case("parallel_mqa", PaLM, IDS, lm_loss, True, "sound; each weight of all blocks is stacked in one tensor"),
    Case("lora", build_lora, IDS, lm_loss, True, "sound; frozen base and zero b are deliberate, a moves after step 1"),
    Case("dit_adaln_zero", DiT, NOISY, noise_loss, True, "sound; output 0 and shut gates on purpose, open in steps"),
    Case("vit_conv", ViT, PIXELS, class_loss, True, "sound; dropout 0.1"),
    Case("series_in_place", Series, SERIES, next_loss, True, "sound; ReZero, blocks move from step 2; edits its input"),
    Case("looped_linear", Looped, IDS, lm_loss, True, "sound; one core four times on purpose, not equal copies"),
    Case("scale_reversed", lambda: sequential(64, llama(2, 64, 2, 0.5)), IDS, lm_loss, False,
         "scores of layers 1 and 2 times sqrt(32), not over it: attention saturated, frozen, or few effective tokens"),
    Case("embed_sqrt_d", lambda: GPT(wte=1.0 * math.sqrt(64)), IDS, lm_loss, False,
         "wte has std 8 and is tied: logits (std 64) or first loss too large, or blocks negligible beside the stream"),
    Case("forgotten_residual", lambda: sequential(48, [Forgot(48, 4, 192, 0.0, batch_first=True) for _ in range(4)]),
         32, lm_loss, False, "rank collapse: all tokens alike from block 2 on"),
    Case("deep_copies", lambda: sequential(48, [copy.deepcopy(b) for b in [GPTBlock(48, 4)] * 4]), IDS, lm_loss, False,
         "layers 1 to 4 have equal numbers in all weights: copies, or dependent layers, named"),
    Case("dead_relu_gate", lambda: Series(gate=nn.ReLU), SERIES, next_loss, False,
         "alpha sits at relu's zero: no gradient to alpha, attn or mlp, now or in any later step"),
    Case("nan_rows", PaLM, PADDED, lm_loss, False,
         "rows of left padding see no key: NaN from block 0 on, a NaN loss, or a refusal that says so"),
    Case("constant_norm", lambda: sequential(32, llama(3, 32, 4), nn.Linear(32, 1), nn.LayerNorm(1)),
         IDS, value_loss, False, "last layer: output constant, independent of the input, or no gradient in the trunk"),
    Case("wrong_fan", build_wrong_fan, IDS, lm_loss, False,
         "blocks.2.mlp_proj is 10 times too wide: the stream jumps (times 5) in block 2 of 0 to 3"),
    Case("head_detached", build_head_detached, PIXELS, class_loss, False,
         "the trunk (patch, cls, pos, body) has no gradient, only head has one"),
    Case("uninitialised", build_uninitialised, IDS, lm_loss, False,
         "v is torch.empty, memory that nobody fills: named as such, or a refusal; its numbers are arbitrary"),
]
