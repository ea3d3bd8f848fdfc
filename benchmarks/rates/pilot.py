"""Train thirty small networks at ten learning rates each: python -m benchmarks.rates.pilot pilot.jsonl.

A language model of bytes of Python's standard library, 150 steps without warm-up, gradients clipped to norm 1. Every
line of the file is one run; a run that is in the file is not repeated. `build` and `optimizer` are what `limitformer`
reads for the same networks.
"""

import json
import math
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

STEPS, SEQUENCES, TOKENS = 150, 16, 64
TAIL = 20  # steps whose mean is the final loss of training
FILES = 150  # of the standard library
HELD_OUT = 0.1  # of the bytes
RATES = {"adamw": [1e-4 * 2**k for k in range(10)], "muon": [4e-4 * 2**k for k in range(10)]}
MUON_OVER_ADAMW = 5.0  # rate of hidden matrices over that of all other weights, where Muon updates the former


@dataclass(frozen=True)
class Architecture:
    """A network of the pilot, and its optimiser."""

    number: int
    width: int
    layers: int
    std: float
    norm: str  # pre, post
    kind: str  # LayerNorm, RMSNorm
    gated: bool  # SwiGLU in place of GELU
    scaled: bool  # whether matrices that write into the stream are divided by √(2 layers)
    optimizer: str


def architectures(count: int = 30, seed: int = 20261128) -> list[Architecture]:
    """Return the networks: every fifth trains with Muon, every third is post-norm, the rest is drawn."""
    rng = np.random.default_rng(seed)
    result = []
    for k in range(count):
        width, layers = int(rng.choice([48, 64, 96, 128])), round(float(np.exp(rng.uniform(math.log(3), math.log(16)))))
        std = float(f"{np.exp(rng.uniform(math.log(0.015), math.log(0.12))):.2g}")
        kind, gated, scaled = (
            str(rng.choice(["LayerNorm", "RMSNorm"])),
            bool(rng.random() < 0.4),
            bool(rng.random() < 0.4),
        )
        norm, optimizer = "post" if k % 3 == 2 else "pre", "muon" if k % 5 == 4 else "adamw"
        result.append(Architecture(k, width, layers, std, norm, kind, gated, scaled, optimizer))
    return result


class Attention(nn.Module):
    """Causal attention with four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inward, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.inward(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A GELU network of four times the width, or a gated one of the same size."""

    def __init__(self, width: int, gated: bool) -> None:
        super().__init__()
        hidden = 8 * width // 3 if gated else 4 * width
        self.inward = nn.Linear(width, 2 * hidden if gated else hidden, bias=False)
        self.out, self.gated = nn.Linear(hidden, width, bias=False), gated

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inward(x)
        if self.gated:
            gate, hidden = hidden.chunk(2, -1)
            return self.out(functional.silu(gate) * hidden)
        return self.out(functional.gelu(hidden))


class Block(nn.Module):
    """Attention and a feed-forward network, each with its norm."""

    def __init__(self, one: Architecture) -> None:
        super().__init__()
        norm = nn.LayerNorm if one.kind == "LayerNorm" else nn.RMSNorm
        self.first, self.second, self.post = norm(one.width), norm(one.width), one.norm == "post"
        self.attention, self.feedforward = Attention(one.width), FeedForward(one.width, one.gated)

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.first(x + self.attention(x))
            return self.second(x + self.feedforward(x))
        x = x + self.attention(self.first(x))
        return x + self.feedforward(self.second(x))


class Network(nn.Module):
    """A language model of `words` words."""

    def __init__(self, one: Architecture, words: int) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(words, one.width), nn.Embedding(TOKENS, one.width)
        self.blocks = nn.ModuleList(Block(one) for _ in range(one.layers))
        self.norm, self.head = nn.LayerNorm(one.width), nn.Linear(one.width, words, bias=False)
        for name, each in self.named_modules():
            if isinstance(each, nn.Linear | nn.Embedding):
                inside = one.scaled and name.endswith(".out")
                nn.init.normal_(each.weight, std=one.std / math.sqrt(2 * one.layers) if inside else one.std)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def optimizers(module: Network, kind: str, rate: float) -> list[torch.optim.Optimizer]:
    """Return AdamW, or Muon for matrices of the blocks and AdamW for the rest at a fixed part of its rate."""
    adamw = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    if kind == "adamw":
        return [torch.optim.AdamW(module.parameters(), lr=rate, **adamw)]
    hidden = [each for each in module.blocks.parameters() if each.dim() == 2]
    inside = {id(each) for each in hidden}
    rest = [each for each in module.parameters() if id(each) not in inside]
    return [torch.optim.Muon(hidden, lr=rate), torch.optim.AdamW(rest, lr=rate / MUON_OVER_ADAMW, **adamw)]


def text() -> tuple[Tensor, Tensor, int]:
    """Return ids of bytes for training and held out, and the number of different bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:FILES]
    values = np.frombuffer(b"".join(each.read_bytes() for each in files), dtype=np.uint8)
    used, ids = np.unique(values, return_inverse=True)
    cut = int((1 - HELD_OUT) * len(ids))
    return torch.tensor(ids[:cut]), torch.tensor(ids[cut:]), len(used)


def batch(ids: Tensor, sequences: int, generator: torch.Generator) -> Tensor:
    """Return sequences of ids (sequences, TOKENS + 1) from random places."""
    starts = torch.randint(0, len(ids) - TOKENS - 1, (sequences,), generator=generator)
    return torch.stack([ids[start : start + TOKENS + 1] for start in starts])


def loss_of(module: nn.Module, ids: Tensor) -> Tensor:
    return functional.cross_entropy(module(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train(one: Architecture, rate: float, training: Tensor, held_out: Tensor, words: int) -> dict[str, object]:
    """Train a network, and return its losses; a loss that is not finite ends the run."""
    torch.manual_seed(one.number)
    module = Network(one, words)
    every, generator = optimizers(module, one.optimizer, rate), torch.Generator().manual_seed(one.number)
    losses: list[float] = []
    for _ in range(STEPS):
        loss = loss_of(module, batch(training, SEQUENCES, generator))
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        for each in every:
            each.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for each in every:
            each.step()
    finished = len(losses) == STEPS and math.isfinite(losses[-1])
    with torch.no_grad():
        unseen = loss_of(module, batch(held_out, 64, torch.Generator().manual_seed(0))).item()
    final = float(np.mean(losses[-TAIL:])) if finished else math.inf
    return {"final": final, "held_out": unseen if finished else math.inf, "losses": [round(each, 4) for each in losses]}


def main() -> None:
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    done = (
        {(row["number"], row["rate"]) for row in map(json.loads, path.read_text().splitlines())}
        if path.exists()
        else set()
    )
    training, held_out, words = text()
    for one in architectures():
        for rate in RATES[one.optimizer]:
            if (one.number, rate) in done:
                continue
            began = time.process_time()
            result = {**asdict(one), "rate": rate, **train(one, rate, training, held_out, words)}
            result["seconds"] = round(time.process_time() - began, 1)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            print(one, rate, result["final"], result["seconds"], flush=True)


if __name__ == "__main__":
    main()
