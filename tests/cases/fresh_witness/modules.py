"""Forty small modules by an author who has not read the witness: twenty traps for it, and twenty sound ones."""

# fmt: off
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

F, V, D = nn.functional, 61, 32  # the functions of torch, the vocabulary, the width of most modules

@dataclass
class Case:
    name: str
    build: Callable[[], nn.Module]
    inputs: Any
    loss: Callable[[Any, dict[str, Tensor]], Tensor]
    optimizer: Callable[[nn.Module], Optimizer]
    trap: bool
    why: str

def ids(batch: int = 2, tokens: int = 8, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (batch, tokens), generator=torch.Generator().manual_seed(seed))
def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))
def next_token(output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    targets = list(inputs.values())[-1]
    return F.cross_entropy(output[:, :-1].transpose(1, 2), targets[:, 1:], reduction="none").mean(1)
def fourth_class(output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return -output.log_softmax(-1)[:, 3]
def same_as_input(output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return (output - next(iter(inputs.values()))).square().flatten(1).mean(1)
def unmasked(output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(output.transpose(1, 2), inputs["input_ids"], reduction="none")
    return (losses * inputs["attention_mask"]).sum(1) / inputs["attention_mask"].sum(1)

# A plain GPT, which most of the traps change in one place.
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))
    def forward(self, x, memory=None, causal=True, mask=None, scale=None):
        pairs = (self.q, x), (self.k, x if memory is None else memory), (self.v, x if memory is None else memory)
        q, k, v = (layer(y).unflatten(-1, (4, -1)).transpose(1, 2) for layer, y in pairs)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale)
        return self.out(y.transpose(1, 2).flatten(2))
class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
    def forward(self, x):
        return self.down(F.gelu(self.up(x)))
class Block(nn.Module):
    causal = True
    def __init__(self, mlp: Any = Mlp, attention: Any = Attention) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(D), attention(), nn.LayerNorm(D), mlp()
    def attend(self, x):
        return self.attention(x, causal=self.causal)
    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))
class Gpt(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 3, **embedding: Any) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(V, D, **embedding), nn.Embedding(16, D)
        self.blocks = nn.Sequential(*(block() for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))

# Traps.
def hooks_of_parameters() -> nn.Module:
    module = Gpt()
    for block in module.blocks:
        block.attention.v.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        block.mlp.up.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.sign() * 0.01))
    return module
def hooks_of_modules() -> nn.Module:
    module = Gpt()
    for block in module.blocks:
        block.attention.out.register_forward_hook(lambda m, args, output: output - output.mean(1, keepdim=True))
        block.mlp.register_full_backward_hook(lambda m, inside, outside: (inside[0] * 0.25,))
    return module

class FeedbackLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()
    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ (weight.sign() * weight.std()), gradient.flatten(0, -2).t() @ x.flatten(0, -2)
class FeedbackMlp(Mlp):
    def forward(self, x):
        return FeedbackLinear.apply(F.gelu(self.up(x)), self.down.weight) + self.down.bias

class TernaryMlp(Mlp):
    @staticmethod
    def ternary(weight):
        scale = weight.abs().mean().clamp(min=1e-5)
        return weight + ((weight / scale).round().clamp(-1, 1) * scale - weight).detach()
    def forward(self, x):
        hidden = F.relu(F.linear(x, self.ternary(self.up.weight), self.up.bias))
        return F.linear(hidden, self.ternary(self.down.weight), self.down.bias)
class CentredBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(D))
    def forward(self, x):
        x = super().forward(x - self.centre)
        with torch.no_grad():
            self.centre.lerp_(x.mean((0, 1)), 0.5)
        return x
class RememberingBlock(Block):
    memory: Tensor | None = None
    def forward(self, x):
        memory, self.memory = self.memory, x.detach()
        if memory is not None and memory.shape == x.shape:  # of the last call, as in Transformer-XL
            x = x + self.attention(self.norm1(x), self.norm1(memory), causal=False)
        return super().forward(x)

def lookahead(module: nn.Module) -> Optimizer:
    optimizer = AdamW(module.parameters(), lr=1e-2)
    inner, slow = optimizer.step, [p.detach().clone() for p in module.parameters()]
    def step(closure=None):
        result = inner(closure)
        with torch.no_grad():
            for fast, anchor in zip(module.parameters(), slow, strict=True):
                fast.copy_(anchor.lerp_(fast, 0.5))
        return result
    optimizer.step = step
    return optimizer
def centralised_adamw(module: nn.Module) -> Optimizer:
    class AdamW(torch.optim.AdamW):
        def step(self, closure=None):
            for p in (p for group in self.param_groups for p in group["params"]):
                if p.grad is not None and p.dim() > 1:
                    p.grad.sub_(p.grad.mean(1, keepdim=True))
            return super().step(closure)

    return AdamW(module.parameters(), lr=1e-3)
def turned(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"], group["momentum"], group["maximize"] = group["lr"] * 3, 0.5, not group["maximize"]
def turning_sgd(module: nn.Module) -> Optimizer:
    embeddings = [*module.embed.parameters(), *module.position.parameters()]
    groups = [{"params": embeddings, "maximize": True}, {"params": [*module.blocks.parameters(), module.head.weight]}]
    optimizer = SGD(groups, lr=0.05, momentum=0.9)
    optimizer.register_step_post_hook(turned)
    return optimizer

class NumbersMlp(Mlp):
    def forward(self, x):
        spread = float(self.up.weight.std()) + abs(self.down.weight.detach().flatten()[0].item())
        hidden = self.up(x) / spread / 8
        hidden = F.relu(hidden) if self.up.weight.sum() > 0 else torch.tanh(hidden)
        return self.down(hidden) + F.linear(x, self.up.weight.data.t() @ self.up.weight.data)
class KernelTwiceMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(D, D, 3), nn.Linear(D, D)
    def forward(self, x):
        padded = F.pad(x, (0, 0, 2, 0))
        local = self.conv(padded.transpose(1, 2)).transpose(1, 2)
        unfolded = padded.unfold(1, 3, 1).flatten(2)  # the entries that the convolution multiplies, in its order
        gate = F.linear(unfolded, self.conv.weight.flatten(1).flip(0), self.conv.bias)
        return self.out(local * gate.sigmoid()) + x @ self.conv.weight[:, :, 1].detach()

def spectral_block() -> nn.Module:
    block = Block()
    parametrizations.spectral_norm(block.mlp.up, n_power_iterations=1)  # iterates in each forward in training
    parametrizations.weight_norm(block.mlp.down)
    parametrizations.orthogonal(block.attention.out)
    return block

class TamedParameter(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is F.linear:
            result = result.as_subclass(Tensor)
            return 2 * torch.tanh(result / 2)
        return result

def tamed_block() -> nn.Module:
    block = Block()
    for layer in (block.mlp.up, block.attention.v):
        layer.weight = TamedParameter(layer.weight.detach())
    return block

class FastWeightsBlock(Block):
    def forward(self, x):
        keys, values, start = self.attention.k(x), self.attention.v(x), self.attention.out.weight
        slope = torch.func.grad(lambda w, k, v: (torch.tanh(k @ w.t()) - v).square().mean())
        fast = start - 3.0 * torch.func.vmap(slope, in_dims=(None, 0, 0))(start, keys, values)  # of each sequence
        x = x + torch.tanh(torch.einsum("btd,bed->bte", self.attention.q(x), fast))
        return x + self.mlp(self.norm2(x))
class RecomputedBlock(Block):
    calls = 0
    def inside(self, x):
        self.calls += 1  # another number, and another mask, when it is computed again for the gradient
        return F.dropout(self.mlp(self.norm2(x)), 0.1, training=True) / self.calls
    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + checkpoint(self.inside, x, use_reentrant=False, preserve_rng_state=False)
class AuxiliaryBackward(Gpt):
    def forward(self, tokens):
        if torch.is_grad_enabled():
            x = self.blocks[0](self.embed(tokens))
            (0.1 * F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())).backward()  # stays in .grad
        return super().forward(tokens)
class HalfIslandMlp(Mlp):
    def forward(self, x):
        hidden = F.linear(x.bfloat16(), self.up.weight.bfloat16(), self.up.bias.bfloat16())
        return self.down(F.gelu(hidden).to(x.dtype))

class WarmedSgd(SGD):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters(), lr=0.1, weight_decay=0.1)
        with torch.no_grad():  # an initialisation that lives in the optimiser
            module.head.weight.zero_()
            for block in module.blocks:
                block.mlp.down.weight.mul_(0.2)
                block.attention.q.weight.copy_(block.attention.k.weight)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self, lambda k: 1.0 / (1 + k))
    def step(self, closure=None):
        result = super().step(closure)
        self.schedule.step()
        return result

BUILDS = [0]
def alternating() -> nn.Module:
    BUILDS[0] += 1
    module = Gpt()
    generator = torch.Generator().manual_seed(0)  # the same values of these weights in each build
    for k, block in enumerate(module.blocks):
        block.attention.v.weight = nn.Parameter(torch.randn(D, D, generator=generator) / math.sqrt(D))
        if (k + BUILDS[0]) % 2:
            block.mlp = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    return module

# Sound modules.
def sgd(module: nn.Module) -> Optimizer:
    return SGD(module.parameters(), lr=0.1)
def adam(module: nn.Module) -> Optimizer:
    return Adam(module.parameters(), lr=1e-3)
def adamw(module: nn.Module) -> Optimizer:
    return AdamW(module.parameters(), lr=1e-3)
def decay_groups(module: nn.Module) -> Optimizer:
    matrices = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, lr=6e-4, betas=(0.9, 0.95))
def mup_groups(module: nn.Module) -> Optimizer:
    hidden = [p for p in module.blocks.parameters() if p.dim() == 2]
    rest = [p for p in module.parameters() if not any(p is each for each in hidden)]
    return Adam([{"params": hidden, "lr": 1e-2 / (D / 16)}, {"params": rest}], lr=1e-2)

class TiedGpt(Gpt):
    def __init__(self) -> None:
        super().__init__(depth=4)
        self.head.weight = self.embed.weight
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02 / (math.sqrt(8) if "out." in name or "down." in name else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(p)

def rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    speeds = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device).float(), speeds)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)

class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)
        self.q, self.kv, self.o = (nn.Linear(D, n, bias=False) for n in (D, D, D))
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((D, 80), (D, 80), (80, D)))
    def forward(self, x):
        h = self.norm1(x)
        q = self.q(h).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(V, D), nn.Embedding(16, D), nn.Linear(D, V)
        self.transformer = nn.Transformer(D, 4, 2, 2, 64, 0.0, batch_first=True, norm_first=True)
    def forward(self, input_ids, decoder_input_ids):
        x, y = (self.words(i) + self.places.weight[: i.shape[1]] for i in (input_ids, decoder_input_ids))
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], dtype=y.dtype)
        return self.head(self.transformer(x, y, tgt_mask=mask, tgt_is_causal=True))

class Vision(nn.Module):
    def __init__(self, stem: nn.Module, tokens: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.stem, self.position = stem, nn.Parameter(torch.randn(1, tokens, D) * 0.02)
        self.blocks, self.norm, self.head = nn.Sequential(*blocks), nn.LayerNorm(D), nn.Linear(D, 10)
    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))
class OpenBlock(Block):
    causal = False

class TopTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, 4, bias=False), nn.ModuleList(Mlp() for _ in range(4))
    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        weights, result = weights / weights.sum(-1, keepdim=True), torch.zeros_like(flat)
        for k, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == k)
            result = result.index_add(0, rows, expert(flat[rows]) * weights[rows, slot, None])
        return result.view_as(x)
class SwinBlock(OpenBlock):
    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift
    def attend(self, x):  # an image of 8 × 8 tokens in windows of 4 × 4
        h = x.view(-1, 8, 8, D).roll((-self.shift, -self.shift), (1, 2)).view(-1, 2, 4, 2, 4, D)
        h = super().attend(h.transpose(2, 3).reshape(-1, 16, D)).view(-1, 2, 2, 4, 4, D)
        return h.transpose(2, 3).reshape(-1, 8, 8, D).roll((self.shift, self.shift), (1, 2)).reshape(x.shape)

def vit() -> nn.Module:
    return Vision(nn.Conv2d(3, D, 4, 4), 16, [OpenBlock() for _ in range(4)])
def swin() -> nn.Module:
    return Vision(nn.Conv2d(3, D, 2, 2), 64, [SwinBlock(2 * (k % 2)) for k in range(4)])
def whisper() -> nn.Module:
    stem = [nn.Conv1d(12, D, 3, padding=1), nn.GELU(), nn.Conv1d(D, D, 3, stride=2, padding=1), nn.GELU()]
    return Vision(nn.Sequential(*stem), 8, [OpenBlock() for _ in range(3)])

class MambaBlock(nn.Module):
    def __init__(self, n: int = 4) -> None:
        super().__init__()
        self.norm, self.inside, self.out = nn.RMSNorm(D), nn.Linear(D, 4 * D), nn.Linear(2 * D, D)
        self.conv, self.x_proj = nn.Conv1d(2 * D, 2 * D, 4, padding=3, groups=2 * D), nn.Linear(2 * D, 2 + 2 * n)
        self.dt, self.skip = nn.Linear(2, 2 * D), nn.Parameter(torch.ones(2 * D))
        self.a_log, self.n = nn.Parameter(torch.arange(1.0, n + 1).log().repeat(2 * D, 1)), n
    def forward(self, x):
        u, z = self.inside(self.norm(x)).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        dt, b, c = self.x_proj(u).split([2, self.n, self.n], -1)
        dt, a = F.softplus(self.dt(dt)), -self.a_log.exp()
        state, ys = torch.zeros_like(u[:, 0, :, None] * a), []
        for t in range(x.shape[1]):
            state = (dt[:, t, :, None] * a).exp() * state + (dt[:, t] * u[:, t])[..., None] * b[:, t, None]
            ys.append((state * c[:, t, None]).sum(-1))
        return x + self.out((torch.stack(ys, 1) + u * self.skip) * F.silu(z))

class ParallelBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fused, self.out = nn.LayerNorm(D), nn.Linear(D, 7 * D), nn.Linear(5 * D, D)
    def forward(self, x):
        qkv, hidden = self.fused(self.norm(x)).split([3 * D, 4 * D], -1)
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in qkv.chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.out(torch.cat([y, F.gelu(hidden)], -1))
class AlibiBlock(Block):
    def attend(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        slopes = 2.0 ** -torch.arange(2, 9, 2, device=x.device, dtype=x.dtype)
        bias = slopes[:, None, None] * (places - places[:, None]).to(x.dtype)
        return self.attention(x, mask=bias.masked_fill(places > places[:, None], -math.inf))

class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.segments, self.places = nn.Embedding(V, D), nn.Embedding(2, D), nn.Embedding(16, D)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(3)), nn.LayerNorm(D)
        self.dense, self.bias = nn.Linear(D, D), nn.Parameter(torch.zeros(V))
    def forward(self, input_ids, attention_mask, token_type_ids):
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.norm(self.words(input_ids) + self.segments(token_type_ids) + self.places(places))
        for block in self.blocks:
            x = block.norm1(x + block.attention(x, mask=attention_mask.bool()[:, None, None]))
            x = block.norm2(x + block.mlp(x))
        return F.linear(F.gelu(self.dense(x)), self.words.weight, self.bias)
class Albert(Gpt):
    def __init__(self) -> None:
        super().__init__(depth=1)
        self.embed = nn.Sequential(nn.Embedding(V, 16), nn.Linear(16, D))
        self.blocks = nn.Sequential(*self.blocks, *self.blocks, *self.blocks)
class DeepNormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        for layer in (self.attention.v, self.attention.out, self.mlp.up, self.mlp.down):
            nn.init.xavier_normal_(layer.weight, gain=(8 * 3) ** -0.25)
    def forward(self, x):
        x = self.norm1(x * (2 * 3) ** 0.25 + self.attention(x))
        return self.norm2(x * (2 * 3) ** 0.25 + self.mlp(x))

class QkNormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm, self.scale = nn.RMSNorm(8), nn.RMSNorm(8), nn.Parameter(torch.full((4, 1, 1), 0.5))
    def attend(self, x):
        a = self.attention
        q, k, v = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (a.q, a.k, a.v))
        y = F.scaled_dot_product_attention(self.q_norm(q) * self.scale, self.k_norm(k), v, is_causal=True, scale=1.0)
        return a.out(y.transpose(1, 2).flatten(2))
class MupBlock(Block):
    def attend(self, x):
        return self.attention(x, scale=1 / 8)
class Mup(Gpt):
    def forward(self, tokens):
        return self.head(self.norm(self.blocks(10.0 * self.embed(tokens)))) * (16 / D)

class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.a = base, nn.Linear(base.in_features, 4, bias=False)
        self.b = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)
    def forward(self, x):
        return self.base(x) + 2.0 * self.b(self.a(x))

def lora_gpt() -> nn.Module:
    module = Gpt().requires_grad_(False)
    for block in module.blocks:
        block.attention.q, block.attention.v = Lora(block.attention.q), Lora(block.attention.v)
    return module

class Dit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, D), nn.SiLU(), nn.Linear(D, D))
        self.inside, self.out = nn.Linear(8, D), nn.Linear(D, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.modulations = nn.ModuleList(nn.Linear(D, 6 * D) for _ in range(3))
    def forward(self, x, time):
        angles = time[:, None] * torch.arange(1, 9, device=time.device)
        c, x = F.silu(self.time(torch.cat([angles.sin(), angles.cos()], -1))), self.inside(x)
        for block, modulation in zip(self.blocks, self.modulations, strict=True):
            s1, g1, a1, s2, g2, a2 = modulation(c)[:, None].chunk(6, -1)
            x = x + a1 * block.attention(block.norm1(x) * (1 + g1) + s1, causal=False)
            x = x + a2 * block.mlp(block.norm2(x) * (1 + g2) + s2)
        return self.out(x)
class ReZeroBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(2))
    def forward(self, x):
        x = x + self.alpha[0] * self.attention(x)
        return x + self.alpha[1] * self.mlp(x)

class LinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, D, 4, 8) / math.sqrt(D))
        self.out = nn.Parameter(torch.randn(4, 8, D) / math.sqrt(D))
    def forward(self, x, causal):
        q, k, v = torch.einsum("btd,sdhe->sbhte", x, self.qkv)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = (k[..., None] * v[..., None, :]).cumsum(2)
        y = torch.einsum("bhte,bhtef->bhtf", q, state) / (q * k.cumsum(2)).sum(-1, keepdim=True)
        return torch.einsum("bhtf,hfd->btd", y, self.out)

class DifferentialBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.lambdas, self.sub = nn.Parameter(torch.randn(4, 4) * 0.1), nn.RMSNorm(8)
    def attend(self, x):
        a, n = self.attention, x.shape[1]
        q, k = (f(x).unflatten(-1, (4, 2, 4)).permute(3, 0, 2, 1, 4) for f in (a.q, a.k))
        v = a.v(x).unflatten(-1, (4, 8)).transpose(1, 2)
        future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        first, second = (q @ k.mT / 2).masked_fill(future, -math.inf).softmax(-1)
        one, two = (self.lambdas[0::2] * self.lambdas[1::2]).sum(-1).exp()
        y = self.sub((first - (one - two + 0.2) * second) @ v) * 0.8
        return a.out(y.transpose(1, 2).flatten(2))

IDS, IMAGES = ids(), floats(2, 3, 16, 16)
PAIRS = {"input_ids": ids(), "decoder_input_ids": ids(tokens=6, seed=1)}
PADDED = {"input_ids": ids(3), "attention_mask": (torch.arange(8) < torch.tensor([[8], [6], [5]])).long()}
PADDED["token_type_ids"] = (torch.arange(8) > 3).long().repeat(3, 1)
NOISED = {"x": floats(2, 6, 8), "time": torch.tensor([0.3, 0.9])}

def nesterov(module: nn.Module) -> Optimizer:
    return SGD(module.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
def muon(module: nn.Module) -> Optimizer:
    return torch.optim.Muon([p for p in module.blocks.parameters() if p.dim() == 2], lr=0.02)
def trainable(module: nn.Module) -> Optimizer:
    return AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
def gpt_case(name: str, block: Any, optimizer: Any, trap: bool, why: str) -> Case:
    return Case(name, partial(Gpt, block), IDS, next_token, optimizer, trap, why)

CASES = [
    Case("hooks of parameters", hooks_of_parameters, IDS, next_token, sgd, True, "gradients clamped, or made signs"),
    Case("hooks of modules", hooks_of_modules, IDS, next_token, sgd, True, "change an output, and a gradient by 1/4"),
    gpt_case("feedback alignment", partial(Block, FeedbackMlp), sgd, True, "goes back by the signs of the matrix"),
    gpt_case("ternary weights", partial(Block, TernaryMlp), sgd, True, "rounded with a straight-through gradient"),
    Case("max norm", partial(Gpt, max_norm=1.0), IDS, next_token, sgd, True, "lookup rescales the used rows in place"),
    gpt_case("running centre", CentredBlock, sgd, True, "a buffer that forward updates in evaluation too"),
    gpt_case("remembered keys", RememberingBlock, sgd, True, "the second call attends to the first one's stream"),
    gpt_case("lookahead", Block, lookahead, True, "a patched step pulls weights back to those of construction"),
    gpt_case("centralised AdamW", Block, centralised_adamw, True, "named AdamW and one of them, with another rule"),
    gpt_case("turning SGD", Block, turning_sgd, True, "maximises a group; a hook turns that after each step"),
    gpt_case("weights as numbers", partial(Block, NumbersMlp), sgd, True, ".item(), float, .data, a branch on a sum"),
    gpt_case("kernel twice", partial(Block, KernelTwiceMlp), sgd, True, "a kernel convolves, is flipped, is detached"),
    gpt_case("parametrizations", spectral_block, sgd, True, "power iterations move buffers in each forward"),
    gpt_case("__torch_function__", tamed_block, sgd, True, "F.linear of these parameters is not a product"),
    gpt_case("fast weights", FastWeightsBlock, sgd, True, "a weight takes a step in forward, by vmap of grad"),
    gpt_case("recomputed", RecomputedBlock, sgd, True, "the checkpoint's second forward has other values"),
    Case("backward in forward", AuxiliaryBackward, IDS, next_token, sgd, True, "forward itself adds to .grad"),
    gpt_case("bfloat16 island", partial(Block, HalfIslandMlp), sgd, True, "one product is rounded to 8 bits"),
    gpt_case("optimiser initialises", Block, WarmedSgd, True, "sets weights when made, a scheduler in its step"),
    Case("alternating build", alternating, IDS, next_token, adamw, True, "two builds differ, some weights are fixed"),
    Case("GPT-2", TiedGpt, IDS, next_token, decay_groups, False, "tied head, scaled residual projections"),
    gpt_case("Llama", LlamaBlock, decay_groups, False, "RMSNorm, RoPE, grouped queries, SwiGLU"),
    Case("encoder-decoder", EncoderDecoder, PAIRS, next_token, adam, False, "torch's own Transformer, two inputs"),
    Case("ViT", vit, IMAGES, fourth_class, nesterov, False, "patches by a convolution"),
    Case("Swin", swin, IMAGES, fourth_class, adamw, False, "shifted windows"),
    gpt_case("mixture of experts", partial(Block, TopTwo), adamw, False, "top two of four experts, normalised"),
    gpt_case("Mamba", MambaBlock, adamw, False, "selective scan with a depthwise convolution"),
    gpt_case("parallel", ParallelBlock, adam, False, "attention and MLP from one fused projection"),
    gpt_case("ALiBi", AlibiBlock, nesterov, False, "linear biases by head"),
    Case("BERT", Bert, PADDED, unmasked, adamw, False, "post-norm, padding, segments, tied decoder with a bias"),
    Case("ALBERT", Albert, IDS, next_token, nesterov, False, "one block three times, factorised embedding"),
    gpt_case("DeepNorm", DeepNormBlock, adam, False, "scaled skips, post-norm, small Xavier gains"),
    gpt_case("QK-norm", QkNormBlock, muon, False, "normalised queries and keys; only matrices of blocks step"),
    Case("muP", partial(Mup, MupBlock), IDS, next_token, mup_groups, False, "multipliers, rates, unused positions"),
    Case("LoRA", lora_gpt, IDS, next_token, trainable, False, "only adapters train, half of them zero at first"),
    Case("DiT", Dit, NOISED, same_as_input, adamw, False, "adaLN modulation by a time"),
    gpt_case("ReZero", ReZeroBlock, sgd, False, "no use of the norms, branches times zero"),
    Case("Whisper", whisper, floats(2, 12, 16), fourth_class, adam, False, "a stem of convolutions with strides"),
    gpt_case("linear attention", partial(Block, attention=LinearAttention), adamw, False, "stacked weights, sums"),
    gpt_case("differential attention", DifferentialBlock, adamw, False, "a difference of two softmaxes"),
]
